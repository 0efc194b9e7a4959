"""Lock files for speculators' stock `file` backend, where engine, sidecar and trainer share a host.

Its reader takes `path + ".lock"` to mean that a file is still being written: it waits for an exclusive flock on it,
removes it and opens the file. So the lock is made and held before the engine answers, and dropped when the sidecar has
the capture or has lost it. The lock of a capture that is whole stays for its reader to remove, that of any other is
removed here. No other part of hsconnector looks at these files.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

__all__ = ["LockFiles", "shard_path"]

log = logging.getLogger("vllm.hsconnector.lockfiles")

LINGER_S = 600.0
"""How long the lock file of a finished capture stays; only a reader that has opened it already needs it."""


def shard_path(store_dir: str, capture_id: str) -> str:
    """Where the sidecar puts the shard of a ready capture."""
    return str(Path(store_dir) / "captures" / capture_id[-2:] / f"{capture_id}.safetensors")


class LockFiles:
    """The locks of one engine's open captures. May be used from several threads; never raises."""

    def __init__(self, store_dir: str, now: Callable[[], float] = time.monotonic) -> None:
        self._store_dir = store_dir
        self._now = now
        self._guard = threading.Lock()
        self._held: dict[str, int] = {}
        self._dropped: deque[tuple[float, str]] = deque()
        self._said = False

    @property
    def held(self) -> frozenset[str]:
        """Ids of the captures whose readers wait."""
        with self._guard:
            return frozenset(self._held)

    def hold(self, capture_id: str) -> None:
        """A capture begins: whoever reads its file waits from now on."""
        self._sweep()
        path = self._path(capture_id)
        try:
            fd = _locked(path)
        except OSError as error:
            self._say(f"{path} cannot be made ({error.strerror or error}): store_dir is the sidecar's --store here")
            return
        with self._guard:
            self._held[capture_id] = fd

    def drop(self, capture_id: str, *, ready: bool) -> None:
        """The capture is over; `ready` where its file is there. A second call for it does nothing."""
        with self._guard:
            fd = self._held.pop(capture_id, None)
        if fd is None:
            return
        path = self._path(capture_id)
        if ready:
            self._dropped.append((self._now(), path))
        else:
            _remove(path)
        os.close(fd)

    def close(self) -> None:
        """Drops what is left: those captures have no file."""
        for capture_id in self.held:
            self.drop(capture_id, ready=False)

    def _sweep(self) -> None:
        """Removes locks that no reader came for."""
        while self._dropped and self._dropped[0][0] + LINGER_S < self._now():
            _remove(self._dropped.popleft()[1])

    def _path(self, capture_id: str) -> str:
        return f"{shard_path(self._store_dir, capture_id)}.lock"

    def _say(self, problem: str) -> None:
        if not self._said:
            log.error("file_backend: readers will not wait for their files: %s", problem)
        self._said = True


def _locked(path: str) -> int:
    """An open file with its exclusive lock; `captures` must be there, the two-digit folder need not."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(os.path.dirname(path))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
