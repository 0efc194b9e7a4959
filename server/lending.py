"""Leases as the routes ask for them: on the writer's thread, waiting where there is nothing to lend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from server.holdings import Holdings
from server.lease import Ack, Lease, Wanted
from server.leases import Leases
from server.refusals import Refusal
from server.retention import Retention
from server.waiting import LEASES
from server.writer import Writer

__all__ = ["Lending"]

POLL_S = 1.0
"""How often a free capture is looked for: when a deadline passes nobody is woken."""


class Lending:
    """What consumers may do with captures."""

    def __init__(self, leases: Leases, retention: Retention, holdings: Holdings, writer: Writer) -> None:
        self._leases = leases
        self._retention = retention
        self._holdings = holdings
        self._waiters = holdings.waiters
        self._writer = writer

    async def take(self, wanted: Wanted, wait_s: float = 0) -> tuple[Lease, int, int]:
        """A lease, waiting until something is free; also how many captures are lent in its queue and being received."""
        clock = asyncio.get_running_loop().time
        end = clock() + wait_s
        while True:
            left = max(0.0, end - clock())
            lease = await self._waiters.until(LEASES, lambda: self._taken(wanted), _has_captures, min(left, POLL_S))
            if lease.captures or left <= POLL_S or self._waiters.closing:
                return lease, *await self._writer.run(self._yet_to_come, wanted.queue)

    async def ack(self, lease_id: str, capture_ids: Sequence[str] | None, *, remove: bool) -> dict[str, Ack]:
        """Acknowledges; raises `Refusal` where all of it comes late."""
        answers = await self._writer.run(self._acked, lease_id, capture_ids, remove=remove)
        if answers and set(answers.values()) == {Ack.LEASE_EXPIRED}:
            raise Refusal(409, "lease_expired", await self._writer.run(self._leases.end, lease_id), "lease_id")
        return answers

    async def release(self, lease_id: str, capture_ids: Sequence[str] | None) -> list[str]:
        """Gives captures back."""
        released = await self._writer.run(self._leases.release, lease_id, capture_ids)
        self._waiters.announce()
        return released

    async def release_all(self, queue: str, consumer: str) -> list[str]:
        """Gives back whatever a consumer holds in a queue."""
        released = await self._writer.run(self._leases.release_all, queue, consumer)
        self._waiters.announce()
        return released

    async def renew(self, lease_id: str, deadline_s: float) -> float:
        """Moves a deadline; returns the new one, seconds since the epoch."""
        return await self._writer.run(self._leases.renew, lease_id, deadline_s)

    async def counts(self) -> list[dict[str, Any]]:
        """What each consumer was lent."""
        return await self._writer.run(self._leases.counts)

    async def _taken(self, wanted: Wanted) -> Lease:
        return await self._writer.run(self._leases.take, wanted)

    def _acked(self, lease_id: str, capture_ids: Sequence[str] | None, *, remove: bool) -> dict[str, Ack]:
        answers = self._leases.ack(lease_id, capture_ids, remove=remove)
        if remove:
            self._retention.remove_asked()
            self._holdings.settle()
        self._waiters.announce()
        return answers

    def _yet_to_come(self, queue: str) -> tuple[int, int]:
        return self._leases.outstanding(queue), len(self._holdings.catalog.receiving())


def _has_captures(lease: Lease) -> bool:
    return bool(lease.captures)
