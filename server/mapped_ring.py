"""A producer's shared memory, opened for reading and trusted with nothing."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

from hsconnector.capture.protocol import RingOffer
from hsconnector.errors import RingError

__all__ = ["MappedRing"]


class MappedRing:
    """The shared file of one producer, mapped read-only.

    Its bytes are only ever handed to `pwrite`: a file that shrinks under a map kills whoever touches the map
    (SIGBUS), while the system call merely fails. Ask `holds` again after the call: up to the end of its last page
    a shrunken file reads as zeros.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._fd = fd
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)

    @classmethod
    def open(cls, shm_dir: Path, offer: RingOffer) -> MappedRing:
        """Opens a ring by its bare name; raises `RingError` with one line for whoever offered it."""
        name = offer.name
        if not name or name in (".", "..") or "/" in name or "\0" in name or len(name.encode()) > 255:
            raise RingError(f"a ring has a bare file name, not {name[:64]!r}")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(shm_dir / name, flags)
        except OSError as error:
            raise RingError(f"{name} cannot be opened under {shm_dir}: {error.strerror}") from error
        try:
            _check(name, os.fstat(fd), offer.size)
            return cls(fd, offer.size)
        except (RingError, OSError, ValueError) as error:
            os.close(fd)
            raise error if isinstance(error, RingError) else RingError(f"{name} cannot be mapped: {error}") from error

    def holds(self, end: int) -> bool:
        """Whether the file still reaches byte `end`."""
        return 0 <= end <= min(self.size, os.fstat(self._fd).st_size)

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes `offset .. offset + length`; release it before `close`."""
        with memoryview(self._map) as whole:
            return whole[offset : offset + length]

    def close(self) -> None:
        """Unmaps and closes."""
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)


def _check(name: str, status: os.stat_result, size: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RingError(f"{name} is not a regular file")
    if status.st_uid != os.geteuid() and status.st_gid not in {os.getegid(), *os.getgroups()}:
        raise RingError(f"{name} belongs to user {status.st_uid} and group {status.st_gid}, not to this sidecar's")
    if size < 1 or status.st_size != size:
        raise RingError(f"{name} was offered with {size} bytes and has {status.st_size}")
