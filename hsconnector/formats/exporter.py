"""Captures into a trainer's files, several at a time, each whole or absent, none twice."""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hsconnector.capture.shard import Capture
from hsconnector.client.sources import Source, View
from hsconnector.errors import CaptureError, HSConnectorError, SettingsError, ShardError, StoreError
from hsconnector.formats.assignment import Assignment, Problem
from hsconnector.formats.draft_vocab import DraftVocabulary, Ids, count_tokens
from hsconnector.formats.manifest import ONES, Manifest, ManifestEntry, file_hash
from hsconnector.formats.norm import FinalNorm
from hsconnector.formats.sample import Format, Layers, Sample
from hsconnector.prompts.labels import DataRow, token_hash

__all__ = ["Exporter", "FileOutcome", "Link"]

_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_NO_LINKS = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EROFS}
)


class Link(enum.StrEnum):
    """How a shard that needs no change gets into the export. Shards are read-only, also through a link."""

    AUTO = "auto"
    """A hard link where the file system and the shard's owner allow it, else a copy."""
    HARD = "hard"
    SYMBOLIC = "symlink"
    """Breaks when the sidecar's retention removes the shard."""
    COPY = "copy"


@dataclass(frozen=True)
class FileOutcome:
    """What became of one assignment: a new file, one that was there, or a problem."""

    assignment: Assignment
    written: int = 0
    """Bytes."""
    way: str = ""
    """How: "hard-linked", "linked", "copied" or "made"."""
    kept: bool = False
    replaced: bool = False
    """Whether a file was there that was not as it had been written."""
    remasked: bool = False
    """Whether the data set's mask is another than when the file, which holds none, was written."""
    problem: str = ""

    def __str__(self) -> str:
        return str(Problem(self.assignment.sample, self.problem))


