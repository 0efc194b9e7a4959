"""What leaves the store, in which order, and what never does.

In this order, the oldest first within each:

1. `asked`     acknowledged by a consumer that has no more use for it (`delete` with the ack)
2. `ttl`       final for longer than `ttl_s`
3. `acked`     acknowledged in any queue, while there is too little room
4. `oldest`    any other, quarantined ones included, while there is too little room and `evict` is `oldest`

What failed or left is forgotten by the index once that is `forget_s` ago.

Too little room: the next bytes would go over `quota`, or the disk has none. Steps 1 and 2 need no lack of room. Never
removed here: what a lease holds, what is being read over HTTP, what is not final. A removed capture is `expired`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from hsconnector.capture.protocol import CaptureState, FailReason
from hsconnector.capture.record import CaptureRecord
from server.holdings import Holdings
from server.lease import Unheld
from server.leases import Leases
from server.leaving import Chosen, Collection, Leaving, Limits, Why
from server.settings import Evict
from server.shard_files import Readers

__all__ = ["Retention"]

PAGE = 500
FORGET_WITHIN_S = 0.25
"""The longest that a sweep forgets: batches wait for its thread."""


class Retention:
    """Decides what goes, and removes it; runs on the writer's thread. `now` gives seconds since the epoch."""

    def __init__(
        self,
        limits: Limits,
        holdings: Holdings,
        leases: Leases,
        readers: Readers,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._holdings = holdings
        self._store = holdings.store
        self._catalog = holdings.catalog
        self._leases = leases
        self._readers = readers
        self._now = now

    def sweep(self) -> int:
        """Removes what must go; how many captures that were. The index forgets what has gone long ago."""
        count = self._take_out(self._leaving(self.limits, 0))
        self._forget()
        return count

    def make_room(self, more: int) -> bool:
        """Removes what must go and as much as may go until `more` bytes fit; whether they do."""
        if self._store.shortage(more) > 0:
            self._take_out(self._leaving(self.limits, more))
        return self._store.shortage(more) <= 0

    def remove_asked(self) -> int:
        """Removes what consumers have no more use for."""
        return self._take_out(self._asked())

    def collect(self, limits: Limits, *, dry_run: bool) -> Collection:
        """Applies `limits` now, or says what that would remove."""
        return self._done(list(self._leaving(limits, 0)), dry_run, held=0)

    def collect_chosen(self, chosen: Chosen, *, dry_run: bool) -> Collection:
        """Removes the final captures that a person named, save what is held."""
        found = [record for record in self._chosen(chosen) if record.size]
        free = [record for record in found if not self._is_held(record)]
        leaving = [Leaving(record, Why.SELECTED) for record in free]
        return self._done(leaving, dry_run, held=len(found) - len(free))

    def _forget(self) -> None:
        if not self.limits.forget_s:
            return
        before, end = self._now() - self.limits.forget_s, time.monotonic() + FORGET_WITHIN_S
        while self._catalog.forget(before, PAGE) == PAGE and time.monotonic() < end:
            pass

    def _done(self, leaving: list[Leaving], dry_run: bool, held: int) -> Collection:
        if not dry_run:
            self._take_out(iter(leaving))
        return Collection(leaving=tuple(leaving), held=held)

    def _take_out(self, leaving: Iterator[Leaving]) -> int:
        gone = []
        for each in leaving:
            reason = FailReason.CONSUMED if self._leases.is_acked(each.record.capture_id) else None
            if self._holdings.remove(each.record, each.why.detail, reason):
                self._holdings.metrics.removed.labels(each.why).inc()
                gone.append(each.record.capture_id)
        if gone:
            self._leases.gone(gone)
        return len(gone)

    def _leaving(self, limits: Limits, more: int) -> Iterator[Leaving]:
        """In the declared order, each once; the caller may remove each as it comes."""
        shortage = self._store.shortage(more, limits.max_bytes)
        gone: set[str] = set()
        for each in itertools.chain(self._asked(), self._outlived(limits), self._evictable(limits)):
            needed = each.why in (Why.ASKED, Why.TTL) or shortage > 0
            if not needed:
                return
            if each.record.capture_id not in gone:
                gone.add(each.record.capture_id)
                shortage -= each.record.size
                yield each

    def _asked(self) -> Iterator[Leaving]:
        yield from self._unheld(Unheld.ASKED, Why.ASKED)

    def _outlived(self, limits: Limits) -> Iterator[Leaving]:
        if limits.ttl_s is None:
            return
        oldest = self._now() - limits.ttl_s
        for each in self._unheld(Unheld.ANY, Why.TTL, created_before=oldest):
            if (each.record.finished or each.record.created) < oldest:
                yield each

    def _evictable(self, limits: Limits) -> Iterator[Leaving]:
        if limits.evict is not Evict.NONE:
            yield from self._unheld(Unheld.ACKED, Why.ACKED)
        if limits.evict is Evict.OLDEST:
            yield from self._unheld(Unheld.ANY, Why.OLDEST)

    def _unheld(self, kind: Unheld, why: Why, *, created_before: float | None = None) -> Iterator[Leaving]:
        self._catalog.flush()
        for record in self._leases.unheld(kind, created_before=created_before):
            known = self._catalog.get(record.capture_id)
            if known is not None and known.size and not self._readers.has(record.capture_id):
                yield Leaving(record, why)

    def _chosen(self, chosen: Chosen) -> Iterator[CaptureRecord]:
        self._catalog.flush()
        cursor: str | None = ""
        while cursor is not None:
            page = self._catalog.page(chosen.wanted, limit=PAGE, cursor=cursor, oldest_first=True)
            yield from (
                record
                for record in page.records
                if record.state in (CaptureState.READY, CaptureState.QUARANTINED) and chosen.admits(record)
            )
            cursor = page.next_cursor

    def _is_held(self, record: CaptureRecord) -> bool:
        return self._readers.has(record.capture_id) or self._leases.is_held(record.capture_id)
