"""A full store slows its producers before it fails their captures.

The answer to a batch that does not fit is held back while retention, consumers or people make room: the producer's
staging memory stays taken, so its own `on_overflow` decides (`wait`: rows stay in the engine's blocks, `drop`: captures
fail as `overflow`). A store that stays full for `full_wait_s`, or half of what the producer waits for an answer, fails
captures as `disk_full` without further delay until there is room again, so no producer is slowed without bound.

There is room again when a shard has left, or a whole capture has got its place. What a failed capture gives back is
none: the next one would fill it and wait once more.
"""

from __future__ import annotations

import asyncio

from hsconnector.capture.header import header_room
from hsconnector.capture.protocol import Batch, Open, Rows
from hsconnector.capture.record import metadata_of
from server.holdings import Holdings
from server.retention import Retention
from server.streams import ProducerStream
from server.waiting import ROOM
from server.writer import Writer

__all__ = ["Admission", "bytes_needed"]

POLL_S = 0.25
"""How often room is looked for: a lease that runs out and a reader that is done make some, and wake nobody."""


class Admission:
    """Lets a batch through when there is room for it, or when waiting has not helped; lives in the event loop."""

    def __init__(self, holdings: Holdings, retention: Retention, writer: Writer, wait_s: float) -> None:
        self._holdings = holdings
        self._store = holdings.store
        self._waiters = holdings.waiters
        self._retention = retention
        self._writer = writer
        self._wait_s = wait_s
        self._full_since, self._full_at = 0.0, -1
        """When the store was found full, and what its turnover was then."""

    async def wait_for_room(self, stream: ProducerStream, batch: Batch) -> None:
        """Returns when the batch fits, when the store has been full for too long, or when it can never fit."""
        more = bytes_needed(stream, batch)
        if not more or self._store.shortage(more) <= 0:
            return
        if self._store.quota is not None and more > self._store.quota:
            return
        if await self._fits(more):
            return
        self._holdings.metrics.full_waits.inc()
        clock = asyncio.get_running_loop().time
        if self._full_at != self._holdings.turnover:
            self._full_since, self._full_at = clock(), self._holdings.turnover
        deadline = self._full_since + min(self._wait_s, stream.producer.patience_s / 2)
        while (left := deadline - clock()) > 0 and not self._waiters.closing:
            if await self._waiters.until(ROOM, lambda: self._fits(more), bool, min(left, POLL_S)):
                return

    async def _fits(self, more: int) -> bool:
        return await self._writer.run(self._retention.make_room, more)


def bytes_needed(stream: ProducerStream, batch: Batch) -> int:
    """Bytes of shards that a batch will add, headers and token ids included."""
    total = 0
    begun = {name for name, capture in list(stream.open.items()) if capture.reserved}
    opened = {message.capture.capture_id: message.capture for message in batch.messages if isinstance(message, Open)}
    producer = stream.producer
    for message in batch.messages:
        if isinstance(message, Rows):
            total += message.span.length + 8 * message.count
            capture = stream.open.get(message.capture_id)
            info = opened.get(message.capture_id) or (capture.assembly.info if capture else None)
            if info is not None and message.capture_id not in begun:
                begun.add(message.capture_id)
                slots, hidden = len(producer.layer_ids), producer.hidden_size
                total += header_room(metadata_of(producer, info), producer.dtype, slots, hidden)
    return total or int(bool(opened))
