from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import httpx
import pytest

from server.routes.deps import MAX_JSON_BYTES
from server.waiting import Waiters
from tests.server.engine import Engine
from tests.sidecar import SidecarThread


def test_the_import_is_light() -> None:
    script = (
        "import sys, server.app, server.listen; heavy = {'torch', 'vllm', 'pandas', 'transformers', 'safetensors'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_health_version_and_index(http: httpx.Client) -> None:
    assert [http.get(path).status_code for path in ("/health", "/livez", "/readyz", "/docs")] == [200] * 4
    assert http.get("/version").json() == {"version": "0.1.0", "protocol": 1}
    assert http.get("/").json()["docs"] == "/docs"


def test_every_route_is_described(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert set(paths) >= {
        "/v1/producers", "/v1/ingest", "/v1/captures", "/v1/captures/{capture_id}", "/v1/captures/{capture_id}/tensors",
        "/v1/requests/{request_id}/hidden-states", "/health", "/readyz", "/version", "/metrics",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("PUT", "/v1/captures", 405), ("GET", "/v1/ingest", 405)]
)
def test_errors_have_one_shape(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}


def test_no_route_reads_json_without_bound(http: httpx.Client) -> None:
    """Each route that says it takes JSON, by its length and, where it has none, as it comes."""
    paths = http.get("/openapi.json").json()["paths"]
    taking = [path for path, verbs in paths.items() if "application/json" in _body_of(verbs.get("post", {}))]
    assert {"/v1/leases", "/v1/leases/{lease_id}/ack", "/v1/captures:lookup", "/v1/captures:collect"} <= set(taking)
    huge = b'{"consumer": "' + b"x" * MAX_JSON_BYTES + b'"}'
    for path in taking:
        for content in (huge, (huge[at : at + (1 << 16)] for at in range(0, len(huge), 1 << 16))):
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            assert (path, answer.status_code, answer.json()["error"]["type"]) == (path, 413, "body_too_large")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/leases", {"consumer": "\ud800"}),
        *(("/v1/leases", {"consumer": "c", "filters": {name: "a\udfff"}}) for name in ("dataset", "model", "lora")),
        ("/v1/leases/none/ack", {"capture_ids": ["\ud800"]}),
        ("/v1/leases/none/release", {"capture_ids": ["\ud800"]}),
        ("/v1/captures:collect", {"filters": {"model": "\ud800"}}),
        ("/v1/captures:lookup", {"content_hashes": ["\ud800"]}),
    ],
)
def test_half_a_character_is_refused_before_the_index_sees_it(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """JSON can say what is no Unicode text, and SQLite cannot hold it."""
    answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "bad_request")


def _body_of(verb: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = verb.get("requestBody", {}).get("content", {})
    return found


def test_every_metric_is_there_at_zero(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for line in (
        'hsconnector_captures_total{reason="",state="ready"}',
        'hsconnector_captures_total{reason="disk_full",state="failed"}',
        'hsconnector_captures_total{reason="engine_lost",state="failed"}',
        'hsconnector_findings_total{reason="constant_rows"}',
        'hsconnector_findings_total{reason="wrong_content_hash"}',
        'hsconnector_row_bytes_total{via="body"}',
        "hsconnector_rows_total",
        "hsconnector_sent_bytes_total",
        "hsconnector_damaged_files_total",
        "hsconnector_lost_producers_total",
        "hsconnector_producers",
        "hsconnector_captures_receiving",
        "hsconnector_queue_batches",
        "hsconnector_store_bytes",
    ):
        assert f"\n{line} 0.0\n" in text, line


def test_what_clients_write_is_no_label(engine: Engine, http: httpx.Client) -> None:
    engine.capture(
        2, request_id="tell-tale", dataset="tell-tale", sample_id="tell-tale", tags={"tell-tale": "tell-tale"}
    )
    assert "tell-tale" not in http.get("/metrics").text


def test_an_idle_connection_is_kept_for_longer_than_a_minute(sidecar: SidecarThread) -> None:
    assert sidecar._server.config.timeout_keep_alive >= 75


def test_a_waiter_is_woken_by_its_name_only() -> None:
    async def scenario() -> tuple[int, int, int]:
        waiters = Waiters()
        asked = 0

        async def ask() -> int:
            nonlocal asked
            asked += 1
            return asked

        waiting = asyncio.create_task(waiters.until("a", ask, lambda n: n >= 3, 60))
        await asyncio.sleep(0)
        for name in ("b", "a", "b", "a"):
            waiters.tell([name])
            for _ in range(5):
                await asyncio.sleep(0)
        answer = await waiting
        waiters.close()
        return answer, await waiters.until("c", ask, lambda n: False, 60), len(waiters)

    assert asyncio.run(scenario()) == (3, 4, 0)


def test_a_bug_is_answered_in_the_same_shape(
    http: httpx.Client, sidecar: SidecarThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(sidecar.app.catalog, "page", fails)
    answer = http.get("/v1/captures")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "internal_error")
    assert "secret" not in answer.text
