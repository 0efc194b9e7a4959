"""What leaves the store, what never does, and what a full store does to those who send."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hsconnector.capture.protocol import CaptureState, Commit, FailReason, Message, Rows, Span, pack_token_ids
from server.store import RESERVE
from tests.server.engine import Engine, metric, opening, rows_of, until
from tests.sidecar import start_sidecar

ROWS = rows_of(20)


def shard_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in [*store.rglob("*.safetensors"), *store.rglob("*.part")])


def size_of_one(folder: Path) -> int:
    running = start_sidecar(folder / "measure")
    with Engine(running.url) as engine:
        engine.capture(ROWS)
    running.stop()
    return shard_bytes(running.store)


class Limited:
    """A sidecar whose store holds so many captures of `ROWS`."""

    def __init__(self, folder: Path, captures: float, **settings: Any) -> None:
        self.size = size_of_one(folder)
        self.quota = int(self.size * captures)
        self.sidecar = start_sidecar(folder / "store", **{"quota": self.quota, "sweep_s": 0.05, **settings})
        self.engine = Engine(self.sidecar.url)
        self.http = httpx.Client(base_url=self.sidecar.url, timeout=60)

    def close(self) -> None:
        self.http.close()
        self.engine.http.close()
        self.sidecar.stop()

    def state(self, name: str) -> str:
        return str(self.http.get(f"/v1/captures/{name}").json()["state"])

    def take(self, count: int = 1, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.http.post("/v1/leases", json={"consumer": "c", "count": count, **more}).json()
        return found

    def ack(self, lease: dict[str, Any], **more: Any) -> None:
        self.http.post(f"/v1/leases/{lease['lease_id']}/ack", json=more).raise_for_status()

    def collect(self, **body: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.http.post("/v1/captures:collect", json=body).raise_for_status().json()
        return found


@pytest.fixture
def limited(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Limited]:
    made = Limited(tmp_path, **request.param)
    yield made
    made.close()


limits = pytest.mark.parametrize


@limits("limited", [{"captures": 10, "evict": "oldest"}], indirect=True)
def test_a_thousand_captures_pass_through_a_budget_of_ten(limited: Limited) -> None:
    leases: list[dict[str, Any]] = []
    for number in range(1000):
        name = limited.engine.capture(ROWS)
        if number % 100 == 50:
            leases.append(limited.take(deadline_s=600))
        if len(leases) > 3:
            limited.http.post(f"/v1/leases/{leases.pop(0)['lease_id']}/release")
        assert limited.sidecar.app.store.used <= limited.quota
        if number % 50 == 0:
            assert shard_bytes(limited.sidecar.store) == limited.sidecar.app.store.used
            leased = [lease["captures"][0]["capture_id"] for lease in leases]
            assert [limited.state(each) for each in leased] == ["ready"] * len(leased)
    assert limited.state(name) == "ready"
    assert metric(limited.http, 'hsconnector_captures_total{reason="",state="ready"}') == 1000
    assert metric(limited.http, 'hsconnector_captures_total{reason="disk_full",state="failed"}') == 0
    assert metric(limited.http, 'hsconnector_removed_captures_total{why="oldest"}') >= 985
    assert limited.http.get("/readyz").status_code == 200


@limits("limited", [{"captures": 10, "evict": "oldest"}], indirect=True)
def test_a_batch_larger_than_what_is_free_makes_its_own_room(limited: Limited) -> None:
    """Sixteen captures in one batch: those of the batch's head have to go for its tail."""
    opened = [opening(num_prompt_tokens=20) for _ in range(16)]
    messages: list[Message] = []
    for message in opened:
        name = message.capture.capture_id
        messages += [message, Rows(name, 0, 20, Span(0, ROWS.nbytes)), Commit(name, 20, pack_token_ids(range(20)))]
    answers = limited.engine.send(*messages, payload=ROWS.tobytes())
    assert {answer.reason for answer in answers} == {None}
    states = [limited.state(each.capture.capture_id) for each in opened]
    assert (sorted(states), states[-1]) == (["expired"] * 6 + ["ready"] * 10, "ready")


@limits("limited", [{"captures": 3, "full_wait_s": 600}], indirect=True)
def test_a_full_store_slows_its_producer_until_a_consumer_is_done(limited: Limited) -> None:
    """Nothing may go but what is acknowledged, and the consumer takes its time: no capture fails."""
    lease = {}
    taken: list[str] = []

    def consume() -> None:
        nonlocal lease
        for _ in range(300):
            if len(taken) >= 30:
                return
            with httpx.Client(base_url=limited.sidecar.url, timeout=60) as http:
                lease = http.post("/v1/leases?wait=60", json={"consumer": "c", "count": 2}).json()
                taken.extend(capture["capture_id"] for capture in lease["captures"])
                http.post(f"/v1/leases/{lease['lease_id']}/ack", json={"delete": True}).raise_for_status()

    for _ in range(3):
        limited.engine.capture(ROWS)
    consumer = threading.Timer(0.3, consume)
    consumer.start()
    names = [limited.engine.capture(ROWS) for _ in range(27)]
    consumer.join()
    assert taken[3:] == names
    assert metric(limited.http, 'hsconnector_captures_total{reason="disk_full",state="failed"}') == 0
    assert metric(limited.http, "hsconnector_full_waits_total") >= 1


