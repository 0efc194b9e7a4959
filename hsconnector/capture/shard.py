"""Reading shards: safetensors files of one capture, from a local disk or from bytes.

A shard holds `hidden_states` `[T, L, H]` (bfloat16, float16 or float32) and `token_ids` `[T]` (int64), with the
capture's metadata as strings. Files are read, never mapped: a map of a file that shrinks, or lies on a network file
system that goes away, kills the process. A view of a local file reads only its rows.

torch is imported only where torch tensors are asked for.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from hsconnector.capture.record import Verdict
from hsconnector.errors import SettingsError, ShardError, StoreError, UnsupportedError

__all__ = [
    "Capture",
    "Framework",
    "RowRange",
    "ShardHeader",
    "data_hash",
    "open_header",
    "open_shard",
    "parse_shard",
    "read_header",
    "resolve_rows",
    "resolve_slots",
]

Framework = Literal["torch", "numpy"]
RowRange = slice | tuple[int, int]

MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""

_LENGTH = struct.Struct("<Q")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}


@dataclass(frozen=True)
class Capture:
    """The hidden states of one engine request, or a view of them.

    `hidden_states` `[T, L, H]` in the stored dtype, `token_ids` `[T]` int64; slot `s` holds layer id `layer_ids[s]`
    in vLLM's counting (0 the embeddings, N the last layer before the final norm). Row 0 is row `first_row` of the
    capture. `metadata` is the shard's, `verdict` the sidecar's judgement where it was asked, `path` the file the rows
    were read from where it was local.
    """

    hidden_states: Any
    token_ids: Any
    layer_ids: tuple[int, ...]
    metadata: Mapping[str, str] = field(repr=False)
    first_row: int = 0
    verdict: Verdict | None = None
    path: Path | None = None

    @property
    def capture_id(self) -> str:
        return self.metadata.get("capture_id", "")

    def slot(self, layer_id: int) -> int:
        """The index into the second dimension that holds a layer; raises SettingsError where it was not captured."""
        if layer_id not in self.layer_ids:
            raise SettingsError(f"layer {layer_id} is not among the layers {list(self.layer_ids)} of this capture")
        return self.layer_ids.index(layer_id)

    def layer(self, layer_id: int) -> Any:
        """One layer's states `[T, H]`."""
        return self.hidden_states[:, self.slot(layer_id)]


@dataclass(frozen=True)
class ShardHeader:
    """Where the two tensors of a shard lie, checked against the size of the whole.

    `data_at` is the first byte of the data section; `states_at` and `tokens_at` count from it.
    """

    metadata: Mapping[str, str] = field(repr=False)
    layer_ids: tuple[int, ...]
    dtype: str
    shape: tuple[int, int, int]
    data_at: int
    data_bytes: int
    states_at: int
    tokens_at: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row `[L, H]`."""
        return self.shape[1] * self.shape[2] * _ITEM_BYTES[self.dtype]

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


def open_shard(
    path: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    rows: RowRange | None = None,
    framework: Framework = "torch",
    dtype: Literal["float32"] | None = None,
    verify: bool = False,
) -> Capture:
    """A shard file without asking a sidecar.

    `layers` are layer ids, `rows` a range; only the asked rows are read. The sidecar hashed the file when it wrote it,
    so the checksum is read again only with `verify`. Raises ShardError for a file that is not a whole shard or does
    not match its checksum, StoreError where it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            header = read_header(file.fileno(), str(path))
            if verify:
                data = _pread(file.fileno(), header.data_at, header.data_bytes)
                _check_hash(data, header, str(path))
                return _Reader(header, framework, dtype).whole(data, layers, rows, Path(path))
            return _Reader(header, framework, dtype).ranged(file.fileno(), layers, rows, Path(path))
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot read shard {path}: {error.strerror or error}") from error


def open_header(path: str | os.PathLike[str]) -> ShardHeader:
    """What a shard file says of itself; raises ShardError, StoreError."""
    try:
        with open(path, "rb", buffering=0) as file:
            return read_header(file.fileno(), str(path))
    except OSError as error:
        raise StoreError(f"cannot read shard {path}: {error.strerror or error}") from error


