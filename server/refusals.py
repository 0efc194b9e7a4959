"""Answers that say no, as exceptions; `server.app` turns them into responses."""

from __future__ import annotations

from hsconnector.errors import HSConnectorError

__all__ = [
    "Refusal",
    "bad_parameter",
    "producer_unknown",
    "sequence_gap",
    "too_large",
    "unprocessable",
    "wrong_version",
]


class Refusal(HSConnectorError):
    """A request that is answered with an error: HTTP status, stable type, sentence, parameter."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


def bad_parameter(name: str, message: str) -> Refusal:
    """A query parameter that cannot be understood."""
    return Refusal(400, "bad_request", message, name)


def producer_unknown(producer_id: str) -> Refusal:
    """A stream that was never opened here, was closed, or was lost."""
    return Refusal(
        404, "producer_unknown", f"no stream {producer_id[:64]!r} is open here: register again", "producer_id"
    )


def sequence_gap(got: int, wanted: int) -> Refusal:
    """A batch out of order."""
    return Refusal(409, "sequence_gap", f"batch {got} came where {wanted} was next: open a new stream", "seq")


def too_large(limit: int) -> Refusal:
    """A body over the limit."""
    return Refusal(
        413, "body_too_large", f"the body has more than {limit} bytes, the most this sidecar takes in one call"
    )


def unprocessable(param: str, message: str) -> Refusal:
    """A producer that contradicts itself."""
    return Refusal(422, "bad_producer", message, param)


def wrong_version(theirs: object, ours: int) -> Refusal:
    """Another protocol version."""
    message = (
        f"this sidecar speaks protocol {ours}, the producer {theirs!r}: install the same hsconnector on both sides"
    )
    return Refusal(409, "protocol_mismatch", message, "protocol")
