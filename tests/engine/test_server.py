"""The OpenAI server with the connector: streams and not, hostile ids, several answers, an engine that is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.record import CaptureRecord
from hsconnector.client import Client
from hsconnector.errors import CaptureFailed
from tests.engine.inprocess import tokens
from tests.engine.runners import V2
from tests.engine.server import ApiServer
from tests.hugging_face import reference_states
from tests.models import LAYER_IDS
from tests.sidecar import SidecarThread, start_sidecar

pytestmark = [pytest.mark.engine, pytest.mark.both_runners, pytest.mark.timeout(900)]

HEARTBEAT_S = 3.0


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarThread]:
    """On a Unix socket for the engine, on TCP for clients."""
    folder = tmp_path_factory.mktemp("sidecar")
    running = start_sidecar(folder / "store", uds=folder / "hsc.sock", heartbeat_s=HEARTBEAT_S)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def server(
    models: dict[str, Path], sidecar: SidecarThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    connector = {"sidecar": f"unix://{sidecar.settings.uds}", "public_url": sidecar.url}
    running = ApiServer(models["qwen3"], tmp_path_factory.mktemp("server") / "log", connector=connector)
    assert ("Using V2 Model Runner" in running.log()) is bool(V2)
    yield running
    running.stop()


@pytest.fixture
def http(server: ApiServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def completion(http: httpx.Client, prompt: Any, headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0.0, **more}
    response = http.post("/v1/completions", json={"model": model_of(http), **body}, headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


def model_of(http: httpx.Client) -> str:
    return str(http.get("/v1/models").json()["data"][0]["id"])


def ours(**fields: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"hidden_states": fields}}


def check(client: Client, server: ApiServer, capture_id: str, prompt: list[int]) -> None:
    capture = client.fetch(capture_id, wait=30)
    assert capture.token_ids.tolist() == prompt
    right = reference_states(server.model, prompt, LAYER_IDS)
    assert (capture.hidden_states - right).abs().max() < 1e-5


def found(client: Client, count: int, **filters: Any) -> list[CaptureRecord]:
    """So many captures, once they are all final."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        records = client.find(**filters)
        if len(records) == count and all(record.final for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{len(client.find(**filters))} captures of {filters}, expected {count}")


def test_a_handle_comes_with_the_answer(http: httpx.Client, client: Client, server: ApiServer) -> None:
    prompt = tokens(150, seed=500)
    answer = completion(http, prompt)
    params = answer["kv_transfer_params"]
    assert params["handle"].endswith(params["capture_id"])
    check(client, server, params["handle"], prompt)


def test_a_stream_is_found_by_the_clients_id(http: httpx.Client, client: Client, server: ApiServer) -> None:
    """vLLM gives `kv_transfer_params` in answers that are not streamed only."""
    prompt = tokens(90, seed=501)
    body = {"model": model_of(http), "prompt": prompt, "max_tokens": 6, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "stream-1"}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    (record,) = found(client, 1, client_id="stream-1")
    check(client, server, record.capture_id, prompt)


def test_chat_streamed_and_not(http: httpx.Client, client: Client, server: ApiServer) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    for stream, name in ((False, "chat-1"), (True, "chat-2")):
        body = {
            "model": model_of(http),
            "messages": messages,
            "max_tokens": 5,
            "stream": stream,
            **ours(sample_id=name),
        }
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        (record,) = found(client, 1, sample_id=name)
        capture = client.fetch(record.capture_id, wait=30)
        check(client, server, record.capture_id, capture.token_ids.tolist())


def test_several_answers_and_several_prompts(http: httpx.Client, client: Client, server: ApiServer) -> None:
    """`n=2` and two prompts in one call: one capture per engine request, all found by sample and by client id."""
    prompts = [tokens(20, seed=502), tokens(21, seed=503)]
    completion(http, prompts, {"X-Request-Id": "both"}, n=2, temperature=1.0, **ours(sample_id="both"))
    by_sample = found(client, 4, sample_id="both")
    by_client = found(client, 4, client_id="both")
    assert {r.capture_id for r in by_sample} == {r.capture_id for r in by_client}
    assert sorted(record.num_rows for record in by_sample) == [20, 20, 21, 21]
    for record in by_sample:
        check(client, server, record.capture_id, prompts[record.num_rows - 20])


def test_a_stop_string(http: httpx.Client, client: Client, server: ApiServer) -> None:
    prompt = tokens(60, seed=504)
    text = completion(http, prompt, max_tokens=20, ignore_eos=True)["choices"][0]["text"]
    answer = completion(http, prompt, max_tokens=20, ignore_eos=True, stop=[text[6:10]], **ours(sample_id="stop"))
    assert answer["choices"][0]["finish_reason"] == "stop"
    (record,) = found(client, 1, sample_id="stop")
    check(client, server, record.capture_id, prompt)


HOSTILE = ["../../x", "a/b", "..%2f..%2fx", "CON", "x" * 4096, "täst", "a b", "'; drop table captures; --", "-", "{}"]


def test_hostile_request_ids(http: httpx.Client, client: Client, server: ApiServer, sidecar: SidecarThread) -> None:
    """`X-Request-Id` is the client's (Model-Optimizer#1509): served, captured, nothing outside the store changes."""
    before = sorted(path.name for path in sidecar.store.parent.iterdir())
    for index, name in enumerate(HOSTILE):
        prompt = tokens(10, seed=510 + index)
        answer = completion(http, prompt, {"X-Request-Id": name.encode()}, **ours(sample_id=f"hostile-{index}"))  # type: ignore[dict-item]
        check(client, server, answer["kv_transfer_params"]["handle"], prompt)
    assert sorted(path.name for path in sidecar.store.parent.iterdir()) == before


def test_the_same_client_id_twice(http: httpx.Client, client: Client) -> None:
    """Two captures, told apart by the engine's id, which ends in a random suffix (vllm#27987)."""
    for seed in (520, 521):
        completion(http, tokens(10, seed=seed), {"X-Request-Id": "job7"})
    records = found(client, 2, client_id="job7")
    assert len({record.request_id for record in records}) == 2


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"smaple_id": "x"}, "sample_id"),
        ({"tags": ["a"]}, "tags"),
        ({"dataset": "d" * 300}, "300 bytes"),
        ({"expected_content_hash": "xyz"}, "64 lower-case hex"),
        (5, "must be an object"),
    ],
)
def test_bad_wishes(http: httpx.Client, client: Client, wish: Any, words: str) -> None:
    """The request is served; its capture is `failed: bad_request` with the field named."""
    answer = completion(http, tokens(10, seed=530), kv_transfer_params={"hidden_states": wish})
    with pytest.raises(CaptureFailed, match=words) as failure:
        client.fetch(answer["kv_transfer_params"]["handle"], wait=30)
    assert failure.value.reason == "bad_request"


