"""Looking captures up by content, and listing who sends, over the sidecar's own HTTP."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from hsconnector.capture.content import Content
from hsconnector.capture.protocol import FailReason, pack_token_ids
from hsconnector.storage.queries import with_content
from tests.feeding import Feeder
from tests.sidecar import SidecarThread, start_sidecar

LAYERS = (0, 2, 5)


def digest(token_ids: list[int], *, model: str = "tiny", layers: tuple[int, ...] = LAYERS) -> str:
    return Content(model, "", layers).hash_of(pack_token_ids(token_ids))


def states(rows: int) -> torch.Tensor:
    return torch.randn(rows, len(LAYERS), 8, generator=torch.Generator().manual_seed(rows))


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarThread]:
    running = start_sidecar(tmp_path / "store")
    yield running
    running.stop()


@pytest.fixture
def feeder(sidecar: SidecarThread) -> Iterator[Feeder]:
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=8) as opened:
        yield opened


def look_up(url: str, *hashes: str) -> list[dict[str, object]]:
    answer = httpx.post(f"{url}/v1/captures:lookup", json={"content_hashes": list(hashes)}).raise_for_status()
    data: list[dict[str, object]] = answer.json()["data"]
    return data


def test_what_is_here_is_found_and_nothing_else(sidecar: SidecarThread, feeder: Feeder) -> None:
    first = feeder.capture(states(3), [1, 2, 3], dataset="d", sample_id="s")
    feeder.capture(states(4), [1, 2, 3, 4])
    found = look_up(sidecar.url, digest([1, 2, 3]), digest([9]), digest([1, 2, 3], model="other"))
    assert [each["capture_id"] for each in found] == [first]
    assert found[0] | {"state": "ready", "dataset": "d", "sample_id": "s", "num_rows": 3} == found[0]
    assert str(found[0]["handle"]).endswith(f"/v1/captures/{first}")
    assert Path(str(found[0]["path"])).is_file()


def test_every_capture_of_a_content_is_given_oldest_first(sidecar: SidecarThread, feeder: Feeder) -> None:
    captures = [feeder.capture(states(2), [7, 8]) for _ in range(3)]
    httpx.delete(f"{sidecar.url}/v1/captures/{captures[1]}").raise_for_status()
    found = look_up(sidecar.url, digest([7, 8]))
    assert [(each["capture_id"], each["state"]) for each in found] == list(
        zip(sorted(captures), ["ready" if c != captures[1] else "expired" for c in sorted(captures)], strict=True)
    )


def test_a_quarantined_capture_is_given_with_what_is_wrong(sidecar: SidecarThread, feeder: Feeder) -> None:
    feeder.capture(torch.zeros(2, len(LAYERS), 8), [5, 6])
    (found,) = look_up(sidecar.url, digest([5, 6]))
    assert found["state"] == "quarantined"
    assert "zero" in str(found["detail"])


def test_what_is_received_or_failed_has_no_content_yet(sidecar: SidecarThread, feeder: Feeder) -> None:
    feeder.open(2)
    feeder.fail(feeder.open(2), FailReason.ABORTED)
    assert look_up(sidecar.url, digest([1, 2])) == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"content_hashes": "a" * 64},
        {"content_hashes": ["A" * 64]},
        {"content_hashes": ["a" * 63]},
        {"content_hashes": ["a" * 64] * 1001},
        {"content_hashes": [], "more": 1},
        [],
    ],
)
def test_a_body_that_is_no_lookup_is_refused(sidecar: SidecarThread, body: object) -> None:
    answer = httpx.post(f"{sidecar.url}/v1/captures:lookup", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "bad_request"


def test_a_thousand_hashes_are_looked_up_by_the_index(sidecar: SidecarThread, feeder: Feeder) -> None:
    feeder.capture(states(1), [1])
    hashes = [digest([number]) for number in range(1000)]
    assert len(look_up(sidecar.url, *hashes)) == 1
    query, values = with_content(hashes)
    with contextlib.closing(sqlite3.connect(sidecar.app.catalog.path)) as index:
        plan = index.execute(f"EXPLAIN QUERY PLAN {query.text}", query.values(values)).fetchall()
    assert any("captures_content" in step[3] for step in plan)


def test_the_engines_that_send_are_listed(sidecar: SidecarThread) -> None:
    assert httpx.get(f"{sidecar.url}/v1/producers").json()["data"] == []
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=8, engine_id="e-7", model="m"):
        (producer,) = httpx.get(f"{sidecar.url}/v1/producers").json()["data"]
    assert (producer["engine_id"], producer["model"], producer["layer_ids"]) == ("e-7", "m", list(LAYERS))
    assert "ring" not in producer
    assert "producer_id" not in producer


def test_listing_engines_takes_the_reading_key(tmp_path: Path) -> None:
    running = start_sidecar(tmp_path / "store", api_key="reads", ingest_api_key="writes")
    try:
        with Feeder(running.url, layer_ids=LAYERS, hidden_size=8, key="writes"):
            answers = {
                key: httpx.get(f"{running.url}/v1/producers", headers={"Authorization": f"Bearer {key}"}).status_code
                for key in ("reads", "writes")
            }
    finally:
        running.stop()
    assert answers == {"reads": 200, "writes": 401}
