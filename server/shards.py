"""Shard bytes: writing a safetensors file row by row, and reading one back.

A shard is 8 bytes of little-endian header length, a JSON header padded with spaces to a multiple of 8, and the data
section: `hidden_states` `[T, L, H]`, then `token_ids` `[T]` int64. The header's room is reserved when the file is
opened, before T is known, so rows are appended as they come.

`data_hash` is the xxh3-128 (hex) of the data section: every byte after the header, in file order.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from hsconnector.capture.protocol import DTYPE_BYTES, CaptureInfo, Producer
from hsconnector.errors import ShardError

__all__ = [
    "MAX_FINISH_REASON",
    "PIECE_BYTES",
    "ShardHeader",
    "ShardWriter",
    "build_header",
    "header_room",
    "metadata_of",
    "parse_header",
    "read_header",
]

FORMAT = "hsconnector/1"
PIECE_BYTES = 1 << 20
"""Bytes of one write; longer ones fall to a third of the speed after an idle while."""
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
MAX_FINISH_REASON = 64
"""Characters kept of a finish reason."""
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_WIDEST = 10**18
_KEEP_SIZE = 1
_NO_ROOM_AHEAD = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.EINVAL, errno.ENODEV, errno.ESPIPE})

_libc = ctypes.CDLL(None, use_errno=True)
_libc_fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
if _libc_fallocate is not None:
    _libc_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    _libc_fallocate.restype = ctypes.c_int


@dataclass(frozen=True)
class ShardHeader:
    """A parsed header: what lies where in the file."""

    metadata: dict[str, str]
    dtype: str
    """A key of `DTYPE_BYTES`."""
    shape: tuple[int, int, int]
    """`[T, L, H]`."""
    data_start: int
    """Where the data section begins, bytes from the start of the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row `[L, H]`."""
        return self.shape[1] * self.shape[2] * DTYPE_BYTES[self.dtype]

    @property
    def hidden_bytes(self) -> int:
        """Bytes of `hidden_states`."""
        return self.shape[0] * self.row_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_start + self.hidden_bytes + 8 * self.shape[0]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layer id of each slot."""
        return _layer_ids(self.metadata["layer_ids"])


def metadata_of(producer: Producer, info: CaptureInfo) -> dict[str, str]:
    """What a shard says of itself; `content_hash`, `data_hash` and `finish_reason` are filled at the end."""
    return {
        "format": FORMAT,
        "capture_id": info.capture_id,
        "request_id": info.request_id,
        "engine_id": producer.engine_id,
        "model": producer.model,
        "model_revision": producer.model_revision,
        "vllm_version": producer.vllm_version,
        "dims": "token,layer,hidden",
        "layer_ids": msgspec.json.encode(producer.layer_ids).decode(),
        "num_layers": str(producer.num_layers),
        "last_layer_norm": "pre",
        "dtype": producer.dtype,
        "rows": str(info.rows),
        "num_prompt_tokens": str(info.num_prompt_tokens),
        "content_hash": "",
        "data_hash": "",
        "dataset": info.dataset,
        "sample_id": info.sample_id,
        "tags": msgspec.json.encode(info.tags, order="deterministic").decode(),
        "lora": info.lora,
        "finish_reason": "",
        "created": f"{info.created:.3f}",
    }


def build_header(metadata: Mapping[str, str], dtype: str, shape: tuple[int, int, int], room: int = 0) -> bytes:
    """The bytes before the data section, padded to `room` if given; raises `ShardError` where they do not fit."""
    rows, slots, hidden = shape
    middle = rows * slots * hidden * DTYPE_BYTES[dtype]
    fields = {
        "__metadata__": dict(metadata),
        "hidden_states": {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [0, middle]},
        "token_ids": {"dtype": "I64", "shape": [rows], "data_offsets": [middle, middle + 8 * rows]},
    }
    text = msgspec.json.encode(fields)
    length = room - 8 if room else len(text) + -len(text) % 8
    if len(text) > length:
        raise ShardError(f"a header of {len(text)} bytes does not fit the {length} bytes reserved for it")
    return length.to_bytes(8, "little") + text.ljust(length)


def header_room(metadata: Mapping[str, str], dtype: str, slots: int, hidden: int) -> int:
    """Bytes to leave before the data section so that the header fits whatever T becomes."""
    widest = {
        **metadata,
        "content_hash": "f" * 64,
        "data_hash": "f" * 32,
        "finish_reason": "\x00" * MAX_FINISH_REASON,
    }
    room = len(build_header(widest, dtype, (_WIDEST, slots, hidden)))
    return room + -room % 64


def parse_header(head: bytes) -> ShardHeader:
    """A header from a file's first bytes (length and JSON); raises `ShardError` saying what is wrong."""
    try:
        fields = json.loads(head[8:])
        hidden, tokens, metadata = fields["hidden_states"], fields["token_ids"], fields["__metadata__"]
        dtype = next(name for name, code in DTYPE_NAMES.items() if code == hidden["dtype"])
        rows, slots, width = (int(size) for size in hidden["shape"])
    except (ValueError, KeyError, TypeError, OverflowError, StopIteration, RecursionError) as error:
        raise ShardError(f"not a shard's header: {error!r}") from error
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ShardError("the header's metadata is not an object of strings")
    if metadata.get("format") != FORMAT:
        raise ShardError(f"format is {metadata.get('format')!r}, not {FORMAT!r}")
    header = ShardHeader(metadata, dtype, (rows, slots, width), len(head))
    middle = header.hidden_bytes
    _expect("hidden_states.data_offsets", hidden.get("data_offsets"), [0, middle])
    _expect("token_ids", tokens, {"dtype": "I64", "shape": [rows], "data_offsets": [middle, middle + 8 * rows]})
    _expect("tensors", sorted(fields), ["__metadata__", "hidden_states", "token_ids"])
    _expect("number of layer ids", len(_layer_ids(metadata.get("layer_ids", ""))), slots)
    if min(rows, slots, width) < 1:
        raise ShardError(f"hidden_states has shape {[rows, slots, width]}, every size must be 1 or more")
    return header


def _layer_ids(text: str) -> tuple[int, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[int, ...])
    except msgspec.MsgspecError as error:
        raise ShardError(f"layer_ids {text[:64]!r} is not a JSON list of layer ids") from error


def _expect(name: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise ShardError(f"{name} is {got!r} where {wanted!r} was expected")


def read_header(fd: int) -> ShardHeader:
    """The header of an open file whose size fits it; raises `ShardError`."""
    size = os.fstat(fd).st_size
    first = os.pread(fd, 8, 0)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ShardError(f"a file of {size} bytes claims a header of {length} bytes")
    header = parse_header(os.pread(fd, 8 + length, 0))
    if header.file_bytes != size:
        raise ShardError(f"the header describes {header.file_bytes} bytes, the file has {size}")
    return header


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
        self._hash = xxhash.xxh3_128()
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
        """Leaves nothing behind."""
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
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)


def _write(fd: int, data: memoryview, offset: int) -> None:
    for first in range(0, len(data), PIECE_BYTES):
        piece = data[first : first + PIECE_BYTES]
        reserve(fd, offset + first, len(piece))
        done = 0
        while done < len(piece):
            done += os.pwrite(fd, piece[done:], offset + first + done)


def reserve(fd: int, offset: int, length: int) -> None:
    """Takes room on the disk before bytes go there, where the file system can."""
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


def to_plain(value: Any) -> Any:
    """Structs as the plain dicts and lists of JSON."""
    return msgspec.to_builtins(value)
