"""`manifest.json`: what an export holds and where each file of it came from.

While an export runs its entries go to `manifest.part`, one JSON object a line, the description first; an entry is
written before its file gets its name, so that after a crash a file without an entry does not exist. The end of a run,
or the beginning of the next, folds them into `manifest.json`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hsconnector.capture.header import data_hasher
from hsconnector.errors import SettingsError, StoreError
from hsconnector.formats.draft_vocab import DraftVocabulary

__all__ = [
    "MANIFEST",
    "ONES",
    "Description",
    "Manifest",
    "ManifestEntry",
    "file_hash",
    "foreign_files",
    "read_manifest",
]

MANIFEST = "manifest.json"
_JOURNAL = "manifest.part"
_TEMPORARY = ".part"
ONES = "ones"
"""A loss mask in which every token counts."""
_PIECE = 1 << 20
_TELLING = (
    "export",
    "format",
    "model",
    "model_revision",
    "lora",
    "weights_id",
    "num_layers",
    "hidden_size",
    "dtype",
    "layer_ids",
    "last_layer_norm",
    "norm",
)
"""The fields in which another export may differ; the other fields of a description follow from these."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What every file of an export has in common; another description means another folder."""

    export: str = "hsconnector-export/1"
    format: str
    model: str
    model_revision: str = ""
    lora: str = ""
    weights_id: str = ""
    """Whose weights; empty where the captures do not say."""
    num_layers: int
    hidden_size: int
    dtype: str
    layer_ids: tuple[int, ...]
    """In vLLM's counting, in the order of the file's states; N last where the format has a place for it."""
    slots: tuple[str, ...]
    """The same by name: "embed", "after_layer_0", …, counting decoder layers from 0 as Hugging Face does."""
    last_layer_norm: str
    """ "pre", "post", or "none" where the files do not hold the last layer."""
    norm: dict[str, Any] = {}
    """How the final norm was applied: kind, eps, tensor."""
    trainer: str = ""
    """The layers as the trainer's own configuration names them."""


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of one file."""

    file: str
    row: int | None
    """The data set's row index."""
    sample_id: str
    dataset: str
    capture_id: str
    num_tokens: int
    content_hash: str
    """Of the capture."""
    data_hash: str
    """Of the capture's shard."""
    token_hash: str
    """SHA-256 of the token ids, int64 little-endian."""
    loss_mask: str = ""
    """ "ones", "sha256:…" of the data set's mask, or empty where there is neither."""
    bytes: int
    file_hash: str = ""
    """ "xxh3:…", XXH3-128 of the whole file; empty in manifests that were written before there was one."""
    mtime_ns: int = 0
    """The file's modification time as it was left."""


class _Written(msgspec.Struct, frozen=True):
    description: Description
    files: tuple[ManifestEntry, ...] = ()
    draft_vocabularies: tuple[DraftVocabulary, ...] = ()


