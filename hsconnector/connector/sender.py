"""The thread that ships batches, takes acknowledgements and keeps the failure ledger.

The engine's thread only queues; it never waits for the network. Staging memory is used again when the batch that named
it has been answered. When the sidecar is lost every open capture fails, once, with one reason, and goes into the
ledger, which is sent to the sidecar when it is back. A stream that is lost takes its staging memory with it: the
sidecar may still be reading there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from hsconnector.capture.protocol import (
    PROTOCOL_VERSION,
    Batch,
    BatchAnswer,
    CaptureInfo,
    CaptureState,
    Commit,
    Fail,
    FailReason,
    Message,
    MessageAnswer,
    MessageStatus,
    Open,
    Producer,
    ProducerAccepted,
    RingOffer,
    Rows,
    Span,
)
from hsconnector.connector.bounded_texts import bounded_info, bounded_text
from hsconnector.connector.lockfiles import LockFiles
from hsconnector.connector.ring import Ring
from hsconnector.connector.settings import ConnectorSettings
from hsconnector.connector.stream import Item, Loss, Stream, Ticket, place_spans
from hsconnector.connector.transport import Transport
from hsconnector.errors import ProducerUnknown, RingError, SidecarRefused, SidecarUnreachable, TransportError

__all__ = ["Sender"]

log = logging.getLogger("vllm.hsconnector.sender")

MAX_BATCH_MESSAGES = 256
MAX_BATCH_BYTES = 32 << 20
MAX_LEDGER = 10_000
"""Failures kept for a sidecar that is away or slow; beyond that the oldest are only counted."""
MAX_QUEUED = 10_000
"""While this many messages wait for a slow sidecar, captures that begin fail at once."""
RETRY_S = 1.0
"""How long a batch that nobody answered is sent again before the sidecar counts as lost."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0


