"""What is known of one capture, as the catalogue keeps it and as HTTP shows it."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from hsconnector.capture.content import Content
from hsconnector.capture.header import FORMAT, ShardHeader
from hsconnector.capture.protocol import LARGEST, CaptureInfo, CaptureState, FailReason, Producer
from hsconnector.errors import ShardError

__all__ = [
    "CaptureRecord",
    "Finding",
    "FindingKind",
    "SlotStats",
    "Verdict",
    "client_ids",
    "describe",
    "kept",
    "metadata_of",
    "public_fields",
    "record_of",
    "record_of_header",
]


class FindingKind(enum.StrEnum):
    """What can be wrong with a whole capture; stable strings, on the wire and as metric labels."""

    NON_FINITE = "non_finite"
    """An infinity or NaN."""
    ZERO_ROWS = "zero_rows"
    """Rows that are zero in every slot, or in those that are named."""
    ZERO_SLOTS = "zero_slots"
    """Slots that are zero in every row."""
    CONSTANT_ROWS = "constant_rows"
    """A run of rows equal in every slot though their tokens differ, or rows each of whose slots repeats one value."""
    EQUAL_SLOTS = "equal_slots"
    """Slots that are equal in every row."""
    WRONG_CONTENT_HASH = "wrong_content_hash"
    """Model, layers and token ids are not the ones that were expected."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong, and where."""

    reason: str
    """A `FindingKind`, or one that only a newer sidecar knows."""
    count: int
    """Rows concerned (slots, for `zero_slots` and `equal_slots`)."""
    rows: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    detail: str = ""

    @property
    def phrase(self) -> str:
        """ "zero_rows in rows [3, 4]"."""
        places = [f"in {what} {list(found)}" for what, found in (("rows", self.rows), ("slots", self.slots)) if found]
        return " ".join([self.reason, *places, self.detail]).rstrip()


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

    @property
    def phrase(self) -> str:
        """Every finding and where it is; empty for a sound capture."""
        return "; ".join(finding.phrase for finding in self.findings)


class CaptureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one capture without its tensors; replaced whole when something changes.

    The index keeps it as a msgpack map by field name, `describe` shows it as JSON, a client reads that JSON back.
    """

    capture_id: str
    request_id: str = ""
    """The engine's: the client's, with a prefix and a random suffix."""
    state: CaptureState
    reason: str | None = None
    """Why it has no shard: a `FailReason`, or one that only a newer sidecar knows."""
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
    """"prompt" or "prompt+output"."""
    num_rows: int = 0
    num_prompt_tokens: int = 0
    dataset: str = ""
    sample_id: str = ""
    tags: dict[str, str] = {}
    lora: str = ""
    weights_id: str = ""
    """Whose weights, 64 hex digits; empty where they are not known."""
    kv_cache_dtype: str = ""
    lora_weights_id: str = ""
    finish_reason: str = ""
    content_hash: str = ""
    data_hash: str = ""
    created: float = 0.0
    """Seconds since the epoch."""
    finished: float | None = None
    size: int = 0
    """Bytes of the shard file."""
    mtime_ns: int = 0
    """When the shard file was last written, by its file system; stays with the sidecar."""
    verdict: Verdict | None = None
    handle: str = ""
    """The capture's URL, as a sidecar gives it; the index keeps none."""
    path: str | None = None
    """The shard's file on the sidecar's host, where there is one; the index keeps none."""

    @property
    def final(self) -> bool:
        return self.state is not CaptureState.RECEIVING

    @property
    def content(self) -> Content:
        """What it is of, apart from its tokens and from images and the like, which no record names."""
        return Content(
            model=self.model,
            model_revision=self.model_revision,
            layer_ids=self.layer_ids,
            lora=self.lora,
            weights_id=self.weights_id,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            lora_weights_id=self.lora_weights_id,
        )

    @property
    def consumed(self) -> bool:
        """Whether a consumer has acknowledged it, after which its bytes were let go."""
        return self.state is CaptureState.EXPIRED and self.reason == FailReason.CONSUMED

    @property
    def lost(self) -> bool:
        """Whether it expired because the store lost its shard: ready again when that is, since nobody removed it."""
        return self.state is CaptureState.EXPIRED and self.reason == FailReason.STORE_ERROR

    @property
    def unsound(self) -> tuple[str, ...]:
        """The verdict's reasons; empty for a sound capture and for one not judged yet."""
        return self.verdict.reasons if self.verdict else ()

    @property
    def findings(self) -> str:
        """What the verdict found and where, as a phrase."""
        return (self.verdict and self.verdict.phrase) or self.detail or "the verdict gives no reason"


def record_of(producer: Producer, info: CaptureInfo) -> CaptureRecord:
    """A capture that has just begun."""
    return CaptureRecord(
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
        weights_id=info.weights_id or producer.weights_id,
        kv_cache_dtype=producer.kv_cache_dtype,
        lora_weights_id=info.lora_weights_id,
        created=info.created,
    )


