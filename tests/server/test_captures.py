from __future__ import annotations

import threading
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsconnector.capture.protocol import new_capture_id
from hsconnector.capture.record import client_ids
from tests.examples import examples
from tests.server.engine import Engine, opening, rows_of, until
from tests.sidecar import SidecarThread


def ids(http: httpx.Client, **query: object) -> list[str]:
    return [item["capture_id"] for item in http.get("/v1/captures", params=query).json()["data"]]  # type: ignore[arg-type]


def test_metadata_says_everything(engine: Engine, http: httpx.Client, sidecar: SidecarThread) -> None:
    name = engine.capture(3, dataset="d", sample_id="s", tags={"k": "v"}, lora="l", created=1234.5)
    about = http.get(f"/v1/captures/{name}").json()
    assert about | {
        "capture_id": name, "state": "ready", "reason": None, "request_id": "cmpl-request-0-0123abcd", "dataset": "d",
        "sample_id": "s", "tags": {"k": "v"}, "lora": "l", "created": 1234.5, "num_rows": 3, "num_prompt_tokens": 3,
        "rows": "prompt", "layer_ids": [0, 2, 4], "num_layers": 4, "hidden_size": 32, "dtype": "float32",
        "shape": [3, 3, 32], "model": "model", "engine_id": "engine", "vllm_version": "0.32.0",
        "handle": f"{sidecar.url}/v1/captures/{name}",
    } == about  # fmt: skip
    assert about["verdict"]["sound"] is True
    assert [slot["layer_id"] for slot in about["verdict"]["slots"]] == [0, 2, 4]


def test_filters(engine: Engine, http: httpx.Client) -> None:
    one = engine.capture(3, request_id="a-00000000", dataset="d1", sample_id="s", created=100.0)
    two = engine.capture(4, request_id="b-00000000", dataset="d2", sample_id="s", created=200.0)
    three = engine.open(request_id="c-00000000", created=300.0)
    content = http.get(f"/v1/captures/{one}").json()["content_hash"]
    assert ids(http) == [three, two, one]
    assert ids(http, order="oldest") == [one, two, three]
    assert ids(http, request_id="a-00000000") == [one]
    assert ids(http, request_id="a") == []
    assert ids(http, client_id="a") == [one]
    assert ids(http, dataset="d2") == [two]
    assert ids(http, sample_id="s") == [two, one]
    assert ids(http, dataset="d1", sample_id="s") == [one]
    assert ids(http, state="receiving") == [three]
    assert ids(http, content_hash=content) == [one]
    assert ids(http, model="model", since=150) == [three, two]
    assert ids(http, model="other") == []
    assert http.get("/v1/captures?state=nonsense").json()["error"]["param"] == "state"
    assert http.get("/v1/captures?limit=0").status_code == 400


@pytest.mark.parametrize("order", ["oldest", "newest"])
def test_pages_give_each_capture_once_while_more_arrive(engine: Engine, http: httpx.Client, order: str) -> None:
    names = [engine.capture(1) for _ in range(7)]
    seen, cursor, sizes = [], "", []
    while cursor is not None:
        page = http.get("/v1/captures", params={"limit": 3, "cursor": cursor, "order": order}).json()
        seen += [item["capture_id"] for item in page["data"]]
        sizes.append(len(page["data"]))
        cursor = page["next_cursor"]
        if order == "newest":
            engine.capture(1)
    assert [name for name in seen if name in names] == (names if order == "oldest" else names[::-1])
    assert sizes == [3, 3, 1]


@pytest.mark.parametrize(
    ("engine_id", "certain", "possible"),
    [
        ("chatcmpl-X-0123abcd", {"chatcmpl-X", "X"}, set()),
        ("cmpl-X-0-0123abcd", {"cmpl-X-0", "cmpl-X", "X"}, set()),
        ("cmpl-X-12-0123abcd", {"cmpl-X-12", "cmpl-X", "X"}, set()),
        ("1_cmpl-X-0-0123abcd", {"1_cmpl-X-0", "cmpl-X-0", "cmpl-X", "X"}, set()),
        ("0_chatcmpl-X-0123abcd", {"0_chatcmpl-X", "chatcmpl-X", "X"}, set()),
        ("generate-tokens-X-0123abcd", {"generate-tokens-X", "X"}, set()),
        ("chatcmpl-X_3-0123abcd", {"chatcmpl-X_3", "X_3"}, {"chatcmpl-X", "X"}),
        ("resp_X_0-0123abcd", {"resp_X_0"}, {"resp_X"}),
        ("17-0123abcd", {"17"}, set()),
        ("1_17-0123abcd", {"1_17"}, {"17", "1"}),
        ("job-00000000-0123abcd", {"job-00000000"}, set()),
        ("cmpl-job-00000000-0-0123abcd", {"cmpl-job-00000000-0", "cmpl-job-00000000", "job-00000000"}, set()),
        ("plain", {"plain"}, set()),
        ("X-0123ABCD", {"X-0123ABCD"}, set()),
        ("-0123abcd", {""}, set()),
    ],
)
def test_the_ids_a_client_may_know(engine_id: str, certain: set[str], possible: set[str]) -> None:
    found = client_ids(engine_id)
    assert {name for name, rank in found.items() if rank == 0} == certain
    assert {name for name, rank in found.items() if rank == 1} == possible


