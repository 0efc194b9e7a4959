"""What is known of one capture, as the catalogue keeps it and as HTTP shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from hsconnector.capture.protocol import CaptureInfo, CaptureState, FailReason, Producer

__all__ = [
    "CaptureRecord",
    "Finding",
    "Record",
    "SlotStats",
    "Verdict",
    "client_ids",
    "describe",
    "kept",
    "record_of",
    "returns",
]


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong, and where."""

    reason: str
    count: int
    """Rows concerned (slots, for `zero_slots` and `equal_slots`)."""
    rows: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    detail: str = ""


class SlotStats(msgspec.Struct, frozen=True):
    """What one slot looks like; a number that is not finite is None."""

    slot: int
    layer_id: int
    mean_norm: float | None
    """Mean Euclidean norm over every 16th row, beginning with row 0."""
    minimum: float | None
    maximum: float | None
    zero_fraction: float
    """Rows in which this slot is all zero, as a fraction."""
    non_finite_rows: int


class Verdict(msgspec.Struct, frozen=True):
    """Sound or not, and why."""

    sound: bool
    reasons: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    slots: tuple[SlotStats, ...] = ()


class CaptureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the sidecar knows of one capture, without its tensors."""

    capture_id: str
    state: CaptureState
    reason: str | None = None
    """Why it failed; a value of `hsconnector.capture.protocol.FailReason`."""
    detail: str = ""
    request_id: str = ""
    """The engine's: the client's, with a prefix and a random suffix."""
    engine_id: str = ""
    model: str = ""
    model_revision: str = ""
    vllm_version: str = ""
    layer_ids: tuple[int, ...] = ()
    num_layers: int = 0
    hidden_size: int = 0
    dtype: str = ""
    rows: str = ""
    """"prompt" or "prompt+output"."""
    num_rows: int = 0
    num_prompt_tokens: int = 0
    dataset: str = ""
    sample_id: str = ""
    tags: dict[str, str] = {}
    lora: str = ""
    finish_reason: str = ""
    content_hash: str = ""
    data_hash: str = ""
    created: float = 0.0
    """Seconds since the epoch."""
    finished: float | None = None
    size: int = 0
    """Bytes of the shard."""
    verdict: dict[str, Any] | None = None
    handle: str = ""
    path: str | None = None
    """The shard's file on the sidecar's host, where there is one."""

    @property
    def final(self) -> bool:
        return self.state is not CaptureState.RECEIVING

    @property
    def consumed(self) -> bool:
        """Whether a consumer has acknowledged it, after which its bytes were let go."""
        return self.state is CaptureState.EXPIRED and self.reason == FailReason.CONSUMED

    @property
    def unsound(self) -> tuple[str, ...]:
        """The verdict's reasons; empty for a sound capture and for one not judged yet."""
        return tuple((self.verdict or {}).get("reasons", ()))

    @property
    def findings(self) -> str:
        """What the verdict found and where, as a phrase."""
        found = [_finding(finding) for finding in (self.verdict or {}).get("findings", ())]
        return "; ".join(found) or self.detail or "the verdict gives no reason"