@limits("limited", [{"captures": 2.5, "full_wait_s": 0.2}], indirect=True)
def test_a_store_that_stays_full_fails_captures_and_loses_nothing(limited: Limited) -> None:
    kept = [limited.engine.capture(ROWS) for _ in range(2)]
    lease = limited.take(count=2)
    for _ in range(5):
        name = limited.engine.open(num_prompt_tokens=20)
        answer = limited.engine.rows(name, ROWS)
        assert (answer.reason, limited.state(name)) == (FailReason.DISK_FULL, "failed")
    assert [limited.state(each) for each in kept] == ["ready", "ready"]
    limited.ack(lease)
    assert limited.state(limited.engine.capture(ROWS)) == "ready"
    assert [limited.state(each) for each in kept] == ["expired", "ready"]
    assert "acknowledged" in limited.http.get(f"/v1/captures/{kept[0]}/tensors").json()["error"]["message"]


@limits("limited", [{"captures": 2.5, "full_wait_s": 600}], indirect=True)
def test_a_producer_is_not_held_longer_than_it_waits_for_an_answer(limited: Limited) -> None:
    """An answer that comes later would be taken for a lost sidecar, and a full disk be called that."""
    for _ in range(2):
        limited.engine.capture(ROWS)
    with Engine(limited.sidecar.url, patience_s=0.5) as hasty:
        name = hasty.open(num_prompt_tokens=20)
        assert hasty.rows(name, ROWS).reason is FailReason.DISK_FULL
    assert metric(limited.http, "hsconnector_full_waits_total") == 1


@limits("limited", [{"captures": 2.5, "evict": "none", "full_wait_s": 0}], indirect=True)
def test_nothing_is_removed_where_nothing_may_be(limited: Limited) -> None:
    kept = [limited.engine.capture(ROWS) for _ in range(2)]
    limited.ack(limited.take(count=2))
    name = limited.engine.capture(ROWS)
    assert [limited.state(each) for each in [*kept, name]] == ["ready", "ready", "failed"]


@limits("limited", [{"captures": 2.5, "evict": "oldest", "full_wait_s": 600}], indirect=True)
def test_a_capture_that_can_never_fit_fails_at_once(limited: Limited) -> None:
    kept = limited.engine.capture(ROWS)
    name = limited.engine.open(num_prompt_tokens=100)
    assert limited.engine.rows(name, rows_of(100)).reason is FailReason.DISK_FULL
    assert limited.state(kept) in ("ready", "expired")
    assert metric(limited.http, "hsconnector_full_waits_total") == 0


@limits("limited", [{"captures": 2.5, "full_wait_s": 600}], indirect=True)
def test_a_sidecar_that_stops_lets_go_of_who_waits(limited: Limited) -> None:
    for _ in range(2):
        limited.engine.capture(ROWS)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(limited.engine.capture, ROWS)
        until(lambda: metric(limited.http, "hsconnector_full_waits_total"))
        limited.http.close()
        limited.sidecar.stop()
        waiting.result()


@limits("limited", [{"captures": 100, "ttl_s": 0.05, "sweep_s": 0.01}], indirect=True)
def test_the_sweeper_leaves_what_is_read_leased_or_not_complete(limited: Limited) -> None:
    """As speculators#1011 asks. The reader is slow: the kernel's buffers hold less than the shard."""
    with Engine(limited.sidecar.url, hidden_size=1024) as engine:
        wide = rows_of(1200, hidden=1024)
        limited.sidecar.app.store.quota = None
        receiving = limited.engine.open(num_prompt_tokens=20)
        held: dict[str, Any] = {}
        for _ in range(1000):
            limited.engine.capture(ROWS)
            held = limited.take(deadline_s=600)
            if held["captures"]:
                break
        for _ in range(1000):
            name = engine.capture(wide)
            with limited.http.stream("GET", f"/v1/captures/{name}/tensors") as answer:
                if answer.status_code == 410:
                    continue
                pieces = answer.iter_raw(1 << 16)
                got = len(next(pieces))
                gone = limited.engine.capture(ROWS)
                until(lambda gone=gone: limited_state(limited.sidecar.url, gone) == "expired")  # type: ignore[misc]
                assert limited_state(limited.sidecar.url, name) == "ready"
                got += sum(map(len, pieces))
                assert got == int(answer.headers["content-length"])
            break
    assert limited.http.get(f"/v1/captures/{name}?wait=0").status_code == 200
    until(lambda: limited.state(name) == "expired")
    assert limited.state(held["captures"][0]["capture_id"]) == "ready"
    assert limited.engine.rows(receiving, ROWS).reason is None
    assert limited.engine.commit(receiving, range(20)).state is CaptureState.READY


