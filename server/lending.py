"""Leases and retention as the routes ask for them: on the writer's thread, waiting where there is nothing to lend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from server.catalog import Catalog
from server.leases import Ack, Lease, Leases, Wanted
from server.refusals import Refusal
from server.retention import Collection, Limits, Retention, Selection
from server.waiting import LEASES, Waiters

__all__ = ["Lending"]

POLL_S = 1.0
"""Deadlines pass without telling."""
_T = TypeVar("_T")


class Write(Protocol):
    """Runs a function on the writer's thread."""

    def __call__(self, function: Callable[..., _T], *arguments: Any) -> Awaitable[_T]: ...


class Lending:
    """What consumers may do with captures."""

    def __init__(
        self,
        leases: Leases,
        retention: Retention,
        catalog: Catalog,
        waiters: Waiters,
        write: Write,
        settle: Callable[[], None],
        announce: Callable[[list[str]], None],
    ) -> None:
        self.limits = retention.limits
        self._leases = leases
        self._retention = retention
        self._catalog = catalog
        self._waiters = waiters
        self._write = write
        self._settle = settle
        self._announce = announce

    async def take(self, wanted: Wanted, wait_s: float = 0) -> tuple[Lease, int, int]:
        """A lease, waiting until something is free; also how many captures are lent in its queue and being received."""
        clock = asyncio.get_running_loop().time
        end = clock() + wait_s
        while True:
            left = max(0.0, end - clock())
            lease = await self._waiters.until(LEASES, lambda: self._taken(wanted), _has_captures, min(left, POLL_S))
            if lease.captures or left <= POLL_S or self._waiters.closing:
                return lease, *await self._write(self._pending, wanted.queue)

    async def ack(self, lease_id: str, capture_ids: Sequence[str] | None, *, remove: bool) -> dict[str, Ack]:
        """Acknowledges; raises `Refusal` where all of it comes late."""

        def settle() -> dict[str, Ack]:
            answers = self._leases.ack(lease_id, capture_ids, remove=remove)
            if remove:
                self._retention.remove_asked()
                self._settle()
            self._announce([])
            return answers

        answers = await self._write(settle)
        if answers and set(answers.values()) == {Ack.LEASE_EXPIRED}:
            raise Refusal(409, "lease_expired", await self._write(self._leases.end, lease_id), "lease_id")
        return answers

    async def release(self, lease_id: str, capture_ids: Sequence[str] | None) -> list[str]:
        """Gives captures back."""
        released = await self._write(self._leases.release, lease_id, capture_ids)
        self._announce([])
        return released

    async def renew(self, lease_id: str, deadline_s: float) -> float:
        """Moves a deadline; the new one."""
        return await self._write(self._leases.renew, lease_id, deadline_s)

    async def counts(self) -> list[dict[str, Any]]:
        """What each consumer was lent."""
        return await self._write(self._leases.counts)

    async def collect(self, limits: Limits, *, dry_run: bool) -> Collection:
        """Applies limits."""
        return await self._write(self._collected, lambda: self._retention.collect(limits, dry_run=dry_run))

    async def collect_selected(self, selection: Selection, *, dry_run: bool) -> Collection:
        """Removes what a person named."""
        found = lambda: self._retention.collect_selected(selection, dry_run=dry_run)  # noqa: E731
        return await self._write(self._collected, found)

    def sweep(self) -> None:
        """Frees leases past their deadline and removes what must go; on the writer's thread."""
        self._leases.expire()
        if self._retention.sweep():
            self._settle()
        self._announce([])

    async def _taken(self, wanted: Wanted) -> Lease:
        return await self._write(self._leases.take, wanted)

    def _collected(self, collect: Callable[[], Collection]) -> Collection:
        collection = collect()
        self._settle()
        return collection

    def _pending(self, queue: str) -> tuple[int, int]:
        return self._leases.outstanding(queue), len(self._catalog.receiving())


def _has_captures(lease: Lease) -> bool:
    return bool(lease.captures)
