"""Stores that were made before the index had revisions open, and nothing in them is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.sidecar import start_sidecar
from tests.storage.version_2 import DATA, UNSOUND, OldStore


@dataclass
class Opened:
    """A sidecar on an old store, and what was put there."""

    http: httpx.Client
    store: OldStore
    held: str
    done: str
    free: str
    unsound: str
    failed: str
    deleted: str
    consumed: str
    lost: str
    receiving: str


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    now = time.time()
    old = OldStore(tmp_path_factory.mktemp("old") / "store")
    held, done, free = old.whole(client="mine"), old.whole(), old.whole()
    ended = {"finished": now, "detail": "as it was told"}
    names = {
        "held": held,
        "done": done,
        "free": free,
        "unsound": old.whole("quarantined", UNSOUND),
        "failed": old.without_shard("failed", reason="aborted", **ended),
        "deleted": old.without_shard("expired", **ended),
        "consumed": old.without_shard("expired", reason="consumed", **ended),
        "lost": old.without_shard("expired", reason="store_error", **ended),
        "receiving": old.without_shard("receiving"),
    }
    old.lease("1" * 32, now + 3600, **{held: "leased", done: "acked", names["consumed"]: "gone"})
    old.lease("2" * 32, now - 3600, **{free: "free"})
    old.count("delivered", 4, now)
    old.count("acked", 2, now)
    old.close()
    running = start_sidecar(old.root)
    with httpx.Client(base_url=running.url, timeout=60) as http:
        yield Opened(http, old, **names)
    running.stop()


def test_captures_and_tombstones(opened: Opened) -> None:
    listed = opened.http.get("/v1/captures", params={"order": "oldest"}).json()["data"]
    told = {each["capture_id"]: (each["state"], each["reason"], each["detail"]) for each in listed}
    assert told == {
        opened.held: ("ready", None, ""),
        opened.done: ("ready", None, ""),
        opened.free: ("ready", None, ""),
        opened.unsound: ("quarantined", None, ""),
        opened.failed: ("failed", "aborted", "as it was told"),
        opened.deleted: ("expired", None, "as it was told"),
        opened.consumed: ("expired", "consumed", "as it was told"),
        opened.lost: ("expired", "store_error", "as it was told"),
        opened.receiving: ("failed", "sidecar_restarted", "the sidecar ended while this was being received"),
    }
    about = opened.http.get(f"/v1/captures/{opened.unsound}").json()
    assert (about["verdict"], about["tags"], about["shape"]) == (UNSOUND, {"k": "v"}, [2, 1, 4])
    assert not (opened.store.root / "damaged").exists()
    assert [file.name for file in opened.store.root.glob("catalog.sqlite*") if "broken" in file.name] == []


def test_bytes_are_served_by_id_client_id_and_content(opened: Opened) -> None:
    answer = opened.http.get(f"/v1/captures/{opened.held}/tensors")
    assert answer.content == opened.store.shard(opened.held).read_bytes()
    assert opened.http.get("/v1/requests/mine/hidden-states").content == answer.content
    assert opened.http.get(f"/v1/captures/{opened.held}/tensors?rows=0:2").content.endswith(DATA)
    unsound = opened.http.get(f"/v1/captures/{opened.unsound}/tensors?quarantined=1")
    assert unsound.content == opened.store.shard(opened.unsound, "quarantined").read_bytes()
    found = opened.http.post("/v1/captures:lookup", json={"content_hashes": ["c" * 64]}).json()["data"]
    assert len(found) == 4
    assert opened.http.get(f"/v1/captures/{opened.failed}/tensors").status_code == 424
    assert opened.http.get(f"/v1/captures/{opened.consumed}/tensors").status_code == 410


def test_leases_go_on(opened: Opened) -> None:
    (counts,) = opened.http.get("/v1/leases").json()["data"]
    assert counts | {"queue": "q", "consumer": "trainer", "delivered": 4, "acked": 2, "held": 1} == counts
    taken = opened.http.post("/v1/leases", json={"consumer": "other", "queue": "q", "count": 9}).json()["captures"]
    assert [(each["capture_id"], each["deliveries"]) for each in taken] == [(opened.free, 2)]
    answer = opened.http.post(f"/v1/leases/{'1' * 32}/ack").json()["captures"]
    assert answer == {opened.held: "acked", opened.done: "already_acked", opened.consumed: "already_acked"}


def test_a_store_on_which_nothing_was_ever_lent(tmp_path: Path) -> None:
    """Its index has no tables of leases yet."""
    old = OldStore(tmp_path / "store", lease_tables=False)
    names = [old.whole(), old.whole()]
    old.close()
    running = start_sidecar(old.root)
    try:
        taken = httpx.post(f"{running.url}/v1/leases", json={"consumer": "c", "count": 9}).json()["captures"]
        assert [each["capture_id"] for each in taken] == names
    finally:
        running.stop()
