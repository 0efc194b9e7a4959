"""A sidecar without disk or network, behind the same contract as the transport over HTTP.

For tests, and for trying the connector out where no sidecar runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    Rows,
    Span,
)
from hsconnector.connector.transport import Buffer
from hsconnector.errors import ProducerUnknown, SidecarRefused

__all__ = ["InMemoryTransport", "StoredCapture"]


@dataclass
class StoredCapture:
    """What is kept of a capture."""

    info: CaptureInfo
    state: CaptureState = CaptureState.RECEIVING
    rows: int = 0
    data: bytearray = field(default_factory=bytearray)
    token_ids: bytes = b""
    finish_reason: str = ""
    reason: FailReason | None = None
    detail: str = ""


class InMemoryTransport:
    """Keeps every capture in `captures`; none is judged.

    `ring` gives the memory that shared spans point into; without it the answer to a producer says `shm=False`.
    """

    def __init__(self, ring: Callable[[], Any] | None = None, heartbeat_s: float = 15.0) -> None:
        self.captures: dict[str, StoredCapture] = {}
        self.producer: Producer | None = None
        self.batches = 0
        self._ring = ring
        self._memory: Any = None
        self._heartbeat_s = heartbeat_s
        self._last: BatchAnswer | None = None
        self._streams = 0

    def open(self, producer: Producer) -> ProducerAccepted:
        if producer.protocol != PROTOCOL_VERSION:
            raise SidecarRefused(f"protocol {producer.protocol} is not {PROTOCOL_VERSION}")
        self._fail_open(FailReason.SIDECAR_UNREACHABLE, "the producer opened a new stream")
        self.producer = producer
        self._streams += 1
        self._last = None
        self._memory = self._ring() if self._ring is not None and producer.ring is not None else None
        shm = self._memory is not None
        return ProducerAccepted(
            producer_id=self._producer_id(), shm=shm, heartbeat_s=self._heartbeat_s, max_payload_bytes=64 << 20
        )

    def ingest(self, batch: Batch, payload: Sequence[Buffer]) -> BatchAnswer:
        if batch.producer_id != self._producer_id():
            raise ProducerUnknown(f"no stream {batch.producer_id!r}")
        expected = 0 if self._last is None else self._last.seq + 1
        if self._last is not None and batch.seq == self._last.seq:
            return self._last
        if batch.seq != expected:
            raise SidecarRefused(f"batch {batch.seq} came where {expected} was expected")
        self.batches += 1
        body = b"".join(payload)
        answer = BatchAnswer(batch.seq, tuple(self._take(message, body) for message in batch.messages))
        self._last = answer
        if batch.close:
            self._streams += 1
            self._fail_open(FailReason.ENGINE_SHUTDOWN, "the engine closed its stream")
        return answer

    def close(self) -> None:
        return

    def _producer_id(self) -> str:
        return f"memory-{self._streams}"

    def _take(self, message: Message, body: bytes) -> MessageAnswer:
        if isinstance(message, Open):
            known = self.captures.setdefault(message.capture.capture_id, StoredCapture(message.capture))
            return _answer(known)
        capture = self.captures.get(message.capture_id)
        if capture is None:
            detail = f"no capture {message.capture_id} is open in this stream"
            return MessageAnswer(MessageStatus.FAILED, CaptureState.FAILED, FailReason.BAD_MESSAGE, detail)
        if capture.state is CaptureState.RECEIVING:
            self._apply(capture, message, body)
        return _answer(capture)

    def _apply(self, capture: StoredCapture, message: Rows | Commit | Fail, body: bytes) -> None:
        if isinstance(message, Fail):
            _end(capture, message.reason, message.detail)
        elif isinstance(message, Commit):
            self._commit(capture, message)
        else:
            self._append(capture, message, body)

    def _append(self, capture: StoredCapture, rows: Rows, body: bytes) -> None:
        data = self._bytes(rows.span, body)
        if rows.start + rows.count <= capture.rows:
            return
        row_bytes = self.producer.row_bytes if self.producer else 0
        if rows.start != capture.rows or len(data) != rows.count * row_bytes:
            _end(
                capture,
                FailReason.BAD_MESSAGE,
                f"rows {rows.start} to {rows.start + rows.count} in {len(data)} bytes after {capture.rows} rows",
            )
            return
        capture.data += data
        capture.rows += rows.count

    def _bytes(self, span: Span, body: bytes) -> bytes:
        source = self._memory if span.shared and self._memory is not None else body
        return bytes(memoryview(source)[span.offset : span.offset + span.length])

    def _commit(self, capture: StoredCapture, commit: Commit) -> None:
        if commit.num_rows != capture.rows or len(commit.token_ids) != 8 * commit.num_rows:
            _end(capture, FailReason.BAD_MESSAGE, f"{commit.num_rows} rows committed, {capture.rows} received")
            return
        if capture.rows == 0:
            _end(capture, FailReason.BAD_MESSAGE, "a capture without rows cannot be committed")
            return
        capture.token_ids = commit.token_ids
        capture.finish_reason = commit.finish_reason
        capture.state = CaptureState.READY

    def _fail_open(self, reason: FailReason, detail: str) -> None:
        for capture in self.captures.values():
            if capture.state is CaptureState.RECEIVING:
                _end(capture, reason, detail)


def _end(capture: StoredCapture, reason: FailReason, detail: str) -> None:
    capture.state = CaptureState.FAILED
    capture.reason = reason
    capture.detail = detail
    capture.data.clear()


def _answer(capture: StoredCapture) -> MessageAnswer:
    status = MessageStatus.FAILED if capture.state is CaptureState.FAILED else MessageStatus.OK
    return MessageAnswer(status, capture.state, capture.reason, capture.detail)
