"""Captures that several sources hold, read from whichever answers, until too many attempts in a row have failed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.shard import Capture
from hsconnector.client.sources import Source, View, open_source
from hsconnector.errors import CaptureError, SettingsError, ShardError, SidecarUnreachable, StoreError

__all__ = ["Failures", "Fetcher", "Replica", "Sources", "open_sources"]

Sources = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Store folders and sidecar addresses."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0
_DOWN_S = 5.0
"""How long a source that did not answer is asked last."""


class Replica(msgspec.Struct, frozen=True, array_like=True):
    """A capture as one source holds it."""

    source: int
    """Which one, in the order they were given."""
    record: CaptureRecord


@dataclass
class Failures:
    """Attempts in a row that nobody answered; `most` are too many."""

    most: int
    consecutive: int = 0
    last: Exception | None = field(default=None, repr=False)

    def note(self, error: Exception) -> None:
        """One more."""
        self.consecutive += 1
        self.last = error

    def count(self, error: Exception) -> None:
        """One more; raises SidecarUnreachable where that was the last one allowed."""
        self.note(error)
        if self.exhausted:
            self.stop()

    @property
    def exhausted(self) -> bool:
        return self.consecutive >= self.most

    def stop(self) -> NoReturn:
        """Raises SidecarUnreachable."""
        raise SidecarUnreachable(f"{self.consecutive} attempts in a row failed, the last: {self.last}") from self.last

    def clear(self) -> None:
        self.consecutive = 0


class Fetcher:
    """Reads captures from whichever source answers."""

    def __init__(self, sources: Sequence[Source], view: View, max_failures: int) -> None:
        if max_failures < 1:
            raise SettingsError(f"max_failures is {max_failures}, it must be 1 or more")
        self._sources = sources
        self._view = view
        self._failures = Failures(max_failures)
        self._down: dict[int, float] = {}

    def list(self, model: str | None) -> list[Replica]:
        """What there is, in every source; records are kept without what is large and not needed."""
        return [
            Replica(index, msgspec.structs.replace(record, verdict=None, tags={}, handle=""))
            for index, source in enumerate(self._sources)
            for record in source.ready(model=model)
        ]

    def fetch(self, replicas: Sequence[Replica]) -> Capture:
        """The first copy that can be had; waits and tries again while a source that holds one does not answer."""
        left, pause = list(replicas), FIRST_PAUSE_S
        while True:
            for replica in sorted(left, key=self._is_down):
                try:
                    capture = self._sources[replica.source].open(replica.record, self._view)
                except SidecarUnreachable as error:
                    self._down[replica.source] = time.monotonic() + _DOWN_S
                    self._failures.count(error)
                    continue
                except (CaptureError, ShardError, StoreError):
                    left.remove(replica)
                    if not left:
                        raise
                    continue
                self._failures.clear()
                self._down.pop(replica.source, None)
                return capture
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)

    def _is_down(self, replica: Replica) -> bool:
        return self._down.get(replica.source, 0.0) > time.monotonic()


def open_sources(sources: Sources, api_key: str | None, local: bool) -> list[Source]:
    """Raises SettingsError, also where there are none."""
    given = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    if not given:
        raise SettingsError("no sources: give store folders or sidecar addresses")
    return [open_source(source, api_key=api_key, local=local) for source in given]
