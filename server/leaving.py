"""What may leave the store, and why: what retention and people say of it."""

from __future__ import annotations

import enum

import msgspec

from hsconnector.capture.record import CaptureRecord
from hsconnector.storage.queries import Filter
from server.settings import Evict

__all__ = ["Chosen", "Collection", "Leaving", "Limits", "Why"]


class Why(enum.StrEnum):
    """Why a capture leaves."""

    ASKED = "asked"
    TTL = "ttl"
    ACKED = "acked"
    OLDEST = "oldest"
    SELECTED = "selected"
    """A person named it."""

    @property
    def detail(self) -> str:
        """What the capture's record says from then on."""
        return _DETAIL[self]


_DETAIL = {
    Why.ASKED: "deleted with its acknowledgement",
    Why.TTL: "it was older than the time to live (ttl_s)",
    Why.ACKED: "removed to make room: it had been acknowledged",
    Why.OLDEST: "removed to make room: it was among the oldest",
    Why.SELECTED: "deleted by a collection",
}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the store may keep; None is no limit."""

    ttl_s: float | None = None
    max_bytes: int | None = None
    evict: Evict = Evict.ACKED
    forget_s: float | None = None


class Leaving(msgspec.Struct, frozen=True):
    """A capture that goes, or would."""

    record: CaptureRecord
    why: Why


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Captures that a person wants gone."""

    wanted: Filter
    created_before: float | None = None

    def admits(self, record: CaptureRecord) -> bool:
        """What the index does not decide."""
        return self.created_before is None or record.created < self.created_before


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """What one collection removed, or would have."""

    leaving: tuple[Leaving, ...]
    held: int = 0
    """Chosen captures that stay, because a lease holds them or someone reads them."""

    @property
    def size(self) -> int:
        """Bytes of shards."""
        return sum(each.record.size for each in self.leaving)