@settings(max_examples=examples(100), deadline=None)
@given(
    client=st.text(min_size=1),
    route=st.sampled_from(["chatcmpl-{}", "cmpl-{}-3", "generate-tokens-{}", "{}"]),
    n=st.integers(-1, 3),
)
def test_any_client_id_is_found(client: str, route: str, n: int) -> None:
    engine_id = ("" if n < 0 else f"{n}_") + route.format(client) + "-0123abcd"
    assert client in client_ids(engine_id)


def test_two_requests_with_the_same_client_id(engine: Engine, http: httpx.Client) -> None:
    """Both are listed by the client's id, each found by the engine's (vllm#27987)."""
    one = engine.capture(2, request_id="chatcmpl-job7-00000001")
    two = engine.capture(3, request_id="chatcmpl-job7-00000002")
    assert ids(http, client_id="job7") == [two, one]
    assert (
        http.get("/v1/requests/chatcmpl-job7-00000001/hidden-states")
        .headers["content-location"]
        .endswith(f"{one}/tensors")
    )
    several = http.get("/v1/requests/job7/hidden-states")
    assert several.status_code == 300
    assert [item["capture_id"] for item in several.json()["data"]] == [one, two]


def test_a_certain_match_hides_a_possible_one(engine: Engine, http: httpx.Client) -> None:
    one = engine.capture(2, request_id="chatcmpl-a_1-00000001")
    assert ids(http, client_id="a") == [one]
    two = engine.capture(2, request_id="chatcmpl-a-00000002")
    assert ids(http, client_id="a") == [two]
    assert http.get("/v1/requests/a/hidden-states").headers["content-location"].endswith(f"{two}/tensors")


@pytest.mark.parametrize("client", ["a/b", "../../x", "50%", "x y", "名前"])
def test_by_request_with_any_id(engine: Engine, http: httpx.Client, client: str) -> None:
    engine.capture(2, request_id=f"cmpl-{client}-0-00000001")
    path = httpx.URL("/").copy_with(path=f"/v1/requests/{client}/hidden-states") if client != "../../x" else None
    url = path or "/v1/requests/..%2F..%2Fx/hidden-states"
    assert http.get(url).status_code == 200


def test_by_request_that_is_unknown(http: httpx.Client) -> None:
    assert http.get("/v1/requests/nobody/hidden-states?wait=0.05").status_code == 404


def later(seconds: float, call: object, *arguments: object) -> threading.Timer:
    timer = threading.Timer(seconds, call, arguments)  # type: ignore[arg-type]
    timer.start()
    return timer


def test_waiting_for_the_end(engine: Engine, http: httpx.Client) -> None:
    name = engine.open()
    engine.rows(name, rows_of(3))
    timer = later(0.3, engine.commit, name, range(3))
    assert http.get(f"/v1/captures/{name}?wait=200").json()["state"] == "ready"
    timer.join()


def test_waiting_for_a_capture_not_heard_of(engine: Engine, http: httpx.Client) -> None:
    opened = opening()
    timer = later(0.3, lambda: (engine.send(opened), engine.fail(opened.capture.capture_id)))
    assert http.get(f"/v1/captures/{opened.capture.capture_id}/tensors?wait=200").status_code == 424
    timer.join()


def test_waiting_for_a_request(engine: Engine, http: httpx.Client) -> None:
    timer = later(0.3, lambda: engine.capture(3, request_id="chatcmpl-soon-0123abcd"))
    assert http.get("/v1/requests/soon/hidden-states?wait=200").status_code == 200
    timer.join()


def test_waiting_in_vain(engine: Engine, http: httpx.Client) -> None:
    name = engine.open()
    answer = http.get(f"/v1/captures/{name}?wait=0.1")
    assert (answer.status_code, answer.json()["state"], answer.headers["retry-after"]) == (200, "receiving", "1")
    assert http.get(f"/v1/captures/{name}/tensors?wait=0.1").status_code == 202
    assert http.get(f"/v1/captures/{new_capture_id()}?wait=0.1").status_code == 404


def test_a_bad_id_is_not_waited_for(http: httpx.Client) -> None:
    started = time.monotonic()
    assert http.get("/v1/captures/nonsense?wait=50").status_code == 404
    assert time.monotonic() - started < 40


def test_many_wait_for_one(sidecar: SidecarThread, engine: Engine) -> None:
    name = engine.open()
    engine.rows(name, rows_of(3))
    states: list[str] = []

    def wait() -> None:
        states.append(httpx.get(f"{sidecar.url}/v1/captures/{name}?wait=60", timeout=90).json()["state"])

    readers = [threading.Thread(target=wait) for _ in range(20)]
    for reader in readers:
        reader.start()
    until(lambda: len(sidecar.app.waiters) == 20)
    engine.commit(name, range(3))
    for reader in readers:
        reader.join()
    assert states == ["ready"] * 20
    assert len(sidecar.app.waiters) == 0
