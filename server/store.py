"""The writing side of a store's folder: who may write there, how much is used, what is removed."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hsconnector.capture.protocol import CaptureState
from hsconnector.errors import StoreError
from hsconnector.storage.folder import Folder

__all__ = ["FULL", "Store"]

RESERVE = 8 << 20
"""Bytes of the disk that shards leave to the index, at most an eighth of it."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that mean: no room."""


class Store(Folder):
    """An opened store; holds its lock until `close`. Raises `StoreError` where it cannot be made, locked or written."""

    def __init__(self, root: Path, *, quota: int | None = None) -> None:
        super().__init__(root)
        self.quota = quota
        self.used = 0
        """Bytes of shards, those being written included."""
        self.make_room: Callable[[int], bool] = lambda more: False
        """Called with the bytes that are missing before that is an error; removes what may go, and says whether they fit."""
        try:
            if not root.exists():
                root.mkdir(parents=True)
                root.chmod(0o750)
            for folder in (self.captures, self.quarantine):
                folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                pass
            self._lock = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        except OSError as error:
            raise StoreError(f"the store {root} cannot be written: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StoreError(f"the store {root} is in use by another sidecar; give each its own --store") from error

    def close(self) -> None:
        """Lets another sidecar have the store."""
        os.close(self._lock)

    def check_room(self, more: int) -> None:
        """Raises ENOSPC where `more` bytes would go over the quota and nothing may be removed for them."""
        if self.shortage(more) > 0:
            self.make_room(more)
        if self.quota is not None and self.used + more > self.quota:
            used = f"{self.used} of {self.quota} bytes of the quota are used, {more} more were needed"
            raise OSError(errno.ENOSPC, used)

    def shortage(self, more: int, quota: int | None = None) -> int:
        """How many bytes must go before `more` fit under the quota and on the disk; none or fewer: they fit."""
        disk = os.statvfs(self.root)
        limit = self.quota if quota is None else quota
        over = -1 if limit is None else self.used + more - limit
        reserve = min(RESERVE, disk.f_blocks * disk.f_frsize // 8)
        return max(over, more + reserve - disk.f_bavail * disk.f_frsize)

    def remove(self, capture_id: str, size: int) -> None:
        """Removes a capture's shard wherever it lies."""
        for state in (CaptureState.READY, CaptureState.QUARANTINED):
            self.shard(capture_id, state).unlink(missing_ok=True)
        self.used -= size

    def set_aside(self, path: Path) -> Path:
        """Moves a file that is no whole shard to `damaged`; returns where it lies now."""
        self.damaged.mkdir(exist_ok=True)
        target = self.damaged / f"{path.name[:200]}.{time.time_ns()}"
        path.rename(target)
        return target
