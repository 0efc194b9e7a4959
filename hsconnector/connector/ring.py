"""Bounded staging memory: rows wait here between the KV cache and the sidecar.

A ring shared with the sidecar is a file in `shm_dir`. Its space is reserved before first use: a `/dev/shm` of 64 MB
(Docker's) would otherwise kill the engine with SIGBUS at the first write beyond it. Once the sidecar has the file open
its name is removed, so that a crash leaves nothing behind. Until then its owner holds a lock on it: a file without one
belongs to an engine that died while it waited for a sidecar, and whoever comes next removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import time
from collections import deque
from collections.abc import Callable

from hsconnector.errors import RingError

__all__ = ["ALIGNMENT", "PREFIX", "Ring"]

PREFIX = "hsconnector-"
"""What the names of shared rings begin with."""
DEAD_AFTER_S = 60.0
"""A younger file without a lock is left alone: its engine may be about to take the lock."""

ALIGNMENT = 64
"""Reservations start at multiples of this many bytes, so that rows can be viewed in any dtype."""


class Ring:
    """`size` bytes, reserved in order and given back in the same order.

    Not thread-safe by itself: one thread reserves, and whoever gives back does so under the same lock.
    """

    def __init__(self, memory: mmap.mmap, size: int, path: str = "", fd: int = -1) -> None:
        self.memory = memory
        self.size = size
        self._path = path
        self._fd = fd
        self._undo: Callable[[], None] = lambda: None
        self._head = 0
        self._used = 0
        self._reserved: deque[tuple[int, int]] = deque()

    @classmethod
    def private(cls, size: int) -> Ring:
        """Memory of this process only, for row bytes that travel in the body; raises `RingError`."""
        try:
            return cls(mmap.mmap(-1, size), size)
        except (OSError, ValueError, OverflowError) as error:
            raise RingError(f"no {size} bytes of staging memory are to be had ({error}); lower ring_bytes") from error

    @classmethod
    def shared(cls, directory: str, size: int) -> Ring:
        """A new file in `directory`, mode 0640; raises `RingError` where it cannot be had in full."""
        _sweep(directory)
        path = os.path.join(directory, f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise RingError(f"cannot create staging memory in {directory}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, size)
            return cls(mmap.mmap(fd, size), size, path, fd)
        except (OSError, ValueError, OverflowError) as error:
            os.unlink(path)
            os.close(fd)
            raise RingError(
                f"{directory} has no room for {size} bytes of staging memory ({error}); "
                "lower ring_bytes or give the container a larger one (docker run --shm-size)"
            ) from error

    @property
    def name(self) -> str:
        """The shared file's bare name; empty for private memory and after `unlink`."""
        return os.path.basename(self._path) if self._path else ""

    @property
    def used(self) -> int:
        """Bytes reserved and not given back, wrap-around gaps included."""
        return self._used

    def largest(self) -> int:
        """Bytes of the largest reservation possible now."""
        if self._used == 0:
            free = self.size
        else:
            tail = self._reserved[0][0]
            free = max(self.size - self._head, tail) if self._head > tail else tail - self._head
            free = min(free, self.size - self._used)
        return free // ALIGNMENT * ALIGNMENT

    def reserve(self, length: int) -> int | None:
        """The offset of `length` fresh bytes, or None while there is no room for them in one piece."""
        length = -(-length // ALIGNMENT) * ALIGNMENT
        if self._used == 0:
            self._head = 0
        start = self._head
        gap = 0
        if start + length > self.size:
            gap, start = self.size - start, 0
        if length <= 0 or self._used + gap + length > self.size:
            return None
        self._reserved.append((self.size - gap if gap else start, gap + length))
        self._used += gap + length
        self._head = (start + length) % self.size
        return start

    def release(self) -> None:
        """Gives the oldest reservation back."""
        _, taken = self._reserved.popleft()
        self._used -= taken

    def cancel(self) -> None:
        """Gives the newest reservation back; no message names its bytes yet."""
        self._head, taken = self._reserved.pop()
        self._used -= taken

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes of a reservation."""
        return memoryview(self.memory)[offset : offset + length]

    def unlink(self) -> None:
        """Removes the shared file's name; the memory stays. Called again, does nothing."""
        path, self._path = self._path, ""
        fd, self._fd = self._fd, -1
        if path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.close(fd)

    def before_unmap(self, call: Callable[[], None]) -> None:
        """Has something undone before the memory goes, page-locking for instance."""
        self._undo = call

    def __del__(self) -> None:
        """The memory itself goes with the last view into it: a reader may still be at work in another thread."""
        self.unlink()
        self._undo()


def _sweep(directory: str) -> None:
    """Removes the rings of engines that died before a sidecar had them open."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_dead(entry.path)


def _remove_dead(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(fd)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if ours and time.time() - status.st_mtime > DEAD_AFTER_S:
            os.unlink(path)
    finally:
        os.close(fd)
