"""Shard bytes on their way to a reader: the whole file, a range of it, or a view as a file of its own."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from hsconnector.capture.protocol import DTYPE_BYTES
from hsconnector.errors import ShardError
from server.shards import PIECE_BYTES, ShardHeader, build_header, read_header

__all__ = ["Selection", "ShardFile", "View"]

_FORGET = 8 << 20
"""Mapped bytes after which pages behind the reader are let go and pages before it are asked for."""


class ShardFile:
    """An open shard; keeps giving its bytes when the name is removed. Close it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def close(self) -> None:
        """Lets the file go."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def header(self) -> ShardHeader:
        """Its header; raises `ShardError`."""
        return read_header(self._fd)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; raises `ShardError` where the file ends before."""
        parts: list[bytes] = []
        while length:
            part = os.pread(self._fd, length, offset)
            if not part:
                raise ShardError(f"the file ends at byte {offset}, {length} bytes short")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    async def chunks(self, start: int, stop: int) -> AsyncIterator[memoryview]:
        """The bytes `start .. stop` in pieces of 1 MiB; from a map, or read where mapping is not possible."""
        try:
            mapped = mmap.mmap(self._fd, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError:
            for offset in range(start, stop, PIECE_BYTES):
                yield memoryview(await asyncio.to_thread(self.read, offset, min(PIECE_BYTES, stop - offset)))
            return
        forgotten = asked = start & -mmap.PAGESIZE
        view = memoryview(mapped)
        for offset in range(start, stop, PIECE_BYTES):
            if offset >= asked:
                mapped.madvise(mmap.MADV_WILLNEED, asked, min(2 * _FORGET, self.size - asked))
                asked += _FORGET
            yield view[offset : min(offset + PIECE_BYTES, stop)]
            if offset - forgotten >= _FORGET:
                mapped.madvise(mmap.MADV_DONTNEED, forgotten, _FORGET)
                forgotten += _FORGET


class Selection(msgspec.Struct, frozen=True):
    """Which part of a shard a view holds."""

    layers: tuple[int, ...]
    """Layer ids, ascending."""
    slots: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def of(
        cls, header: ShardHeader, layers: tuple[int, ...] | None, rows: tuple[int | None, int | None] | None
    ) -> Selection:
        """A checked selection; raises `ShardError` naming what the shard does not have."""
        has = header.layer_ids
        wanted = has if layers is None else tuple(sorted(layers))
        if not wanted or len(set(wanted)) != len(wanted) or not set(wanted) <= set(has):
            raise ShardError(f"layers {list(wanted)} are not among this capture's layers {list(has)}, each once")
        total = header.shape[0]
        start, stop = rows or (0, total)
        start, stop = start or 0, total if stop is None else stop
        if not 0 <= start < stop <= total:
            raise ShardError(f"rows {start}:{stop} are not within the {total} rows of this capture")
        return cls(wanted, tuple(has.index(layer) for layer in wanted), start, stop)


class View:
    """Some rows and layers of a shard, as a small safetensors file with a `data_hash` of its own.

    Its metadata is the shard's with `layer_ids` and `data_hash` of the view; `content_hash` is left out, `view` says
    (JSON) which rows and layers these are, `source_data_hash` and `source_content_hash` what they were cut from.
    """

    def __init__(self, file: ShardFile, header: ShardHeader, selection: Selection) -> None:
        self._file, self._header, self._selection = file, header, selection
        self.shape = (selection.stop - selection.start, len(selection.slots), header.shape[2])
        digest = xxhash.xxh3_128()
        for piece in self._data():
            digest.update(piece)
        self.data_hash = digest.hexdigest()
        self.head = build_header(self._metadata(), header.dtype, self.shape)
        self.size = len(self.head) + self.shape[0] * (self.shape[1] * self.shape[2] * DTYPE_BYTES[header.dtype] + 8)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The file's bytes."""
        yield self.head
        pieces = self._data()
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def _metadata(self) -> dict[str, str]:
        kept = dict(self._header.metadata)
        kept["source_data_hash"] = kept.get("data_hash", "")
        kept["source_content_hash"] = kept.pop("content_hash", "")
        selection = self._selection
        view = {"rows": [selection.start, selection.stop], "layers": list(selection.layers)}
        kept["view"] = msgspec.json.encode(view).decode()
        kept["layer_ids"] = msgspec.json.encode(list(selection.layers)).decode()
        kept["data_hash"] = self.data_hash
        return kept

    def _data(self) -> Iterator[bytes]:
        header, selection = self._header, self._selection
        step = max(1, PIECE_BYTES // header.row_bytes)
        for row in range(selection.start, selection.stop, step):
            count = min(step, selection.stop - row)
            data = self._file.read(header.data_start + row * header.row_bytes, count * header.row_bytes)
            yield self._pick(data, count)
        tokens = header.data_start + header.hidden_bytes
        yield self._file.read(tokens + 8 * selection.start, 8 * (selection.stop - selection.start))

    def _pick(self, data: bytes, count: int) -> bytes:
        if len(self._selection.slots) == self._header.shape[1]:
            return data
        rows: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(data, np.uint8).reshape(
            count, self._header.shape[1], -1
        )
        return rows[:, list(self._selection.slots)].tobytes()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[ShardFile]:
    """A shard for a moment."""
    file = ShardFile(path)
    try:
        yield file
    finally:
        file.close()
