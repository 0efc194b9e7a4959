"""The rows of a data set: JSON lines, a JSON list, Parquet, an Arrow data set, or a folder of the first and third."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from hsconnector.errors import SettingsError, UnsupportedError
from hsconnector.prompts.row import Row, RowRefused, without_nulls

__all__ = ["LARGEST_LIST", "Rows", "import_datasets", "open_rows"]

_BATCH = 256
LARGEST_LIST = 256 << 20
"""Bytes of a `.json` file."""


@dataclass(frozen=True)
class Rows:
    """How many rows there are, and a way to read them from the first one."""

    count: int
    read: Callable[[], Iterator[Row]]


def open_rows(path: Path) -> Rows:
    """The rows under a path; raises SettingsError, or UnsupportedError where a library is missing."""
    if not path.exists():
        raise SettingsError(f"there is no data set at {path}")
    if path.is_dir():
        return _folder(path)
    reader = _FILES.get(path.suffix.lower())
    if reader is None:
        raise SettingsError(f"{path.name}: a data set is one of {', '.join(_FILES)} or an Arrow folder")
    return reader(path)


def import_datasets() -> ModuleType:
    """Hugging Face's `datasets`; raises UnsupportedError naming the extra that brings it."""
    return _import("datasets", "Arrow data sets")


def _import(name: str, what: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"{what} are read with {name.partition('.')[0]}, which is not installed: pip install 'hsconnector[data]'"
        ) from error


def _folder(path: Path) -> Rows:
    if (path / "dataset_dict.json").exists():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise SettingsError(f"{path} holds several data sets, name one: {', '.join(str(path / s) for s in splits)}")
    if (path / "state.json").exists():
        return _arrow(lambda: import_datasets().load_from_disk(str(path)), path)
    for suffix in (".parquet", ".jsonl"):
        files = sorted(path.glob(f"*{suffix}"))
        if files:
            return _joined([_FILES[suffix](file) for file in files])
    raise SettingsError(f"{path} is neither an Arrow data set nor a folder with .parquet or .jsonl files")


def _joined(parts: list[Rows]) -> Rows:
    return Rows(sum(part.count for part in parts), lambda: chain.from_iterable(part.read() for part in parts))


def _json_lines(path: Path) -> Rows:
    try:
        with path.open("rb") as file:
            count = sum(1 for line in file if line.strip())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error

    def read() -> Iterator[Row]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _decoded(line, number)

    return Rows(count, read)


def _decoded(line: bytes | msgspec.Raw, number: int) -> Row:
    try:
        value: Row = msgspec.json.decode(line)
        return value
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return RowRefused(f"(line {number}) is no JSON: {error}")


def _json_list(path: Path) -> Rows:
    """A list is held whole as it is written, its rows are decoded one by one."""
    try:
        size = path.stat().st_size
        if size > LARGEST_LIST:
            raise SettingsError(
                f"{path} has {size >> 20} MB, and a list over {LARGEST_LIST >> 20} MB is not held in memory: write one "
                f"object a line, `jq -c '.[]' {path.name} > {path.stem}.jsonl`"
            )
        rows = msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path} holds no list of rows; one object a line belongs in a .jsonl file") from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path} is no JSON: {error}") from error
    return Rows(len(rows), lambda: map(_decoded, rows, itertools.count(1)))


def _parquet(path: Path) -> Rows:
    parquet = _import("pyarrow.parquet", "Parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            count = file.metadata.num_rows
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise SettingsError(f"{path} is no Parquet file: {error}") from error

    def read() -> Iterator[Row]:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                yield from map(without_nulls, batch.to_pylist())

    return Rows(count, read)


def _arrow_file(path: Path) -> Rows:
    return _arrow(lambda: import_datasets().Dataset.from_file(str(path)), path)


def _arrow(load: Callable[[], Any], path: Path) -> Rows:
    import_datasets()
    try:
        dataset = load().with_format("arrow")
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{path} is no Arrow data set: {error}") from error

    def read() -> Iterator[Row]:
        for table in dataset.iter(_BATCH):
            yield from map(without_nulls, table.to_pylist())

    return Rows(len(dataset), read)


_FILES: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet,
    ".arrow": _arrow_file,
}