@dataclass(frozen=True)
class Exporter:
    """Turns assignments into files of one format, in the folder of one manifest."""

    format: Format
    layers: Layers
    source: Source
    manifest: Manifest
    norm: FinalNorm | None = None
    link: Link = Link.AUTO
    verify: bool = True
    """Compare the checksum of every shard."""

    def run(self, assignments: Iterable[Assignment], *, workers: int) -> Iterator[FileOutcome]:
        """Every file once, in any order, `workers` at a time."""
        todo = iter(assignments)
        with ThreadPoolExecutor(workers, thread_name_prefix="export") as pool:
            running: set[Future[FileOutcome]] = set()
            while True:
                more = islice(todo, 2 * workers - len(running))
                running |= {pool.submit(self.export, assignment) for assignment in more}
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)

    def export(self, assignment: Assignment) -> FileOutcome:
        """One file; whatever is wrong with the sample is in the outcome, not raised."""
        try:
            existing = self.manifest.existing(assignment.file)
            if existing is not None:
                return self._keep(assignment, existing)
            spoilt = os.path.exists(self.manifest.folder / assignment.file)
            entry, way = self._write(assignment)
            return FileOutcome(assignment, written=entry.bytes, way=way, replaced=spoilt)
        except (CaptureError, ShardError, StoreError) as error:
            return FileOutcome(assignment, problem=str(error))
        except _Refused as refused:
            return FileOutcome(assignment, problem=str(refused))
        except HSConnectorError as error:
            return FileOutcome(assignment, problem=f"{type(error).__name__}: {error}")

    def stale(self, rows: Iterable[DataRow]) -> list[str]:
        """Files in the folder that belong to none of all the rows of the data set, in which the trainer would look."""
        return sorted(self.manifest.entries.keys() - {self.format.file_name(row.row, "") for row in rows})

    def rows_of_all_files(self, assignments: Iterable[Assignment]) -> dict[int, DataRow]:
        """The rows of the data set that the folder's files hold, by index.

        Raises SettingsError where it holds files besides these: the trainer reads them too, and their masks are not
        known here.
        """
        files = {each.file: each for each in assignments}
        others = sorted(self.manifest.entries.keys() - files)
        if others:
            raise SettingsError(
                f"a draft vocabulary is counted over all files, and {self.manifest.folder} holds {len(others)} that "
                f"this run did not write or find as they should be (the first is {others[0]}): export all of them"
            )
        return {each.data.row: each.data for each in files.values() if each.data is not None}

    def draft_vocabularies(
        self, rows: Iterable[tuple[Ids, Ids]], size: int, vocab_size: int
    ) -> Iterator[tuple[DraftVocabulary, bool]]:
        """The vocabulary of `size` tokens, and all of other sizes that were there, and whether each is what it was.

        They are made of the same counts, over the pairs of token ids and mask of all files that the folder holds.
        """
        counts = count_tokens(rows, vocab_size)
        there = self.manifest.vocabularies
        for each in sorted({size, *there}):
            files = self.format.vocabulary(counts, each)
            hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
            vocabulary = counts.vocabulary(each, rows=len(self.manifest.entries), files=hashes)
            self.manifest.publish_vocabulary(vocabulary, files)
            yield vocabulary, each not in there or there[each].files == hashes

    def _keep(self, assignment: Assignment, existing: ManifestEntry) -> FileOutcome:
        mask = self._mask_name(assignment)
        if problem := self._conflict(assignment, existing, mask):
            return FileOutcome(assignment, kept=True, problem=problem)
        if existing.loss_mask != mask:
            self.manifest.note_mask(assignment.file, mask)
        return FileOutcome(assignment, kept=True, remasked=existing.loss_mask not in ("", mask))

    def _conflict(self, assignment: Assignment, existing: ManifestEntry, mask: str) -> str:
        if existing.content_hash != assignment.record.content_hash:
            return (
                f"{assignment.file} is already there, from other tokens (capture {existing.capture_id}, not "
                f"{assignment.record.capture_id}): is it another data set? Give another folder, or remove the file"
            )
        if self.format.has_mask and existing.loss_mask != mask:
            return f"{assignment.file} is already there with another loss mask: give another folder, or remove the file"
        return ""

    def _write(self, assignment: Assignment) -> tuple[ManifestEntry, str]:
        capture = self.source.open(assignment.record, View(layers=self.layers.ids, verify=self.verify))
        ids_hash = self._checked(assignment, capture)
        sample = Sample(capture, self.layers, self._loss_mask(assignment, capture), self.norm)
        if reason := self.format.refusal(sample.loss_mask):
            raise _Refused(reason)
        temporary = self.manifest.temporary(assignment.file)
        try:
            way = self._linked(assignment, temporary)
            if not way:
                self.format.write(sample, temporary)
            entry = self._entry(assignment, ids_hash, temporary)
            self.manifest.publish(entry, temporary)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StoreError(f"cannot write {assignment.file}: {error.strerror or error}") from error
        return entry, way or "made"

    def _checked(self, assignment: Assignment, capture: Capture) -> str:
        """The hash of the capture's tokens, which are those of its row; raises _Refused."""
        if not len(capture.token_ids):
            raise _Refused(f"capture {assignment.record.capture_id} has no rows")
        if not bool(capture.hidden_states.isfinite().all()):
            raise _Refused(f"capture {assignment.record.capture_id} holds values that are not finite")
        found = token_hash(capture.token_ids.numpy().astype("<i8").tobytes())
        if assignment.data is not None and found != assignment.data.token_hash:
            raise _Refused(
                f"capture {assignment.record.capture_id} is of other tokens than the data set has there "
                f"({len(capture.token_ids)} and {assignment.data.num_tokens}): extract it again from this data set"
            )
        return found

    def _loss_mask(self, assignment: Assignment, capture: Capture) -> Any:
        import torch

        if assignment.data is None:
            return torch.ones(len(capture.token_ids), dtype=torch.int64)
        return torch.from_numpy(assignment.data.loss_mask)

    def _mask_name(self, assignment: Assignment) -> str:
        if assignment.data is None:
            return ONES if self.format.has_mask else ""
        return f"sha256:{assignment.data.mask_hash}"

    def _linked(self, assignment: Assignment, temporary: Path) -> str:
        """How the shard itself was put there, where the format is the shard and no layer is left out; else nothing."""
        path = self.source.path(assignment.record)
        if path is None or not self.format.is_shard or assignment.record.layer_ids != self.layers.ids:
            return ""
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        if self.link is Link.SYMBOLIC:
            _protect(path)
            temporary.symlink_to(path.absolute())
            return "linked"
        if self.link is not Link.COPY and self._hard_linked(path, temporary):
            return "hard-linked"
        shutil.copyfile(path, temporary)
        return "copied"

    def _hard_linked(self, path: Path, temporary: Path) -> bool:
        try:
            _protect(path)
            os.link(path, temporary)
        except OSError as error:
            if self.link is Link.AUTO and error.errno in _NO_LINKS:
                return False
            raise
        return True

    def _entry(self, assignment: Assignment, ids_hash: str, temporary: Path) -> ManifestEntry:
        record, status = assignment.record, temporary.stat()
        return ManifestEntry(
            file=assignment.file,
            row=assignment.row,
            sample_id=record.sample_id,
            dataset=record.dataset,
            capture_id=record.capture_id,
            num_tokens=record.num_rows,
            content_hash=record.content_hash,
            data_hash=record.data_hash,
            token_hash=ids_hash,
            loss_mask=self._mask_name(assignment),
            bytes=status.st_size,
            file_hash=file_hash(temporary),
            mtime_ns=status.st_mtime_ns,
        )


def _protect(path: Path) -> None:
    """Takes the right to write from a shard of a sidecar that did not yet make them read-only; raises OSError."""
    mode = path.stat().st_mode
    if mode & _WRITABLE:
        try:
            path.chmod(mode & ~_WRITABLE)
        except OSError as error:
            reason = f"its shard {path} can be written to, which only its owner can change: take --link copy"
            raise OSError(error.errno, reason) from error


class _Refused(Exception):
    """A sample that the trainer must not get."""
