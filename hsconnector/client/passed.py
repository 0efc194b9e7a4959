"""What a trainer passes over because it cannot be read: counted, named, and too much of it is an error."""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
import weakref
from pathlib import Path

import msgspec

from hsconnector.errors import CaptureError, SettingsError

__all__ = ["Passed", "PassedOver"]

log = logging.getLogger("hsconnector.dataset")

_NAMED = 10
"""In an error."""


class Passed(msgspec.Struct, frozen=True):
    """One that was passed over."""

    name: str
    """The sample's id, or what else it is known by."""
    capture_id: str
    reason: str


class PassedOver:
    """Everything that was passed over, by this process and its data-loading workers, forked or spawned.

    They share a file in the folder for temporary files; it comes into being with the first one and goes with the
    process that made this. More than `limit`, a fraction, is an error.
    """

    def __init__(self, limit: float) -> None:
        if not 0 <= limit <= 1:
            raise SettingsError(f"max_bad is {limit:g}, it must be a fraction from 0 to 1")
        self.limit = limit
        self._path = Path(tempfile.gettempdir(), f"hsconnector-passed-{uuid.uuid4().hex}")
        weakref.finalize(self, _remove, self._path, os.getpid())

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.limit, self._path)

    def __len__(self) -> int:
        return len(self.all())

    def all(self) -> list[Passed]:
        """Each once, however often it was met."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return list(
            {passed.name: passed for passed in (msgspec.json.decode(line, type=Passed) for line in lines)}.values()
        )

    def note(self, passed: Passed, of: int) -> None:
        """One more; raises CaptureError where more than the limit of `of` samples are passed over."""
        known = self.all()
        if any(each.name == passed.name for each in known):
            return
        log.warning("sample %r is passed over: %s", passed.name, passed.reason)
        known.append(passed)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, msgspec.json.encode(passed) + b"\n")
        finally:
            os.close(file)
        if len(known) > self.limit * of:
            self._stop(known, of)

    def _stop(self, known: list[Passed], of: int) -> None:
        listed = "; ".join(f"{each.name!r}: {each.reason}" for each in known[:_NAMED])
        more = f"; and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
        raise CaptureError(
            f"{len(known)} of {of} samples cannot be had, more than max_bad={self.limit:g}: {listed}{more}; extract "
            "them again, or allow more with max_bad",
            capture_id=known[-1].capture_id,
            reason="passed_over",
        )


def _reopen(limit: float, path: Path) -> PassedOver:
    """The same in another process, which leaves the file to its maker."""
    again = PassedOver.__new__(PassedOver)
    again.limit, again._path = limit, path
    return again


def _remove(path: Path, process: int) -> None:
    if process == os.getpid():
        path.unlink(missing_ok=True)
