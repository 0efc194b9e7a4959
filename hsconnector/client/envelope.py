"""Answers that say no: the error envelope of vLLM and of the sidecar, and the exception that each answer stands for.

The envelope is `{"error": {"message", "type", "param", "code"}}`; the sidecar adds `reason` where a capture is meant.
"""

from __future__ import annotations

import msgspec

from hsconnector.errors import (
    CaptureError,
    CaptureExpired,
    CaptureFailed,
    CaptureNotFound,
    CapturePending,
    CaptureQuarantined,
    HSConnectorError,
    SidecarRefused,
    SidecarUnreachable,
)

__all__ = ["PASSING", "Denial", "error_of", "read_denial"]

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
"""Statuses of a server that cannot now, and may a moment later."""

_BY_TYPE: dict[str | None, type[CaptureError]] = {
    "capture_not_found": CaptureNotFound,
    "capture_pending": CapturePending,
    "capture_failed": CaptureFailed,
    "capture_quarantined": CaptureQuarantined,
    "capture_expired": CaptureExpired,
}
_BY_STATUS: dict[int, type[CaptureError]] = {404: CaptureNotFound, 410: CaptureExpired, 424: CaptureFailed}
"""For answers about one capture whose body a proxy has replaced."""
_LONGEST = 1000


class Denial(msgspec.Struct, frozen=True):
    """Why a server says no."""

    message: str = ""
    """For people: one line of at most 1,000 characters."""
    type: str | None = None
    """The stable name of the reason, such as `lease_expired`; None where the answer is not in the envelope."""
    reason: str | None = None
    """Of a capture that failed: a value of `hsconnector.capture.protocol.FailReason`."""


class _Envelope(msgspec.Struct, frozen=True):
    error: Denial


def read_denial(body: bytes) -> Denial:
    """What the body of an error answer says; of another server's, its first 200 characters."""
    try:
        denial = msgspec.json.decode(body, type=_Envelope).error
    except (msgspec.MsgspecError, RecursionError):
        denial = Denial(body[:200].decode(errors="replace"))
    return msgspec.structs.replace(denial, message=" ".join(denial.message.split())[:_LONGEST])


def error_of(status: int, body: bytes, *, url: str, capture: str = "") -> HSConnectorError:
    """The exception for an answer of `url` that is not a success; `capture` is the one that was asked for, if any."""
    denial = read_denial(body)
    kind = _BY_TYPE.get(denial.type) or (_BY_STATUS.get(status) if capture else None)
    if kind is not None:
        return kind(denial.message, capture_id=capture, reason=denial.reason or "")
    message = f"{url} answered {status}: {denial.message or 'nothing more'}"
    if status in PASSING:
        return SidecarUnreachable(message)
    return SidecarRefused(message, kind=denial.type or "")