def limited_state(url: str, name: str) -> str:
    return str(httpx.get(f"{url}/v1/captures/{name}").json()["state"])


@limits("limited", [{"captures": 100, "sweep_s": 600}], indirect=True)
def test_a_reader_that_goes_away_leaves_the_shard(limited: Limited) -> None:
    """A consumer that crashes drops its GET (speculators#1011): the capture is ready, and may go again."""
    with Engine(limited.sidecar.url, hidden_size=1024) as engine:
        limited.sidecar.app.store.quota = None
        name = engine.capture(rows_of(1200, hidden=1024))
    with httpx.Client(base_url=limited.sidecar.url) as leaving, leaving.stream("GET", f"/v1/captures/{name}/tensors"):
        assert limited.collect(ttl_s=0)["count"] == 0
    until(lambda: not limited.sidecar.app.readers.has(name))
    assert limited.state(name) == "ready"
    assert limited.collect(ttl_s=0)["data"][0]["capture_id"] == name
    assert limited.http.delete(f"/v1/captures/{name}").status_code == 204
    assert limited.http.delete(f"/v1/captures/{name}").status_code == 204


@limits("limited", [{"captures": 100, "sweep_s": 600}], indirect=True)
def test_the_declared_order(limited: Limited) -> None:
    old = limited.engine.capture(ROWS)
    asked = limited.engine.capture(ROWS, dataset="asked")
    acked = limited.engine.capture(ROWS, dataset="acked")
    bad = limited.engine.capture(rows_of(20) * 0)
    held, late = limited.engine.capture(ROWS, dataset="held"), limited.engine.capture(ROWS, dataset="asked")
    limited.take(filters={"dataset": "held"})
    second = limited.take(queue="second", filters={"dataset": "asked"})
    limited.ack(limited.take(filters={"dataset": "acked"}))
    limited.ack(limited.take(count=2, filters={"dataset": "asked"}), delete=True)
    assert second["captures"][0]["capture_id"] == asked
    assert limited.state(late) == "expired", "nobody else holds it"

    def order(**body: Any) -> list[tuple[str, str]]:
        return [(each["capture_id"], each["why"]) for each in limited.collect(**body)["data"]]

    assert order() == []
    assert order(max_bytes=0) == [(acked, "acked")]
    assert order(max_bytes=0, evict="none") == []
    assert order(max_bytes=0, evict="oldest") == [(acked, "acked"), (old, "oldest"), (bad, "oldest")]
    assert order(max_bytes=3 * limited.size, evict="oldest") == [(acked, "acked"), (old, "oldest")]
    assert order(ttl_s=0) == [(name, "ttl") for name in sorted([old, acked, bad])]
    assert order(ttl_s=600, max_bytes=10 * limited.size, evict="oldest") == []
    limited.http.post(f"/v1/leases/{second['lease_id']}/release")
    assert order(max_bytes=10 * limited.size) == [(asked, "asked")]
    assert limited.collect(max_bytes=0, evict="oldest", dry_run=False)["count"] == 4
    assert [limited.state(name) for name in (old, asked, acked, bad, held)] == ["expired"] * 4 + ["ready"]
    assert limited.sidecar.app.store.used == shard_bytes(limited.sidecar.store) == limited.size


@limits("limited", [{"captures": 100, "sweep_s": 600}], indirect=True)
def test_collecting_by_filter(limited: Limited) -> None:
    mine = [limited.engine.capture(ROWS, dataset="d") for _ in range(3)]
    other = limited.engine.capture(ROWS, dataset="e")
    opened = limited.engine.open(dataset="d")
    limited.take(filters={"dataset": "d"})
    would = limited.collect(filters={"dataset": "d"})
    assert (would["count"], would["held"], would["bytes"], would["dry_run"]) == (2, 1, 2 * limited.size, True)
    assert limited.state(mine[1]) == "ready"
    assert limited.collect(filters={"dataset": "d"}, dry_run=False)["count"] == 2
    assert [limited.state(name) for name in [*mine, other, opened]] == [
        "ready",
        "expired",
        "expired",
        "ready",
        "receiving",
    ]
    assert limited.collect(filters={"created_before": time.time() - 60}, dry_run=False)["count"] == 0
    created = limited.http.get(f"/v1/captures/{other}").json()["created"]
    before = {"dataset": "e", "created_before": created}
    assert limited.collect(filters=before)["count"] == 0, "before, not at"
    assert limited.collect(filters=before | {"created_before": math.nextafter(created, math.inf)})["count"] == 1
    answer = limited.http.post("/v1/captures:collect", json={"filters": {}, "dry_run": False})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "bad_request")


