"""Open shard files, and which captures are being read over HTTP at the moment."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from hsconnector.capture.header import ShardHeader, check_written_by_sidecar, read_header
from hsconnector.errors import ShardError
from server.shards import PIECE_BYTES

__all__ = ["Readers", "ShardFile"]

_FORGET = 8 << 20
"""Every so many bytes of a map, the pages already sent are let go and the next ones are asked for."""


class ShardFile:
    """An open shard; keeps giving its bytes when the name is removed. Close it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def close(self) -> None:
        """Closes the file; harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def header(self) -> ShardHeader:
        """Its header; raises `ShardError`."""
        return check_written_by_sidecar(read_header(self._fd))

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


class Readers:
    """Counts open shards; may be asked from any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def open(self, capture_id: str, path: Path) -> ShardFile:
        """A shard that counts as being read until it is closed; raises OSError."""
        with self._lock:
            self._counts[capture_id] += 1
        try:
            return _CountedShard(path, lambda: self._done(capture_id))
        except BaseException:
            self._done(capture_id)
            raise

    def has(self, capture_id: str) -> bool:
        """Whether someone reads this capture now."""
        with self._lock:
            return capture_id in self._counts

    def _done(self, capture_id: str) -> None:
        with self._lock:
            self._counts[capture_id] -= 1
            if self._counts[capture_id] <= 0:
                del self._counts[capture_id]


class _CountedShard(ShardFile):
    def __init__(self, path: Path, done: Callable[[], None]) -> None:
        super().__init__(path)
        self._done: Callable[[], None] | None = done

    def close(self) -> None:
        done, self._done = self._done, None
        super().close()
        if done is not None:
            done()
