"""The wire between one producer (a connector worker) and the sidecar: types and framing, no I/O.

Two calls, both msgpack bodies:

`POST /v1/producers`   body `Producer`, answer `ProducerAccepted`. Opens a stream.
`POST /v1/ingest`      body one framed `Batch` (see `encode_batch`), answer `BatchAnswer`.

A batch is framed as

    8 bytes   little-endian length of the message block
    N bytes   msgpack `Batch`
    the rest  payload: the row bytes that spans with `shared=False` point into

Row bytes never sit inside a message. They lie in the payload, or, where the sidecar said `shm=True`, in the ring:
a span with `shared=True` counts from the start of the shared file. Bytes of rows are the row-major `[count, L, H]`
elements in the producer's dtype, little-endian.

Batches of one producer are numbered from 0 without gaps. A batch sent again under its number is answered again and
changes nothing. A gap is refused with 409 and means that the sender lost its place: it opens a new stream.
Only when the answer to a batch has come may the memory that its spans name be used again.
"""

from __future__ import annotations

import enum
import secrets
import struct
import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from hsconnector.errors import ProtocolError

__all__ = [
    "DTYPE_BYTES",
    "LARGEST",
    "MAX_MESSAGES_BYTES",
    "MAX_TEXTS_BYTES",
    "MAX_TEXT_BYTES",
    "PROTOCOL_VERSION",
    "Batch",
    "BatchAnswer",
    "CaptureInfo",
    "CaptureState",
    "Commit",
    "Fail",
    "FailReason",
    "Message",
    "MessageAnswer",
    "MessageStatus",
    "Open",
    "Producer",
    "ProducerAccepted",
    "RingOffer",
    "Rows",
    "RowsKind",
    "Span",
    "decode",
    "decode_batch",
    "encode",
    "encode_batch",
    "is_capture_id",
    "is_weights_id",
    "new_capture_id",
    "pack_token_ids",
    "unpack_token_ids",
]

PROTOCOL_VERSION = 1
"""A producer of another version is refused: capture is off, serving goes on."""

MAX_TEXT_BYTES = 256
"""The longest client-given text (dataset, sample id, a tag's key or value), in UTF-8 bytes."""

MAX_TEXTS_BYTES = 4096
"""All client-given texts of one capture together, in UTF-8 bytes."""

MAX_MESSAGES_BYTES = 64 << 20
"""The largest message block of a batch; a longer one is refused before it is read."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Element types a producer may send, with their size in bytes."""

LARGEST = 2**53
"""The largest number of seconds, tokens or layers that is believed; JSON readers keep no larger one exact."""

_LENGTH = struct.Struct("<Q")
_T = TypeVar("_T")


class CaptureState(enum.StrEnum):
    """Where a capture stands; only `receiving` is not final, and a final state changes only to `expired`."""

    RECEIVING = "receiving"
    READY = "ready"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    EXPIRED = "expired"


