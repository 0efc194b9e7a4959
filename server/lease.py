"""What is said when captures are lent: who asks for which, what is lent, what becomes of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from hsconnector.capture.record import CaptureRecord
from server.refusals import Refusal

__all__ = ["Ack", "Lease", "LeaseEvent", "LeaseFilter", "Lent", "StoredLease", "Unheld", "Wanted"]


class LeaseEvent(enum.StrEnum):
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
    weights_id: str | None = None
    """Its first digits; "" for captures that do not say."""
    lora: str | None = None
    layer_ids: tuple[int, ...] = ()
    """Layers that a capture must hold; it may hold more."""
    since: float | None = None
    """Created at or after, seconds since the epoch."""

    def admits(self, record: CaptureRecord) -> bool:
        """What the index has no column for."""
        return (
            (self.model_revision is None or record.model_revision == self.model_revision)
            and (self.weights_id is None or _begins(record.weights_id, self.weights_id))
            and (self.lora is None or record.lora == self.lora)
            and set(self.layer_ids) <= set(record.layer_ids)
        )


def _begins(weights_id: str, digits: str) -> bool:
    return weights_id.startswith(digits) if digits else not weights_id


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
    """Captures with a shard that no lease holds."""

    ASKED = "asked"
    """Acknowledged by a consumer that has no more use for the shard."""
    ACKED = "acked"
    ANY = "any"


class StoredLease(msgspec.Struct, frozen=True):
    """A lease as the index keeps it."""

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
