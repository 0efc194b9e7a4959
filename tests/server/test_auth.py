from __future__ import annotations

import logging
import socket
from pathlib import Path

import httpx
import pytest

from server.auth import host_name, is_loopback
from tests.server.engine import Engine
from tests.sidecar import SidecarThread, start_sidecar

OPEN = ("/health", "/livez", "/readyz", "/version")
READ = (
    "/",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/v1/captures",
    f"/v1/captures/{'0' * 32}",
    "/v1/requests/x/hidden-states",
)
INGEST = ("/v1/producers", "/v1/ingest")


def asked(url: str, key: str | None = None, scheme: str = "Bearer", **headers: str) -> dict[str, int]:
    """The status of every route."""
    if key is not None:
        headers["authorization"] = f"{scheme} {key}"
    with httpx.Client(base_url=url, headers=headers) as http:
        got = {path: http.get(path).status_code for path in OPEN + READ}
        return got | {path: http.post(path, content=b"x").status_code for path in INGEST}


def refused(statuses: dict[str, int], code: int = 401) -> set[str]:
    return {path for path, status in statuses.items() if status == code}


def test_one_key_for_everything(tmp_path: Path) -> None:
    running = start_sidecar(tmp_path / "store", api_key="sesame")
    try:
        assert refused(asked(running.url)) == {*READ, *INGEST}
        assert refused(asked(running.url, "wrong")) == {*READ, *INGEST}
        assert refused(asked(running.url, "sesame", scheme="Basic")) == {*READ, *INGEST}
        assert refused(asked(running.url, "sesame")) == set()
        assert refused(asked(running.url, "sesame", host="evil.example")) == set()
        answer = httpx.get(f"{running.url}/v1/captures")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "invalid_api_key"
        with Engine(running.url, key="sesame") as engine:
            assert engine.capture(3)
    finally:
        running.stop()


def test_keys_apart(tmp_path: Path) -> None:
    keys = tmp_path / "key"
    keys.write_text("read\n")
    running = start_sidecar(tmp_path / "store", api_key_file=keys, ingest_api_key="write")
    try:
        assert refused(asked(running.url, "read")) == set(INGEST)
        assert refused(asked(running.url, "write")) == set(READ)
    finally:
        running.stop()


def test_without_a_key_the_host_must_be_loopback(sidecar: SidecarThread) -> None:
    for host in ("localhost", "localhost:8190", "127.0.0.1", "127.1.2.3:9", "[::1]:8190", "LOCALHOST", "a.localhost"):
        assert refused(asked(sidecar.url, host=host), 403) == set(), host
    for host in (
        "evil.example",
        "evil.example:8190",
        "10.0.0.1",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "[::2]",
    ):
        assert refused(asked(sidecar.url, host=host), 403) == {*READ, *INGEST}, host


def test_a_request_without_a_host(sidecar: SidecarThread) -> None:
    host, port = sidecar.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as plain:
        plain.sendall(b"GET /v1/captures HTTP/1.0\r\n\r\n")
        assert plain.recv(100).split()[1] in (b"400", b"403")


def test_insecure_takes_any_host(tmp_path: Path) -> None:
    running = start_sidecar(tmp_path / "store", insecure=True, host="0.0.0.0")
    try:
        assert refused(asked(running.url, host="evil.example"), 403) == set()
    finally:
        running.stop()


def test_keys_are_never_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    running = start_sidecar(tmp_path / "store", api_key="s3same", access_log=True)
    try:
        asked(running.url, "s3same")
        asked(running.url, "wr0ng")
        assert "s3same" not in repr(running.settings)
    finally:
        running.stop()
    assert "s3same" not in caplog.text
    assert "wr0ng" not in caplog.text


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.9.9.9", True),
        ("[::1]", True),
        ("::1", True),
        ("localhost.", True),
        ("0.0.0.0", False),
        ("127.0.0.1.x", False),
        ("", False),
        ("xlocalhost", False),
        ("::", False),
        ("1.2.3.4", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_host_names() -> None:
    names = {"a:1": "a", "a": "a", "[::1]:5": "[::1]", "[::1]": "[::1]", "::1": "::1", "": ""}
    assert {header: host_name(header) for header in names} == names