def parse_shard(
    body: bytes | bytearray,
    *,
    layers: Sequence[int] | None = None,
    rows: RowRange | None = None,
    framework: Framework = "torch",
    dtype: Literal["float32"] | None = None,
    verify: bool = True,
    name: str = "the answer",
) -> Capture:
    """The bytes of a shard as tensors that share the memory of `body`; raises ShardError."""
    header = _parse_header(memoryview(body), len(body), name)
    data = memoryview(body)[header.data_at :]
    if verify:
        _check_hash(data, header, name)
    return _Reader(header, framework, dtype).whole(data, layers, rows, None)


def read_header(fd: int, name: str) -> ShardHeader:
    """The header of an open shard file; raises ShardError."""
    size = os.fstat(fd).st_size
    prefix = os.pread(fd, _LENGTH.size, 0)
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else 0
    if length > MAX_HEADER_BYTES:
        raise ShardError(f"{name} is no shard: its header claims {length} bytes")
    return _parse_header(memoryview(prefix + os.pread(fd, length, _LENGTH.size)), size, name)


def data_hash(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of a data section, in hex, as shards carry it under `data_hash`."""
    try:
        import xxhash
    except ImportError:
        raise UnsupportedError("checksums need xxhash: pip install xxhash, or read with verify=False") from None
    return str(xxhash.xxh3_128_hexdigest(data))


def _check_hash(data: bytearray | memoryview, header: ShardHeader, name: str) -> None:
    if not header.data_hash:
        raise ShardError(f"{name} carries no data_hash; read it with verify=False")
    found = data_hash(data)
    if found != header.data_hash:
        raise ShardError(f"{name} is damaged: its data hash to {found}, its header says {header.data_hash}")


def _parse_header(view: memoryview, size: int, name: str) -> ShardHeader:
    if len(view) < _LENGTH.size:
        raise ShardError(f"{name} is no shard: {size} bytes")
    (length,) = _LENGTH.unpack_from(view)
    if length > MAX_HEADER_BYTES or _LENGTH.size + length > min(size, len(view)):
        raise ShardError(f"{name} is no whole shard: its header claims {length} bytes, the whole has {size}")
    try:
        fields = msgspec.json.decode(view[_LENGTH.size : _LENGTH.size + length], type=_Fields)
        layer_ids = tuple(msgspec.json.decode(fields.metadata.get("layer_ids", "null"), type=list[int]))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ShardError(f"{name} is no shard of hsconnector: {error}") from error
    header = _located(fields, layer_ids, _LENGTH.size + length, size - _LENGTH.size - length, name)
    _check_covered(fields, header, name)
    return header


def _located(fields: _Fields, layer_ids: tuple[int, ...], data_at: int, data_bytes: int, name: str) -> ShardHeader:
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
        data_bytes=data_bytes,
        states_at=states.data_offsets[0],
        tokens_at=tokens.data_offsets[0],
    )


def _check_covered(fields: _Fields, header: ShardHeader, name: str) -> None:
    """The two tensors fill the data section without a gap, as safetensors demands."""
    states = (fields.hidden_states.data_offsets, header.shape[0] * header.row_bytes)
    tokens = (fields.token_ids.data_offsets, header.shape[0] * _ITEM_BYTES["int64"])
    end = 0
    for (start, stop), length in sorted([states, tokens]):
        if start != end or stop - start != length:
            raise ShardError(f"{name}: a tensor of {length} bytes lies at {start} to {stop}")
        end = stop
    if end != header.data_bytes:
        raise ShardError(f"{name} is no whole shard: {header.data_bytes} bytes of data, its tensors take {end}")


def _pread(fd: int, offset: int, length: int) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise ShardError(f"the file ended {length - done} bytes early: it was changed while being read")
        done += count
    return data


@dataclass(frozen=True)
class _Reader:
    """Bytes to arrays of one framework."""

    header: ShardHeader
    framework: Framework
    dtype: Literal["float32"] | None

    def __post_init__(self) -> None:
        if self.framework not in ("torch", "numpy"):
            raise SettingsError(f'framework is "torch" or "numpy", not {self.framework!r}')
        if self.dtype not in (None, "float32"):
            raise SettingsError(f'dtype is None (as stored) or "float32", not {self.dtype!r}')
        if self.framework == "numpy" and self.header.dtype == "bfloat16" and self.dtype is None:
            raise SettingsError(
                'numpy has no bfloat16: ask for dtype="float32", which holds every value, or framework="torch"'
            )

    def whole(
        self, data: bytearray | memoryview, layers: Sequence[int] | None, rows: RowRange | None, path: Path | None
    ) -> Capture:
        """From a whole data section."""
        start, stop = resolve_rows(rows, self.header.shape[0])
        header = self.header
        states: bytearray | memoryview = memoryview(data)[header.states_at + start * header.row_bytes :]
        if (header.data_at + header.states_at) % _ITEM_BYTES[header.dtype]:
            states = bytearray(states)
        tokens = bytearray(data[header.tokens_at + start * 8 : header.tokens_at + stop * 8])
        return self._capture(states, tokens, layers, (start, stop), path)

    def ranged(self, fd: int, layers: Sequence[int] | None, rows: RowRange | None, path: Path) -> Capture:
        """From a file, reading the asked rows only."""
        header = self.header
        start, stop = resolve_rows(rows, header.shape[0])
        count = stop - start
        states = _pread(fd, header.data_at + header.states_at + start * header.row_bytes, count * header.row_bytes)
        tokens = _pread(fd, header.data_at + header.tokens_at + start * 8, count * 8)
        return self._capture(states, tokens, layers, (start, stop), path)

    def _capture(
        self,
        states: bytearray | memoryview,
        tokens: bytearray | memoryview,
        layers: Sequence[int] | None,
        rows: tuple[int, int],
        path: Path | None,
    ) -> Capture:
        count = rows[1] - rows[0]
        arrays = _torch_array if self.framework == "torch" else _numpy_array
        hidden_states = arrays(states, self.header.dtype, (count, *self.header.shape[1:]), self.dtype)
        slots = resolve_slots(layers, self.header.layer_ids)
        if slots is not None:
            hidden_states = hidden_states[:, slots]
        return Capture(
            hidden_states=hidden_states,
            token_ids=arrays(tokens, "int64", (count,), None),
            layer_ids=self.header.layer_ids if slots is None else tuple(self.header.layer_ids[s] for s in slots),
            metadata=self.header.metadata,
            first_row=rows[0],
            path=path,
        )


def resolve_rows(rows: RowRange | None, total: int) -> tuple[int, int]:
    """A row range as first and one-past-last row of `total`; raises SettingsError."""
    if rows is None:
        return 0, total
    asked = rows if isinstance(rows, slice) else slice(*rows)
    start, stop, step = asked.indices(total)
    if step != 1 or start >= stop or (asked.stop is not None and asked.stop > total):
        raise SettingsError(f"rows {asked.start}:{asked.stop} is no range within the {total} rows of this capture")
    return start, stop


def resolve_slots(layers: Sequence[int] | None, layer_ids: tuple[int, ...]) -> list[int] | None:
    """The slots of the asked layer ids, ascending; raises SettingsError for a layer that was not captured."""
    if layers is None:
        return None
    missing = sorted(set(layers) - set(layer_ids))
    if missing or not layers:
        raise SettingsError(f"layers {missing or list(layers)} are not among the captured {json.dumps(layer_ids)}")
    return [slot for slot, layer in enumerate(layer_ids) if layer in layers]


def _torch_array(data: bytearray | memoryview, dtype: str, shape: tuple[int, ...], cast: str | None) -> Any:
    try:
        import torch
    except ImportError:
        raise UnsupportedError(
            'torch is not installed here: pip install torch, or read with framework="numpy"'
        ) from None
    count = _product(shape)
    kind: torch.dtype = getattr(torch, dtype)
    flat = torch.frombuffer(_writable(data), dtype=kind, count=count) if count else torch.empty(0, dtype=kind)
    return flat.reshape(shape).to(getattr(torch, cast or dtype))


def _numpy_array(data: bytearray | memoryview, dtype: str, shape: tuple[int, ...], cast: str | None) -> Any:
    import numpy as np

    count = _product(shape)
    if dtype == "bfloat16":
        bits = np.frombuffer(data, dtype="<u2", count=count).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).reshape(shape)
    array = np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"), count=count).reshape(shape)
    return array.astype(cast) if cast else array


def _writable(data: bytearray | memoryview) -> bytearray | memoryview:
    """torch shares memory only with what may be written; bytes are copied once."""
    return bytearray(data) if isinstance(data, memoryview) and data.readonly else data


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
