"""Connections that keep one deadline over a whole exchange.

An HTTP client's timeouts count from the last byte: a peer that takes or gives one kilobyte a second never runs into
them. Here what is sent and received until the answer is whole shares one deadline.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpcore

__all__ = ["DeadlineBackend"]


class DeadlineBackend(httpcore.NetworkBackend):
    """Makes connections for `httpcore`; set the deadline with `allow` before each exchange."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._inner = httpcore.SyncBackend()
        self._now = now
        self._deadline = 0.0

    def allow(self, seconds: float) -> None:
        """What follows may take this long, all together."""
        self._deadline = self._now() + seconds

    def left(self, most: float | None = None) -> float:
        """Seconds until the deadline, at most so many; raises `TimeoutError` where it is over."""
        left = self._deadline - self._now()
        if left <= 0:
            raise TimeoutError("the exchange took too long")
        return left if most is None else min(left, most)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._inner.connect_tcp(host, port, self.left(timeout), local_address, socket_options)
        return _DeadlineStream(stream.get_extra_info("socket"), self)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None
    ) -> httpcore.NetworkStream:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.left(timeout))
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise httpcore.ConnectError(f"{path}: {error}") from error
        return _DeadlineStream(connection, self)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _DeadlineStream(httpcore.NetworkStream):
    def __init__(self, connection: socket.socket, backend: DeadlineBackend) -> None:
        self._socket = connection
        self._backend = backend

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            self._socket.settimeout(self._backend.left(timeout))
            return self._socket.recv(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        view = memoryview(buffer)
        try:
            while view:
                self._socket.settimeout(self._backend.left(timeout))
                view = view[self._socket.send(view) :]
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        try:
            self._socket.settimeout(self._backend.left(timeout))
            return _DeadlineStream(
                ssl_context.wrap_socket(self._socket, server_hostname=server_hostname), self._backend
            )
        except OSError as error:
            self.close()
            raise httpcore.ConnectError(str(error)) from error

    def close(self) -> None:
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            return self._is_readable()
        return self._socket if info == "socket" else None

    def _is_readable(self) -> bool:
        """Of an idle connection: the peer has closed it."""
        if self._socket.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))
