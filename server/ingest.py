"""Protocol messages -> assembler -> store. Everything here runs on the writer's thread, in order.

Whatever is wrong with one message fails that message's capture and nothing else. An answer is given only once the index
has been told of what it says.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgspec

from hsconnector.capture.content import content_of
from hsconnector.capture.protocol import (
    Batch,
    BatchAnswer,
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
    Rows,
    Span,
)
from hsconnector.capture.record import CaptureRecord, Finding, FindingKind, Verdict, record_of
from hsconnector.errors import RingError
from server.assembler import Action, Assembly
from server.holdings import Holdings
from server.mapped_ring import MappedRing
from server.refusals import producer_unknown, sequence_gap
from server.settings import OnUnsound, Settings
from server.shards import ShardWriter
from server.store import FULL
from server.streams import OpenCapture, ProducerStream, check_info
from server.verdict import Judge

__all__ = ["Ingest"]

log = logging.getLogger("hsconnector.server.ingest")


class SpanRefused(Exception):
    """A span that points outside the memory it names; the message says where."""


@dataclass(frozen=True)
class Judged:
    """What a whole capture is found to be."""

    state: CaptureState
    verdict: Verdict
    content_hash: str


class Ingest:
    """The streams of all producers, and what becomes of their captures."""

    def __init__(self, settings: Settings, holdings: Holdings) -> None:
        self.settings = settings
        self.streams: dict[str, ProducerStream] = {}
        self._holdings = holdings
        self._store = holdings.store
        self._metrics = holdings.metrics
        self._owners: dict[str, ProducerStream] = {}
        self._buffer = bytearray()

    def register(self, producer: Producer) -> ProducerAccepted:
        """Opens a stream, and ends the one that the same producer had before: it has given that up."""
        for given_up in [
            s for s in self.streams.values() if producer.instance and s.producer.instance == producer.instance
        ]:
            self._end(given_up, FailReason.SIDECAR_UNREACHABLE, "its producer gave this stream up and opened another")
            self._settle()
        ring, reason = self._open_ring(producer)
        stream = ProducerStream(producer, ring)
        self.streams[stream.producer_id] = stream
        self._metrics.producers.set(len(self.streams))
        log.info(
            "stream %s: engine %r, layers %s, ring %s",
            stream.producer_id,
            producer.engine_id,
            producer.layer_ids,
            bool(ring),
        )
        return ProducerAccepted(
            producer_id=stream.producer_id,
            shm=ring is not None,
            shm_reason=reason,
            heartbeat_s=self.settings.heartbeat_s,
            max_payload_bytes=int(self.settings.max_payload_bytes),
        )

    def take(self, batch: Batch, payload: memoryview) -> BatchAnswer:
        """One batch; raises `Refusal` for a stream that is not open and for a gap."""
        stream = self.streams.get(batch.producer_id)
        if stream is None:
            raise producer_unknown(batch.producer_id)
        if batch.seq == stream.last_seq and stream.last_answer is not None:
            self._metrics.batches.labels("repeated").inc()
            return stream.last_answer
        if batch.seq != stream.last_seq + 1:
            raise sequence_gap(batch.seq, stream.last_seq + 1)
        with self._metrics.batch_seconds.time():
            answers = tuple(self._answer(stream, message, payload) for message in batch.messages)
            stream.last_seq, stream.last_answer = batch.seq, BatchAnswer(batch.seq, answers)
            if batch.close:
                self._end(stream, FailReason.ENGINE_SHUTDOWN, "the engine closed its stream while this was open")
            self._settle()
        self._metrics.batches.labels("taken").inc()
        return stream.last_answer

    def lose_silent(self) -> None:
        """Gives up the streams that have said nothing within the deadline."""
        now = time.monotonic()
        for stream in list(self.streams.values()):
            silent = now - stream.seen
            if silent > self.settings.heartbeat_s and not stream.waiting:
                self._metrics.lost.inc()
                log.warning(
                    "stream %s: engine %r is silent for %.1f s", stream.producer_id, stream.producer.engine_id, silent
                )
                self._end(stream, FailReason.ENGINE_LOST, f"its engine said nothing for {silent:.1f} s")
        self._settle()

    def close(self) -> None:
        """Ends every stream: the sidecar stops."""
        for stream in list(self.streams.values()):
            self._end(stream, FailReason.SIDECAR_RESTARTED, "the sidecar stopped while this was open")
        self._settle()

    def progress(self, capture_id: str) -> int | None:
        """Rows received of a capture that is being received; readable from any thread."""
        stream = self._owners.get(capture_id)
        capture = stream.open.get(capture_id) if stream else None
        return capture.assembly.rows if capture else None

    def _settle(self) -> None:
        self._holdings.settle()
        self._metrics.receiving.set(len(self._owners))

    def _open_ring(self, producer: Producer) -> tuple[MappedRing | None, str]:
        if producer.ring is None:
            return None, ""
        try:
            return MappedRing.open(self.settings.shm_dir, producer.ring), ""
        except RingError as error:
            return None, str(error)

    def _answer(self, stream: ProducerStream, message: Message, payload: memoryview) -> MessageAnswer:
        if isinstance(message, Open):
            return self._opened(stream, message)
        capture = stream.open.get(message.capture_id)
        if capture is None:
            return self._not_open(message)
        try:
            if isinstance(message, Rows):
                action = self._rows(stream, capture, message, payload)
            elif isinstance(message, Commit):
                action = self._commit(stream, capture, message)
            else:
                capture.assembly.fail(message.reason, _one_line(message.detail))
                action = Action.APPLY
        except SpanRefused as error:
            capture.assembly.fail(FailReason.BAD_MESSAGE, str(error))
        except OSError as error:
            capture.assembly.fail(*self._store_failure(message.capture_id, error))
        except Exception as error:
            log.exception("capture %s: a bug on our side", message.capture_id)
            capture.assembly.fail(FailReason.INTERNAL_ERROR, _one_line(f"{type(error).__name__}: {error}"))
        if capture.assembly.state is CaptureState.FAILED:
            self._drop(stream, capture)
            return capture.assembly.answer(MessageStatus.OK if isinstance(message, Fail) else MessageStatus.FAILED)
        return capture.assembly.answer(MessageStatus.DUPLICATE if action is Action.DUPLICATE else MessageStatus.OK)

    def _opened(self, stream: ProducerStream, message: Open) -> MessageAnswer:
        info = message.capture
        wrong = check_info(info)
        if wrong:
            log.warning("stream %s: refused a capture: %s", stream.producer_id, wrong)
            return _failed(FailReason.BAD_MESSAGE, wrong)
        owner = self._owners.get(info.capture_id)
        if owner is stream:
            return MessageAnswer(MessageStatus.DUPLICATE, CaptureState.RECEIVING)
        if owner is not None:
            capture = owner.open[info.capture_id]
            capture.assembly.fail(FailReason.ENGINE_LOST, "it was opened again in another stream")
            self._drop(owner, capture)
        known = self._holdings.catalog.get(info.capture_id)
        if known is not None:
            return _known(
                known, MessageStatus.FAILED if known.state is CaptureState.FAILED else MessageStatus.DUPLICATE
            )
        return self._begin(stream, message)

    def _begin(self, stream: ProducerStream, message: Open) -> MessageAnswer:
        info, producer = message.capture, stream.producer
        record = record_of(producer, info)
        judge = Judge(producer.dtype, producer.layer_ids, producer.hidden_size)
        try:
            self._store.check_room(1)
            folder = self._store.folder(info.capture_id)
            shard = ShardWriter(folder, producer, info, inspect=judge.take, buffer=self._buffer)
        except OSError as error:
            reason, detail = self._store_failure(info.capture_id, error)
            self._holdings.end(msgspec.structs.replace(record, state=CaptureState.FAILED, reason=reason, detail=detail))
            return _failed(reason, detail)
        capture = OpenCapture(Assembly(info, producer.row_bytes), judge, shard)
        stream.weights_id = info.weights_id
        stream.open[info.capture_id] = capture
        self._owners[info.capture_id] = stream
        self._holdings.catalog.put(record)
        return capture.assembly.answer(MessageStatus.OK)

    def _rows(self, stream: ProducerStream, capture: OpenCapture, message: Rows, payload: memoryview) -> Action:
        action = capture.assembly.action_on_rows(message)
        if action is not Action.APPLY:
            return action
        more = capture.shard.bytes_written + message.span.length + 8 * (capture.assembly.rows + message.count)
        self._reserve(capture, more)
        with _span(stream, message.span, payload) as data:
            try:
                capture.shard.append(data, message.count)
            except OSError:
                _check_still_there(stream, message.span)
                raise
        _check_still_there(stream, message.span)
        capture.assembly.wrote(message.count)
        self._holdings.troubles.pop("store", None)
        self._metrics.rows.inc(message.count)
        self._metrics.row_bytes.labels("shm" if message.span.shared else "body").inc(message.span.length)
        return action

    def _commit(self, stream: ProducerStream, capture: OpenCapture, message: Commit) -> Action:
        action = capture.assembly.action_on_commit(message)
        if action is not Action.APPLY:
            return action
        judged = self._judge(stream, capture, message)
        if judged.state is CaptureState.FAILED:
            capture.assembly.fail(FailReason.UNSOUND, judged.verdict.phrase)
            return Action.REFUSED
        capture_id = capture.assembly.info.capture_id
        folder = self._store.folder(capture_id, judged.state)
        folder.mkdir(parents=True, exist_ok=True)
        published = capture.shard.publish(
            folder,
            message.token_ids,
            content_hash=judged.content_hash,
            finish_reason=message.finish_reason,
            durable=self.settings.durable,
        )
        capture.assembly.finish(judged.state, judged.verdict.phrase)
        self._store.used += published.size - capture.reserved
        self._holdings.turnover += published.size
        del stream.open[capture_id], self._owners[capture_id]
        self._holdings.end(
            msgspec.structs.replace(
                record_of(stream.producer, capture.assembly.info),
                state=judged.state,
                detail=judged.verdict.phrase,
                num_rows=message.num_rows,
                finish_reason=message.finish_reason[:64],
                content_hash=judged.content_hash,
                data_hash=published.data_hash,
                size=published.size,
                mtime_ns=published.mtime_ns,
                verdict=judged.verdict,
            )
        )
        return action

    def _judge(self, stream: ProducerStream, capture: OpenCapture, message: Commit) -> Judged:
        producer, info = stream.producer, capture.assembly.info
        found = content_of(producer, info).hash_of(message.token_ids)
        verdict = capture.judge.verdict(message.token_ids)
        if info.expected_content_hash and info.expected_content_hash != found:
            verdict = _with_wrong_hash(verdict, info.expected_content_hash, found)
        state = CaptureState.READY
        if not verdict.sound:
            log.warning("capture %s: unsound: %s", info.capture_id, verdict.phrase)
            state = _UNSOUND[self.settings.on_unsound]
            for reason in verdict.reasons:
                self._metrics.findings.labels(reason).inc()
        return Judged(state, verdict, found)

    def _reserve(self, capture: OpenCapture, size: int) -> None:
        more = size - capture.reserved
        self._store.check_room(more)
        self._store.used += more
        capture.reserved = size

    def _not_open(self, message: Rows | Commit | Fail) -> MessageAnswer:
        known = self._holdings.catalog.get(message.capture_id)
        if known is None:
            return _failed(
                FailReason.BAD_MESSAGE, f"capture {message.capture_id[:64]!r} was never opened in this stream"
            )
        if known.state is CaptureState.RECEIVING:
            return _failed(FailReason.BAD_MESSAGE, f"capture {known.capture_id} is open in another stream")
        failed = known.state is CaptureState.FAILED and not isinstance(message, Fail)
        return _known(known, MessageStatus.FAILED if failed else MessageStatus.DUPLICATE)

    def _drop(self, stream: ProducerStream, capture: OpenCapture) -> None:
        assembly = capture.assembly
        capture_id = assembly.info.capture_id
        try:
            capture.shard.abort()
        except OSError as error:
            log.error("capture %s: %s cannot be removed: %s", capture_id, capture.shard.path, error)
        self._store.used -= capture.reserved
        del stream.open[capture_id], self._owners[capture_id]
        record = record_of(stream.producer, assembly.info)
        log.info("capture %s: failed as %s: %s", capture_id, assembly.reason, assembly.detail)
        self._holdings.end(
            msgspec.structs.replace(
                record, state=assembly.state, reason=assembly.reason, detail=assembly.detail, num_rows=assembly.rows
            )
        )

    def _end(self, stream: ProducerStream, reason: FailReason, detail: str) -> None:
        for capture in list(stream.open.values()):
            capture.assembly.fail(reason, detail)
            self._drop(stream, capture)
        del self.streams[stream.producer_id]
        stream.end()
        self._metrics.producers.set(len(self.streams))

    def _store_failure(self, capture_id: str, error: OSError) -> tuple[FailReason, str]:
        reason = FailReason.DISK_FULL if error.errno in FULL else FailReason.STORE_ERROR
        detail = error.strerror or str(error)
        self._holdings.troubles["store"] = f"{reason}: {detail}"
        log.error("capture %s: the store took no more: %s", capture_id, detail)
        return reason, detail


_UNSOUND = {
    OnUnsound.QUARANTINE: CaptureState.QUARANTINED,
    OnUnsound.REJECT: CaptureState.FAILED,
    OnUnsound.WARN: CaptureState.READY,
}


def _span(stream: ProducerStream, span: Span, payload: memoryview) -> memoryview:
    end = span.offset + span.length
    if span.shared:
        _check_still_there(stream, span)
        if stream.ring is not None and span.offset >= 0:
            return stream.ring.view(span.offset, span.length)
    elif span.offset >= 0 and end <= len(payload):
        return payload[span.offset : end]
    raise SpanRefused(f"the span {span.offset}..{end} lies outside the payload of {len(payload)} bytes")


def _check_still_there(stream: ProducerStream, span: Span) -> None:
    if not span.shared:
        return
    end = span.offset + span.length
    if stream.ring is None:
        raise SpanRefused("the span names shared memory, this stream has none")
    if span.offset < 0 or not stream.ring.holds(end):
        raise SpanRefused(
            f"the span {span.offset}..{end} lies outside the ring of {stream.ring.size} bytes, or it has shrunk"
        )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:1000]


def _failed(reason: FailReason, detail: str) -> MessageAnswer:
    return MessageAnswer(MessageStatus.FAILED, CaptureState.FAILED, reason, detail)


def _known(record: CaptureRecord, status: MessageStatus) -> MessageAnswer:
    reason = FailReason(record.reason) if record.reason else None
    return MessageAnswer(status, record.state, reason, record.detail)


def _with_wrong_hash(verdict: Verdict, expected: str, found: str) -> Verdict:
    wrong = Finding(FindingKind.WRONG_CONTENT_HASH, 1, detail=f"expected {expected[:64]}, the capture has {found}")
    return Verdict(False, (*verdict.reasons, wrong.reason), (*verdict.findings, wrong), verdict.slots)
