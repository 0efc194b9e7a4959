"""The captures that the sidecar holds: what changes in the index, on the disk and in the counts when one ends or goes.

Everything runs on the writer's thread, save what says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from hsconnector.capture.protocol import CaptureState, FailReason
from hsconnector.capture.record import CaptureRecord, client_ids
from server.catalog import Catalog
from server.metrics import Metrics
from server.store import Store
from server.waiting import Waiters

__all__ = ["Holdings"]


class Holdings:
    """Store and catalogue as one. What `end` and `remove` change is committed, and told to who waits, by `settle`."""

    def __init__(self, store: Store, catalog: Catalog, metrics: Metrics, waiters: Waiters) -> None:
        self.store = store
        self.catalog = catalog
        self.metrics = metrics
        self.waiters = waiters
        self.troubles: dict[str, str] = {}
        """What cannot be written at the moment, and why; empty when all is well."""
        self.turnover = 0
        """Bytes of shards that have got their place or left it, ever; read from any thread."""
        self._ended: list[CaptureRecord] = []

    def end(self, record: CaptureRecord) -> None:
        """A capture is final now."""
        self._put(record)
        self.metrics.captures.labels(record.state, record.reason or "").inc()

    def remove(self, record: CaptureRecord, detail: str, reason: FailReason | None = None) -> bool:
        """Removes a final capture's shard and leaves a tombstone; False where that was done before."""
        known = self.catalog.get(record.capture_id)
        if known is None or known.state not in (CaptureState.READY, CaptureState.QUARANTINED, CaptureState.FAILED):
            return False
        self.store.remove(known.capture_id, known.size)
        self.turnover += known.size
        self._expire(known, detail, reason)
        return True

    def delete(self, record: CaptureRecord) -> None:
        """Removes a capture because a person wants it gone; one whose shard the store has lost will not come back."""
        known = self.catalog.get(record.capture_id)
        if known is not None and known.lost:
            self.store.remove(known.capture_id, 0)
            self._expire(known, "deleted", None)
        else:
            self.remove(record, "deleted")
        self.settle()

    def lose(self, record: CaptureRecord) -> None:
        """A shard's file is not there any more; where it is again at a later start, so is the capture."""
        self.remove(record, "its shard file is gone", FailReason.STORE_ERROR)
        self.settle()

    def settle(self) -> None:
        """Commits the index, then wakes who waits for what has ended."""
        trouble = self.catalog.flush()
        if trouble:
            self.troubles["index"] = trouble
        else:
            self.troubles.pop("index", None)
        ended, self._ended = self._ended, []
        names = [name for record in ended for name in _names(record)]
        if names:
            self.waiters.announce(names)
        self.metrics.store_bytes.set(self.store.used)

    def _expire(self, record: CaptureRecord, detail: str, reason: FailReason | None) -> None:
        expired = msgspec.structs.replace(record, state=CaptureState.EXPIRED, reason=reason, detail=detail, size=0)
        self._put(expired)
        self.metrics.expired.inc()

    def _put(self, record: CaptureRecord) -> None:
        record = msgspec.structs.replace(record, finished=time.time())
        self.catalog.put(record)
        self._ended.append(record)


def _names(record: CaptureRecord) -> Iterator[str]:
    yield record.capture_id
    yield f"request:{record.request_id}"
    for name in client_ids(record.request_id):
        yield f"request:{name}"
