"""The index of every capture, failures and tombstones included: one SQLite file in WAL mode.

Columns serve the filters; the capture itself is a msgpack `CaptureRecord`. One thread writes, in one transaction a
batch; any thread reads. What was put but could not be committed (a full disk) is still given by `get` and tried again.

Only an index that is damaged, or of another version, is moved aside for a new one: leases, failures and tombstones
lie nowhere else. Whatever passes (a lock, a full disk, a missing permission) is an error that leaves it as it is.
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

from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.record import CaptureRecord, client_ids, kept

__all__ = ["BrokenIndex", "Catalog", "Filter", "Page", "is_broken", "refusal"]

log = logging.getLogger("hsconnector.server.catalog")

VERSION = 2
BUSY_S = 10.0
"""How long another process's lock is waited for."""
_CAPTURES = """
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
    record BLOB NOT NULL,
    ended REAL,
    reason TEXT NOT NULL DEFAULT ''
)
"""
_INDEXES = """
CREATE INDEX IF NOT EXISTS captures_live ON captures (created) WHERE ended IS NULL;
CREATE INDEX IF NOT EXISTS captures_live_folder ON captures (folder) WHERE ended IS NULL;
CREATE INDEX IF NOT EXISTS captures_ended ON captures (ended) WHERE ended IS NOT NULL;
CREATE INDEX IF NOT EXISTS captures_request ON captures (request_id);
CREATE INDEX IF NOT EXISTS captures_sample ON captures (dataset, sample_id);
CREATE INDEX IF NOT EXISTS captures_sample_only ON captures (sample_id) WHERE sample_id != '';
CREATE INDEX IF NOT EXISTS captures_state ON captures (state, capture_id);
CREATE INDEX IF NOT EXISTS captures_content ON captures (content_hash) WHERE content_hash != '';
CREATE INDEX IF NOT EXISTS captures_created ON captures (created);
"""
_CLIENT_IDS = """
CREATE TABLE IF NOT EXISTS client_ids (
    client_id TEXT NOT NULL,
    capture_id TEXT NOT NULL,
    rank INTEGER NOT NULL,
    PRIMARY KEY (client_id, capture_id)
) WITHOUT ROWID;
"""
_PUT = """
INSERT INTO captures (capture_id, folder, request_id, dataset, sample_id, state, content_hash, model, created, size,
    record, ended, reason)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (capture_id) DO UPDATE SET state = excluded.state, content_hash = excluded.content_hash,
    size = excluded.size, record = excluded.record, ended = excluded.ended, reason = excluded.reason
"""
_UNFIT = (ValueError, OverflowError, TypeError, sqlite3.IntegrityError, sqlite3.DataError)
"""What one record's own contents can raise."""
_LEFT = (CaptureState.FAILED, CaptureState.EXPIRED)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CaptureRecord).decode


class BrokenIndex(sqlite3.DatabaseError):
    """The index does not hold what this version writes."""


def is_broken(error: sqlite3.Error) -> bool:
    """Whether only a new index helps."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, BrokenIndex) or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def refusal(path: Path, error: sqlite3.Error) -> sqlite3.Error:
    """An error that passes, as a sentence with the way out; the index is left as it is."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    way_out = _WAYS_OUT.get(code, "see to that")
    return sqlite3.OperationalError(f"the index {path} cannot be used: {error}; {way_out} and start again")


_HELD = "another process holds it: let that end"
_DENIED = "let the user of the sidecar write it and its folder"
_WAYS_OUT = {
    sqlite3.SQLITE_BUSY: _HELD,
    sqlite3.SQLITE_LOCKED: _HELD,
    sqlite3.SQLITE_FULL: "make room on its disk",
    sqlite3.SQLITE_IOERR: "make room on its disk or mend it",
    sqlite3.SQLITE_READONLY: _DENIED,
    sqlite3.SQLITE_CANTOPEN: _DENIED,
    sqlite3.SQLITE_PERM: _DENIED,
}


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

    records: list[CaptureRecord]
    next_cursor: str | None


