"""Where the copies of captures are, and reading one from whichever source answers."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.shard import Capture, open_shard
from hsconnector.client import Client
from hsconnector.client.calls import Calls
from hsconnector.client.sources import StoreSource
from hsconnector.errors import CaptureError, SettingsError, ShardError, SidecarUnreachable, StoreError

__all__ = ["Failures", "Fetcher", "Place", "Sidecar", "Sources", "Store", "View", "open_sources"]

Sources = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Store folders and sidecar addresses."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0
_DOWN_S = 5.0
"""How long a source that did not answer is asked last."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Which part of each capture is read, and how."""

    layers: Sequence[int] | None = None
    """Layer ids; None for all."""
    rows: tuple[int, int] | None = None
    """First and one past the last row; None for all."""
    verify: bool = True
    """Compare the checksum."""
    local: bool = True
    """Open shards of a sidecar on this host directly."""


@dataclass(frozen=True)
class Place:
    """One copy of a sample."""

    source: int
    record: CaptureRecord


@dataclass
class Failures:
    """Attempts in a row that nobody answered."""

    most: int
    consecutive: int = 0
    last: Exception | None = field(default=None, repr=False)

    def note(self, error: Exception) -> None:
        self.consecutive += 1
        self.last = error

    def count(self, error: Exception) -> None:
        """Notes one; raises SidecarUnreachable at the most that are borne."""
        self.note(error)
        if self.exhausted:
            self.stop()

    @property
    def exhausted(self) -> bool:
        return self.consecutive >= self.most

    def stop(self) -> None:
        raise SidecarUnreachable(f"{self.consecutive} attempts in a row failed, the last: {self.last}") from self.last

    def clear(self) -> None:
        self.consecutive = 0


class Store:
    """The folder of a store, without its sidecar."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise SettingsError(f"{folder} is neither a store's folder nor an address (http://…, unix:///…)")
        self.name = str(folder)
        self._folder = folder

    def list(self, dataset: str | None, model: str | None) -> list[CaptureRecord]:
        ready = StoreSource(self._folder).list(dataset=dataset).ready
        return [record for record in ready if model in (None, record.model)]

    def open(self, record: CaptureRecord, view: View, rows: tuple[int, int] | None) -> Capture:
        return open_shard(record.path or "", layers=view.layers, rows=rows, verify=view.verify)


class Sidecar:
    """A sidecar; its connections belong to one process and do not travel."""

    def __init__(self, url: str, api_key: str | None, local: bool) -> None:
        self.name = url
        self._key = os.environ.get("HSC_API_KEY", "") if api_key is None else api_key
        self._local = local
        self._process = -1
        self._connect()

    def __getstate__(self) -> tuple[str, str, bool]:
        return self.name, self._key, self._local

    def __setstate__(self, state: tuple[str, str, bool]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def list(self, dataset: str | None, model: str | None) -> list[CaptureRecord]:
        return self.client.find(dataset=dataset, model=model, state=CaptureState.READY)

    def open(self, record: CaptureRecord, view: View, rows: tuple[int, int] | None) -> Capture:
        return self.client.fetch(record, wait=0, layers=view.layers, rows=rows, verify=view.verify)

    @property
    def client(self) -> Client:
        self._connect()
        return self._client

    @property
    def calls(self) -> Calls:
        self._connect()
        return self._calls

    def _connect(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._client = Client(self.name, api_key=self._key, local=self._local)
            self._calls = Calls(self.name, api_key=self._key)
            weakref.finalize(self, _close, self._process, self._client, self._calls)


def _close(process: int, client: Client, calls: Calls) -> None:
    if process == os.getpid():
        client.close()
        calls.close()


class Fetcher:
    """Reads captures from whichever source answers."""

    def __init__(self, sources: Sequence[Store | Sidecar], view: View, max_failures: int) -> None:
        if max_failures < 1:
            raise SettingsError(f"max_failures is {max_failures}, it must be 1 or more")
        self._sources = sources
        self._view = view
        self._failures = Failures(max_failures)
        self._down: dict[int, float] = {}

    def list(self, dataset: str | None, model: str | None) -> list[Place]:
        return [
            Place(index, msgspec.structs.replace(record, verdict=None, tags={}, handle=""))
            for index, source in enumerate(self._sources)
            for record in source.list(dataset, model)
        ]

    def fetch(self, places: Sequence[Place], rows: tuple[int, int] | None) -> Capture:
        """The first copy that can be had; waits and tries again while a source that holds one does not answer."""
        left, pause = list(places), FIRST_PAUSE_S
        while True:
            for place in sorted(left, key=self._is_down):
                try:
                    capture = self._sources[place.source].open(place.record, self._view, rows)
                except SidecarUnreachable as error:
                    self._down[place.source] = time.monotonic() + _DOWN_S
                    self._failures.count(error)
                    continue
                except (CaptureError, ShardError, StoreError):
                    left.remove(place)
                    if not left:
                        raise
                    continue
                self._failures.clear()
                self._down.pop(place.source, None)
                return capture
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)

    def _is_down(self, place: Place) -> bool:
        return self._down.get(place.source, 0.0) > time.monotonic()


def open_sources(sources: Sources, api_key: str | None, view: View) -> list[Store | Sidecar]:
    given = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    if not given:
        raise SettingsError("no sources: give store folders or sidecar addresses")
    return [
        Sidecar(source, api_key, view.local)
        if isinstance(source, str) and "://" in source
        else Store(Path(source).absolute())
        for source in given
    ]
