"""Where captures come from: a store's folder, without its sidecar, or a sidecar's address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from hsconnector.capture.header import open_header
from hsconnector.capture.protocol import CaptureState, is_capture_id
from hsconnector.capture.record import CaptureRecord, record_of_header
from hsconnector.capture.shard import Capture, open_shard
from hsconnector.client import Client
from hsconnector.errors import CaptureError, SettingsError, ShardError, StoreError

__all__ = ["Listing", "RemoteSource", "Source", "StoreSource", "Unready", "open_source"]


@dataclass(frozen=True)
class Unready:
    """A capture that cannot be exported, and why."""

    capture_id: str
    sample_id: str
    reason: str


@dataclass(frozen=True)
class Listing:
    """What there is: the ready captures, oldest first, and the others."""

    ready: tuple[CaptureRecord, ...]
    others: tuple[Unready, ...] = ()


class Source(Protocol):
    """Where captures come from."""

    name: str

    def list(self, *, dataset: str | None = None, ids: Sequence[str] = ()) -> Listing:
        """Captures of a data set, or those whose capture or sample id is among `ids`, or all."""

    def open(self, record: CaptureRecord, layers: Sequence[int], *, verify: bool) -> Capture:
        """A capture's tensors; raises CaptureError, ShardError, StoreError, TransportError."""

    def path(self, record: CaptureRecord) -> Path | None:
        """The capture's shard on this host, where there is one."""

    def close(self) -> None:
        """Lets go of connections."""


class StoreSource:
    """The folder of a store. Its shards say everything that is needed; quarantined ones lie elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._root = folder / "captures" if (folder / "captures").is_dir() else folder
        self._quarantine = folder / "quarantine"

    def list(self, *, dataset: str | None = None, ids: Sequence[str] = ()) -> Listing:
        ready: list[CaptureRecord] = []
        others: list[Unready] = []
        for path in sorted(self._root.rglob("*.safetensors")):
            try:
                record = _record_of(path)
            except (ShardError, StoreError) as error:
                others.append(Unready(path.stem, "", str(error)))
                continue
            if _chosen(record, dataset, ids):
                ready.append(record)
        ready.sort(key=lambda record: record.capture_id)
        if ids:
            others = [other for other in others if other.capture_id in ids]
        return Listing(tuple(ready), (*others, *self._quarantined(dataset, ids)))

    def open(self, record: CaptureRecord, layers: Sequence[int], *, verify: bool) -> Capture:
        return open_shard(str(record.path), layers=layers, verify=verify)

    def path(self, record: CaptureRecord) -> Path | None:
        return Path(record.path) if record.path else None

    def close(self) -> None:
        """Nothing is held."""

    def _quarantined(self, dataset: str | None, ids: Sequence[str]) -> Iterator[Unready]:
        if not self._quarantine.is_dir():
            return
        for path in sorted(self._quarantine.rglob("*.safetensors")):
            try:
                record = _record_of(path)
            except (ShardError, StoreError):
                continue
            if _chosen(record, dataset, ids):
                yield Unready(
                    record.capture_id, record.sample_id, f"capture {record.capture_id} is unsound: it is in quarantine"
                )


class RemoteSource:
    """A sidecar, over HTTP or a Unix socket; shards on this host are opened directly."""

    def __init__(self, client: Client) -> None:
        self.name = client.url
        self._client = client

    def list(self, *, dataset: str | None = None, ids: Sequence[str] = ()) -> Listing:
        records = list(self._by_ids(ids)) if ids else list(self._client.captures(dataset=dataset, page_size=1000))
        records = [record for record in records if _chosen(record, dataset, ids)]
        ready = [record for record in records if record.state is CaptureState.READY]
        ready.sort(key=lambda record: record.capture_id)
        others = [
            Unready(record.capture_id, record.sample_id, _state(record))
            for record in records
            if record.state is not CaptureState.READY
        ]
        return Listing(tuple(ready), tuple(others))

    def open(self, record: CaptureRecord, layers: Sequence[int], *, verify: bool) -> Capture:
        chosen = None if tuple(layers) == record.layer_ids else layers
        return self._client.fetch(record, wait=0, layers=chosen, verify=verify)

    def path(self, record: CaptureRecord) -> Path | None:
        path = Path(record.path) if record.path and self._client.local else None
        try:
            same = path is not None and open_header(path).metadata.get("capture_id") == record.capture_id
        except (ShardError, StoreError):
            return None
        return path if same else None

    def close(self) -> None:
        self._client.close()

    def _by_ids(self, ids: Sequence[str]) -> Iterator[CaptureRecord]:
        for name in dict.fromkeys(ids):
            if is_capture_id(name):
                try:
                    yield self._client.record(name)
                except CaptureError:
                    continue
            else:
                yield from self._client.captures(sample_id=name)


def open_source(source: str, *, local: bool = True) -> Source:
    """A store's folder or a sidecar's address; with `local` its files on this host are opened directly.

    Raises SettingsError.
    """
    if "://" in source:
        return RemoteSource(Client(source, local=local))
    folder = Path(source)
    if not folder.is_dir():
        raise SettingsError(f"{source} is neither a store's folder nor an address (http://…, unix:///…)")
    return StoreSource(folder)


def _chosen(record: CaptureRecord, dataset: str | None, ids: Sequence[str]) -> bool:
    named = not ids or record.capture_id in ids or (record.sample_id and record.sample_id in ids)
    return bool(named) and (dataset is None or record.dataset == dataset)


def _state(record: CaptureRecord) -> str:
    if record.state is CaptureState.FAILED:
        return f"capture {record.capture_id} failed: {record.reason} {record.detail}".rstrip()
    if record.state is CaptureState.QUARANTINED:
        return f"capture {record.capture_id} is unsound: {record.findings}"
    return f"capture {record.capture_id} is {record.state}"


def _record_of(path: Path) -> CaptureRecord:
    header = open_header(path)
    try:
        record = record_of_header(header, CaptureState.READY, complete=False)
    except ShardError as error:
        raise ShardError(f"{path}: {error}") from error
    return msgspec.structs.replace(record, path=str(path.absolute()))