def _finding(finding: Mapping[str, Any]) -> str:
    places = [f"in {what} {list(finding[what])}" for what in ("rows", "slots") if finding.get(what)]
    return " ".join([finding["reason"], *places, finding.get("detail", "")]).rstrip()


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One capture; replaced whole when something changes."""

    capture_id: str
    request_id: str
    state: CaptureState
    reason: FailReason | None = None
    detail: str = ""
    engine_id: str = ""
    model: str = ""
    model_revision: str = ""
    vllm_version: str = ""
    layer_ids: tuple[int, ...] = ()
    num_layers: int = 0
    hidden_size: int = 0
    dtype: str = ""
    rows: str = ""
    num_rows: int = 0
    num_prompt_tokens: int = 0
    dataset: str = ""
    sample_id: str = ""
    tags: dict[str, str] = {}
    lora: str = ""
    finish_reason: str = ""
    content_hash: str = ""
    data_hash: str = ""
    created: float = 0.0
    finished: float | None = None
    size: int = 0
    """Bytes of the shard file."""
    mtime_ns: int = 0
    verdict: Verdict | None = None


def record_of(producer: Producer, info: CaptureInfo) -> Record:
    """A capture that has just begun."""
    return Record(
        capture_id=info.capture_id,
        request_id=info.request_id,
        state=CaptureState.RECEIVING,
        engine_id=producer.engine_id,
        model=producer.model,
        model_revision=producer.model_revision,
        vllm_version=producer.vllm_version,
        layer_ids=producer.layer_ids,
        num_layers=producer.num_layers,
        hidden_size=producer.hidden_size,
        dtype=producer.dtype,
        rows=str(info.rows),
        num_prompt_tokens=info.num_prompt_tokens,
        dataset=info.dataset,
        sample_id=info.sample_id,
        tags=info.tags,
        lora=info.lora,
        created=info.created,
    )


def returns(record: Record) -> bool:
    """Whether a capture that has expired is ready again when its shard is: the store lost it, nobody removed it."""
    return record.state is CaptureState.EXPIRED and record.reason is FailReason.STORE_ERROR


def kept(record: Record) -> Record:
    """What the index keeps: of a capture that was removed, all but the verdict, which is most of its bytes."""
    if record.state is not CaptureState.EXPIRED or record.verdict is None or returns(record):
        return record
    return msgspec.structs.replace(record, verdict=None)


def describe(record: Record, public_url: str, path: str | None, *, num_rows: int | None = None) -> dict[str, Any]:
    """A capture as JSON; `path` is its shard on this host, `num_rows` what has arrived so far."""
    handle = f"{public_url}/v1/captures/{record.capture_id}"
    fields: dict[str, Any] = msgspec.to_builtins(record)
    del fields["mtime_ns"]
    if num_rows is not None:
        fields["num_rows"] = num_rows
    return {
        "object": "capture",
        **fields,
        "shape": [fields["num_rows"], len(record.layer_ids), record.hidden_size],
        "handle": handle,
        "tensors": f"{handle}/tensors",
        "path": path,
    }


_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_CHILD = re.compile(r"\d+_(?=.)", re.DOTALL)
_COMPLETION = re.compile(r"(?P<id>cmpl-(?P<client>.+))-\d+\Z", re.DOTALL)
_PREFIXED = re.compile(r"(?:chatcmpl|generate-tokens)-(?P<client>.+)\Z", re.DOTALL)
_NUMBERED = re.compile(r"(?P<id>.+)_\d+\Z", re.DOTALL)


def client_ids(request_id: str) -> dict[str, int]:
    """The ids by which a client may know an engine request; 0 for a certain one, 1 for a possible one.

    vLLM 0.32 makes them like this: the OpenAI routes put `chatcmpl-`, `cmpl-` or `generate-tokens-` before the
    `X-Request-Id` (or before an id of their own) and `-{i}` after it for each prompt of a completion; the chat and
    responses routes may add `_{i}`; the engine appends `-` and 8 hex digits; `n > 1` then puts `{i}_` in front
    of the whole. A part that the client's own id could hold as well is taken off only as a possibility.
    """
    base = _SUFFIX.sub("", request_id)
    found = _without_route(base, 0)
    if child := _CHILD.match(base):
        inner = base[child.end() :]
        routed = _COMPLETION.match(inner) or _PREFIXED.match(inner)
        for name, rank in _without_route(inner, 0 if routed else 1).items():
            found[name] = min(rank, found.get(name, rank))
    return found


def _without_route(name: str, rank: int) -> dict[str, int]:
    found = {name: rank}
    if completion := _COMPLETION.match(name):
        return found | {completion["id"]: rank, completion["client"]: rank}
    prefixed = _PREFIXED.match(name)
    if prefixed:
        found[prefixed["client"]] = rank
    if numbered := _NUMBERED.match(name):
        found.setdefault(numbered["id"], 1)
        if prefixed and (client := _NUMBERED.match(prefixed["client"])):
            found.setdefault(client["id"], 1)
    return found