def test_a_wrong_expected_hash_is_quarantined(http: httpx.Client, client: Client) -> None:
    from hsconnector.errors import CaptureQuarantined

    answer = completion(http, tokens(10, seed=531), **ours(expected_content_hash="0" * 64))
    with pytest.raises(CaptureQuarantined, match="hash"):
        client.fetch(answer["kv_transfer_params"]["handle"], wait=30)


def test_clients_that_vanish(http: httpx.Client, client: Client, server: ApiServer) -> None:
    """vllm#56841: twenty requests, nineteen clients gone; the last is answered, the engine lives, no block is kept."""
    for index in range(19):
        body = {"model": model_of(http), "prompt": tokens(300, seed=540 + index), "max_tokens": 200, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.05)
    prompt = tokens(30, seed=560)
    check(client, server, completion(http, prompt)["kv_transfer_params"]["handle"], prompt)
    deadline = time.monotonic() + 60
    while server.kv_usage() > 0 and time.monotonic() < deadline:
        completion(http, tokens(3, seed=561), max_tokens=1)
        time.sleep(0.2)
    assert server.kv_usage() == 0


def test_an_engine_that_is_killed(
    http: httpx.Client, client: Client, server: ApiServer, sidecar: SidecarThread
) -> None:
    """Last: its open captures end within the heartbeat deadline and nothing half-written stays."""
    body = {"model": model_of(http), "prompt": tokens(1500, seed=570), "max_tokens": 400, "ignore_eos": True}
    body |= ours(sample_id="killed", include_output_tokens=True)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60) as response:
        next(response.iter_lines())
        server.kill()
    (record,) = found(client, 1, sample_id="killed")
    assert (record.state, record.reason) == (CaptureState.FAILED, "engine_lost")
    assert not list(sidecar.store.rglob("*.part"))
