"""How batches reach the sidecar: HTTP over TCP or a Unix socket, and an in-memory twin with the same contract.

Whether rows travel in the body or lie in shared memory is written in each span; the transport carries both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import httpcore

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
    decode,
    encode,
    encode_batch,
)
from hsconnector.client.address import parse_address
from hsconnector.client.envelope import read_denial
from hsconnector.connector.deadline import DeadlineBackend
from hsconnector.errors import ProducerUnknown, ProtocolError, SidecarRefused, SidecarUnreachable, TransportError

__all__ = ["HttpTransport", "InMemoryTransport", "StoredCapture", "Transport"]

Buffer = bytes | bytearray | memoryview
PIECE_BYTES = 1 << 20
CONNECT_S = 2.0
MAX_ANSWER_BYTES = 16 << 20
"""A longer answer is not one of ours."""
_T = TypeVar("_T")


class Transport(Protocol):
    """One way to one sidecar. Raises `SidecarUnreachable`, `SidecarRefused` or `ProducerUnknown`, nothing else."""

    def open(self, producer: Producer) -> ProducerAccepted:
        """Opens a stream."""
        ...

    def ingest(self, batch: Batch, payload: Sequence[Buffer]) -> BatchAnswer:
        """Sends one batch and waits for what became of it; sending it again is harmless."""
        ...

    def close(self) -> None:
        """Lets connections go."""
        ...


class HttpTransport:
    """`http://host:port` or `unix:///path`; no call takes longer than `timeout` seconds, however slowly bytes move."""

    def __init__(self, address: str, api_key: str = "", timeout: float = 30.0) -> None:
        place = parse_address(address)
        self.address = address
        self._base = place.base
        self._headers = [("Content-Type", "application/msgpack")]
        if api_key:
            self._headers.append(("Authorization", f"Bearer {api_key}"))
        self._timeout = timeout
        self._backend = DeadlineBackend()
        self._pool = httpcore.ConnectionPool(uds=place.socket, max_connections=1, network_backend=self._backend)

    def open(self, producer: Producer) -> ProducerAccepted:
        return self._post("/v1/producers", [encode(producer)], ProducerAccepted)

    def ingest(self, batch: Batch, payload: Sequence[Buffer]) -> BatchAnswer:
        return self._post("/v1/ingest", encode_batch(batch, payload), BatchAnswer)

    def close(self) -> None:
        self._pool.close()

    def _post(self, path: str, buffers: Sequence[Buffer], kind: type[_T]) -> _T:
        try:
            status, body = self._exchange(path, buffers)
        except TransportError:
            raise
        except (*_NETWORK_ERRORS, OSError) as error:
            raise SidecarUnreachable(f"{self.address}: {type(error).__name__} {error}".rstrip()) from error
        if status != 200:
            raise self._refusal(path, status, body)
        try:
            return decode(body, kind)
        except (ProtocolError, RecursionError) as error:
            raise SidecarRefused(f"{self.address}{path} answered something else: {error}") from error

    def _exchange(self, path: str, buffers: Sequence[Buffer]) -> tuple[int, bytes]:
        length = sum(len(buffer) for buffer in buffers)
        self._backend.allow(self._timeout)
        body = bytearray()
        with self._pool.stream(
            "POST",
            f"{self._base}{path}",
            headers=[*self._headers, ("Content-Length", str(length))],
            content=_pieces(buffers),
            extensions={"timeout": {"connect": min(self._timeout, CONNECT_S), "pool": self._timeout}},
        ) as response:
            for chunk in response.iter_stream():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise SidecarRefused(f"{self.address}{path} answered with more than {MAX_ANSWER_BYTES} bytes")
        return response.status, bytes(body)

    def _refusal(self, path: str, status: int, body: bytes) -> Exception:
        denial = read_denial(body)
        text = f"{self.address}{path}: {status} {denial.message}"
        if denial.type == "producer_unknown":
            return ProducerUnknown(text)
        if status in (408, 429) or status >= 500:
            return SidecarUnreachable(text)
        return SidecarRefused(text)


_NETWORK_ERRORS = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    httpcore.ConnectionNotAvailable,
)


def _pieces(buffers: Sequence[Buffer]) -> Iterator[bytes]:
    for buffer in buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])


@dataclass
class StoredCapture:
    """What the in-memory twin keeps of a capture."""

    info: CaptureInfo
    state: CaptureState = CaptureState.RECEIVING
    rows: int = 0
    data: bytearray = field(default_factory=bytearray)
    token_ids: bytes = b""
    finish_reason: str = ""
    reason: FailReason | None = None
    detail: str = ""


class InMemoryTransport:
    """A sidecar without disk or network, for tests and for trying the connector out.

    `ring` gives the memory that shared spans point into; without it the twin says `shm=False`.
    """

    def __init__(self, ring: Callable[[], Any] | None = None, heartbeat_s: float = 15.0) -> None:
        self.captures: dict[str, StoredCapture] = {}
        self.producer: Producer | None = None
        self.batches = 0
        self._ring = ring
        self._memory: Any = None
        self._heartbeat_s = heartbeat_s
        self._last: tuple[str, int, BatchAnswer] | None = None
        self._streams = 0

    def open(self, producer: Producer) -> ProducerAccepted:
        if producer.protocol != PROTOCOL_VERSION:
            raise SidecarRefused(f"protocol {producer.protocol} is not {PROTOCOL_VERSION}")
        self._fail_open(FailReason.SIDECAR_UNREACHABLE, "the producer opened a new stream")
        self.producer = producer
        self._streams += 1
        self._last = None
        shm = self._ring is not None and producer.ring is not None
        self._memory = self._ring() if shm and self._ring is not None else None
        return ProducerAccepted(
            producer_id=self._producer_id(), shm=shm, heartbeat_s=self._heartbeat_s, max_payload_bytes=64 << 20
        )

    def ingest(self, batch: Batch, payload: Sequence[Buffer]) -> BatchAnswer:
        if batch.producer_id != self._producer_id():
            raise ProducerUnknown(f"no stream {batch.producer_id!r}")
        expected = 0 if self._last is None else self._last[1] + 1
        if self._last is not None and batch.seq == self._last[1]:
            return self._last[2]
        if batch.seq != expected:
            raise SidecarRefused(f"batch {batch.seq} came where {expected} was expected")
        self.batches += 1
        body = b"".join(payload)
        answer = BatchAnswer(batch.seq, tuple(self._take(message, body) for message in batch.messages))
        self._last = (batch.producer_id, batch.seq, answer)
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
