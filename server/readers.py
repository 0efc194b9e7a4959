"""Which shards are being read over HTTP at the moment."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from server.reading import ShardFile

__all__ = ["Readers"]


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
