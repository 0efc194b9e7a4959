"""How batches reach the sidecar: HTTP over TCP or a Unix socket. `memory_transport` keeps the same contract.

Whether rows travel in the body or lie in shared memory is written in each span; the transport carries both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import httpcore

from hsconnector.capture.protocol import Batch, BatchAnswer, Producer, ProducerAccepted, decode, encode, encode_batch
from hsconnector.client.address import parse_address
from hsconnector.client.envelope import read_denial
from hsconnector.connector.deadline import DeadlineBackend
from hsconnector.errors import ProducerUnknown, ProtocolError, SidecarRefused, SidecarUnreachable, TransportError

__all__ = ["Buffer", "HttpTransport", "Transport"]

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
