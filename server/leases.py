"""The work queue of training: captures are lent with a deadline, then given back or acknowledged for good.

    free --take--> leased --ack--> acked
      ^               |
      +-- release, or the deadline passed

At least once: what is not acknowledged in time is lent again. What is acknowledged is never lent again in its queue;
each queue (a training run, an epoch) lends every ready capture. All of it lies in the index, next to the captures,
and outlives a restart. Each call is one transaction, made on the writer's thread.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import itertools
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hsconnector.capture.protocol import CaptureState, FailReason
from hsconnector.capture.record import CaptureRecord
from hsconnector.errors import StoreError
from server.metrics import Metrics
from server.refusals import Refusal

__all__ = ["Ack", "Lease", "LeaseFilter", "Leases", "Lent", "Outcome", "Unheld", "Wanted"]

REMEMBER_S = 86_400.0
"""How long the end of a lease is remembered, so that whoever comes late is told so."""
TIDY_S = 3600.0
LISTED = 1000
MAX_FLOORS = 1000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS leases (
    lease_id TEXT PRIMARY KEY,
    queue TEXT NOT NULL,
    consumer TEXT NOT NULL,
    created REAL NOT NULL,
    deadline REAL NOT NULL,
    captures TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lease_items (
    queue TEXT NOT NULL,
    capture_id TEXT NOT NULL,
    state TEXT NOT NULL,
    lease_id TEXT NOT NULL,
    deadline REAL NOT NULL,
    deliveries INTEGER NOT NULL,
    remove INTEGER NOT NULL,
    PRIMARY KEY (queue, capture_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lease_items_capture ON lease_items (capture_id, state);
CREATE INDEX IF NOT EXISTS lease_items_due ON lease_items (state, deadline);
CREATE INDEX IF NOT EXISTS lease_items_lease ON lease_items (lease_id);
CREATE INDEX IF NOT EXISTS lease_items_remove ON lease_items (capture_id) WHERE remove = 1;
CREATE TABLE IF NOT EXISTS lease_counts (
    queue TEXT NOT NULL,
    consumer TEXT NOT NULL,
    outcome TEXT NOT NULL,
    count INTEGER NOT NULL,
    last REAL NOT NULL,
    PRIMARY KEY (queue, consumer, outcome)
) WITHOUT ROWID;
"""
_LEND = """
INSERT INTO lease_items VALUES (?, ?, 'leased', ?, ?, 1, 0)
ON CONFLICT (queue, capture_id) DO UPDATE SET state = 'leased', lease_id = excluded.lease_id,
    deadline = excluded.deadline, deliveries = deliveries + 1
"""
_COUNT = """
INSERT INTO lease_counts VALUES (?, ?, ?, ?, ?)
ON CONFLICT (queue, consumer, outcome) DO UPDATE SET count = count + excluded.count, last = excluded.last
"""
_NOBODY_HOLDS = """NOT EXISTS (SELECT 1 FROM lease_items AS held
    WHERE held.capture_id = captures.capture_id AND held.state = 'leased')"""
_decode = msgspec.msgpack.Decoder(CaptureRecord).decode


class Outcome(enum.StrEnum):
    """What became of a capture that was lent, or of an acknowledgement."""

    DELIVERED = "delivered"
    REDELIVERED = "redelivered"
    """Lent again after it was given back or its deadline had passed."""
    ACKED = "acked"
    RELEASED = "released"
    EXPIRED = "expired"
    """The deadline passed."""
    LATE = "late"
    """Acknowledged after the deadline: nothing changed."""


class Ack(enum.StrEnum):
    """The answer to one capture's acknowledgement."""

    ACKED = "acked"
    ALREADY_ACKED = "already_acked"
    LEASE_EXPIRED = "lease_expired"
    """The deadline had passed: it is free again, or another consumer has it. Nothing changed."""
    RELEASED = "released"
    """It was given back before. Nothing changed."""


class LeaseFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which captures a consumer takes; None does not restrict."""

    dataset: str | None = None
    sample_id: str | None = None
    model: str | None = None
    model_revision: str | None = None
    lora: str | None = None
    layer_ids: tuple[int, ...] = ()
    """Layers that a capture must hold; it may hold more."""
    since: float | None = None
    """Created at or after, seconds since the epoch."""

    def admits(self, record: CaptureRecord) -> bool:
        """What the index has no column for."""
        return (
            (self.model_revision is None or record.model_revision == self.model_revision)
            and (self.lora is None or record.lora == self.lora)
            and set(self.layer_ids) <= set(record.layer_ids)
        )


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer asks for."""

    consumer: str
    queue: str = ""
    count: int = 1
    max_bytes: int | None = None
    """Of all shards together; one capture is given however large it is."""
    deadline_s: float = 300.0
    filters: LeaseFilter = LeaseFilter()


class Lent(msgspec.Struct, frozen=True):
    """A capture of a lease."""

    record: CaptureRecord
    deliveries: int
    """How often it has been lent in this queue; 1 the first time."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Captures that are one consumer's until the deadline."""

    lease_id: str
    """Empty where nothing was free."""
    queue: str
    consumer: str
    deadline: float
    """Seconds since the epoch."""
    captures: tuple[Lent, ...] = ()


class Unheld(enum.Enum):
    """Captures with a shard that no lease holds; the value is the condition of its items."""

    ASKED = "item.state = 'acked' AND item.remove = 1"
    """Acknowledged by a consumer that has no more use for the shard."""
    ACKED = "item.state = 'acked'"
    ANY = ""


