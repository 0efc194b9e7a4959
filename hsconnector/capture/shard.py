"""The tensors of a shard, from a local file or from bytes.

Files are read, never mapped: a map of a file that shrinks, or lies on a network file system that goes away, kills the
process. A view of a local file reads only its rows. torch is imported only where torch tensors are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hsconnector.capture.header import TOKEN_BYTES, ShardHeader, data_hasher, parse_header, read_header
from hsconnector.capture.protocol import DTYPE_BYTES
from hsconnector.capture.record import Verdict
from hsconnector.capture.selection import RowRange, resolve_rows, resolve_slots
from hsconnector.errors import SettingsError, ShardError, StoreError, UnsupportedError

__all__ = ["Capture", "Framework", "open_shard", "parse_shard"]

Framework = Literal["torch", "numpy"]


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
                return _Decoder(header, framework, dtype).whole(data, layers, rows, Path(path))
            return _Decoder(header, framework, dtype).ranged(file.fileno(), layers, rows, Path(path))
    except OSError as error:
        if isinstance(error, StoreError):
            raise
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
    header = parse_header(memoryview(body), len(body), name)
    data = memoryview(body)[header.data_at :]
    if verify:
        _check_hash(data, header, name)
    return _Decoder(header, framework, dtype).whole(data, layers, rows, None)


def _check_hash(data: bytearray | memoryview, header: ShardHeader, name: str) -> None:
    if not header.data_hash:
        raise ShardError(f"{name} carries no data_hash; read it with verify=False")
    hasher = data_hasher()
    hasher.update(data)
    found = hasher.hexdigest()
    if found != header.data_hash:
        raise ShardError(f"{name} is damaged: its data hash to {found}, its header says {header.data_hash}")


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
class _Decoder:
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
        if (header.data_at + header.states_at) % DTYPE_BYTES[header.dtype]:
            states = bytearray(states)
        tokens = bytearray(data[header.tokens_at + start * TOKEN_BYTES : header.tokens_at + stop * TOKEN_BYTES])
        return self._capture(states, tokens, layers, (start, stop), path)

    def ranged(self, fd: int, layers: Sequence[int] | None, rows: RowRange | None, path: Path) -> Capture:
        """From a file, reading the asked rows only."""
        header = self.header
        start, stop = resolve_rows(rows, header.shape[0])
        count = stop - start
        states = _pread(fd, header.data_at + header.states_at + start * header.row_bytes, count * header.row_bytes)
        tokens = _pread(fd, header.data_at + header.tokens_at + start * TOKEN_BYTES, count * TOKEN_BYTES)
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
        if len(slots) < len(self.header.layer_ids):
            hidden_states = hidden_states[:, list(slots)]
        return Capture(
            hidden_states=hidden_states,
            token_ids=arrays(tokens, "int64", (count,), None),
            layer_ids=tuple(self.header.layer_ids[slot] for slot in slots),
            metadata=self.header.metadata,
            first_row=rows[0],
            path=path,
        )


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
