"""The header of a shard: what the file says of itself, and where its two tensors lie.

A shard is a safetensors file: 8 bytes of little-endian length, a JSON header of that length padded with spaces to a
multiple of 8, and the data section. `hidden_states` is `[T, L, H]` (bfloat16, float16 or float32), `token_ids` is
`[T]` (int64); a sidecar writes them in this order. `data_hash` is the xxh3-128 (hex) of the data section: every byte
after the header, in file order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from hsconnector.capture.protocol import DTYPE_BYTES
from hsconnector.errors import ShardError, StoreError, UnsupportedError

if TYPE_CHECKING:
    import xxhash

__all__ = [
    "FORMAT",
    "MAX_FINISH_REASON",
    "ShardHeader",
    "build_header",
    "check_written_by_sidecar",
    "data_hasher",
    "header_room",
    "open_header",
    "parse_header",
    "read_header",
]

FORMAT = "hsconnector/1"
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
MAX_FINISH_REASON = 64
"""Characters kept of a finish reason."""

TOKEN_BYTES = 8
_LENGTH = struct.Struct("<Q")
_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_MOST_ROWS = 10**18
"""More than any capture has: a header reserved for so many holds what is true in the end."""


@dataclass(frozen=True)
class ShardHeader:
    """What a shard holds and where; that it fits the size of the whole was checked.

    `data_at` is the first byte of the data section; `states_at` and `tokens_at` count from it.
    """

    metadata: Mapping[str, str] = field(repr=False)
    layer_ids: tuple[int, ...]
    """The layer id of each slot."""
    dtype: str
    """A key of `DTYPE_BYTES`."""
    shape: tuple[int, int, int]
    """`[T, L, H]`."""
    data_at: int
    states_at: int
    tokens_at: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row `[L, H]`."""
        return self.shape[1] * self.shape[2] * DTYPE_BYTES[self.dtype]

    @property
    def data_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.shape[0] * (self.row_bytes + TOKEN_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.data_at + self.data_bytes

    @property
    def data_hash(self) -> str:
        """xxh3-128 over the data section, as written by the sidecar; empty where the file does not say."""
        return self.metadata.get("data_hash", "")


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hidden_states: _Tensor
    token_ids: _Tensor
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def build_header(metadata: Mapping[str, str], dtype: str, shape: tuple[int, int, int], room: int = 0) -> bytes:
    """The bytes before the data section, padded to `room` if given; raises `ShardError` where they do not fit."""
    rows, slots, hidden = shape
    middle = rows * slots * hidden * DTYPE_BYTES[dtype]
    fields = {
        "__metadata__": dict(metadata),
        "hidden_states": {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [0, middle]},
        "token_ids": {"dtype": "I64", "shape": [rows], "data_offsets": [middle, middle + TOKEN_BYTES * rows]},
    }
    text = msgspec.json.encode(fields)
    length = room - _LENGTH.size if room else len(text) + -len(text) % 8
    if len(text) > length:
        raise ShardError(f"a header of {len(text)} bytes does not fit the {length} bytes reserved for it")
    return _LENGTH.pack(length) + text.ljust(length)


def header_room(metadata: Mapping[str, str], dtype: str, slots: int, hidden: int) -> int:
    """Bytes to leave before the data section so that the header fits whatever T becomes."""
    widest = {
        **metadata,
        "content_hash": "f" * 64,
        "data_hash": "f" * 32,
        "finish_reason": "\x00" * MAX_FINISH_REASON,
    }
    room = len(build_header(widest, dtype, (_MOST_ROWS, slots, hidden)))
    return room + -room % 64


def open_header(path: str | os.PathLike[str]) -> ShardHeader:
    """What a shard file says of itself; raises ShardError, StoreError."""
    try:
        with open(path, "rb", buffering=0) as file:
            return read_header(file.fileno(), str(path))
    except OSError as error:
        raise StoreError(f"cannot read shard {path}: {error.strerror or error}") from error


def read_header(fd: int, name: str = "the file") -> ShardHeader:
    """The header of an open shard file; raises ShardError."""
    size = os.fstat(fd).st_size
    prefix = os.pread(fd, _LENGTH.size, 0)
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else 0
    if length > MAX_HEADER_BYTES:
        raise ShardError(f"{name} is no shard: its header claims {length} bytes")
    return parse_header(memoryview(prefix + os.pread(fd, length, _LENGTH.size)), size, name)


def parse_header(view: memoryview, size: int, name: str) -> ShardHeader:
    """The header at the beginning of a shard of `size` bytes in all; raises ShardError saying what is wrong with it.

    The tensors may lie in either order, as in files that safetensors has rewritten.
    """
    if len(view) < _LENGTH.size:
        raise ShardError(f"{name} is no shard: {size} bytes")
    (length,) = _LENGTH.unpack_from(view)
    data_at = _LENGTH.size + length
    if length > MAX_HEADER_BYTES or data_at > min(size, len(view)):
        raise ShardError(f"{name} is no whole shard: its header claims {length} bytes, the whole has {size}")
    try:
        fields = msgspec.json.decode(view[_LENGTH.size : data_at], type=_Fields)
        layer_ids = tuple(msgspec.json.decode(fields.metadata.get("layer_ids", "null"), type=list[int]))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ShardError(f"{name} is no shard of hsconnector: {error}") from error
    header = _located(fields, layer_ids, data_at, name)
    _check_covered(fields, header, size, name)
    return header


def check_written_by_sidecar(header: ShardHeader) -> ShardHeader:
    """The header, if it is one as a sidecar writes them: of our format, rows first, nothing empty; else ShardError."""
    written = header.metadata.get("format")
    if written != FORMAT:
        raise ShardError(f"format is {written!r}, not {FORMAT!r}")
    if min(header.shape) < 1:
        raise ShardError(f"hidden_states has shape {list(header.shape)}, every size must be 1 or more")
    if header.states_at:
        raise ShardError("token_ids lie before hidden_states")
    return header


def data_hasher() -> xxhash.xxh3_128:
    """What a data section is hashed with, empty; its `hexdigest()` is what shards carry as `data_hash`."""
    try:
        import xxhash
    except ImportError:
        raise UnsupportedError("checksums need xxhash: pip install xxhash, or read with verify=False") from None
    return xxhash.xxh3_128()


def _located(fields: _Fields, layer_ids: tuple[int, ...], data_at: int, name: str) -> ShardHeader:
    states, tokens = fields.hidden_states, fields.token_ids
    if states.dtype not in _DTYPES or tokens.dtype != "I64":
        raise ShardError(f"{name}: hidden_states are {states.dtype} and token_ids {tokens.dtype}, not floats and I64")
    if len(states.shape) != 3 or tokens.shape != states.shape[:1] or min(states.shape) < 0:
        raise ShardError(f"{name}: hidden_states {list(states.shape)} and token_ids {list(tokens.shape)} do not agree")
    if len(layer_ids) != states.shape[1]:
        raise ShardError(f"{name}: {states.shape[1]} slots for the layer ids {list(layer_ids)}")
    return ShardHeader(
        metadata=fields.metadata,
        layer_ids=layer_ids,
        dtype=_DTYPES[states.dtype],
        shape=(states.shape[0], states.shape[1], states.shape[2]),
        data_at=data_at,
        states_at=states.data_offsets[0],
        tokens_at=tokens.data_offsets[0],
    )


def _check_covered(fields: _Fields, header: ShardHeader, size: int, name: str) -> None:
    """The two tensors fill the data section without a gap, as safetensors demands."""
    states = (fields.hidden_states.data_offsets, header.shape[0] * header.row_bytes)
    tokens = (fields.token_ids.data_offsets, header.shape[0] * TOKEN_BYTES)
    end = 0
    for (start, stop), length in sorted([states, tokens]):
        if start != end or stop - start != length:
            raise ShardError(f"{name}: a tensor of {length} bytes lies at {start} to {stop}")
        end = stop
    if header.data_at + end != size:
        raise ShardError(f"{name} is no whole shard: {size - header.data_at} bytes of data, its tensors take {end}")
