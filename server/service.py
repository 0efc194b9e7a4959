"""The sidecar as one object: its parts, and what the routes ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hsconnector.capture.content import WeightsHeld
from hsconnector.capture.protocol import (
    MAX_MESSAGES_BYTES,
    BatchAnswer,
    CaptureState,
    Producer,
    ProducerAccepted,
    decode_batch,
    is_capture_id,
)
from hsconnector.capture.record import CaptureRecord, describe
from hsconnector.errors import (
    CaptureError,
    CaptureExpired,
    CaptureFailed,
    CaptureNotFound,
    CapturePending,
    CaptureQuarantined,
    IndexFault,
    StoreError,
)
from hsconnector.storage.index import Page
from hsconnector.storage.queries import Filter
from server.admission import Admission
from server.catalog import Catalog
from server.holdings import Holdings
from server.ingest import Ingest
from server.leases import Leases
from server.leaving import Chosen, Collection, Limits
from server.lending import Lending
from server.metrics import Metrics
from server.recovery import recover
from server.refusals import Refusal
from server.retention import Retention
from server.settings import Settings
from server.shard_files import Readers
from server.store import Store
from server.streams import producer_named, read_producer
from server.waiting import Waiters
from server.writer import Writer

__all__ = ["Service"]

log = logging.getLogger("hsconnector.server")

_T = TypeVar("_T")


class Service:
    """Opens the store at once (raising `StoreError`), serves from `start` to `stop`.

    One thread changes streams, shards and index; the event loop only reads.
    """

    def __init__(self, settings: Settings, public_url: str = "") -> None:
        self.settings = settings
        self.public_url = settings.public_url or public_url or f"http://{settings.host}:{settings.port}"
        self.metrics = Metrics()
        self.waiters = Waiters()
        self.readers = Readers()
        self.body_limit = 8 + MAX_MESSAGES_BYTES + int(settings.max_payload_bytes)
        self.store = Store(settings.store, quota=settings.quota)
        try:
            self.catalog = Catalog(self.store.index_path, durable=settings.durable)
            recover(self.store, self.catalog, self.metrics)
            self._leases = Leases(self.catalog.path, self.metrics, durable=settings.durable)
        except (OSError, IndexFault) as error:
            self.store.close()
            raise StoreError(f"the store {settings.store} cannot be opened: {error}") from error
        self._holdings = Holdings(self.store, self.catalog, self.metrics, self.waiters)
        self._writer = Writer(self.metrics, settings.queue_batches)
        self._ingest = Ingest(settings, self._holdings)
        self.limits = Limits(
            ttl_s=settings.ttl_s, max_bytes=settings.quota, evict=settings.evict, forget_s=settings.forget_s
        )
        self._retention = Retention(self.limits, self._holdings, self._leases, self.readers)
        self.store.make_room = self._retention.make_room
        self._admission = Admission(self._holdings, self._retention, self._writer, settings.full_wait_s)
        self.lending = Lending(self._leases, self._retention, self._holdings, self._writer)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins to watch for silent producers and for what has outlived its time."""
        self.waiters.start()
        watch = self._repeat(self.settings.heartbeat_s / 4, self._ingest.lose_silent)
        sweep = self._repeat(self.settings.sweep_s, self._sweep)
        self._tasks = [
            asyncio.create_task(watch, name="hsconnector-watch"),
            asyncio.create_task(sweep, name="hsconnector-sweep"),
        ]

    async def stop(self) -> None:
        """Finishes what waits for the writer, fails what is open, closes everything."""
        self.waiters.close()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.get_running_loop().run_in_executor(self._writer, self._ingest.close)
        await asyncio.to_thread(self._writer.shutdown)
        self._leases.close()
        self.catalog.close()
        self.store.close()

    async def register(self, body: bytes) -> ProducerAccepted:
        """Opens a stream; raises `ProtocolError` or `Refusal`."""
        producer = read_producer(body)
        return await self._writer.run(self._ingest.register, producer)

    def hear(self, body: bytearray) -> None:
        """Notes that the stream of a batch lives while the batch's body is still arriving."""
        stream = self._ingest.streams.get(producer_named(body) or "")
        if stream is not None:
            stream.touch()

    async def ingest(self, body: bytes | bytearray) -> BatchAnswer:
        """Takes one framed batch; raises `ProtocolError` or `Refusal`."""
        batch, payload = decode_batch(body)
        stream = self._ingest.streams.get(batch.producer_id)
        if stream is not None:
            stream.waiting += 1
        try:
            if stream is not None:
                await self._admission.wait_for_room(stream, batch)
            return await self._writer.run(self._ingest.take, batch, payload)
        except Refusal:
            self.metrics.batches.labels("refused").inc()
            raise
        finally:
            if stream is not None:
                stream.waiting -= 1
                stream.touch()

    async def find(self, capture_id: str, wait_s: float = 0) -> CaptureRecord:
        """A capture, waiting for its end; raises `CaptureNotFound`."""
        if not is_capture_id(capture_id):
            raise CaptureNotFound(f"{capture_id[:64]!r} is not a capture id (32 lower-case hex digits)")

        async def ask() -> CaptureRecord | None:
            return await asyncio.to_thread(self.catalog.get, capture_id)

        record = await self._until(capture_id, ask, _is_final, wait_s)
        if record is None:
            raise CaptureNotFound(f"no capture {capture_id} is known here", capture_id=capture_id)
        return record

    async def of_request(self, request_id: str, wait_s: float = 0) -> list[CaptureRecord]:
        """The captures of a request id, waiting until there are some and all are final; raises `CaptureNotFound`."""

        async def ask() -> list[CaptureRecord]:
            return await asyncio.to_thread(self.catalog.of_request, request_id)

        records = await self._until(
            f"request:{request_id}", ask, lambda found: bool(found) and all(map(_is_final, found)), wait_s
        )
        if not records:
            raise CaptureNotFound(f"no capture of request {request_id[:256]!r} is known here")
        return records

    async def page(self, wanted: Filter, *, limit: int, cursor: str, oldest_first: bool) -> Page:
        """A page of captures."""
        ask = functools.partial(self.catalog.page, wanted, limit=limit, cursor=cursor, oldest_first=oldest_first)
        return await asyncio.to_thread(ask)

    async def with_content(self, hashes: Sequence[str]) -> list[CaptureRecord]:
        """The captures of these content hashes, oldest first."""
        return await asyncio.to_thread(self.catalog.with_content, hashes)

    async def weights(self, **narrowed: str | None) -> list[WeightsHeld]:
        """Whose weights the ready captures are of, narrowed by `dataset` and `model`."""
        return await asyncio.to_thread(functools.partial(self.catalog.weights, **narrowed))

    def producers(self) -> list[Producer]:
        """What the open streams say of themselves."""
        return [stream.now for stream in list(self._ingest.streams.values())]

    async def delete(self, capture_id: str) -> None:
        """Removes a capture; nothing changes where that was done before."""
        record = await self.find(capture_id)
        if record.state is CaptureState.RECEIVING:
            message = f"capture {capture_id} is being received; delete it when it is final"
            raise Refusal(409, "capture_receiving", message)
        if record.state is not CaptureState.EXPIRED or record.lost:
            await self._writer.run(self._holdings.delete, record)

    async def note_gone(self, record: CaptureRecord) -> CaptureExpired:
        """A shard that was ready is not there: from now on the capture is expired."""
        await self._writer.run(self._holdings.lose, record)
        return CaptureExpired(f"the shard of capture {record.capture_id} is gone", capture_id=record.capture_id)

    async def collect(self, limits: Limits, *, dry_run: bool) -> Collection:
        """Applies limits, or says what that would remove."""
        ask = functools.partial(self._retention.collect, limits, dry_run=dry_run)
        return await self._writer.run(self._collected, ask)

    async def collect_chosen(self, chosen: Chosen, *, dry_run: bool) -> Collection:
        """Removes what a person named, or says what that would be."""
        ask = functools.partial(self._retention.collect_chosen, chosen, dry_run=dry_run)
        return await self._writer.run(self._collected, ask)

    def shard_path(self, record: CaptureRecord, *, quarantined: bool) -> Path:
        """Where a readable capture's shard lies; otherwise raises the `CaptureError` that says why not."""
        if record.state is CaptureState.READY or (quarantined and record.state is CaptureState.QUARANTINED):
            return self.store.shard(record.capture_id, record.state)
        raise _unreadable(record)

    def describe(self, record: CaptureRecord) -> dict[str, Any]:
        """A capture as JSON."""
        has_shard = record.state in (CaptureState.READY, CaptureState.QUARANTINED)
        path = str(self.store.shard(record.capture_id, record.state)) if has_shard else None
        return describe(record, self.public_url, path, num_rows=self._ingest.progress(record.capture_id))

    def handle(self, record: CaptureRecord) -> str:
        """The absolute URL of a capture."""
        return f"{self.public_url}/v1/captures/{record.capture_id}"

    def troubles(self) -> list[str]:
        """Why captures cannot be taken at the moment; empty when they can."""
        stopping = ["the sidecar is stopping"] if self.waiters.closing else []
        return [*stopping, *self._holdings.troubles.values()]

    async def _until(
        self, name: str, ask: Callable[[], Awaitable[_T]], done: Callable[[_T], bool], wait_s: float
    ) -> _T:
        with self.metrics.waiting.track_inprogress():
            return await self.waiters.until(name, ask, done, min(wait_s, self.settings.max_wait_s))

    def _collected(self, collect: Callable[[], Collection]) -> Collection:
        collection = collect()
        self._holdings.settle()
        return collection

    def _sweep(self) -> None:
        """Frees leases past their deadline and removes what must go; on the writer's thread."""
        self._leases.expire()
        if self._retention.sweep():
            self._holdings.settle()
        self.waiters.announce()

    async def _repeat(self, every_s: float, function: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._writer.run(function)
            except Exception:
                log.exception("%s failed", function.__qualname__)


def _is_final(record: CaptureRecord | None) -> bool:
    return record is not None and record.state is not CaptureState.RECEIVING


def _unreadable(record: CaptureRecord) -> CaptureError:
    name, reason = f"capture {record.capture_id}", str(record.reason or record.state)
    given = {"capture_id": record.capture_id, "reason": reason}
    if record.state is CaptureState.RECEIVING:
        return CapturePending(f"{name} is still being received", **given)
    if record.state is CaptureState.QUARANTINED:
        return CaptureQuarantined(
            f"{name} is whole but unsound ({record.detail}); ask with ?quarantined=1 to get it", **given
        )
    if record.state is CaptureState.EXPIRED:
        return CaptureExpired(f"{name} is not here any more: {record.detail}", **given)
    return CaptureFailed(f"{name} failed as {reason}: {record.detail}", **given)
