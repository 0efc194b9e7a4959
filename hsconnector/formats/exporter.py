"""Captures into a trainer's files, several at a time, each whole or absent, none twice."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hsconnector.capture.shard import Capture
from hsconnector.client.sources import Source, View
from hsconnector.errors import CaptureError, HSConnectorError, ShardError, StoreError
from hsconnector.formats.jobs import Job, Problem
from hsconnector.formats.manifest import Entry, Manifest
from hsconnector.formats.norm import FinalNorm
from hsconnector.formats.sample import Format, Layers, Sample
from hsconnector.prompts.labels import token_hash

__all__ = ["Exporter", "Link", "Outcome"]

_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


class Link(enum.StrEnum):
    """How a shard that needs no change gets into the export."""

    AUTO = "auto"
    """A hard link where the file system allows it, else a copy."""
    HARD = "hard"
    SYMBOLIC = "symlink"
    """Breaks when the sidecar's retention removes the shard."""
    COPY = "copy"


@dataclass(frozen=True)
class Outcome:
    """What became of one job: a new file, one that was there, or a problem."""

    job: Job
    written: int = 0
    """Bytes."""
    kept: bool = False
    problem: str = ""

    def __str__(self) -> str:
        return str(Problem(self.job.sample, self.problem))


@dataclass(frozen=True)
class Exporter:
    """Turns jobs into files of one format, in the folder of one manifest."""

    format: Format
    layers: Layers
    source: Source
    manifest: Manifest
    norm: FinalNorm | None = None
    link: Link = Link.AUTO
    verify: bool = True
    """Compare the checksum of every shard."""

    def run(self, jobs: Iterable[Job], *, workers: int, stop: threading.Event | None = None) -> Iterator[Outcome]:
        """Every job once, in any order, `workers` at a time; ends early where `stop` is set."""
        todo = iter(jobs)
        with ThreadPoolExecutor(workers, thread_name_prefix="export") as pool:
            running: set[Future[Outcome]] = set()
            while True:
                if stop is None or not stop.is_set():
                    running |= {pool.submit(self.export, job) for job in islice(todo, 2 * workers - len(running))}
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)

    def export(self, job: Job) -> Outcome:
        """One job; whatever is wrong with the sample is in the outcome, not raised."""
        try:
            existing = self.manifest.existing(job.file)
            if existing is not None:
                return Outcome(job, kept=True, problem=self._conflict(job, existing))
            return Outcome(job, written=self._write(job))
        except (CaptureError, ShardError, StoreError) as error:
            return Outcome(job, problem=str(error))
        except _Refused as refused:
            return Outcome(job, problem=str(refused))
        except HSConnectorError as error:
            return Outcome(job, problem=f"{type(error).__name__}: {error}")

    def _conflict(self, job: Job, existing: Entry) -> str:
        if existing.content_hash != job.record.content_hash:
            return (
                f"{job.file} is already there, from other tokens (capture {existing.capture_id}, not "
                f"{job.record.capture_id}): is it another data set? Give another folder, or remove the file"
            )
        if existing.loss_mask != self._mask_name(job):
            return f"{job.file} is already there with another loss mask: give another folder, or remove the file"
        return ""

    def _write(self, job: Job) -> int:
        capture = self.source.open(job.record, View(layers=self.layers.ids, verify=self.verify))
        ids_hash = self._checked(job, capture)
        sample = Sample(capture, self.layers, self._loss_mask(job, capture), self.norm)
        if reason := self.format.refusal(sample.loss_mask):
            raise _Refused(reason)
        temporary = self.manifest.temporary(job.file)
        try:
            if not self._linked(job, temporary):
                self.format.write(sample, temporary)
            entry = self._entry(job, ids_hash, temporary.stat().st_size)
            self.manifest.publish(entry, temporary)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StoreError(f"cannot write {job.file}: {error.strerror or error}") from error
        return entry.bytes

    def _checked(self, job: Job, capture: Capture) -> str:
        """The hash of the capture's tokens, which are those of its row; raises _Refused."""
        if not len(capture.token_ids):
            raise _Refused(f"capture {job.record.capture_id} has no rows")
        if not bool(capture.hidden_states.isfinite().all()):
            raise _Refused(f"capture {job.record.capture_id} holds values that are not finite")
        found = token_hash(capture.token_ids.numpy().astype("<i8").tobytes())
        if job.data is not None and found != job.data.token_hash:
            raise _Refused(
                f"capture {job.record.capture_id} is of other tokens than the data set has there "
                f"({len(capture.token_ids)} and {job.data.num_tokens}): extract it again from this data set"
            )
        return found

    def _loss_mask(self, job: Job, capture: Capture) -> Any:
        import torch

        if job.data is None:
            return torch.ones(len(capture.token_ids), dtype=torch.int64)
        return torch.from_numpy(job.data.loss_mask)

    def _mask_name(self, job: Job) -> str:
        if not self.format.has_mask:
            return ""
        return "ones" if job.data is None else f"sha256:{job.data.mask_hash}"

    def _linked(self, job: Job, temporary: Path) -> bool:
        """Whether the shard itself could be put there: the format is the shard, and no layer is left out."""
        path = self.source.path(job.record)
        if path is None or self.format.suffix != path.suffix or job.record.layer_ids != self.layers.ids:
            return False
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        if self.link is Link.SYMBOLIC:
            temporary.symlink_to(path.absolute())
        elif self.link is Link.COPY or not self._hard_linked(path, temporary):
            shutil.copyfile(path, temporary)
        return True

    def _hard_linked(self, path: Path, temporary: Path) -> bool:
        try:
            os.link(path, temporary)
        except OSError as error:
            if self.link is Link.AUTO and error.errno in _NO_LINKS:
                return False
            raise
        return True

    def _entry(self, job: Job, ids_hash: str, size: int) -> Entry:
        record = job.record
        return Entry(
            file=job.file,
            row=job.row,
            sample_id=record.sample_id,
            dataset=record.dataset,
            capture_id=record.capture_id,
            num_tokens=record.num_rows,
            content_hash=record.content_hash,
            data_hash=record.data_hash,
            token_hash=ids_hash,
            loss_mask=self._mask_name(job),
            bytes=size,
        )


class _Refused(Exception):
    """A sample that the trainer must not get."""