class Sender:
    """Ships what the worker queues. `pump` is one turn of its work; `start` runs turns on a thread of its own.

    `locks` are held from the beginning of a capture to the sidecar's final answer.
    """

    def __init__(
        self,
        producer: Producer,
        settings: ConnectorSettings,
        transport: Transport,
        now: Callable[[], float] = time.monotonic,
        locks: LockFiles | None = None,
    ) -> None:
        self.row_bytes = producer.row_bytes
        self._producer = producer
        self.settings = settings
        self._transport = transport
        self.now = now
        self._locks = locks
        self._lock = threading.Condition()
        self._stream: Stream | None = None
        self._spare: Ring | None = None
        self._down = (FailReason.SIDECAR_UNREACHABLE, "the sidecar has not been reached yet")
        self._said: FailReason | None = None
        """Why the log says that nothing is captured."""
        self._pause = FIRST_PAUSE_S
        self._next_try = 0.0
        self._last_sent = 0.0
        self._ledger: OrderedDict[str, Loss] = OrderedDict()
        self._forgotten = 0
        self._refused: set[str] = set()
        self._closing: float | None = None
        self._thread: threading.Thread | None = None
        self._tried = threading.Event()

    # ---- the engine's thread

    @property
    def stream(self) -> Stream | None:
        """The stream that is open now; another object after each loss."""
        return self._stream

    def largest(self, stream: Stream) -> int:
        """Bytes that `reserve` can give now."""
        with self._lock:
            return stream.ring.largest()

    def reserve(self, stream: Stream, length: int) -> int | None:
        """Staging memory for rows that will be queued next."""
        with self._lock:
            return stream.ring.reserve(length)

    def cancel(self, stream: Stream) -> None:
        """Takes the newest reservation back: nothing was queued for it."""
        with self._lock:
            stream.ring.cancel()

    def begin(self, stream: Stream | None, info: CaptureInfo) -> bool:
        """A capture begins; False where there is no stream to take it, and it has failed."""
        info = bounded_info(info)
        with self._lock:
            if stream is None or stream is not self._stream:
                self._record(Loss(info, *self._down))
                return False
            if len(stream.queue) >= MAX_QUEUED:
                detail = f"{len(stream.queue)} messages wait for the sidecar's answer"
                self._record(Loss(info, FailReason.OVERFLOW, detail))
                return False
            stream.open[info.capture_id] = info
            if self._locks is not None:
                self._locks.hold(info.capture_id)
            self._queue(stream, Item(Open(info)))
            return True

    def rows(self, stream: Stream, capture_id: str, rows: range, offset: int, ticket: Ticket) -> None:
        """Rows lie, or will lie when the ticket is done, at `offset` of the stream's ring."""
        span = Span(offset, len(rows) * self.row_bytes, stream.accepted.shm)
        with self._lock:
            self._queue(stream, Item(Rows(capture_id, rows.start, len(rows), span), ticket))

    def commit(self, stream: Stream, commit: Commit) -> None:
        """Every row of the capture is queued."""
        with self._lock:
            self._queue(stream, Item(commit))

    def fail(self, info: CaptureInfo, reason: FailReason, detail: str) -> None:
        """The capture will have no shard, whether the sidecar has heard of it or not."""
        log.info("capture %s (request %.80r) failed: %s: %s", info.capture_id, info.request_id, reason, detail)
        self._drop_lock(info.capture_id)
        info, detail = bounded_info(info), bounded_text(detail)
        with self._lock:
            stream = self._stream
            loss = Loss(info, reason, detail)
            if stream is None or (len(stream.queue) >= MAX_QUEUED and info.capture_id not in stream.open):
                self._record(loss)
                return
            if stream.open.pop(info.capture_id, None) is None:
                self._queue(stream, Item(Open(info)))
            stream.failing[info.capture_id] = loss
            self._queue(stream, Item(Fail(info.capture_id, reason, detail)))

    def take_refused(self) -> set[str]:
        """Ids of captures that the sidecar has failed since the last call."""
        if not self._refused:
            return set()
        with self._lock:
            refused, self._refused = self._refused, set()
            return refused

    # ---- lifecycle

    def start(self, first_try_s: float = 10.0) -> None:
        """Starts the thread and waits for the end of the first try, so that the first request finds a stream.

        A sidecar that refuses or is absent ends it at once; one that hangs delays the engine's start by this long.
        """
        self._thread = threading.Thread(target=self._run, name="hsconnector-sender", daemon=True)
        self._thread.start()
        self._tried.wait(first_try_s)

    def close(self, timeout: float) -> None:
        """Ships what is queued for up to `timeout` seconds, closes the stream, logs the ids that were lost."""
        with self._lock:
            if self._closing is not None:
                return
            self._closing = self.now() + timeout
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(timeout + 1.0)
        else:
            self._finish()

    @property
    def idle(self) -> bool:
        """Nothing is queued or unanswered."""
        with self._lock:
            stream = self._stream
            return not self._ledger and (stream is None or not (stream.queue or stream.failing))

    def _run(self) -> None:
        while self._closing is None:
            try:
                worked = self.pump()
            except Exception:
                log.exception("a bug in the sender; the stream is given up")
                self._start_over()
                worked = False
            self._tried.set()
            if not worked:
                self._rest()
        try:
            self._finish()
        except Exception:
            log.exception("a bug in the sender while it was shutting down")

    def _start_over(self) -> None:
        """After a bug in a turn. A stream whose first batch never went out is not given the same failures again.

        That batch carries the ledger, and a failure in it may be what cannot be sent.
        """
        stream = self._stream
        self._lose(FailReason.INTERNAL_ERROR, "a bug in the sender, see the engine's log")
        with self._lock:
            if stream is not None and stream.seq == 0:
                self._forgotten += len(self._ledger)
                self._ledger.clear()
            self._back_off()

    def _rest(self) -> None:
        with self._lock:
            stream = self._stream
            if self._closing is not None or (stream is not None and stream.queue):
                return
            due = self._next_try if stream is None else self._last_sent + self._heartbeat(stream)
            self._lock.wait(max(0.001, due - self.now()))

    def _finish(self) -> None:
        while not self._late() and not self.idle:
            self._next_try = 0.0
            if not self.pump():
                break
        stream = self._stream
        lost = self._unfinished()
        if lost:
            log.warning("shutting down with %d captures unshipped: %s", len(lost), ", ".join(sorted(lost)[:20]))
        if stream is not None:
            self._goodbye(stream)
        self._spare = self._stream = None
        if self._locks is not None:
            self._locks.close()
        self._transport.close()

    def _late(self) -> bool:
        """Whether the time that `close` gave is over."""
        return self._closing is not None and self.now() >= self._closing

    def _unfinished(self) -> set[str]:
        stream = self._stream
        return set(self._ledger) | (set(stream.open) | set(stream.failing) if stream is not None else set())

    def _goodbye(self, stream: Stream) -> None:
        try:
            self._transport.ingest(Batch(stream.accepted.producer_id, stream.seq, close=True), [])
        except TransportError as error:
            log.debug("closing the stream: %s", error)

    # ---- one turn

    def pump(self) -> bool:
        """One turn: connect, or ship one batch, or a heartbeat that is due. True if anything was done."""
        stream = self._stream
        if stream is None:
            return self.now() >= self._next_try and self._connect()
        if self._ledger and len(stream.queue) < MAX_BATCH_MESSAGES:
            with self._lock:
                self._tell_ledger(stream)
        items = self._take_batch(stream)
        if not items and self.now() < self._last_sent + self._heartbeat(stream):
            return False
        answer = self._ship(stream, items)
        if answer is not None:
            self._settle(stream, items, answer)
        return True

    def _heartbeat(self, stream: Stream) -> float:
        return stream.accepted.heartbeat_s / 3

    def _connect(self) -> bool:
        try:
            ring = self._spare = self._spare or self._new_ring()
            offer = RingOffer(ring.name, ring.size) if ring.name else None
            accepted = self._transport.open(msgspec.structs.replace(self._producer, ring=offer))
            self._check(accepted, offer)
        except (TransportError, RingError) as error:
            self._stay_down(error)
            return False
        ring.unlink()
        self._spare = None
        self._say_connected(accepted, offer)
        with self._lock:
            stream = self._stream = Stream(accepted, ring)
            self._last_sent = self.now()
            self._tell_ledger(stream)
        return True

    def _new_ring(self) -> Ring:
        size = self.settings.ring_bytes
        ring = None
        if self.settings.transport != "http":
            try:
                ring = Ring.shared(self.settings.shm_dir, size)
            except RingError as error:
                log.warning("no shared memory, rows travel in the body: %s", error)
        return ring or Ring.private(size)

    def _check(self, accepted: ProducerAccepted, offer: RingOffer | None) -> None:
        """Refuses an answer that cannot be worked with."""
        if accepted.protocol != PROTOCOL_VERSION:
            raise SidecarRefused(f"the sidecar speaks protocol {accepted.protocol}, this connector {PROTOCOL_VERSION}")
        if not (0 < accepted.heartbeat_s < math.inf) or accepted.max_payload_bytes < 1:
            raise SidecarRefused(f"the sidecar's answer makes no sense: {accepted}")
        if accepted.shm and offer is None:
            raise SidecarRefused("the sidecar says that it has shared memory open, and none was offered")
        if self.settings.transport == "shm" and not accepted.shm:
            why = accepted.shm_reason or "it could not be created here, see above"
            raise SidecarRefused(f"transport is 'shm' and shared memory is not to be had: {why}")

    def _stay_down(self, error: TransportError | RingError) -> None:
        refused = isinstance(error, SidecarRefused)
        reason = FailReason.SIDECAR_REFUSED if refused else FailReason.SIDECAR_UNREACHABLE
        with self._lock:
            self._down = (reason, bounded_text(str(error)))
            self._back_off(5 * LAST_PAUSE_S if refused else 0.0)
        level = logging.DEBUG if reason is self._said else logging.WARNING
        self._said = reason
        log.log(level, "no hidden states are captured until the sidecar answers: %s", error)

    def _back_off(self, least: float = 0.0) -> None:
        """The next try is later each time, until a batch has been answered."""
        self._next_try = self.now() + max(self._pause, least)
        self._pause = min(2 * self._pause, LAST_PAUSE_S)

    def _say_connected(self, accepted: ProducerAccepted, offer: RingOffer | None) -> None:
        self._said = None
        way = "shared memory" if accepted.shm else "the request body"
        why = f" ({accepted.shm_reason})" if offer is not None and accepted.shm_reason else ""
        told = f", telling {len(self._ledger)} failures" if self._ledger else ""
        log.info("streaming hidden states to %s through %s%s%s", self.settings.sidecar, way, why, told)
        if self._forgotten:
            log.warning("%d older failures were too many to keep and are not told", self._forgotten)
            self._forgotten = 0

    def _take_batch(self, stream: Stream) -> list[Item]:
        """The head of the queue, as far as its rows have arrived; the items stay queued until answered."""
        most = MAX_BATCH_BYTES if stream.accepted.shm else min(MAX_BATCH_BYTES, stream.accepted.max_payload_bytes)
        with self._lock:
            queued = [stream.queue[index] for index in range(min(len(stream.queue), MAX_BATCH_MESSAGES))]
        if queued and queued[0].ticket is not None:
            queued[0].ticket.wait()
        items: list[Item] = []
        for item in queued:
            if items and (item.size > most or (item.ticket is not None and not item.ticket.done())):
                break
            items.append(item)
            most -= item.size
        return items

    def _ship(self, stream: Stream, items: list[Item]) -> BatchAnswer | None:
        messages, payload = place_spans(stream, items)
        batch = Batch(stream.accepted.producer_id, stream.seq, messages)
        give_up = self.now() + RETRY_S
        while True:
            try:
                answer = self._transport.ingest(batch, payload)
                if (answer.seq, len(answer.messages)) != (batch.seq, len(items)):
                    got = f"{len(answer.messages)} answers to batch {answer.seq}"
                    raise SidecarRefused(f"{got} came where {len(items)} to batch {batch.seq} were expected")
                return answer
            except ProducerUnknown as error:
                self._lose(FailReason.SIDECAR_RESTARTED, str(error))
            except SidecarRefused as error:
                self._lose(FailReason.SIDECAR_REFUSED, str(error))
            except SidecarUnreachable as error:
                if self.now() < (give_up if self._closing is None else self._closing):
                    time.sleep(0.05)
                    continue
                self._lose(FailReason.SIDECAR_UNREACHABLE, str(error))
            return None

    def _settle(self, stream: Stream, items: list[Item], answer: BatchAnswer) -> None:
        with self._lock:
            stream.seq += 1
            self._last_sent, self._pause = self.now(), FIRST_PAUSE_S
            for item, result in zip(items, answer.messages, strict=True):
                stream.queue.popleft()
                if isinstance(item.message, Rows):
                    stream.ring.release()
                self._settle_one(stream, item.message, result)

    def _settle_one(self, stream: Stream, message: Message, result: MessageAnswer) -> None:
        capture_id = message.capture.capture_id if isinstance(message, Open) else message.capture_id
        if isinstance(message, Fail):
            stream.failing.pop(capture_id, None)
        elif result.status is MessageStatus.FAILED and stream.open.pop(capture_id, None) is not None:
            self._refused.add(capture_id)
            self._drop_lock(capture_id)
            log.warning("capture %s failed in the sidecar: %s: %s", capture_id, result.reason, result.detail)
        elif isinstance(message, Commit):
            stream.open.pop(capture_id, None)
            self._drop_lock(capture_id, ready=result.state is CaptureState.READY)
            if result.state is CaptureState.QUARANTINED:
                why = result.detail or "the sidecar's record of it says why"
                log.warning("capture %s is quarantined: %s", capture_id, why)

    def _drop_lock(self, capture_id: str, *, ready: bool = False) -> None:
        if self._locks is not None:
            self._locks.drop(capture_id, ready=ready)

    # ---- under the lock

    def _queue(self, stream: Stream, item: Item) -> None:
        if stream is self._stream:
            stream.queue.append(item)
            self._lock.notify_all()

    def _record(self, loss: Loss) -> None:
        self._ledger[loss.info.capture_id] = loss
        while len(self._ledger) > MAX_LEDGER:
            self._ledger.popitem(last=False)
            self._forgotten += 1

    def _tell_ledger(self, stream: Stream) -> None:
        """Queues as many failures as half a batch takes, so that captures that begin now do not wait behind all."""
        for _ in range(min(len(self._ledger), MAX_BATCH_MESSAGES // 2)):
            _, loss = self._ledger.popitem(last=False)
            stream.failing[loss.info.capture_id] = loss
            self._queue(stream, Item(Open(loss.info)))
            self._queue(stream, Item(Fail(loss.info.capture_id, loss.reason, loss.detail)))

    def _lose(self, reason: FailReason, detail: str) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
            if stream is None:
                return
            detail = bounded_text(detail)
            self._down = (reason, detail)
            self._back_off()
            lost = [Loss(info, reason, detail) for info in stream.open.values()]
            for loss in [*lost, *stream.failing.values()]:
                self._drop_lock(loss.info.capture_id)
                self._record(loss)
        for item in stream.queue:
            if item.ticket is not None:
                item.ticket.wait()  # rows still being copied must arrive before their memory goes
        ids = ", ".join(loss.info.capture_id for loss in lost[:5])
        log.warning(
            "lost the sidecar (%s: %s); %d captures failed%s", reason, detail, len(lost), f": {ids}" * bool(ids)
        )