def metadata_of(producer: Producer, info: CaptureInfo) -> dict[str, str]:
    """What a shard says of itself; `content_hash`, `data_hash` and `finish_reason` are filled at the end."""
    return {
        "format": FORMAT,
        "capture_id": info.capture_id,
        "request_id": info.request_id,
        "engine_id": producer.engine_id,
        "model": producer.model,
        "model_revision": producer.model_revision,
        "vllm_version": producer.vllm_version,
        "dims": "token,layer,hidden",
        "layer_ids": msgspec.json.encode(producer.layer_ids).decode(),
        "num_layers": str(producer.num_layers),
        "last_layer_norm": "pre",
        "dtype": producer.dtype,
        "rows": str(info.rows),
        "num_prompt_tokens": str(info.num_prompt_tokens),
        "content_hash": "",
        "data_hash": "",
        "dataset": info.dataset,
        "sample_id": info.sample_id,
        "tags": msgspec.json.encode(info.tags, order="deterministic").decode(),
        "lora": info.lora,
        "finish_reason": "",
        "created": f"{info.created:.3f}",
        **_known(
            weights_id=info.weights_id or producer.weights_id,
            kv_cache_dtype=producer.kv_cache_dtype,
            lora_weights_id=info.lora_weights_id,
        ),
    }


def _known(**texts: str) -> dict[str, str]:
    """What shards of sidecars that told no weights apart do not say, and others only where they know it."""
    return {name: text for name, text in texts.items() if text}


_TEXTS = (
    *("request_id", "engine_id", "model", "model_revision", "vllm_version", "rows", "dataset", "sample_id", "lora"),
    *("finish_reason", "content_hash", "data_hash"),
)
_UNSAID = dict.fromkeys(_TEXTS, "") | {"num_prompt_tokens": "0", "tags": "{}", "created": "0"}
"""What a shard that another program wrote need not say."""


def record_of_header(header: ShardHeader, state: CaptureState, *, complete: bool) -> CaptureRecord:
    """A finished capture as its shard tells it; raises ShardError.

    `complete` demands all the metadata that a sidecar writes. The verdict, the path and when the file was written are
    not in the header.
    """
    said = header.metadata
    facts: Mapping[str, str] = said if complete else _UNSAID | {name: value for name, value in said.items() if value}
    try:
        record = CaptureRecord(
            capture_id=facts["capture_id"],
            request_id=facts["request_id"],
            state=state,
            engine_id=facts["engine_id"],
            model=facts["model"],
            model_revision=facts["model_revision"],
            vllm_version=facts["vllm_version"],
            layer_ids=header.layer_ids,
            num_layers=min(int(facts["num_layers"]), LARGEST),
            hidden_size=header.shape[2],
            dtype=header.dtype,
            rows=facts["rows"],
            num_rows=header.shape[0],
            num_prompt_tokens=int(facts["num_prompt_tokens"]),
            dataset=facts["dataset"],
            sample_id=facts["sample_id"],
            tags=msgspec.json.decode(facts["tags"], type=dict[str, str]),
            lora=facts["lora"],
            weights_id=said.get("weights_id", ""),
            kv_cache_dtype=said.get("kv_cache_dtype", ""),
            lora_weights_id=said.get("lora_weights_id", ""),
            finish_reason=facts["finish_reason"],
            content_hash=facts["content_hash"],
            data_hash=facts["data_hash"],
            created=float(facts["created"]),
            size=header.file_bytes,
        )
        msgspec.msgpack.encode(record)  # layer ids without end pass JSON, not the index
    except (KeyError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise ShardError(f"the metadata is not that of a capture: {error!r}") from error
    if not (0 <= record.created <= LARGEST and 0 <= record.num_prompt_tokens <= LARGEST):
        raise ShardError(f"created {record.created} or num_prompt_tokens {record.num_prompt_tokens} cannot be")
    return record


def kept(record: CaptureRecord) -> CaptureRecord:
    """What the index keeps: of a capture that was removed, all but the verdict, which is most of its bytes."""
    if record.state is not CaptureState.EXPIRED or record.verdict is None or record.lost:
        return record
    return msgspec.structs.replace(record, verdict=None)


def public_fields(record: CaptureRecord) -> dict[str, Any]:
    """A record as JSON shows it; when its file was written stays with the sidecar."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    del fields["mtime_ns"]
    return fields


def describe(
    record: CaptureRecord, public_url: str, path: str | None, *, num_rows: int | None = None
) -> dict[str, Any]:
    """A capture as HTTP shows it; `path` is its shard on this host, `num_rows` what has arrived so far."""
    handle = f"{public_url}/v1/captures/{record.capture_id}"
    shown = record if num_rows is None else msgspec.structs.replace(record, num_rows=num_rows)
    return {
        "object": "capture",
        **public_fields(shown),
        "shape": [shown.num_rows, len(record.layer_ids), record.hidden_size],
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
