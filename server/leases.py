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
import heapq
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.record import CaptureRecord
from hsconnector.errors import IndexFault, StoreError
from hsconnector.storage.connection import Connection
from hsconnector.storage.index import record_of
from hsconnector.storage.statement import Statement
from server import lease_queries as queries
from server.lease import Ack, Lease, LeaseEvent, LeaseFilter, Lent, StoredLease, Unheld, Wanted
from server.lease_queries import ItemState
from server.metrics import Metrics
from server.refusals import Refusal

__all__ = ["Leases"]

REMEMBER_S = 86_400.0
"""How long the end of a lease is remembered, so that whoever comes late is told so."""
TIDY_S = 3600.0
LISTED = 1000
MAX_FLOORS = 1000


class Leases:
    """The leases in an index that a catalogue has opened. `now` gives seconds since the epoch."""

    def __init__(
        self, path: Path, metrics: Metrics, *, durable: bool = False, now: Callable[[], float] = time.time
    ) -> None:
        self._metrics = metrics
        self._now = now
        self._tidied = 0.0
        self._floors: dict[tuple[str, LeaseFilter], int] = {}
        """Numbers of captures up to which a queue has nothing left to lend, by what is asked for."""
        self._index = Connection(path, durable=durable)
        self._show()

    def close(self) -> None:
        """Lets the index go."""
        self._index.close()

    def take(self, wanted: Wanted) -> Lease:
        """Lends up to `count` free captures, those that began first at the head; none where none is free."""
        with self._transaction() as now:
            lease_id, deadline = secrets.token_hex(16), now + wanted.deadline_s
            lent = tuple(self._choose(wanted))
            if lent:
                self._lend(wanted, lent, lease_id, now, deadline)
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
            self._change(queries.ACK_AND_REMOVE if remove else queries.ACK, lease.queue, done)
            found = list(answers.values())
            self._count(lease.queue, lease.consumer, LeaseEvent.ACKED, found.count(Ack.ACKED))
            self._count(lease.queue, lease.consumer, LeaseEvent.LATE, found.count(Ack.LEASE_EXPIRED))
        return answers

    def release(self, lease_id: str, capture_ids: Sequence[str] | None = None) -> list[str]:
        """Gives captures of a lease back at once; those that it holds no longer are left as they are."""
        with self._transaction():
            lease = self._known(lease_id)
            held = {name for (name,) in self._index.rows(queries.HELD_BY, of_lease=lease_id)}
            names = [name for name in lease.chosen(capture_ids) if name in held]
            self._change(queries.FREE, lease.queue, names)
            self._count(lease.queue, lease.consumer, LeaseEvent.RELEASED, len(names))
        return names

    def release_all(self, queue: str, consumer: str) -> list[str]:
        """Gives back whatever a consumer holds in a queue: for one that was restarted and knows no leases any more."""
        with self._transaction():
            held = self._index.rows(queries.HELD_BY_CONSUMER, of_queue=queue, of_consumer=consumer)
            names = [name for (name,) in held]
            self._change(queries.FREE, queue, names)
            self._count(queue, consumer, LeaseEvent.RELEASED, len(names))
        return names

    def renew(self, lease_id: str, deadline_s: float) -> float:
        """Moves the deadline to `deadline_s` seconds from now; raises `Refusal` where it has passed."""
        with self._transaction() as now:
            lease = self._known(lease_id)
            if lease.deadline <= now:
                raise Refusal(409, "lease_expired", lease.end(now), "lease_id")
            for statement in (queries.RENEW, queries.RENEW_ITEMS):
                self._index.run(statement, {"of_lease": lease_id, "until": now + deadline_s})
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
                self._index.run(queries.TIDY_LEASES, {"before": now - REMEMBER_S})
                self._index.run(queries.TIDY_COUNTS, {"before": now - 30 * REMEMBER_S})
                self._index.run(queries.TIDY_ITEMS, {})

    def counts(self) -> list[dict[str, Any]]:
        """What each consumer was lent and what became of it, the latest first, with what it holds now."""
        with self._transaction():
            held = {(queue, consumer): count for queue, consumer, count in self._index.rows(queries.HOLDERS)}
            rows = self._index.rows(queries.COUNTS)
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for queue, consumer, event, count, last in rows:
            zeros = {str(each): 0 for each in LeaseEvent}
            start = {"queue": queue, "consumer": consumer, **zeros, "held": held.get((queue, consumer), 0), "last": 0.0}
            counts = found.setdefault((queue, consumer), start)
            counts[event] = count
            counts["last"] = max(counts["last"], last)
        return sorted(found.values(), key=lambda counts: -counts["last"])[:LISTED]

    def outstanding(self, queue: str) -> int:
        """Captures of a queue that are lent now."""
        with self._transaction():
            return int(self._index.rows(queries.LEASED_IN, of_queue=queue)[0][0])

    def unheld(self, kind: Unheld, *, created_before: float | None = None) -> Iterator[CaptureRecord]:
        """Captures with a shard that no lease holds now, oldest first; the index must be flushed."""
        self.expire()
        if kind is Unheld.ACKED and self._index.first(queries.HAS_ACKED) is None:
            return iter(())
        query = queries.unheld(kind, by_age=created_before is not None)
        if created_before is not None:
            return self._records(query, before=created_before)
        found = [self._records(query, state=state) for state in (CaptureState.READY, CaptureState.QUARANTINED)]
        return heapq.merge(*found, key=lambda record: record.capture_id)

    def gone(self, capture_ids: Sequence[str]) -> None:
        """The shards of acknowledged captures are removed."""
        with self._transaction():
            self._index.run(queries.GONE, *({"of_capture": name} for name in capture_ids))

    def is_held(self, capture_id: str) -> bool:
        """Whether a lease holds a capture now, in any queue."""
        return self._index.first(queries.IS_HELD, of_capture=capture_id, now=self._now()) is not None

    def is_acked(self, capture_id: str) -> bool:
        """Whether a consumer has acknowledged a capture, in any queue."""
        return self._index.first(queries.IS_ACKED, of_capture=capture_id) is not None

    def _records(self, query: Statement, **values: object) -> Iterator[CaptureRecord]:
        return (record_of(packed) for (packed,) in self._index.each(query, **values))

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
        query, values = queries.free(filters)
        floor = self._floors.get((queue, filters), 0)
        self._floors[queue, filters] = self._index.rows(queries.NEWEST)[0][0] or 0
        with contextlib.closing(self._index.each(query, **values, of_queue=queue, floor=floor)) as rows:
            for number, state, item, deliveries, packed in rows:
                record = record_of(packed)
                if filters.admits(record):
                    self._floors[queue, filters] = min(number - 1, self._floors[queue, filters])
                    if state == CaptureState.READY and item == ItemState.FREE:
                        yield record, deliveries

    def _lend(self, wanted: Wanted, lent: Sequence[Lent], lease_id: str, now: float, deadline: float) -> None:
        ids = [each.record.capture_id for each in lent]
        lease = {"lease_id": lease_id, "queue": wanted.queue, "deadline": deadline}
        self._index.run(
            queries.BEGIN, {**lease, "consumer": wanted.consumer, "created": now, "captures": json.dumps(ids)}
        )
        self._index.run(queries.LEND, *({**lease, "capture_id": name} for name in ids))
        again = sum(each.deliveries > 1 for each in lent)
        self._count(wanted.queue, wanted.consumer, LeaseEvent.DELIVERED, len(lent) - again)
        self._count(wanted.queue, wanted.consumer, LeaseEvent.REDELIVERED, again)

    def _change(self, statement: Statement, queue: str, names: Sequence[str]) -> None:
        self._index.run(statement, *({"of_queue": queue, "of_capture": name} for name in names))

    def _ack_of(self, lease: StoredLease, capture_id: str, now: float) -> Ack:
        found = self._index.first(queries.ITEM, of_queue=lease.queue, of_capture=capture_id)
        state, holder = found or (ItemState.FREE, "")
        if holder == lease.lease_id and state == ItemState.LEASED:
            return Ack.ACKED
        if holder == lease.lease_id and state in (ItemState.ACKED, ItemState.GONE):
            return Ack.ALREADY_ACKED
        return Ack.LEASE_EXPIRED if lease.deadline <= now else Ack.RELEASED

    def _known(self, lease_id: str) -> StoredLease:
        row = self._index.first(queries.LEASE, of_lease=lease_id)
        if row is None:
            days = REMEMBER_S / 86_400
            raise Refusal(
                404,
                "lease_unknown",
                f"no lease {lease_id[:64]!r} is known; ended ones are kept {days:g} day",
                "lease_id",
            )
        lease_id, queue, consumer, deadline, captures = row
        return StoredLease(lease_id, queue, consumer, deadline, tuple(json.loads(captures)))

    def _expire(self, now: float) -> None:
        overdue = self._index.rows(queries.OVERDUE, now=now)
        if overdue:
            self._index.run(queries.FREE_OVERDUE, {"now": now})
        for queue, consumer, count in overdue:
            self._count(queue, consumer, LeaseEvent.EXPIRED, count)

    def _count(self, queue: str, consumer: str, event: LeaseEvent, count: int) -> None:
        if count:
            row = {"queue": queue, "consumer": consumer, "outcome": event, "count": count, "last": self._now()}
            self._index.run(queries.COUNT, row)
            self._metrics.lent.labels(event).inc(count)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[float]:
        """One transaction, begun by freeing what is past its deadline; gives the time. Raises `StoreError`."""
        now = self._now()
        try:
            with self._index.transaction():
                self._expire(now)
                yield now
        except IndexFault as fault:
            raise StoreError(f"the index cannot keep leases: {fault}") from fault
        self._show()

    def _show(self) -> None:
        self._metrics.leased.set(self._index.rows(queries.LEASED)[0][0])
