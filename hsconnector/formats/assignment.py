"""Which capture becomes which file. Pure: records and rows in, assignments and problems out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hsconnector.capture.record import CaptureRecord
from hsconnector.client.sources import Listing, Unready
from hsconnector.errors import SettingsError
from hsconnector.formats.sample import Format
from hsconnector.prompts.labels import DataRow

__all__ = ["Assignment", "Assignments", "Problem", "assign", "common_identity"]

_NAMES = ("model", "model_revision", "lora")
_IDENTITY = ("weights_id", "lora_weights_id", "kv_cache_dtype", "num_layers", "hidden_size", "dtype")


@dataclass(frozen=True)
class Assignment:
    """One file to be, and the capture that it is made of."""

    file: str
    record: CaptureRecord
    row: int | None
    data: DataRow | None = None

    @property
    def sample(self) -> str:
        """What a person knows the sample by."""
        return _named(self.row, self.record.sample_id, self.record.capture_id)


@dataclass(frozen=True)
class Problem:
    """One sample that was not exported, and why."""

    sample: str
    reason: str

    def __str__(self) -> str:
        return f"{self.sample}: {self.reason}"


@dataclass(frozen=True)
class Assignments:
    """The files to be, in the order of the data set, and the samples that become none."""

    made: tuple[Assignment, ...]
    problems: tuple[Problem, ...]
    repeated: int
    """Captures left out because a later one holds the same sample."""
    unused: int
    """Ready captures that no row of the data set asks for."""


def common_identity(records: Sequence[CaptureRecord]) -> CaptureRecord:
    """The first record, which speaks for all. Raises SettingsError where they are of several models.

    Where it is known whose weights they are, it does not matter what these are called.
    """
    first = records[0]
    names = _IDENTITY if first.weights_id else (*_NAMES, *_IDENTITY)
    for record in records:
        fields = [
            f"{name} {getattr(first, name)!r} and {getattr(record, name)!r}"
            for name in names
            if getattr(first, name) != getattr(record, name)
        ]
        if fields:
            raise SettingsError(
                f"the captures are not of one model: {first.capture_id} and {record.capture_id} differ in "
                f"{'; '.join(fields)}: choose with --dataset, --weights-id or --id"
            )
    return first


def assign(format: Format, listing: Listing, rows: Sequence[DataRow] | None) -> Assignments:
    """One file for each row that has a capture, or without a data set for each capture."""
    return _by_capture(format, listing) if rows is None else _by_row(format, listing, rows)


def _by_row(format: Format, listing: Listing, rows: Sequence[DataRow]) -> Assignments:
    by_hash = {record.content_hash: record for record in listing.ready}
    by_sample = {record.sample_id: record for record in listing.ready if record.sample_id}
    unready = _by_sample(listing.others)
    made, problems, used = [], [], set()
    for row in rows:
        record = None if row.problem else by_hash.get(row.content_hash) or by_sample.get(row.sample_id)
        if record is None:
            problems.append(Problem(_named(row.row, row.sample_id, ""), _missing(row, unready)))
            continue
        used.add(record.content_hash)
        made.append(Assignment(format.file_name(row.row, record.capture_id), record, row.row, row))
    unused = {record.content_hash for record in listing.ready} - used
    return Assignments(tuple(made), tuple(problems), len(listing.ready) - len(by_hash), len(unused))


def _by_capture(format: Format, listing: Listing) -> Assignments:
    chosen: dict[str, Assignment] = {}
    problems, repeated = [], 0
    for record in listing.ready:
        row = int(record.sample_id) if record.sample_id.isdecimal() and record.sample_id.isascii() else None
        if row is None and format.needs_row:
            problems.append(Problem(_named(None, record.sample_id, record.capture_id), _no_row(record, format)))
            continue
        new = Assignment(format.file_name(row, record.capture_id), record, row)
        _refuse_two_datasets(chosen.get(new.file), new)
        repeated += new.file in chosen
        chosen[new.file] = new
    covered = {each.record.sample_id for each in chosen.values()}
    problems += [
        Problem(_named(None, other.sample_id, other.capture_id), other.reason)
        for other in listing.others
        if not other.sample_id or other.sample_id not in covered
    ]
    made = sorted(chosen.values(), key=lambda each: (each.row is None, each.row or 0, each.file))
    return Assignments(tuple(made), tuple(problems), repeated, 0)


def _refuse_two_datasets(earlier: Assignment | None, new: Assignment) -> None:
    if earlier is not None and earlier.record.dataset != new.record.dataset:
        both = " and ".join(sorted({repr(earlier.record.dataset), repr(new.record.dataset)}))
        raise SettingsError(f"captures of the data sets {both} share row {new.row}: choose with --dataset")


def _by_sample(others: Iterable[Unready]) -> dict[str, Unready]:
    return {other.sample_id: other for other in others if other.sample_id}


def _missing(row: DataRow, unready: dict[str, Unready]) -> str:
    if row.problem:
        return row.problem
    other = unready.get(row.sample_id)
    return f"has no ready capture ({other.reason})" if other else "has no capture: extract it first"


def _no_row(record: CaptureRecord, format: Format) -> str:
    has = f"the sample id {record.sample_id!r}" if record.sample_id else "no sample id"
    return f"has {has}, from which no row index can be told, and {format.name} names files by it: give --data"


def _named(row: int | None, sample_id: str, capture_id: str) -> str:
    if row is not None:
        return f"row {row}" if sample_id in ("", str(row)) else f"row {row} (sample {sample_id})"
    return f"sample {sample_id}" if sample_id else f"capture {capture_id}"
