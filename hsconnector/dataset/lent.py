"""Captures that sidecars have lent, and which of them are not acknowledged yet."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hsconnector.capture.record import CaptureRecord

__all__ = ["Leased", "Lent", "Unacked", "by_lease"]

Leased = dict[tuple[int, str], list[str]]
"""Captures by sidecar and lease."""


@dataclass(frozen=True)
class Lent:
    """A capture that sidecar number `source` has lent."""

    source: int
    lease_id: str
    record: CaptureRecord

    @property
    def size(self) -> int:
        return self.record.size

    @property
    def lease(self) -> str:
        """What `by_lease` knows it by."""
        return f"{self.source}/{self.lease_id}/{self.record.capture_id}"


class Unacked:
    """Captures whose acknowledgement no sidecar has answered yet; for any thread, and pickled without its lock."""

    def __init__(self, names: Leased | None = None) -> None:
        self._names = names or {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Unacked], tuple[Leased]]:
        with self._lock:
            return Unacked, ({key: list(names) for key, names in self._names.items()},)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._names.values()))

    @contextlib.contextmanager
    def taken(self, more: Leased) -> Iterator[Leased]:
        """All of them and `more`, for this caller alone; what it leaves in the dictionary is put back at the end."""
        with self._lock:
            todo, self._names = self._names, {}
        try:
            yield _add(todo, more)
        finally:
            with self._lock:
                _add(self._names, todo)


def by_lease(samples: Any) -> Leased:
    """The captures of each sidecar and lease among samples, batches of them, or `lease` values."""
    leases: Leased = defaultdict(list)
    pending = [samples]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            pending.append(each["lease"])
        elif isinstance(each, str):
            index, lease_id, capture_id = each.split("/")
            leases[int(index), lease_id].append(capture_id)
        else:
            pending.extend(each)
    return leases


def _add(leased: Leased, more: Leased) -> Leased:
    for key, names in more.items():
        leased.setdefault(key, []).extend(names)
    return leased
