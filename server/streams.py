"""One producer's stream as the sidecar sees it, and what it must say of itself to get one."""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, field

import msgspec

from hsconnector.capture.protocol import (
    DTYPE_BYTES,
    LARGEST,
    MAX_TEXT_BYTES,
    MAX_TEXTS_BYTES,
    PROTOCOL_VERSION,
    Batch,
    BatchAnswer,
    CaptureInfo,
    Producer,
    decode,
    encode,
    is_capture_id,
    is_weights_id,
)
from hsconnector.errors import ProtocolError
from server.assembler import Assembly
from server.mapped_ring import MappedRing
from server.refusals import unprocessable, wrong_version
from server.shards import ShardWriter
from server.verdict import Judge

__all__ = ["MAX_ROW_BYTES", "OpenCapture", "ProducerStream", "check_info", "producer_named", "read_producer"]

MAX_ROW_BYTES = 64 << 20
"""A longer row is refused: one row is judged in memory."""
MAX_SLOTS = 1024
"""More layers than any model has: each slot gets statistics of its own, which the index keeps."""
MAX_NAME_BYTES = 4096
MAX_REQUEST_ID_BYTES = 64 << 10
# The bytes of every batch are the same up to its producer's id, which is the first field of the first message block.
_NO_ID = "0" * 32
_BEFORE_ID, _ = encode(Batch(_NO_ID, 0)).split(_NO_ID.encode(), 1)
_ID_AT = 8 + len(_BEFORE_ID)


@dataclass
class OpenCapture:
    """A capture that is being received, and where its rows go."""

    assembly: Assembly
    judge: Judge
    shard: ShardWriter
    reserved: int = 0
    """Bytes of this capture that the store counts as used."""


@dataclass
class ProducerStream:
    """What the sidecar knows of one open stream."""

    producer: Producer
    ring: MappedRing | None
    producer_id: str = field(default_factory=lambda: secrets.token_hex(16))
    last_seq: int = -1
    last_answer: BatchAnswer | None = None
    open: dict[str, OpenCapture] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)
    """When the producer was last heard of, in monotonic seconds."""
    waiting: int = 0
    """Batches that have arrived and are not answered."""
    weights_id: str = ""
    """Those of its newest capture, where they have changed since the stream began."""

    @property
    def now(self) -> Producer:
        """What it says of itself, with the weights that its newest capture is of."""
        if not self.weights_id:
            return self.producer
        return msgspec.structs.replace(self.producer, weights_id=self.weights_id)

    def touch(self) -> None:
        """Notes that the producer has just been heard of."""
        self.seen = time.monotonic()

    def end(self) -> None:
        """Closes the shared memory, if there is any."""
        ring, self.ring = self.ring, None
        if ring is not None:
            ring.close()


def producer_named(body: bytearray) -> str | None:
    """The id of a batch's stream, read from the beginning of its body; None while too little of it has come."""
    if len(body) < _ID_AT + len(_NO_ID) or body[8:_ID_AT] != _BEFORE_ID:
        return None
    return body[_ID_AT : _ID_AT + len(_NO_ID)].decode("ascii", "replace")


def read_producer(body: bytes) -> Producer:
    """A producer that makes sense; raises `Refusal` or `ProtocolError`."""
    try:
        fields = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"not msgpack: {error}") from error
    version = fields.get("protocol", PROTOCOL_VERSION) if isinstance(fields, dict) else PROTOCOL_VERSION
    if version != PROTOCOL_VERSION:
        raise wrong_version(version, PROTOCOL_VERSION)
    producer = decode(body, Producer)
    _check_producer(producer)
    return producer


def _check_producer(producer: Producer) -> None:
    ids = list(producer.layer_ids)
    if producer.dtype not in DTYPE_BYTES:
        raise unprocessable("dtype", f"dtype {producer.dtype[:64]!r} is none of {', '.join(DTYPE_BYTES)}")
    if len(ids) > MAX_SLOTS:
        raise unprocessable("layer_ids", f"there are {len(ids)} layer ids, the most is {MAX_SLOTS}")
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > producer.num_layers:
        raise unprocessable(
            "layer_ids",
            f"layer ids {ids[:256]} must ascend without repeats within 0..{producer.num_layers} (num_layers)",
        )
    if producer.hidden_size < 1:
        raise unprocessable("hidden_size", f"hidden_size is {producer.hidden_size}, it must be 1 or more")
    if producer.row_bytes > MAX_ROW_BYTES or producer.num_layers > LARGEST:
        raise unprocessable("hidden_size", f"a row has {producer.row_bytes} bytes, the most is {MAX_ROW_BYTES}")
    if not 0 < producer.patience_s < math.inf:
        raise unprocessable(
            "patience_s", f"patience_s is {producer.patience_s}, it must be a finite number of seconds, more than 0"
        )
    if not is_weights_id(producer.weights_id):
        shown = producer.weights_id[:64]
        raise unprocessable("weights_id", f"weights_id {shown!r} is not 64 lower-case hex digits")
    for name in ("engine_id", "model", "model_revision", "vllm_version", "kv_cache_dtype"):
        length = len(getattr(producer, name).encode())
        if length > MAX_NAME_BYTES:
            raise unprocessable(name, f"{name} has {length} bytes, the most is {MAX_NAME_BYTES}")


def check_info(info: CaptureInfo) -> str:
    """What is wrong with a capture's own description, or nothing."""
    if not is_capture_id(info.capture_id):
        return f"capture id {info.capture_id[:64]!r} is not 32 lower-case hex digits"
    if not 0 <= info.num_prompt_tokens <= LARGEST:
        return f"num_prompt_tokens is {info.num_prompt_tokens}"
    if not 0 <= info.created <= LARGEST:
        return f"created is {info.created}, not seconds since the epoch"
    if len(info.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        return f"the request id has more than {MAX_REQUEST_ID_BYTES} bytes"
    for name in ("weights_id", "lora_weights_id"):
        if not is_weights_id(getattr(info, name)):
            return f"{name} {getattr(info, name)[:64]!r} is not 64 lower-case hex digits"
    return _check_texts(info)


def _check_texts(info: CaptureInfo) -> str:
    texts = {"dataset": info.dataset, "sample_id": info.sample_id, "lora": info.lora}
    for key, value in info.tags.items():
        texts[f"the key of tag {key[:32]!r}"], texts[f"tag {key[:32]!r}"] = key, value
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    for name, size in sizes.items():
        most = MAX_NAME_BYTES if name == "lora" else MAX_TEXT_BYTES
        if size > most:
            return f"{name} has {size} bytes, the most is {most}"
    total = sum(sizes.values()) - sizes["lora"]
    return f"the texts have {total} bytes together, the most is {MAX_TEXTS_BYTES}" if total > MAX_TEXTS_BYTES else ""
