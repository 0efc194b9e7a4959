"""Where captures come from: a store's folder, without its sidecar, or a sidecar's address."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from hsconnector.capture.header import open_header
from hsconnector.capture.protocol import CaptureState, is_capture_id
from hsconnector.capture.record import CaptureRecord, record_of_header
from hsconnector.capture.shard import Capture, open_shard
from hsconnector.client.captures import Client
from hsconnector.errors import CaptureError, SettingsError, ShardError, StoreError

__all__ = ["FolderSource", "Listing", "SidecarSource", "Source", "Unready", "View", "open_source"]


@dataclass(frozen=True)
class Unready:
    """A capture that cannot be read, and why."""

    capture_id: str
    sample_id: str
    reason: str
    dataset: str | None = None
    """None where that cannot be told."""


@dataclass(frozen=True)
class Listing:
    """What there is: the ready captures, oldest first, and the others."""

    ready: tuple[CaptureRecord, ...]
    others: tuple[Unready, ...] = ()


@dataclass(frozen=True, kw_only=True)
class View:
    """Which part of a capture is read, and how."""

    layers: Sequence[int] | None = None
    """Layer ids; None for all."""
    rows: tuple[int, int] | None = None
    """First and one past the last row; None for all."""
    verify: bool = True
    """Compare the checksum."""


class Source(Protocol):
    """Where captures come from. Travels to spawned workers."""

    name: str
    """The folder or the address, for people."""

    def list(self, *, dataset: str | None = None, ids: Sequence[str] = ()) -> Listing:
        """Captures of a data set, or those whose capture or sample id is among `ids`, or all."""

    def ready(self, *, dataset: str | None = None, model: str | None = None) -> Sequence[CaptureRecord]:
        """The ready captures of a data set and a model, or all, in no order."""

    def open(self, record: CaptureRecord, view: View) -> Capture:
        """A capture's tensors; raises CaptureError, ShardError, StoreError, TransportError."""

    def path(self, record: CaptureRecord) -> Path | None:
        """The capture's shard on this host, where there is one."""

    def close(self) -> None:
        """Lets go of connections."""


class FolderSource:
    """The folder of a store, without its sidecar, or any folder of shards; raises SettingsError where there is none.

    Its shards say everything that is needed; a store keeps unsound ones in a folder of their own.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise SettingsError(f"{folder} is neither a store's folder nor an address (http://…, unix:///…)")
        self.name = str(folder)
        self._folder = folder

    def shards(self) -> Sequence[Path]:
        """The files, the newest capture first: their names begin with the time."""
        captures = self._folder / "captures"
        root = captures if captures.is_dir() else self._folder
        return sorted(root.rglob("*.safetensors"), key=lambda path: path.name, reverse=True)

    def list(self, *, dataset: str | None = None, ids: Sequence[str] = ()) -> Listing:
        ready: list[CaptureRecord] = []
        others: list[Unready] = []
        for path in reversed(self.shards()):
            try:
                record = _record_of(path)
            except (ShardError, StoreError) as error:
                others += [Unready(path.stem, "", str(error))] if not ids or path.stem in ids else []
                continue
            ready += [record] if _chosen(record, dataset, ids) else []
        ready.sort(key=lambda record: record.capture_id)
        return Listing(tuple(ready), (*others, *self._quarantined(dataset, ids)))

    def ready(self, *, dataset: str | None = None, model: str | None = None) -> Sequence[CaptureRecord]:
        return [record for record in self.list(dataset=dataset).ready if model in (None, record.model)]

    def open(self, record: CaptureRecord, view: View) -> Capture:
        return open_shard(str(record.path), layers=view.layers, rows=view.rows, verify=view.verify)

    def path(self, record: CaptureRecord) -> Path | None:
        return Path(record.path) if record.path else None

    def close(self) -> None:
        """Nothing is held."""

    def _quarantined(self, dataset: str | None, ids: Sequence[str]) -> Iterator[Unready]:
        for path in sorted((self._folder / "quarantine").rglob("*.safetensors")):
            with contextlib.suppress(ShardError, StoreError):
                record = _record_of(path)
                if _chosen(record, dataset, ids):
                    reason = f"capture {record.capture_id} is unsound: it is in quarantine"
                    yield Unready(record.capture_id, record.sample_id, reason, record.dataset)


class SidecarSource:
    """A sidecar; shards on this host are opened directly where its client may."""

    def __init__(self, client: Client) -> None:
        self.name = client.url
        self._client = client

    def list(self, *, dataset: str | None = None, ids: Sequence[str] = ()) -> Listing:
        records = list(self._by_ids(ids)) if ids else list(self._client.captures(dataset=dataset, page_size=1000))
        records = [record for record in records if _chosen(record, dataset, ids)]
        ready = [record for record in records if record.state is CaptureState.READY]
        ready.sort(key=lambda record: record.capture_id)
        others = [
            Unready(record.capture_id, record.sample_id, _state(record), record.dataset)
            for record in records
            if record.state is not CaptureState.READY
        ]
        return Listing(tuple(ready), tuple(others))

    def ready(self, *, dataset: str | None = None, model: str | None = None) -> Sequence[CaptureRecord]:
        return self._client.find(dataset=dataset, model=model, state=CaptureState.READY)

    def open(self, record: CaptureRecord, view: View) -> Capture:
        layers = None if tuple(view.layers or ()) == record.layer_ids else view.layers
        return self._client.fetch(record, wait=0, layers=layers, rows=view.rows, verify=view.verify)

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
                with contextlib.suppress(CaptureError):
                    yield self._client.record(name)
            else:
                yield from self._client.captures(sample_id=name)


def open_source(source: str | os.PathLike[str], *, api_key: str | None = None, local: bool = True) -> Source:
    """A store's folder or a sidecar's address.

    `api_key` else `HSC_API_KEY`; with `local` a sidecar's files on this host are opened directly. Raises SettingsError.
    """
    if isinstance(source, str) and "://" in source:
        return SidecarSource(Client(source, api_key=api_key, local=local))
    return FolderSource(Path(source))


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