class Leases:
    """The leases of one store. `now` gives seconds since the epoch."""

    def __init__(
        self, path: Path, metrics: Metrics, *, durable: bool = False, now: Callable[[], float] = time.time
    ) -> None:
        self._metrics = metrics
        self._now = now
        self._tidied = 0.0
        self._floors: dict[tuple[str, LeaseFilter], int] = {}
        """Rows of the index up to which a queue has nothing left to lend, by what is asked for."""
        self._db = sqlite3.connect(path, timeout=10, check_same_thread=False)
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._db.executescript(_SCHEMA)
        self._show()

    def close(self) -> None:
        """Lets the index go."""
        self._db.close()

    def take(self, wanted: Wanted) -> Lease:
        """Lends up to `count` free captures, those that began first at the head; none where none is free."""
        with self._transaction() as now:
            lease_id, deadline = secrets.token_hex(16), now + wanted.deadline_s
            lent = tuple(self._choose(wanted))
            if lent:
                ids = [each.record.capture_id for each in lent]
                row = (lease_id, wanted.queue, wanted.consumer, now, deadline, json.dumps(ids))
                self._db.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?)", row)
                self._db.executemany(_LEND, [(wanted.queue, name, lease_id, deadline) for name in ids])
                again = sum(each.deliveries > 1 for each in lent)
                self._count(wanted.queue, wanted.consumer, Outcome.DELIVERED, len(lent) - again)
                self._count(wanted.queue, wanted.consumer, Outcome.REDELIVERED, again)
        return Lease(
            lease_id=lease_id if lent else "",
            queue=wanted.queue,
            consumer=wanted.consumer,
            deadline=deadline,
            captures=lent,
        )

    def ack(self, lease_id: str, capture_ids: Sequence[str] | None = None, *, remove: bool = False) -> dict[str, Ack]:
        """Marks captures of a lease (all of them by default) as done; with `remove` their shards may go now.

        Harmless when repeated or late. Raises `Refusal` for a lease that is not known and for a capture that was never
        part of it.
        """
        with self._transaction() as now:
            lease = self._known(lease_id)
            answers = {name: self._ack_of(lease, name, now) for name in lease.chosen(capture_ids)}
            done = [name for name, answer in answers.items() if answer in (Ack.ACKED, Ack.ALREADY_ACKED)]
            self._db.executemany(
                "UPDATE lease_items SET state = 'acked', remove = max(remove, ?)"
                " WHERE queue = ? AND capture_id = ? AND state != 'gone'",
                [(int(remove), lease.queue, name) for name in done],
            )
            found = list(answers.values())
            self._count(lease.queue, lease.consumer, Outcome.ACKED, found.count(Ack.ACKED))
            self._count(lease.queue, lease.consumer, Outcome.LATE, found.count(Ack.LEASE_EXPIRED))
        return answers

    def release(self, lease_id: str, capture_ids: Sequence[str] | None = None) -> list[str]:
        """Gives captures of a lease back at once; those that it holds no longer are left as they are."""
        with self._transaction():
            lease = self._known(lease_id)
            held = self._held(lease_id)
            names = [name for name in lease.chosen(capture_ids) if name in held]
            self._db.executemany(
                "UPDATE lease_items SET state = 'free' WHERE queue = ? AND capture_id = ?",
                [(lease.queue, name) for name in names],
            )
            self._count(lease.queue, lease.consumer, Outcome.RELEASED, len(names))
        return names

    def renew(self, lease_id: str, deadline_s: float) -> float:
        """Moves the deadline to `deadline_s` seconds from now; raises `Refusal` where it has passed."""
        with self._transaction() as now:
            lease = self._known(lease_id)
            if lease.deadline <= now:
                raise Refusal(409, "lease_expired", lease.end(now), "lease_id")
            values = (now + deadline_s, lease_id)
            self._db.execute("UPDATE leases SET deadline = ? WHERE lease_id = ?", values)
            self._db.execute("UPDATE lease_items SET deadline = ? WHERE lease_id = ? AND state = 'leased'", values)
        return now + deadline_s

    def end(self, lease_id: str) -> str:
        """A sentence about when a lease ended."""
        with self._transaction() as now:
            return self._known(lease_id).end(now)

    def expire(self) -> None:
        """Frees what is past its deadline; once an hour forgets what nobody will ask about."""
        with self._transaction() as now:
            if now - self._tidied > TIDY_S:
                self._tidied = now
                self._tidy(now)

    def counts(self) -> list[dict[str, Any]]:
        """What each consumer was lent and what became of it, the latest first, with what it holds now."""
        with self._transaction():
            held = dict(self._holders())
            rows = self._db.execute("SELECT queue, consumer, outcome, count, last FROM lease_counts").fetchall()
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for queue, consumer, outcome, count, last in rows:
            zeros = {str(each): 0 for each in Outcome}
            start = {"queue": queue, "consumer": consumer, **zeros, "held": held.get((queue, consumer), 0), "last": 0.0}
            entry = found.setdefault((queue, consumer), start)
            entry[outcome] = count
            entry["last"] = max(entry["last"], last)
        return sorted(found.values(), key=lambda entry: -entry["last"])[:LISTED]

    def outstanding(self, queue: str) -> int:
        """Captures of a queue that are lent now."""
        with self._transaction():
            query = "SELECT count(*) FROM lease_items WHERE state = 'leased' AND queue = ?"
            return int(self._db.execute(query, (queue,)).fetchone()[0])

    def unheld(self, kind: Unheld, *, created_before: float | None = None) -> Iterator[CaptureRecord]:
        """Captures with a shard that no lease holds now, oldest first; the index must be flushed."""
        self.expire()
        clauses = [_NOBODY_HOLDS]
        if kind.value:
            clauses.append(
                "EXISTS (SELECT 1 FROM lease_items AS item"
                f" WHERE item.capture_id = captures.capture_id AND {kind.value})"
            )
        if kind is Unheld.ASKED:
            clauses.append("captures.capture_id IN (SELECT capture_id FROM lease_items WHERE remove = 1)")
        if kind is Unheld.ACKED and not self._has_acked():
            return iter(())
        if created_before is not None:
            query = (
                "SELECT record FROM captures INDEXED BY captures_live"
                f" WHERE ended IS NULL AND created < ? AND state IN (?, ?) AND {' AND '.join(clauses)}"
            )
            states = (CaptureState.READY, CaptureState.QUARANTINED)
            return self._records(f"{query} ORDER BY created", (created_before, *states))
        query = f"SELECT record FROM captures WHERE state = ? AND {' AND '.join(clauses)} ORDER BY capture_id"
        found = [self._records(query, (state,)) for state in (CaptureState.READY, CaptureState.QUARANTINED)]
        return heapq.merge(*found, key=lambda record: record.capture_id)

    def gone(self, capture_ids: Sequence[str]) -> None:
        """The shards of acknowledged captures are removed."""
        with self._transaction():
            self._db.executemany(
                "UPDATE lease_items SET state = 'gone' WHERE capture_id = ? AND state = 'acked'",
                [(name,) for name in capture_ids],
            )

    def is_held(self, capture_id: str) -> bool:
        """Whether a lease holds a capture now, in any queue."""
        query = "SELECT 1 FROM lease_items WHERE capture_id = ? AND state = 'leased' AND deadline > ?"
        return self._db.execute(query, (capture_id, self._now())).fetchone() is not None

    def is_acked(self, capture_id: str) -> bool:
        """Whether a consumer has acknowledged a capture, in any queue."""
        query = "SELECT 1 FROM lease_items WHERE capture_id = ? AND state = 'acked' LIMIT 1"
        return self._db.execute(query, (capture_id,)).fetchone() is not None

    def _has_acked(self) -> bool:
        return self._db.execute("SELECT 1 FROM lease_items WHERE state = 'acked' LIMIT 1").fetchone() is not None

    def _records(self, query: str, values: tuple[object, ...]) -> Iterator[CaptureRecord]:
        with contextlib.closing(self._db.execute(query, values)) as rows:
            for (record,) in rows:
                yield _decode(record)

    def _choose(self, wanted: Wanted) -> Iterator[Lent]:
        size = 0
        free = self._free(wanted.queue, wanted.filters)
        for record, deliveries in itertools.islice(free, wanted.count):
            if size and wanted.max_bytes is not None and size + record.size > wanted.max_bytes:
                return
            size += record.size
            yield Lent(record, deliveries + 1)

    def _free(self, queue: str, filters: LeaseFilter) -> Iterator[tuple[CaptureRecord, int]]:
        """Free captures in the order in which they began, from the first that is not done for good in this queue."""
        if len(self._floors) > MAX_FLOORS:
            self._floors.clear()
        clauses, values = _where(filters)
        query = (
            "SELECT captures.rowid, captures.state, coalesce(item.state, 'free'), coalesce(item.deliveries, 0), record"
            " FROM captures NOT INDEXED"
            " LEFT JOIN lease_items AS item ON item.queue = ? AND item.capture_id = captures.capture_id"
            " WHERE captures.rowid > ? AND captures.state IN (?, ?)"
            f" AND coalesce(item.state, 'free') NOT IN ('acked', 'gone'){clauses} ORDER BY captures.rowid"
        )
        floor = self._floors.get((queue, filters), 0)
        last = self._db.execute("SELECT max(rowid) FROM captures").fetchone()[0] or 0
        found = self._db.execute(query, (queue, floor, CaptureState.READY, CaptureState.RECEIVING, *values))
        with contextlib.closing(found) as rows:
            self._floors[queue, filters] = last
            for row, state, item, deliveries, packed in rows:
                record = _decode(packed)
                if filters.admits(record):
                    self._floors[queue, filters] = min(row - 1, self._floors[queue, filters])
                    if state == CaptureState.READY and item == "free":
                        yield record, deliveries

    def _ack_of(self, lease: _Known, capture_id: str, now: float) -> Ack:
        query = "SELECT state, lease_id FROM lease_items WHERE queue = ? AND capture_id = ?"
        state, holder = self._db.execute(query, (lease.queue, capture_id)).fetchone() or ("free", "")
        if holder == lease.lease_id and state == "leased":
            return Ack.ACKED
        if holder == lease.lease_id and state in ("acked", "gone"):
            return Ack.ALREADY_ACKED
        return Ack.LEASE_EXPIRED if lease.deadline <= now else Ack.RELEASED

    def _held(self, lease_id: str) -> set[str]:
        query = "SELECT capture_id FROM lease_items WHERE lease_id = ? AND state = 'leased'"
        return {name for (name,) in self._db.execute(query, (lease_id,))}

    def _known(self, lease_id: str) -> _Known:
        query = "SELECT lease_id, queue, consumer, deadline, captures FROM leases WHERE lease_id = ?"
        row = self._db.execute(query, (lease_id,)).fetchone()
        if row is None:
            days = REMEMBER_S / 86_400
            raise Refusal(
                404,
                "lease_unknown",
                f"no lease {lease_id[:64]!r} is known; ended ones are kept {days:g} day",
                "lease_id",
            )
        return _Known(row[0], row[1], row[2], row[3], tuple(json.loads(row[4])))

    def _expire(self, now: float) -> None:
        over = self._db.execute(
            "SELECT leases.queue, consumer, count(*) FROM lease_items JOIN leases USING (lease_id)"
            " WHERE state = 'leased' AND lease_items.deadline <= ? GROUP BY leases.queue, consumer",
            (now,),
        ).fetchall()
        if over:
            self._db.execute("UPDATE lease_items SET state = 'free' WHERE state = 'leased' AND deadline <= ?", (now,))
        for queue, consumer, count in over:
            self._count(queue, consumer, Outcome.EXPIRED, count)

    def _tidy(self, now: float) -> None:
        self._db.execute("DELETE FROM leases WHERE deadline < ?", (now - REMEMBER_S,))
        self._db.execute("DELETE FROM lease_counts WHERE last < ?", (now - 30 * REMEMBER_S,))
        self._db.execute(
            "DELETE FROM lease_items WHERE state != 'leased' AND NOT EXISTS (SELECT 1 FROM captures"
            " WHERE captures.capture_id = lease_items.capture_id AND (captures.state = ? OR captures.reason = ?))",
            (CaptureState.READY, FailReason.STORE_ERROR),  # what the store lost may come back
        )

    def _count(self, queue: str, consumer: str, outcome: Outcome, count: int) -> None:
        if count:
            self._db.execute(_COUNT, (queue, consumer, outcome, count, self._now()))
            self._metrics.lent.labels(outcome).inc(count)

    def _holders(self) -> Iterable[tuple[tuple[str, str], int]]:
        query = (
            "SELECT leases.queue, consumer, count(*) FROM lease_items JOIN leases USING (lease_id)"
            " WHERE state = 'leased' GROUP BY leases.queue, consumer"
        )
        return [((queue, consumer), count) for queue, consumer, count in self._db.execute(query)]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[float]:
        """One transaction, begun by freeing what is past its deadline; gives the time. Raises `StoreError`."""
        now = self._now()
        try:
            with self._db:
                self._expire(now)
                yield now
        except sqlite3.Error as error:
            raise StoreError(f"the index cannot keep leases: {error}") from error
        self._show()

    def _show(self) -> None:
        query = "SELECT count(*) FROM lease_items WHERE state = 'leased'"
        self._metrics.leased.set(self._db.execute(query).fetchone()[0])