@limits("limited", [{"captures": 100, "forget_s": 0.2, "sweep_s": 0.02}], indirect=True)
def test_what_has_gone_is_forgotten_in_time(limited: Limited) -> None:
    """With its client ids; what is ready is not. The sweep does it in pieces."""
    deleted, failed = limited.engine.capture(ROWS, request_id="chatcmpl-mine-0123abcd"), limited.engine.open()
    ready = limited.engine.capture(ROWS)
    assert limited.http.delete(f"/v1/captures/{deleted}").status_code == 204
    assert limited.http.get(f"/v1/captures/{deleted}/tensors").status_code == 410
    limited.engine.fail(failed)
    for name in (deleted, failed):
        until(lambda name=name: limited.http.get(f"/v1/captures/{name}").status_code == 404)  # type: ignore[misc]
    assert limited.http.get("/v1/requests/mine/hidden-states").status_code == 404
    assert limited.http.delete(f"/v1/captures/{deleted}").status_code == 404
    assert limited.state(ready) == "ready"


@limits("limited", [{"captures": 100, "forget_s": 0, "sweep_s": 0.01}], indirect=True)
def test_nothing_is_forgotten_where_that_is_said(limited: Limited) -> None:
    name = limited.engine.capture(ROWS)
    limited.http.delete(f"/v1/captures/{name}")
    time.sleep(0.1)
    assert limited.state(name) == "expired"


@limits("limited", [{"captures": 100, "forget_s": 0.01, "sweep_s": 600}], indirect=True)
def test_a_sweep_forgets_for_a_moment_only(limited: Limited, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches wait for the thread that sweeps. The newest stays."""
    monkeypatch.setattr("server.retention.PAGE", 3)
    monkeypatch.setattr("server.retention.FORGET_WITHIN_S", 0.0, raising=False)
    names = [limited.engine.open() for _ in range(5)]
    for name in names:
        limited.engine.fail(name)
    time.sleep(0.05)
    app = limited.sidecar.app
    for left in (2, 1):
        app._writer.submit(app._sweep).result()
        assert len(limited.http.get("/v1/captures").json()["data"]) == left


@limits("limited", [{"captures": 100}], indirect=True)
def test_a_capture_is_counted_out_once(limited: Limited) -> None:
    """Sixteen deletions of one capture that have all seen it ready."""
    for _ in range(10):
        name = limited.engine.capture(ROWS)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(limited.http.delete, [f"/v1/captures/{name}"] * 16))
    assert limited.sidecar.app.store.used == 0


def test_a_disk_that_is_full_makes_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No quota: 30 captures of 38 kB pass through a disk that has room for 200 kB of shards beside the index."""

    def small(path: Path) -> Any:
        free = RESERVE + 200_000 - shard_bytes(tmp_path / "store")
        return SimpleNamespace(f_blocks=10 * RESERVE, f_frsize=1, f_bavail=free)

    monkeypatch.setattr(os, "statvfs", small)
    running = start_sidecar(tmp_path / "store", evict="oldest", full_wait_s=0)
    try:
        with Engine(running.url) as engine, httpx.Client(base_url=running.url, timeout=60) as http:
            names = [engine.capture(rows_of(100)) for _ in range(30)]
            assert http.get(f"/v1/captures/{names[-1]}").json()["state"] == "ready"
            assert metric(http, 'hsconnector_captures_total{reason="disk_full",state="failed"}') == 0
            assert metric(http, 'hsconnector_removed_captures_total{why="oldest"}') == 26
            assert shard_bytes(running.store) <= 200_000
    finally:
        running.stop()


@limits("limited", [{"captures": 2.5, "full_wait_s": 0.5}], indirect=True)
def test_a_store_that_is_full_again_slows_its_producer_again(limited: Limited) -> None:
    """Room came by a consumer's deletions; what a failed capture gives back is none, and delays nobody again."""

    def refused() -> float:
        begun = time.monotonic()
        name = limited.engine.open(num_prompt_tokens=20)
        assert limited.engine.rows(name, ROWS).reason is FailReason.DISK_FULL
        return time.monotonic() - begun

    for _ in range(2):
        for _ in range(2):
            assert limited.state(limited.engine.capture(ROWS)) == "ready"
        assert refused() >= 0.5
        assert sum(refused() for _ in range(5)) < 5 * 0.5
        limited.ack(limited.take(count=2), delete=True)
