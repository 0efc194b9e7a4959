"""Whose weights: from the stream and its captures into records, shards, listings and content hashes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hsconnector.capture.content import Content
from hsconnector.capture.header import open_header
from hsconnector.capture.protocol import CaptureState, pack_token_ids
from hsconnector.capture.record import record_of_header
from hsconnector.client import Client
from tests.server.engine import LAYERS, Engine, opening, rows_of
from tests.sidecar import SidecarThread

A, B, ADAPTER = "a" * 64, "b" * 64, "c" * 64


def ids(http: httpx.Client, **query: str) -> list[str]:
    return [item["capture_id"] for item in http.get("/v1/captures", params=query).json()["data"]]


@pytest.fixture
def sender(sidecar: SidecarThread) -> Iterator[Engine]:
    with Engine(sidecar.url, weights_id=A, kv_cache_dtype="fp8_e4m3") as running:
        yield running


def test_record_shard_and_hash_say_whose(sender: Engine, http: httpx.Client) -> None:
    name = sender.capture(3, lora="l", lora_weights_id=ADAPTER)
    about = http.get(f"/v1/captures/{name}").json()
    said = {"weights_id": A, "kv_cache_dtype": "fp8_e4m3", "lora_weights_id": ADAPTER}
    assert about | said == about
    header = open_header(Path(about["path"]))
    assert {key: header.metadata[key] for key in said} == said
    assert record_of_header(header, CaptureState.READY, complete=True).content.weights_id == A
    content = Content("x", "y", LAYERS, "z", (), A, "float32", "fp8_e4m3", ADAPTER)
    assert about["content_hash"] == content.hash_of(pack_token_ids(range(3)))


def test_weights_that_changed_in_a_running_engine(sender: Engine, http: httpx.Client) -> None:
    """vllm#49040: equal tokens before and after are two contents; what sends now says the newer."""
    before = sender.capture(3)
    assert [each["weights_id"] for each in http.get("/v1/producers").json()["data"]] == [A]
    after = sender.capture(3, weights_id=B)
    assert [each["weights_id"] for each in http.get("/v1/producers").json()["data"]] == [B]
    hashes = {http.get(f"/v1/captures/{name}").json()["content_hash"] for name in (before, after)}
    assert len(hashes) == 2
    sender.capture(4)
    assert [each["weights_id"] for each in http.get("/v1/producers").json()["data"]] == [A]


def test_captures_are_listed_by_weights(sender: Engine, engine: Engine, http: httpx.Client) -> None:
    old = engine.capture(3, dataset="d")
    first, second = sender.capture(3, dataset="d"), sender.capture(3, dataset="e", weights_id=B)
    assert ids(http, weights_id=A) == [first]
    assert ids(http, weights_id=B) == [second]
    assert ids(http, weights_id="") == [old]
    assert ids(http, weights_id=A, dataset="e") == []
    found = http.post(
        "/v1/captures:lookup", json={"content_hashes": [http.get(f"/v1/captures/{first}").json()["content_hash"]]}
    )
    assert [each["weights_id"] for each in found.json()["data"]] == [A]


def test_whose_weights_a_data_set_is_of(sender: Engine, engine: Engine, sidecar: SidecarThread) -> None:
    """Only what is ready counts, the newest weights come last."""
    engine.capture(3, dataset="d")
    sender.capture(3, dataset="d", weights_id=B)
    sender.capture(3, dataset="d")
    newest = sender.capture(4, dataset="d")
    sender.open(dataset="d")
    sender.capture(5, dataset="e")
    with Client(sidecar.url) as client:
        held = client.weights(dataset="d")
        assert [(each.weights_id, each.captures) for each in held] == [("", 1), (B, 1), (A, 2)]
        assert held[-1].newest == newest
        assert [each.captures for each in client.weights(model="model")] == [1, 1, 3]
        assert client.weights(model="other") == []


@pytest.mark.parametrize("name", ["weights_id", "lora_weights_id"])
def test_an_id_that_is_none_fails_its_capture(sender: Engine, name: str) -> None:
    (answer,) = sender.send(opening(**{name: "A" * 64}))
    assert answer.state is CaptureState.FAILED and f"{name} 'AAAA" in answer.detail


def test_a_stream_with_an_id_that_is_none_is_refused(sidecar: SidecarThread) -> None:
    with pytest.raises(RuntimeError, match="weights_id 'x' is not 64 lower-case hex digits"):
        Engine(sidecar.url, weights_id="x")


def test_a_shard_of_unknown_weights_says_nothing_of_them(engine: Engine, http: httpx.Client) -> None:
    """Its bytes are those of sidecars that told no weights apart."""
    about = http.get(f"/v1/captures/{engine.capture(rows_of(3))}").json()
    assert not {"weights_id", "kv_cache_dtype", "lora_weights_id"} & open_header(Path(about["path"])).metadata.keys()
    assert (about["weights_id"], about["lora_weights_id"]) == ("", "")
