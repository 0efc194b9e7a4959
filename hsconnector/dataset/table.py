"""Many small rows that every data-loading worker sees and none copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar, overload

import msgspec
import torch

__all__ = ["Table"]

_Row = TypeVar("_Row")


class Table(Generic[_Row]):
    """A sequence of structs, kept encoded in one tensor.

    Forked workers share its pages, as nothing writes to them; for spawned ones torch moves a tensor to shared memory
    and sends a handle, however many rows there are. A slice is another table over the same bytes.
    """

    def __init__(self, rows: Iterable[_Row], kind: type[_Row]) -> None:
        encoder = msgspec.msgpack.Encoder()
        encoded = [encoder.encode(row) for row in rows]
        joined = bytearray(b"".join(encoded))
        self._kind = kind
        self._bytes = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        bounds = torch.tensor([0, *itertools.accumulate(map(len, encoded))])
        self._bounds = torch.stack([bounds[:-1], bounds[1:]], 1)

    def __len__(self) -> int:
        return len(self._bounds)

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> Table[_Row]: ...
    def __getitem__(self, index: int | slice) -> _Row | Table[_Row]:
        if isinstance(index, slice):
            part = Table[_Row]((), self._kind)
            part._bytes = self._bytes
            part._bounds = self._bounds[list(range(len(self))[index])]
            return part
        start, stop = self._bounds[range(len(self))[index]].tolist()
        row: _Row = msgspec.msgpack.decode(self._bytes[start:stop].numpy().tobytes(), type=self._kind)
        return row
