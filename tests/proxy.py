"""A network that is not well: a TCP relay which drops connections and cuts answers short."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class Proxy:
    """Relays to the server at `target`; the first `drop` connections are closed at once, answers end at `cut` bytes."""

    def __init__(self, target: str, *, drop: int = 0, cut: int | None = None) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 80)
        self._drop, self._cut = drop, cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self._threads = [threading.Thread(target=self._accept, name="proxy")]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.accepted += 1
                if self.accepted <= self._drop:
                    near.close()
                    continue
                thread = threading.Thread(target=self._relay, args=(near,), name="relay")
                self._threads.append(thread)
                thread.start()

    def _relay(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._target) as far:
            up = threading.Thread(target=_pump, args=(near, far, None), name="relay up")
            up.start()
            _pump(far, near, self._cut)
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
            up.join()


def _pump(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
    """Bytes from one to the other until the end or `limit`, then tells the sink that no more will come."""
    left = limit
    with contextlib.suppress(OSError):
        while left != 0 and (data := source.recv(65536)):
            data = data if left is None else data[:left]
            sink.sendall(data)
            left = None if left is None else left - len(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