def _where(filters: LeaseFilter) -> tuple[str, list[object]]:
    clauses, values = "", []
    for name in ("dataset", "sample_id", "model"):
        value = getattr(filters, name)
        if value is not None:
            clauses += f" AND {name} = ?"
            values.append(value)
    if filters.since is not None:
        clauses += " AND created >= ?"
        values.append(filters.since)
    return clauses, values


class _Known(msgspec.Struct, frozen=True):
    lease_id: str
    queue: str
    consumer: str
    deadline: float
    captures: tuple[str, ...]

    def chosen(self, capture_ids: Sequence[str] | None) -> Sequence[str]:
        """The captures that are meant; raises `Refusal` for one that was never part of the lease."""
        if capture_ids is None:
            return self.captures
        strangers = [name for name in capture_ids if name not in self.captures]
        if strangers:
            message = f"capture {strangers[0][:64]!r} was never part of lease {self.lease_id}"
            raise Refusal(422, "not_in_lease", message, "capture_ids")
        return list(dict.fromkeys(capture_ids))

    def end(self, now: float) -> str:
        """When it ended, as a sentence."""
        return (
            f"lease {self.lease_id} ended {now - self.deadline:.1f} s ago: what was not acknowledged by then is free "
            "again or lent to another; take it anew, with a longer deadline_s"
        )