class Catalog:
    """The captures of one store."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self._durable = durable
        self._pending: dict[str, CaptureRecord] = {}
        try:
            self._open()
        except sqlite3.Error as error:
            if not is_broken(error):
                raise refusal(path, error) from error
            self._move_aside(error)
            self._open()

    def close(self) -> None:
        """Commits and closes; what cannot be committed is logged and lost (shards are found again at start)."""
        self.flush()
        self._close()

    def start_anew(self, error: sqlite3.Error) -> None:
        """Moves a broken index aside and begins an empty one; nothing may be reading."""
        self._pending.clear()
        self._close()
        self._move_aside(error)
        self._open()

    def put(self, record: CaptureRecord) -> None:
        """Sets a capture; visible to `get` at once, kept by the next `flush`."""
        self._pending[record.capture_id] = kept(record)

    def flush(self) -> str:
        """Commits what was put; on failure keeps it for the next time and says why."""
        waiting = len(self._pending)
        try:
            self.commit()
        except sqlite3.Error as error:
            log.error("the index cannot be written, %d captures wait for it: %s", waiting, error)
            return f"the index cannot be written: {error}"
        return ""

    def commit(self) -> None:
        """Commits what was put, all of it or nothing; raises `sqlite3.Error`."""
        batch = list(self._pending.values())
        if not batch:
            return
        try:
            self._write(batch)
        except _UNFIT:
            batch = [record for record in batch if self._fits(record)]
        for record in batch:
            if self._pending.get(record.capture_id) is record:
                del self._pending[record.capture_id]

    def forget(self, before: float, limit: int) -> int:
        """Drops up to `limit` captures that failed or expired before a time, with their client ids; how many.

        The newest stays whatever it is: SQLite counts on from it, and what a queue has lent is told by that number.
        """
        query = (
            "SELECT capture_id, request_id FROM captures"
            " WHERE ended < ? AND rowid < (SELECT max(rowid) FROM captures) ORDER BY ended LIMIT ?"
        )
        try:
            with self._writer:
                found = self._writer.execute(query, (before, limit)).fetchall()
                names = [(name, capture_id) for capture_id, request_id in found for name in client_ids(request_id)]
                self._writer.executemany("DELETE FROM client_ids WHERE client_id = ? AND capture_id = ?", names)
                self._writer.executemany("DELETE FROM captures WHERE capture_id = ?", [(row[0],) for row in found])
        except sqlite3.Error as error:
            log.error("the index cannot be written, what has ended long ago stays in it: %s", error)
            return 0
        return len(found)

    def get(self, capture_id: str) -> CaptureRecord | None:
        """One capture, or None."""
        pending = self._pending.get(capture_id)
        if pending is not None:
            return pending
        rows = self._finder.rows("SELECT record FROM captures WHERE capture_id = ?", (capture_id,))
        return _record(rows[0][0]) if rows else None

    def of_request(self, request_id: str) -> list[CaptureRecord]:
        """The captures of an engine's or a client's request id, oldest first; possible ones only if none is certain."""
        exact = self._records("SELECT record FROM captures WHERE request_id = ? ORDER BY capture_id", (request_id,))
        if exact:
            return exact
        rows = self._reader.rows(
            "SELECT rank, record FROM client_ids JOIN captures USING (capture_id)"
            " WHERE client_id = ? ORDER BY capture_id",
            (request_id,),
        )
        best = min((rank for rank, _ in rows), default=0)
        return [_record(record) for rank, record in rows if rank == best]

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

    def with_content(self, hashes: Sequence[str]) -> list[CaptureRecord]:
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

    def live(self, folder: str) -> dict[str, CaptureRecord]:
        """The captures of one two-digit folder that have not failed or expired."""
        rows = self._finder.rows("SELECT record FROM captures WHERE folder = ? AND ended IS NULL", (folder,))
        return {record.capture_id: record for record in (_record(row[0]) for row in rows)}

    def ids(self, state: CaptureState) -> Iterator[str]:
        """The ids of the captures in a state, oldest first; on the writer's thread."""
        query = "SELECT capture_id FROM captures WHERE state = ? ORDER BY capture_id"
        with contextlib.closing(self._writer.execute(query, (state,))) as rows:
            for (capture_id,) in rows:
                yield capture_id

    def receiving(self) -> list[CaptureRecord]:
        """The captures that are not final."""
        rows = self._finder.rows("SELECT record FROM captures WHERE state = ?", (CaptureState.RECEIVING,))
        return [_record(row[0]) for row in rows]

    def _records(self, query: str, values: tuple[object, ...]) -> list[CaptureRecord]:
        return [_record(row[0]) for row in self._reader.rows(query, values)]

    def _write(self, batch: Sequence[CaptureRecord]) -> None:
        names = [(name, r.capture_id, rank) for r in batch for name, rank in client_ids(r.request_id).items()]
        with self._writer:
            self._writer.executemany(_PUT, [_row(record) for record in batch])
            self._writer.executemany("INSERT OR IGNORE INTO client_ids VALUES (?, ?, ?)", names)

    def _fits(self, record: CaptureRecord) -> bool:
        """Writes one record of a batch that failed; a record that can never be written is not tried again."""
        try:
            self._write([record])
        except _UNFIT as error:
            log.error("capture %s: the index cannot hold it, it is dropped: %r", record.capture_id, error)
            self._pending.pop(record.capture_id, None)
            return False
        return True

    def _open(self) -> None:
        self._writer = _connect(self.path, self._durable, check=True)
        self._finder = _Reader(_connect(self.path, self._durable))
        self._reader = _Reader(_connect(self.path, self._durable))

    def _close(self) -> None:
        self._finder.close()
        self._reader.close()
        self._writer.close()

    def _move_aside(self, error: sqlite3.Error) -> None:
        """The index last: a new one must never find the log of an old one beside it."""
        aside = self.path.with_name(f"{self.path.name}.broken-{time.time_ns()}")
        log.error(
            "the index %s is damaged or of another version (%s): moved to %s, captures are listed anew from their "
            "shards; leases, acknowledgements, failures and deletions, which only the index held, are lost",
            self.path,
            error,
            aside.name,
        )
        for suffix in ("-journal", "-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                self.path.with_name(self.path.name + suffix).rename(aside.with_name(aside.name + suffix))


class _Reader:
    """A connection that threads share, one query at a time."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def rows(self, query: str, values: tuple[object, ...]) -> list[Any]:
        """All rows of a query."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        """Waits for the query that runs."""
        with self._lock:
            self._connection.close()


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


def _row(record: CaptureRecord) -> tuple[object, ...]:
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
        (record.finished or record.created) if record.state in _LEFT else None,
        record.reason or "",
    )


def _record(packed: bytes) -> CaptureRecord:
    try:
        return _decode(packed)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise BrokenIndex(f"a capture's record cannot be read: {error}") from error


def _connect(path: Path, durable: bool, *, check: bool = False) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        _prepare(connection)
        if check:
            _check(connection)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Makes the tables; writes nothing where that was done."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == VERSION:
        return
    if version:
        raise BrokenIndex(f"version {version}, this sidecar writes {VERSION}")
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        for statement in f"{_CAPTURES};{_INDEXES};{_CLIENT_IDS}".split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _check(connection: sqlite3.Connection) -> None:
    """Reads every page once, those of the leases too: damage must end no later start, and no lease at night."""
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise BrokenIndex(" ".join(found.split()))


def two_hex() -> Iterator[str]:
    """Every two-digit folder name."""
    return (f"{number:02x}" for number in range(256))
