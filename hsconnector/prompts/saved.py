"""The tokenised data set beside its captures: the same rows, in order, for export and training."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Set
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import msgspec

from hsconnector.errors import SettingsError
from hsconnector.prompts.files import import_datasets
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


class SavedDataset:
    """Collects rows while they are read and appears whole under `folder` at `publish`, or not at all.

    JSON lines in `data.jsonl`, or what `datasets.load_from_disk` reads. A folder that something else made is refused.
    """

    def __init__(self, folder: Path, kind: SaveFormat) -> None:
        if os.path.lexists(folder) and not (folder / _MARK).exists():
            raise SettingsError(
                f"{folder} exists and is no data set of this command: give --save-dataset another folder"
            )
        if kind == "arrow":
            import_datasets()
        self.folder = folder
        self.kind = kind
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

    def add(self, prompt: Prompt) -> None:
        """Takes the next row."""
        row = SavedRow(prompt.token_ids, prompt.loss_mask, len(prompt.token_ids), prompt.sample_id, prompt.row)
        if self._spool is not None:
            self._spool.write(_encode(row) + b"\n")

    def publish(self, without: Set[int], about: dict[str, Any]) -> int:
        """Puts the rows that were taken, save those `without`, in place of what was there; their count."""
        if self._spool is not None:
            self._spool.flush()
        made = self._work / "made"
        made.mkdir()
        count = self._write_lines(made, without) if self.kind == "jsonl" else self._write_arrow(made, without)
        (made / _MARK).write_bytes(msgspec.json.format(_encode({"rows": count, "format": self.kind, **about})))
        if self.folder.exists():
            self.folder.rename(self._work / "replaced")
        made.rename(self.folder)
        return count

    def _kept(self, without: Set[int]) -> Iterator[bytes]:
        with (self._work / "spool").open("rb") as spool:
            yield from (line for line in spool if msgspec.json.decode(line, type=_Numbered).row not in without)

    def _write_lines(self, made: Path, without: Set[int]) -> int:
        count = 0
        with (made / "data.jsonl").open("wb") as file:
            for line in self._kept(without):
                file.write(line)
                count += 1
        return count

    def _write_arrow(self, made: Path, without: Set[int]) -> int:
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
            for line in self._kept(without):
                writer.write(msgspec.json.decode(line))
            count, _ = writer.finalize()
        datasets.Dataset.from_file(rows).with_format("torch").save_to_disk(str(made))
        return int(count)


class _Numbered(msgspec.Struct):
    row: int
