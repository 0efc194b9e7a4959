"""The index of every capture, failures and tombstones included: one SQLite file in WAL mode.

Columns serve the filters; the capture itself is a msgpack `Record`. One thread writes, in one transaction a batch;
any thread reads. What was put but could not be committed (a full disk) is still given by `get` and tried again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hsconnector.protocol import CaptureState
from server.records import Record, client_ids

__all__ = ["Catalog", "Filter", "Page"]

log = logging.getLogger("hsconnector.server.catalog")

VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS captures (
    capture_id TEXT PRIMARY KEY,
    folder TEXT NOT NULL,
    request_id TEXT NOT NULL,
    dataset TEXT NOT NULL,
    sample_id TEXT NOT NULL,
    state TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    model TEXT NOT NULL,
    created REAL NOT NULL,
    size INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS captures_folder ON captures (folder);
CREATE INDEX IF NOT EXISTS captures_request ON captures (request_id);
CREATE INDEX IF NOT EXISTS captures_sample ON captures (dataset, sample_id);
CREATE INDEX IF NOT EXISTS captures_sample_only ON captures (sample_id) WHERE sample_id != '';
CREATE INDEX IF NOT EXISTS captures_state ON captures (state, capture_id);
CREATE INDEX IF NOT EXISTS captures_content ON captures (content_hash) WHERE content_hash != '';
CREATE INDEX IF NOT EXISTS captures_created ON captures (created);
CREATE TABLE IF NOT EXISTS client_ids (
    client_id TEXT NOT NULL,
    capture_id TEXT NOT NULL,
    rank INTEGER NOT NULL,
    PRIMARY KEY (client_id, capture_id)
) WITHOUT ROWID;
"""
_PUT = """
INSERT INTO captures VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (capture_id) DO UPDATE SET state = excluded.state, content_hash = excluded.content_hash,
    size = excluded.size, record = excluded.record
"""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which captures a listing shows; None does not restrict."""

    request_id: str | None = None
    client_id: str | None = None
    dataset: str | None = None
    sample_id: str | None = None
    state: CaptureState | None = None
    content_hash: str | None = None
    model: str | None = None
    since: float | None = None
    """Seconds since the epoch; compared with `created`."""


class Page(msgspec.Struct, frozen=True):
    """Some captures, and where the next page begins (None at the end)."""

    records: list[Record]
    next_cursor: str | None


class Catalog:
    """The captures of one store."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self._pending: dict[str, Record] = {}
        try:
            self._writer = _connect(path, durable)
        except sqlite3.DatabaseError as error:
            aside = path.with_name(f"{path.name}.broken-{time.time_ns()}")
            log.error(
                "the index %s cannot be used (%s); moved to %s, rebuilding from the shards", path, error, aside.name
            )
            path.rename(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._writer = _connect(path, durable)
        self._reader = _connect(path, durable)
        self._reading = threading.Lock()

    def close(self) -> None:
        """Commits and closes; what cannot be committed is logged and lost (shards are found again at start)."""
        self.flush()
        with self._reading:
            self._reader.close()
        self._writer.close()

    def put(self, record: Record) -> None:
        """Sets a capture; visible to `get` at once, kept by the next `flush`."""
        self._pending[record.capture_id] = record

    def flush(self) -> str:
        """Commits what was put; on failure keeps it for the next time and says why."""
        if not self._pending:
            return ""
        batch = list(self._pending.values())
        try:
            with self._writer:
                self._writer.executemany(_PUT, [_row(record) for record in batch])
                names = [(n, r.capture_id, rank) for r in batch for n, rank in client_ids(r.request_id).items()]
                self._writer.executemany("INSERT OR IGNORE INTO client_ids VALUES (?, ?, ?)", names)
        except sqlite3.Error as error:
            log.error("the index cannot be written, %d captures wait for it: %s", len(batch), error)
            return f"the index cannot be written: {error}"
        for record in batch:
            if self._pending.get(record.capture_id) is record:
                del self._pending[record.capture_id]
        return ""

    def get(self, capture_id: str) -> Record | None:
        """One capture, or None."""
        pending = self._pending.get(capture_id)
        if pending is not None:
            return pending
        rows = self._read("SELECT record FROM captures WHERE capture_id = ?", (capture_id,))
        return _decode(rows[0][0]) if rows else None

    def of_request(self, request_id: str) -> list[Record]:
        """The captures of an engine's or a client's request id, oldest first; possible ones only if none is certain."""
        exact = self._records("SELECT record FROM captures WHERE request_id = ? ORDER BY capture_id", (request_id,))
        if exact:
            return exact
        rows = self._read(
            "SELECT rank, record FROM client_ids JOIN captures USING (capture_id)"
            " WHERE client_id = ? ORDER BY capture_id",
            (request_id,),
        )
        best = min((rank for rank, _ in rows), default=0)
        return [_decode(record) for rank, record in rows if rank == best]

    def page(self, wanted: Filter, *, limit: int, cursor: str = "", oldest_first: bool = False) -> Page:
        """Captures by id, which is by time; `cursor` is the last id of the page before."""
        clauses, values = _where(wanted)
        if cursor:
            clauses.append("capture_id > ?" if oldest_first else "capture_id < ?")
            values.append(cursor)
        where = f"WHERE {' AND '.join(clauses)} " if clauses else ""
        order = "ASC" if oldest_first else "DESC"
        query = f"SELECT record FROM captures {where}ORDER BY capture_id {order} LIMIT ?"
        records = self._records(query, (*values, limit + 1))
        return Page(records[:limit], records[limit - 1].capture_id if len(records) > limit else None)

    def with_content(self, hashes: Sequence[str]) -> list[Record]:
        """The captures of these content hashes, oldest first, whatever their state."""
        found = self._records(
            "SELECT record FROM captures WHERE content_hash != '' AND content_hash IN (SELECT value FROM json_each(?))",
            (json.dumps(list(hashes)),),
        )
        records = {record.capture_id: record for record in found}
        wanted = frozenset(hashes)
        for record in list(self._pending.values()):
            if record.content_hash in wanted:
                records[record.capture_id] = record
        return [records[capture_id] for capture_id in sorted(records)]

    def folder(self, folder: str) -> dict[str, Record]:
        """The captures whose shards lie in one two-digit folder."""
        records = self._records("SELECT record FROM captures WHERE folder = ?", (folder,))
        return {record.capture_id: record for record in records}

    def receiving(self) -> list[Record]:
        """The captures that are not final."""
        return self._records("SELECT record FROM captures WHERE state = ?", (CaptureState.RECEIVING,))

    def counts(self) -> tuple[int, int]:
        """Captures, and bytes of shards."""
        ((count, size),) = self._read("SELECT count(*), coalesce(sum(size), 0) FROM captures", ())
        return count, size

    def _records(self, query: str, values: tuple[object, ...]) -> list[Record]:
        return [_decode(row[0]) for row in self._read(query, values)]

    def _read(self, query: str, values: tuple[object, ...]) -> list[Any]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()


def _where(wanted: Filter) -> tuple[list[str], list[object]]:
    clauses: list[str] = []
    values: list[object] = []
    for name in ("request_id", "dataset", "sample_id", "state", "content_hash", "model"):
        value = getattr(wanted, name)
        if value is not None:
            clauses.append(f"{name} = ?")
            values.append(value)
            if value and name in ("sample_id", "content_hash"):
                clauses.append(f"{name} != ''")  # their indexes are partial, and SQLite asks for the words
    if wanted.since is not None:
        clauses.append("created >= ?")
        values.append(wanted.since)
    if wanted.client_id is not None:
        best = "(SELECT min(rank) FROM client_ids WHERE client_id = ?)"
        clauses.append(f"capture_id IN (SELECT capture_id FROM client_ids WHERE client_id = ? AND rank = {best})")
        values += [wanted.client_id, wanted.client_id]
    return clauses, values


def _row(record: Record) -> tuple[object, ...]:
    return (
        record.capture_id,
        record.capture_id[-2:],
        record.request_id,
        record.dataset,
        record.sample_id,
        record.state,
        record.content_hash,
        record.model,
        record.created,
        record.size,
        _encode(record),
    )


def _connect(path: Path, durable: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        with contextlib.closing(connection.execute("PRAGMA user_version")) as found:
            version = found.fetchone()[0]
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"version {version}, this sidecar writes {VERSION}")
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("SELECT count(*) FROM captures LIMIT 1").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def two_hex() -> Iterator[str]:
    """Every two-digit folder name."""
    return (f"{number:02x}" for number in range(256))
