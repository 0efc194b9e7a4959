"""The captures that an index knows, failures and tombstones included, for whoever reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from hsconnector.capture.content import WeightsHeld
from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.record import CaptureRecord
from hsconnector.errors import BrokenIndex
from hsconnector.storage import queries
from hsconnector.storage.connection import SharedConnection
from hsconnector.storage.queries import Filter

__all__ = ["Index", "Page", "record_of"]

_decode = msgspec.msgpack.Decoder(CaptureRecord).decode


class Page(msgspec.Struct, frozen=True):
    """Some captures, and where the next page begins (None at the end)."""

    records: list[CaptureRecord]
    next_cursor: str | None


class Index:
    """An index that is up to date (`hsconnector.storage.migrations`); any thread may ask. Raises `IndexFault`."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self._finder = SharedConnection(path, durable=durable)
        """For what is found at once: it never waits for a listing."""
        self._reader = SharedConnection(path, durable=durable)

    def close(self) -> None:
        """Waits for the queries that run."""
        self._finder.close()
        self._reader.close()

    def get(self, capture_id: str) -> CaptureRecord | None:
        """One capture, or None."""
        row = self._finder.first(queries.GET, capture_id=capture_id)
        return record_of(row[0]) if row else None

    def of_request(self, request_id: str) -> list[CaptureRecord]:
        """The captures of an engine's or a client's request id, oldest first; possible ones only if none is certain."""
        exact = [record_of(row[0]) for row in self._reader.rows(queries.OF_REQUEST, request_id=request_id)]
        if exact:
            return exact
        rows = self._reader.rows(queries.OF_CLIENT, client_id=request_id)
        best = min((rank for rank, _ in rows), default=0)
        return [record_of(packed) for rank, packed in rows if rank == best]

    def page(self, wanted: Filter, *, limit: int, cursor: str = "", oldest_first: bool = False) -> Page:
        """Captures by id, which is by time; `cursor` is the last id of the page before."""
        query, values = queries.page(wanted, after=bool(cursor), oldest_first=oldest_first)
        rows = self._reader.rows(query, **values, limit=limit + 1, cursor=cursor)
        records = [record_of(row[0]) for row in rows]
        return Page(records[:limit], records[limit - 1].capture_id if len(records) > limit else None)

    def with_content(self, hashes: Sequence[str]) -> list[CaptureRecord]:
        """The captures of these content hashes, oldest first, whatever their state."""
        found: dict[str, CaptureRecord] = {}
        for start in range(0, len(hashes), queries.MOST_HASHES):
            query, values = queries.with_content(hashes[start : start + queries.MOST_HASHES])
            records = (record_of(row[0]) for row in self._reader.rows(query, **values))
            found |= {record.capture_id: record for record in records}
        return [found[capture_id] for capture_id in sorted(found)]

    def weights(self, **narrowed: str | None) -> list[WeightsHeld]:
        """Whose weights the ready captures are of, the newest last; narrowed by `dataset` and `model`."""
        values = {name: value for name, value in narrowed.items() if value is not None}
        rows = self._reader.rows(queries.weights(*sorted(values)), state=CaptureState.READY, **values)
        return sorted((WeightsHeld(*row) for row in rows), key=lambda each: each.newest)

    def live(self, folder: str) -> dict[str, CaptureRecord]:
        """The captures of one two-digit folder that have not failed or expired."""
        records = (record_of(row[0]) for row in self._finder.rows(queries.LIVE, folder=folder))
        return {record.capture_id: record for record in records}

    def receiving(self) -> list[CaptureRecord]:
        """The captures that are not final."""
        rows = self._finder.rows(queries.IN_STATE, state=CaptureState.RECEIVING)
        return [record_of(row[0]) for row in rows]


def record_of(packed: bytes) -> CaptureRecord:
    """A capture as an index keeps it; raises `BrokenIndex`."""
    try:
        return _decode(packed)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise BrokenIndex(f"a capture's record cannot be read: {error}") from error