class Manifest:
    """The record of one export's folder; only one process at a time may have it open for writing."""

    def __init__(self, folder: Path, description: Description, suffix: str) -> None:
        """Takes the folder, which is made if need be; `suffix` is of the files that the trainer looks for.

        Raises SettingsError where the folder holds another export, or such files from elsewhere.
        """
        self.folder = folder
        self.description = description
        self._lock = threading.Lock()
        self._vocabularies: dict[int, DraftVocabulary] = {}
        self._folder_fd = _taken(folder)
        try:
            self._entries = self._previous()
            self._refuse_strangers(suffix)
            self._journal = self._begin()
        except BaseException:
            os.close(self._folder_fd)
            raise

    def __enter__(self) -> Manifest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def entries(self) -> dict[str, ManifestEntry]:
        """By file name; a copy."""
        with self._lock:
            return dict(self._entries)

    def existing(self, file: str) -> ManifestEntry | None:
        """The entry of a file that is there as it was written; its bytes are only read where its time is another."""
        entry = self._entries.get(file)
        if entry is None:
            return None
        try:
            status = (self.folder / file).stat()
        except OSError:
            return None
        if status.st_size != entry.bytes or status.st_mtime_ns == entry.mtime_ns or not entry.file_hash:
            return entry if status.st_size == entry.bytes else None
        if file_hash(self.folder / file) != entry.file_hash:
            return None
        return self._noted(msgspec.structs.replace(entry, mtime_ns=status.st_mtime_ns))

    def publish(self, entry: ManifestEntry, temporary: Path) -> None:
        """Gives a finished temporary file its name; raises StoreError."""
        final = self.folder / entry.file
        try:
            with self._lock:
                final.unlink(missing_ok=True)
                self._journal.write(msgspec.json.encode(entry) + b"\n")
                self._journal.flush()
                self._entries[entry.file] = entry
            os.rename(temporary, final)
        except OSError as error:
            raise StoreError(f"cannot write {final}: {error.strerror or error}") from error

    def note_mask(self, file: str, loss_mask: str) -> None:
        """The data set has another mask for a file that holds none."""
        self._noted(msgspec.structs.replace(self._entries[file], loss_mask=loss_mask))

    def remove(self, file: str) -> None:
        """Deletes a file of this export; raises StoreError."""
        try:
            (self.folder / file).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot remove {self.folder / file}: {error.strerror or error}") from error
        with self._lock:
            del self._entries[file]

    @property
    def vocabularies(self) -> dict[int, DraftVocabulary]:
        """Those whose files are there, by size; a copy."""
        return dict(self._vocabularies)

    def publish_vocabulary(self, vocabulary: DraftVocabulary, files: Mapping[str, bytes]) -> None:
        """Writes its files, in place of those of the same size; raises StoreError."""
        for name, data in files.items():
            _replace(self.folder / name, data)
        self._vocabularies[vocabulary.size] = vocabulary

    def temporary(self, file: str) -> Path:
        """Where a file is written before it gets its name: under a hidden one, which no trainer reads."""
        return self.folder / f".{file}{_TEMPORARY}"

    def close(self) -> None:
        """Writes `manifest.json` and lets the folder go."""
        self._journal.close()
        try:
            _replace(self.folder / MANIFEST, self._encoded())
            (self.folder / _JOURNAL).unlink(missing_ok=True)
        finally:
            os.close(self._folder_fd)

    def _previous(self) -> dict[str, ManifestEntry]:
        entries: dict[str, ManifestEntry] = {}
        for written in _written(self.folder):
            _refuse_another(self.folder, written.description, self.description)
            entries |= {entry.file: entry for entry in written.files}
            self._vocabularies |= {
                each.size: each
                for each in written.draft_vocabularies
                if all((self.folder / name).is_file() for name in each.files)
            }
        # A symbolic link to a shard that has gone does not "exist", and this command made it all the same.
        return {name: entry for name, entry in entries.items() if os.path.lexists(self.folder / name)}

    def _noted(self, entry: ManifestEntry) -> ManifestEntry:
        with self._lock:
            self._entries[entry.file] = entry
        return entry

    def _refuse_strangers(self, suffix: str) -> None:
        strangers = foreign_files(self.folder, suffix, self._entries)
        if strangers:
            raise SettingsError(
                f"{self.folder} holds {len(strangers)} {suffix} files that no export of this command wrote "
                f"(the first is {strangers[0]}), and a trainer would read them too: give an empty folder"
            )
        for path in self.folder.glob(f".*{_TEMPORARY}"):
            path.unlink(missing_ok=True)

    def _begin(self) -> BinaryIO:
        _replace(self.folder / MANIFEST, self._encoded())
        return (self.folder / _JOURNAL).open("wb")

    def _encoded(self) -> bytes:
        ordered = sorted(self._entries.values(), key=lambda entry: (entry.row is None, entry.row or 0, entry.file))
        vocabularies = sorted(self._vocabularies.values(), key=lambda each: each.size)
        value = msgspec.to_builtins(_Written(self.description, tuple(ordered), tuple(vocabularies)))
        return json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n"


def file_hash(path: Path) -> str:
    """Of all bytes of a file, as a manifest keeps it; raises StoreError."""
    hasher = data_hasher()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                hasher.update(piece)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    return f"xxh3:{hasher.hexdigest()}"


def foreign_files(folder: Path, suffix: str, entries: Container[str]) -> list[str]:
    """Files that a trainer would take for the export's and that no entry names; SpecForge's reader walks subfolders."""
    found = (str(path.relative_to(folder)) for path in folder.rglob(f"*{suffix}") if not path.name.startswith("."))
    return sorted(name for name in found if name not in entries)


def read_manifest(folder: Path) -> tuple[Description, dict[str, ManifestEntry]]:
    """What a folder says of itself, also after a crash; raises SettingsError where there is no export."""
    written = list(_written(folder))
    if not written:
        raise SettingsError(f"{folder} holds no export: it has no {MANIFEST}")
    return written[0].description, {entry.file: entry for part in written for entry in part.files}


def _written(folder: Path) -> Iterator[_Written]:
    """`manifest.json`, then the entries of a run that did not end."""
    try:
        whole = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Written)
    except FileNotFoundError:
        return
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(f"{folder / MANIFEST} is no manifest of an export: {error}") from error
    yield whole
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / _JOURNAL).read_bytes().split(b"\n")
        yield _Written(whole.description, tuple(msgspec.json.decode(line, type=ManifestEntry) for line in lines[:-1]))


def _refuse_another(folder: Path, there: Description, wanted: Description) -> None:
    old, new = (msgspec.json.decode(msgspec.json.encode(description)) for description in (there, wanted))
    same = bool(there.weights_id) and there.weights_id == wanted.weights_id
    telling = [name for name in _TELLING if not (same and name in ("model", "model_revision"))]
    fields = [f"{name} {old[name]!r} there, {new[name]!r} now" for name in telling if old[name] != new[name]]
    if fields:
        raise SettingsError(f"{folder} holds another export ({'; '.join(fields)}): give another folder with --out")


def _taken(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SettingsError(f"cannot write to {folder}: {error.strerror or error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise SettingsError(f"another export is writing to {folder}: wait for it, or give another folder") from error
    if not os.access(folder, os.W_OK):
        os.close(fd)
        raise SettingsError(f"cannot write to {folder}: no permission")
    return fd


def _replace(path: Path, data: bytes) -> None:
    """Puts bytes in a file's place, unless they are there already; raises StoreError."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        if path.exists() and path.read_bytes() == data:
            return
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