class FailReason(enum.StrEnum):
    """Why a capture has no shard."""

    ABORTED = "aborted"
    """The request ended before every wanted row was computed."""
    STALLED = "stalled"
    """Rows could not be shipped within `stall_timeout_s`."""
    OVERFLOW = "overflow"
    """Staging memory was full and `on_overflow` is `drop`."""
    SIDECAR_UNREACHABLE = "sidecar_unreachable"
    """No sidecar was there to take the rows."""
    SIDECAR_RESTARTED = "sidecar_restarted"
    """The sidecar went away with the rows it had received."""
    SIDECAR_REFUSED = "sidecar_refused"
    """The sidecar will not take this stream."""
    ENGINE_LOST = "engine_lost"
    """The producer sent nothing, not even a heartbeat, within the deadline."""
    ENGINE_SHUTDOWN = "engine_shutdown"
    """The engine closed its stream while the capture was open."""
    EXTERNAL_PREFIX = "external_prefix"
    """Some rows were loaded by another connector and never computed here."""
    CACHE_RESET = "cache_reset"
    """The engine's caches were reset (new weights) while the capture was open."""
    WEIGHTS_CHANGED = "weights_changed"
    """The engine's weights became others while the capture was open, or rows in its prefix cache are of old ones."""
    UNSUPPORTED_REQUEST = "unsupported_request"
    """The request's kind has no hidden states to capture."""
    LAYOUT = "layout"
    """The block table or the hidden group cannot be read exactly."""
    BAD_REQUEST = "bad_request"
    """`kv_transfer_params["hidden_states"]` holds something that is not allowed there."""
    BAD_MESSAGE = "bad_message"
    """The producer's messages for this capture contradict each other or the stream."""
    UNSOUND = "unsound"
    """Whole, but the verdict found it unsound, and the sidecar is told to reject what is."""
    DISK_FULL = "disk_full"
    """The store had no room."""
    STORE_ERROR = "store_error"
    """The store could not be written."""
    CONSUMED = "consumed"
    """It was whole; a consumer has acknowledged it, and its bytes were let go."""
    INTERNAL_ERROR = "internal_error"
    """A bug on our side; the log has the traceback under this capture's id."""


class RowsKind(enum.StrEnum):
    """Which tokens a capture's rows stand for."""

    PROMPT = "prompt"
    PROMPT_AND_OUTPUT = "prompt+output"


class RingOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shared memory the producer has created under its `shm_dir`; `name` is a bare file name, `size` in bytes."""

    name: str
    size: int


class Producer(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream says of itself once; every shard of the stream carries it."""

    protocol: int = PROTOCOL_VERSION
    engine_id: str
    model: str
    model_revision: str = ""
    vllm_version: str
    layer_ids: tuple[int, ...]
    """Ascending layer ids in vLLM's counting; slot `s` of a row holds `layer_ids[s]`."""
    num_layers: int
    """Decoder layers of the model, N; layer id N is the residual stream before the final norm."""
    hidden_size: int
    dtype: str
    """A key of `DTYPE_BYTES`."""
    tensor_parallel_size: int = 1
    data_parallel_rank: int = 0
    block_size: int = 0
    """Tokens in one block of the hidden-state group."""
    ring: RingOffer | None = None
    instance: str = ""
    """Random, one per producer's life. A new stream of the same instance ends the one before: it was given up."""
    weights_id: str = ""
    """Whose weights the engine had loaded when the stream's producer started, 64 hex digits; empty: not known."""
    kv_cache_dtype: str = ""
    """What keys and values are kept in, such as "fp8_e4m3"; empty: in `dtype`, or not known."""
    patience_s: float = 30.0
    """An answer that takes longer means to the producer that the sidecar is lost."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row `[L, H]`."""
        return len(self.layer_ids) * self.hidden_size * DTYPE_BYTES[self.dtype]


class ProducerAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """The sidecar's answer to `Producer`."""

    protocol: int = PROTOCOL_VERSION
    producer_id: str
    shm: bool
    """True: the sidecar has the ring open; the producer unlinks its name now and sends shared spans."""
    shm_reason: str = ""
    """Why not, where a ring was offered and `shm` is False."""
    heartbeat_s: float
    """A producer silent for this long is lost, and its open captures fail as `engine_lost`. Send at a third of it."""
    max_payload_bytes: int
    """The largest payload the sidecar takes in one batch body."""


class CaptureInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a capture when its request is first scheduled."""

    capture_id: str
    request_id: str
    """The engine's request id: the client's, with a random suffix."""
    num_prompt_tokens: int
    rows: RowsKind = RowsKind.PROMPT
    created: float
    """Seconds since the epoch."""
    dataset: str = ""
    sample_id: str = ""
    tags: dict[str, str] = {}
    lora: str = ""
    mm_hashes: tuple[str, ...] = ()
    expected_content_hash: str = ""
    weights_id: str = ""
    """Whose weights, where they have changed since the producer started; empty: the producer's."""
    lora_weights_id: str = ""
    """Whose weights the adapter `lora` has, 64 hex digits."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Where row bytes lie: in the ring (`shared`) or in the batch's payload."""

    offset: int
    length: int
    shared: bool = False


