"""What is known of one capture, as the catalogue keeps it and as HTTP shows it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from hsconnector.protocol import CaptureInfo, CaptureState, FailReason, Producer
from server.verdict import Verdict

__all__ = ["Record", "client_ids", "describe", "kept", "record_of", "returns"]


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
