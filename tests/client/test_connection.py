"""Connections, plain and for asyncio: what is asked again, what is not, and who closes them."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsconnector.capture.protocol import new_capture_id
from hsconnector.client import Client
from hsconnector.client.async_client import AsyncClient
from hsconnector.client.connection import Connection, connect_async
from hsconnector.errors import SidecarRefused, SidecarUnreachable
from tests.sidecar import SidecarThread, start_sidecar


class Says(http.server.BaseHTTPRequestHandler):
    """Answers with the given statuses in turn, the last one for ever, and an empty list."""

    statuses: list[int]
    asked: int

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0])
        body = b'{"data": []}'
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def says() -> Iterator[tuple[str, type[Says]]]:
    handler = type("Handler", (Says,), {"statuses": [200], "asked": 0})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


def producers(url: str, patience_s: float) -> list[object]:
    async def ask() -> list[object]:
        async with connect_async(url, key="", timeout_s=10, connections=2) as http:
            return list(await AsyncClient(url, http, patience_s=patience_s).producers())

    return asyncio.run(ask())


def test_an_extraction_asks_again_while_the_sidecar_cannot(says: tuple[str, type[Says]]) -> None:
    url, server = says
    server.statuses = [503, 429, 200]
    assert producers(url, 60) == [] and server.asked == 3
    server.statuses = [507]
    with pytest.raises(SidecarUnreachable, match=f"no sidecar answers at {url}: it answered 507: "):
        producers(url, 0)
    server.statuses, server.asked = [403], 0
    with pytest.raises(SidecarRefused, match=f"{url}/v1/producers answered 403"):
        producers(url, 60)
    assert server.asked == 1


def test_a_client_takes_it_for_one_that_does_not_answer(says: tuple[str, type[Says]]) -> None:
    url, server = says
    server.statuses = [503]
    with Client(url) as client, pytest.raises(SidecarUnreachable, match=f"{url}/v1/captures answered 503"):
        client.find()
    assert server.asked == 1


def test_waiting_lengthens_the_time_that_an_answer_may_take(sidecar: SidecarThread) -> None:
    allowed: list[dict[str, float | None]] = []
    connection = Connection(sidecar.url, timeout_s=60)
    connection._open().event_hooks = {"request": [lambda request: allowed.append(request.extensions["timeout"])]}
    connection.ask("GET", f"/v1/captures/{new_capture_id()}", params={"wait": "0.01"}, wait_s=25)
    assert (allowed[0]["connect"], allowed[0]["read"]) == (60, 85)


def test_an_error_names_the_socket_and_not_what_stands_for_it(tmp_path: Path) -> None:
    running = start_sidecar(tmp_path / "store", uds=tmp_path / "s.sock")
    address = f"unix://{tmp_path}/s.sock"
    try:
        with (
            Client(address) as client,
            pytest.raises(SidecarRefused, match=f"^{address}/v1/captures answered 400: limit"),
        ):
            list(client.captures(page_size=0))
    finally:
        running.stop()


def test_sockets_are_closed_with_the_last_reference(sidecar: SidecarThread) -> None:
    connection = Connection(sidecar.url)
    sockets = connection._open()
    assert connection.ask("GET", "/livez").status_code == 200 and not sockets.is_closed
    del connection
    assert sockets.is_closed
