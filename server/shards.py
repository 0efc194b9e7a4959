"""A shard on its way to disk, row by row.

The header's room is reserved when the file is opened, before T is known, so rows are appended as they come; the format
is written down in `hsconnector.capture.header`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from hsconnector.capture.header import MAX_FINISH_REASON, build_header, data_hasher, header_room
from hsconnector.capture.protocol import CaptureInfo, Producer
from hsconnector.capture.record import metadata_of

__all__ = ["PIECE_BYTES", "Published", "ShardWriter", "is_regular", "reserve"]

PIECE_BYTES = 1 << 20
"""Bytes of one write: after a pause, longer ones were measured at a third of the speed."""
_READ_ONLY = 0o444
# An export may be hard links to shards: whoever opens one of them to write there is told that it is read-only.
_KEEP_SIZE = 1
# What fallocate answers where room cannot be reserved; rows are written without it then.
_NO_ROOM_AHEAD = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.EINVAL, errno.ENODEV, errno.ESPIPE})

_libc = ctypes.CDLL(None, use_errno=True)
_libc_fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
if _libc_fallocate is not None:
    _libc_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    _libc_fallocate.restype = ctypes.c_int


class ShardWriter:
    """A shard that grows row by row under a temporary name in its final folder.

    Each piece is written, then read back from the file, and only those bytes are hashed and passed to `inspect`:
    what is vouched for is what lies in the file, whatever happens to the memory it came from.
    """

    def __init__(
        self,
        folder: Path,
        producer: Producer,
        info: CaptureInfo,
        *,
        inspect: Callable[[memoryview], None],
        buffer: bytearray,
    ) -> None:
        self.metadata = metadata_of(producer, info)
        self.path = folder / f".{info.capture_id}.part"
        self.rows = 0
        self._slots, self._hidden, self._dtype = len(producer.layer_ids), producer.hidden_size, producer.dtype
        self._row_bytes = producer.row_bytes
        self._room = header_room(self.metadata, self._dtype, self._slots, self._hidden)
        self._hash = data_hasher()
        self._inspect = inspect
        self._buffer = buffer
        self._fd = _create(self.path)

    @property
    def bytes_written(self) -> int:
        """Size of the file so far, header room included."""
        return self._room + self.rows * self._row_bytes

    def append(self, data: memoryview, count: int) -> None:
        """Writes `count` rows `[L, H]`; an OSError leaves the writer good for nothing but `abort`."""
        step = max(1, PIECE_BYTES // self._row_bytes)
        for first in range(0, count, step):
            rows = min(step, count - first)
            piece = data[first * self._row_bytes : (first + rows) * self._row_bytes]
            offset = self.bytes_written
            _write(self._fd, piece, offset)
            self._take_back(len(piece), offset)
            self.rows += rows

    def publish(
        self, folder: Path, token_ids: bytes, *, content_hash: str, finish_reason: str, durable: bool
    ) -> Published:
        """Completes the file and gives it its name in `folder`; after an OSError it has none, `abort` tidies up."""
        _write(self._fd, memoryview(token_ids), self.bytes_written)
        self._hash.update(token_ids)
        self.metadata |= {
            "content_hash": content_hash,
            "data_hash": self._hash.hexdigest(),
            "finish_reason": finish_reason[:MAX_FINISH_REASON],
        }
        header = build_header(self.metadata, self._dtype, (self.rows, self._slots, self._hidden), self._room)
        _write(self._fd, memoryview(header), 0)
        if durable:
            os.fsync(self._fd)
        status = os.fstat(self._fd)
        # Some file systems say only here that there was no room; then the name must not be there yet.
        self._close()
        path = folder / f"{self.metadata['capture_id']}.safetensors"
        self.path.rename(path)
        try:
            if durable:
                _sync_folder(folder)
        except OSError:
            path.unlink()
            raise
        return Published(path, self.metadata["data_hash"], status.st_size, status.st_mtime_ns)

    def abort(self) -> None:
        """Gives the shard up and removes its file."""
        try:
            self._close()
        finally:
            self.path.unlink(missing_ok=True)

    def _take_back(self, length: int, offset: int) -> None:
        if len(self._buffer) < length:
            self._buffer.extend(bytes(length - len(self._buffer)))
        with memoryview(self._buffer) as whole, whole[:length] as view:
            got = os.preadv(self._fd, [view], offset)
            while got < length:
                more = os.preadv(self._fd, [view[got:]], offset + got)
                if not more:
                    raise OSError(errno.EIO, f"{self.path} ends at {offset + got}, {length - got} bytes short")
                got += more
            self._hash.update(view)
            self._inspect(view)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Published(msgspec.Struct, frozen=True):
    """A finished shard."""

    path: Path
    data_hash: str
    size: int
    mtime_ns: int


def _create(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, _READ_ONLY)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, _READ_ONLY)


def _write(fd: int, data: memoryview, offset: int) -> None:
    for first in range(0, len(data), PIECE_BYTES):
        piece = data[first : first + PIECE_BYTES]
        reserve(fd, offset + first, len(piece))
        done = 0
        while done < len(piece):
            done += os.pwrite(fd, piece[done:], offset + first + done)


def reserve(fd: int, offset: int, length: int) -> None:
    """Reserves room on the disk for bytes that are about to be written, where the file system can."""
    if _libc_fallocate is None or _libc_fallocate(fd, _KEEP_SIZE, offset, length) == 0:
        return
    code = ctypes.get_errno()
    if code not in _NO_ROOM_AHEAD:
        raise OSError(code, os.strerror(code))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_regular(path: Path) -> bool:
    """Whether a path is a file of its own: no link, no folder, no device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
