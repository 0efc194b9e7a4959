"""Every metric of the sidecar, by name, present at zero from the start."""

from __future__ import annotations

import functools

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hsconnector.capture.protocol import CaptureState, FailReason
from hsconnector.capture.record import FindingKind
from server.lease import LeaseEvent
from server.leaving import Why

__all__ = ["Metrics"]

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """One registry; no label ever carries what a client wrote."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=self.registry)
        gauge = functools.partial(Gauge, registry=self.registry)
        self.captures = counter(
            "hsconnector_captures", "Captures that ended, by state and reason.", ["state", "reason"]
        )
        self.findings = counter("hsconnector_findings", "Captures found unsound, by reason.", ["reason"])
        self.batches = counter("hsconnector_batches", "Batches, by what became of them.", ["result"])
        self.rows = counter("hsconnector_rows", "Rows written to shards.")
        self.row_bytes = counter("hsconnector_row_bytes", "Bytes of rows written, by way.", ["via"])
        self.batch_seconds = Histogram(
            "hsconnector_batch_seconds",
            "Seconds the writer spent on a batch.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.sent_bytes = counter("hsconnector_sent_bytes", "Bytes of tensors sent to readers.")
        self.damaged = counter("hsconnector_damaged_files", "Files found in the store that are not whole shards.")
        self.expired = counter("hsconnector_expired_captures", "Captures deleted or found gone.")
        self.lost = counter("hsconnector_lost_producers", "Producers silent beyond the deadline.")
        self.producers = gauge("hsconnector_producers", "Open streams.")
        self.receiving = gauge("hsconnector_captures_receiving", "Captures being received.")
        self.queue = gauge("hsconnector_queue_batches", "Batches that wait for the writer.")
        self.store_bytes = gauge("hsconnector_store_bytes", "Bytes of shards in the store.")
        self.waiting = gauge("hsconnector_waiting_readers", "Readers in a long poll.")
        self.lent = counter("hsconnector_lent_captures", "Captures lent, by what became of them.", ["outcome"])
        self.leased = gauge("hsconnector_leased_captures", "Captures that are lent now.")
        self.removed = counter("hsconnector_removed_captures", "Captures that retention removed, by why.", ["why"])
        self.full_waits = counter("hsconnector_full_waits", "Batches held back because the store was full.")
        self._start_at_zero()

    def text(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self.registry)

    def _start_at_zero(self) -> None:
        for state in (CaptureState.READY, CaptureState.QUARANTINED):
            self.captures.labels(state, "")
        for reason in FailReason:
            self.captures.labels(CaptureState.FAILED, reason)
        for finding in FindingKind:
            self.findings.labels(finding)
        for result in ("taken", "repeated", "refused"):
            self.batches.labels(result)
        for outcome in LeaseEvent:
            self.lent.labels(outcome)
        for why in Why:
            self.removed.labels(why)
        for via in ("shm", "body"):
            self.row_bytes.labels(via)
