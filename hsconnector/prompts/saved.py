"""The tokenised data set beside its captures: the same rows, in order, for export and training."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import msgspec

from hsconnector.errors import SettingsError
from hsconnector.prompts.files import import_datasets
from hsconnector.prompts.preparation import Preparation
from hsconnector.prompts.prompt import Prompt

__all__ = ["SavedDataset", "SavedRow"]

SaveFormat = Literal["jsonl", "arrow"]
_MARK = "hsconnector-dataset.json"
_encode = msgspec.json.Encoder().encode


class SavedRow(msgspec.Struct, frozen=True):
    """One row; the fields that trainers read, and where it came from."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    seq_len: int
    sample_id: str
    row: int
    """Its number in the data set it was made from."""


class _Manifest(msgspec.Struct):
    """What a later run reads of `hsconnector-dataset.json`."""

    rows: int = 0
    complete: bool = True
    preparation: Preparation | None = None


class SavedDataset:
    """Collects rows while they are read and appears whole under `folder` at `publish`, or not at all.

    JSON lines in `data.jsonl`, or what `datasets.load_from_disk` reads. A folder that something else made is refused.
    `preparation` is what was decided for the folder, by this run or one before, None for nothing yet.
    """

    def __init__(self, folder: Path, kind: SaveFormat) -> None:
        self._there = _manifest(folder) if os.path.lexists(folder) else _Manifest()
        if kind == "arrow":
            import_datasets()
        self.folder = folder
        self.kind = kind
        self.preparation = self._there.preparation
        self._work = folder.with_name(f".{folder.name}.part")
        self._spool: BinaryIO | None = None

    def __enter__(self) -> SavedDataset:
        shutil.rmtree(self._work, ignore_errors=True)
        try:
            self._work.mkdir(parents=True)
            self._spool = (self._work / "spool").open("wb")
        except OSError as error:
            raise SettingsError(f"{self.folder} cannot be written: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._spool is not None:
            self._spool.close()
        shutil.rmtree(self._work, ignore_errors=True)

    def decide(self, given: Mapping[str, Any]) -> Preparation:
        """How rows are prepared: as an earlier run for this folder did, else as `given`, by names of `Preparation`.

        Raises SettingsError where the two differ: what lies there would be mixed with other tokens.
        """
        kept = self.preparation
        if kept is None:
            self.preparation = kept = Preparation(**given)
        for name, value in given.items():
            if getattr(kept, name) != value:
                raise SettingsError(
                    f"{self.folder} is prepared with {name}={getattr(kept, name)!s}, asked for is {value!s}: leave the "
                    "option away, or give --save-dataset another folder"
                )
        return kept

    def begin(self) -> None:
        """Keeps in the folder what was decided, for the run after one that broke off."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            self._mark(self.folder, {"rows": 0, "complete": False})

    def add(self, prompt: Prompt) -> None:
        """Takes the next row."""
        row = SavedRow(prompt.token_ids, prompt.loss_mask, len(prompt.token_ids), prompt.sample_id, prompt.row)
        if self._spool is not None:
            self._spool.write(_encode(row) + b"\n")

    def publish(self, kept: Container[int], about: dict[str, Any], *, complete: bool = True) -> int | None:
        """Puts those of the rows taken that are `kept` in place of what was there; their count.

        Where the run is not complete, what was there stays if it has as many rows: then None.
        """
        if self._spool is not None:
            self._spool.flush()
        made = self._work / "made"
        made.mkdir()
        count = self._write_lines(made, kept) if self.kind == "jsonl" else self._write_arrow(made, kept)
        if not complete and count <= self._there.rows:
            return None
        self._mark(made, {"rows": count, "complete": complete, **about})
        if self.folder.exists():
            self.folder.rename(self._work / "replaced")
        made.rename(self.folder)
        return count

    def _mark(self, folder: Path, about: dict[str, Any]) -> None:
        facts = {"format": self.kind, "preparation": self.preparation, **about}
        (folder / _MARK).write_bytes(msgspec.json.format(_encode(facts)))

    def _kept(self, kept: Container[int]) -> Iterator[bytes]:
        with (self._work / "spool").open("rb") as spool:
            yield from (line for line in spool if msgspec.json.decode(line, type=_Numbered).row in kept)

    def _write_lines(self, made: Path, kept: Container[int]) -> int:
        count = 0
        with (made / "data.jsonl").open("wb") as file:
            for line in self._kept(kept):
                file.write(line)
                count += 1
        return count

    def _write_arrow(self, made: Path, kept: Container[int]) -> int:
        datasets = import_datasets()
        numbers = datasets.Sequence(datasets.Value("int64"))
        features = datasets.Features(
            {
                "input_ids": numbers,
                "loss_mask": numbers,
                "seq_len": datasets.Value("int64"),
                "sample_id": datasets.Value("string"),
                "row": datasets.Value("int64"),
            }
        )
        rows = str(self._work / "rows.arrow")
        with datasets.arrow_writer.ArrowWriter(path=rows, features=features) as writer:
            for line in self._kept(kept):
                writer.write(msgspec.json.decode(line))
            count, _ = writer.finalize()
        datasets.Dataset.from_file(rows).with_format("torch").save_to_disk(str(made))
        return int(count)


class _Numbered(msgspec.Struct):
    row: int


def _manifest(folder: Path) -> _Manifest:
    path = folder / _MARK
    if not path.exists():
        raise SettingsError(f"{folder} exists and is no data set of this command: give --save-dataset another folder")
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}; give --save-dataset another folder") from error
