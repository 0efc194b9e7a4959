"""Sidecars that are not well: a raw TCP server which does one wrong thing to every connection."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

Behave = Callable[[socket.socket, threading.Event], None]


class BadSidecar:
    """Listens on a free port and gives each connection to `behave`, with an event that says when to stop."""

    def __init__(self, behave: Behave, port: int = 0) -> None:
        self._behave = behave
        self._listener = socket.create_server(("127.0.0.1", port))
        self._stop = threading.Event()
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.accepted = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="bad sidecar")]
        self._threads[0].start()

    def __enter__(self) -> BadSidecar:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.accepted += 1
                self._open.append(connection)
                thread = threading.Thread(target=self._serve, args=(connection,), name="bad connection")
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._behave(connection, self._stop)


def read_message(connection: socket.socket) -> tuple[bytes, bytes]:
    """One whole request or answer: its head with the empty line, and its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _receive(connection)
    end = data.index(b"\r\n\r\n") + 4
    head, body = data[:end], bytearray(data[end:])
    lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while len(body) < int(lengths[0].split(b":")[1]):
        body += _receive(connection)
    return head, bytes(body)


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 20)
    if not data:
        raise ConnectionResetError
    return data


def hang(connection: socket.socket, stop: threading.Event) -> None:
    """Accepts and never answers."""
    stop.wait()


def reset(connection: socket.socket, stop: threading.Event) -> None:
    """Takes some of the request and drops the connection."""
    connection.recv(100)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def take_slowly(connection: socket.socket, stop: threading.Event) -> None:
    """One kilobyte a second."""
    while not stop.wait(0.05) and connection.recv(50):
        pass


def answer_slowly(connection: socket.socket, stop: threading.Event) -> None:
    """A whole request, then one byte of the answer at a time."""
    read_message(connection)
    for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + bytes(100000):
        if stop.wait(0.05):
            return
        connection.sendall(bytes([byte]))


def says(status: int, body: bytes = b"", head: bytes = b"") -> Behave:
    """Answers a request with this, and ends the connection."""

    def behave(connection: socket.socket, stop: threading.Event) -> None:
        read_message(connection)
        connection.sendall(b"HTTP/1.1 %d Whatever\r\ncontent-length: %d\r\n%s\r\n%s" % (status, len(body), head, body))

    return behave


def unused_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def eventually(true: Callable[[], object], within_s: float = 30.0) -> None:
    """Returns once it is so."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


class Switch:
    """Relays whole requests to the sidecar at `target`; while `fault` is set, that is done to them instead."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self.fault: Behave | None = None
        self.delay = 0.0
        self.requests = 0
        self._bad = BadSidecar(self._serve)
        self.url, self.port = self._bad.url, self._bad.port

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        self._bad.stop()

    def down(self) -> None:
        """Nobody listens any more."""
        self._bad.stop()

    def up(self) -> None:
        """Listens again, at the same port."""
        self._bad = BadSidecar(self._serve, self.port)

    def _serve(self, connection: socket.socket, stop: threading.Event) -> None:
        far = socket.create_connection((self._target.hostname or "", self._target.port or 80))
        with far:
            while True:
                if select.select([connection], [], [], 0.05)[0]:
                    if self.fault is not None:
                        return self.fault(connection, stop)
                    self._relay(connection, far, stop)
                elif stop.is_set():
                    return None

    def _relay(self, connection: socket.socket, far: socket.socket, stop: threading.Event) -> None:
        head, body = read_message(connection)
        self.requests += 1
        if stop.wait(self.delay):
            raise ConnectionResetError
        far.sendall(head + body)
        head, body = read_message(far)
        connection.sendall(head + body)
