"""A checkpoint told from its files: which of them an engine loads, and a digest of what they hold.

The digest is over every tensor's name, dtype and shape and samples of its bytes. Folder, file names, order and the way
tensors are spread over files do not enter it: a copy, renamed or re-sharded, has the same one. It reads some thousand
pieces whatever the size: 100 GB take seconds from a disk, less from the page cache that loading has filled.

A tensor of up to a sample's bytes is read whole, a larger one in at least one place, the same places for the same
name and length. What lies between them is not seen: a change of a few bytes, of single rows of an embedding for
instance. Training steps and merged adapters change a part of every tensor they touch and are seen. PyTorch's zip files
carry a CRC-32 of each tensor, so there all of it is. Of other files (GGUF, which engines read through a plug-in, and
old pickles) the size and 4,096 places of the file are taken, which can miss a small tensor.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from hsconnector.errors import CheckpointError

__all__ = ["checkpoint_digest", "weight_files"]

SAMPLES = 8192
"""Samples of a checkpoint, spread evenly over its tensors; more only where it has more tensors."""
MOST_OF_A_TENSOR = 64
SAMPLE_BYTES = 256
ZIP_SAMPLES, FILE_SAMPLES = 64, 4096
THREADS, BATCH = 16, 32
"""A disk answers many at once; a thread takes so many tensors at a time."""
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""

_SAFETENSORS = ("*.safetensors",)
_ANY = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.tensors")
_PATTERNS = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": _SAFETENSORS,
    "fastsafetensors": _SAFETENSORS,
    "instanttensor": _SAFETENSORS,
    "runai_streamer": _SAFETENSORS,
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin", "*.pt"),
    "sharded_state": ("model-*-part-*.safetensors",),
    "runai_streamer_sharded": ("model-*-part-*.safetensors",),
}
_INDEXES = {"mistral": "consolidated.safetensors.index.json"}
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


def weight_files(model: Path, load_format: str = "auto", pattern: str | None = None) -> list[Path]:
    """The files that vLLM 0.32 loads from this folder (`DefaultModelLoader._prepare_weights`), or the file itself.

    The first pattern of the format that finds any wins, an index says which of several safetensors files count, and a
    trainer's own state is left out. `pattern` is one given by hand, for sharded states. Of a load format that is not
    vLLM's own, whatever holds weights counts. Raises `CheckpointError` where there is none.
    """
    if model.is_file():
        return [model]
    if load_format == "auto":
        load_format = "mistral" if any(model.glob("consolidated*.safetensors")) else "hf"
    for glob in (pattern,) if pattern else _PATTERNS.get(load_format, _ANY):
        files = sorted(path for path in model.glob(glob) if not path.name.endswith(_NOT_WEIGHTS))
        if files:
            return _indexed(files, model / _INDEXES.get(load_format, "model.safetensors.index.json"))
    raise CheckpointError(f"no weight files for load format {load_format!r} in {model}")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _indexed(files: list[Path], index: Path) -> list[Path]:
    if files[0].suffix != ".safetensors" or not index.is_file():
        return files
    try:
        named = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{index} is no index of weights: {error}") from error
    return [path for path in files if path.name in named] or files


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor in an open file, or a whole file: what is known of it without reading, and where its bytes lie."""

    label: tuple[str, ...]
    descriptor: int
    start: int
    length: int
    samples: int | None = None
    """How many to take; None for a share of the checkpoint's."""

    def places(self, wanted: int) -> Iterator[tuple[int, int]]:
        """Offset and length of each sample: one at a drawn place in each of `wanted` equal parts, or all at once."""
        if self.length <= wanted * SAMPLE_BYTES:
            yield self.start, self.length
            return
        part = self.length // wanted
        draw = zlib.crc32(self.label[0].encode())
        for index in range(wanted):
            draw = (draw * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            yield self.start + index * part + (draw >> 16) % (part - SAMPLE_BYTES + 1), SAMPLE_BYTES

    def digest(self, share: int) -> bytes:
        """SHA-256 of what is known and the samples."""
        digest = hashlib.sha256(msgspec.json.encode([*self.label, self.length]))
        for offset, length in self.places(self.samples or share):
            read = os.pread(self.descriptor, length, offset)
            if len(read) != length:
                raise CheckpointError(f"{self.label[0]}: the file ends before its {self.length} bytes do")
            digest.update(read)
        return digest.digest()


def checkpoint_digest(files: Sequence[Path]) -> str:
    """SHA-256 (hex) over the sorted digests of every tensor in these files; see the module for what it can miss.

    Raises `CheckpointError` for files that are not what their names say and `OSError` for what cannot be read.
    """
    with ExitStack() as open_files:
        pieces = [piece for path in files for piece in _pieces(path, _open(path, open_files))]
        share = min(MOST_OF_A_TENSOR, max(1, SAMPLES // max(1, len(pieces))))
        batches = [pieces[start : start + BATCH] for start in range(0, len(pieces), BATCH)]
        with ThreadPoolExecutor(THREADS) as pool:
            digests = sorted(chain(*pool.map(lambda batch: [piece.digest(share) for piece in batch], batches)))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _open(path: Path, open_files: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    open_files.callback(os.close, descriptor)
    return descriptor


def _pieces(path: Path, descriptor: int) -> Iterator[_Piece]:
    if path.suffix == ".safetensors":
        return _safetensors(path, descriptor)
    return _other(path, descriptor)


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _safetensors(path: Path, descriptor: int) -> Iterator[_Piece]:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path} is no safetensors file: a header of {length} bytes in a file of {size}")
    try:
        header = msgspec.json.decode(os.pread(descriptor, length, 8), type=dict[str, msgspec.Raw])
        entries = {name: _entry(raw) for name, raw in header.items() if name != "__metadata__"}
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} has no safetensors header: {error}") from error
    for name, entry in entries.items():
        start, end = entry.data_offsets
        if not 0 <= start <= end <= size - 8 - length:
            raise CheckpointError(f"{path}: tensor {name!r} lies at {start} to {end}, beyond the file's end")
        shape = ",".join(map(str, entry.shape))
        yield _Piece((name, entry.dtype, shape), descriptor, 8 + length + start, end - start)


def _entry(raw: msgspec.Raw) -> _Entry:
    return msgspec.json.decode(raw, type=_Entry)


def _other(path: Path, descriptor: int) -> Iterator[_Piece]:
    """The file as one piece; of a PyTorch zip file also each member's size and CRC-32, without the archive's name."""
    members = _members(path) if zipfile.is_zipfile(path) else ()
    samples = ZIP_SAMPLES if members else FILE_SAMPLES
    yield _Piece((path.suffix, *members), descriptor, 0, os.fstat(descriptor).st_size, samples)


def _members(path: Path) -> tuple[str, ...]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} is a damaged zip file: {error}") from error
    return tuple(f"{member.filename.partition('/')[2]} {member.file_size} {member.CRC}" for member in members)