class Open(msgspec.Struct, frozen=True, tag="open"):
    """A capture begins."""

    capture: CaptureInfo


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Rows `start .. start + count` of a capture, in order and without gaps."""

    capture_id: str
    start: int
    count: int
    span: Span


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Every wanted row has been sent. `token_ids` are the ids the rows stand for, int64 little-endian."""

    capture_id: str
    num_rows: int
    token_ids: bytes
    finish_reason: str = ""


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """The capture will have no shard."""

    capture_id: str
    reason: FailReason
    detail: str = ""


Message = Open | Rows | Commit | Fail


class Batch(msgspec.Struct, frozen=True):
    """Messages of one producer, in order. Without messages it is a heartbeat."""

    producer_id: str
    seq: int
    messages: tuple[Message, ...] = ()
    close: bool = False
    """The stream ends with this batch."""


class MessageStatus(enum.StrEnum):
    """What became of one message."""

    OK = "ok"
    DUPLICATE = "duplicate"
    """The sidecar has it already; nothing changed."""
    FAILED = "failed"
    """The capture has failed, now or before; `reason` and `detail` say why. Send no more of it."""


class MessageAnswer(msgspec.Struct, frozen=True):
    """The answer to the message at the same position of the batch."""

    status: MessageStatus
    state: CaptureState
    reason: FailReason | None = None
    detail: str = ""


class BatchAnswer(msgspec.Struct, frozen=True):
    """One answer per message, in order."""

    seq: int
    messages: tuple[MessageAnswer, ...] = ()


def encode(value: msgspec.Struct) -> bytes:
    """A struct as msgpack."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes | bytearray | memoryview, kind: type[_T]) -> _T:
    """A struct from msgpack; raises `ProtocolError` naming the field that is wrong."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a {kind.__name__} of protocol {PROTOCOL_VERSION}: {error}") from error


def encode_batch(
    batch: Batch, payload: Iterable[bytes | bytearray | memoryview] = ()
) -> list[bytes | bytearray | memoryview]:
    """A framed batch as a list of buffers to be sent one after the other; the payload is not copied."""
    block = encode(batch)
    return [_LENGTH.pack(len(block)), block, *payload]


def decode_batch(body: bytes | bytearray | memoryview) -> tuple[Batch, memoryview]:
    """The batch of a framed body, and its payload as a view; raises `ProtocolError`."""
    view = memoryview(body)
    if len(view) < _LENGTH.size:
        raise ProtocolError(f"a batch has at least {_LENGTH.size} bytes, this body has {len(view)}")
    (length,) = _LENGTH.unpack_from(view)
    end = _LENGTH.size + length
    if length > MAX_MESSAGES_BYTES or end > len(view):
        raise ProtocolError(
            f"the message block claims {length} bytes, the body has {len(view) - _LENGTH.size} after it"
        )
    return decode(view[_LENGTH.size : end], Batch), view[end:]


def new_capture_id() -> str:
    """32 lower-case hex digits: 12 of Unix milliseconds, then 20 random; sorts by time, safe as a file name."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def is_capture_id(text: str) -> bool:
    """Whether a text has the shape of a capture id; nothing else ever becomes part of a path."""
    return len(text) == 32 and all(c in "0123456789abcdef" for c in text)


def is_weights_id(text: str) -> bool:
    """Whether a text has the shape of a weights id, or is empty: not known."""
    return not text or (len(text) == 64 and all(c in "0123456789abcdef" for c in text))


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as int64 little-endian bytes."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


def unpack_token_ids(data: bytes) -> tuple[int, ...]:
    """Token ids from int64 little-endian bytes; raises `ProtocolError` on a partial id."""
    if len(data) % 8:
        raise ProtocolError(f"token ids are 8 bytes each, got {len(data)} bytes")
    return struct.unpack(f"<{len(data) // 8}q", data)
