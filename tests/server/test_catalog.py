"""The index: what costs what, what it forgets, and what becomes of one that cannot be used."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from hsconnector.capture.protocol import CaptureState, FailReason, new_capture_id
from hsconnector.capture.record import CaptureRecord, SlotStats, Verdict, describe
from hsconnector.errors import IndexFault
from hsconnector.storage import queries, sqlite
from hsconnector.storage.queries import Filter
from hsconnector.storage.schema import captures
from hsconnector.storage.statement import Statement
from server.catalog import Catalog
from server.lease import Unheld, Wanted
from server.leases import Leases
from server.metrics import Metrics

VERDICT = Verdict(True, slots=tuple(SlotStats(slot, slot, 1.5, -3.25, 3.25, 0.0, 0) for slot in range(4)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    opened = Catalog(path)
    yield opened
    opened.close()


def record(state: CaptureState = CaptureState.READY, **facts: Any) -> CaptureRecord:
    now = time.time()
    given = {"capture_id": new_capture_id(), "request_id": "chatcmpl-x-0123abcd", "created": now, "finished": now}
    return CaptureRecord(**{**given, "verdict": VERDICT, "state": state, **facts})


def put(catalog: Catalog, *records: CaptureRecord) -> None:
    for each in records:
        catalog.put(each)
    assert catalog.flush() == ""


def plan(path: Path, query: str, values: tuple[object, ...] = ()) -> str:
    with sqlite3.connect(path) as database:
        found = " ".join(row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {query}", values))
    database.close()
    return found


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (Filter(content_hash="a" * 64), "captures_content"),
        (Filter(sample_id="17"), "captures_sample_only"),
        (Filter(request_id="cmpl-1"), "captures_request"),
        (Filter(dataset="mine", sample_id="17"), "captures_sample"),
    ],
)
def test_a_listing_uses_its_index(path: Path, catalog: Catalog, wanted: Filter, index: str) -> None:
    """Partial indexes serve only a query that repeats their condition."""
    query, values = queries.page(wanted, after=False, oldest_first=True)
    assert index in plan(path, query.text, query.values({**values, "limit": 10}))


# ---- an index that cannot be used now


def contents(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.endswith(("-wal", "-shm")))


def test_a_locked_index_is_left_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_S", 0.1)
    opened = Catalog(path)
    put(opened, failed := record(CaptureState.FAILED))
    opened.close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(IndexFault, match="database is locked; another process holds it: let that end"):
        Catalog(path)
    other.close()
    assert contents(path.parent) == ["catalog.sqlite"]
    again = Catalog(path)
    assert again.get(failed.capture_id) == failed
    again.close()


@contextlib.contextmanager
def no_root() -> Iterator[None]:
    """Root may write everywhere, so for a moment it is somebody else."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_an_index_without_permission_is_left_as_it_is() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "catalog.sqlite"
        Catalog(path).close()
        path.chmod(0o444)
        path.parent.chmod(0o555)
        try:
            with no_root(), pytest.raises(IndexFault, match="let the user of the sidecar write it"):
                Catalog(path)
        finally:
            path.parent.chmod(0o700)
        assert contents(path.parent) == ["catalog.sqlite"]


def test_a_folder_in_the_place_of_the_index(path: Path) -> None:
    path.mkdir()
    with pytest.raises(IndexFault, match="unable to open database file; let the user of the sidecar"):
        Catalog(path)
    assert path.is_dir()


def test_an_index_that_is_made_is_opened_while_another_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening writes nothing: no lock is waited for, and a full disk does not matter."""
    monkeypatch.setattr(sqlite, "BUSY_S", 0.1)
    Catalog(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    Catalog(path).close()
    other.close()
    assert contents(path.parent) == ["catalog.sqlite"]


# ---- a broken one


def overwrite(path: Path, table: str) -> None:
    """One page of a table is garbage."""
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    database.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * size)


@pytest.mark.parametrize("table", ["captures", "captures_state", "client_ids", "lease_items", "lease_counts"])
def test_a_damaged_page_is_met_at_once(path: Path, table: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also in what only a lease would read: a start that did not see it would never mend it."""
    opened = Catalog(path)
    put(opened, *(record() for _ in range(200)))
    opened.close()
    Leases(path, Metrics()).close()
    overwrite(path, table)
    again = Catalog(path)
    try:
        assert again.page(Filter(), limit=1).records == []
        Leases(path, Metrics()).close()
    finally:
        again.close()
    assert "leases, acknowledgements, failures and deletions, which only the index held, are lost" in caplog.text


def test_an_index_is_moved_with_its_log(path: Path) -> None:
    """A program that has it open keeps its last writes in `-wal`; under the new name `sqlite3` finds both."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA journal_mode = WAL")
    other.execute("CREATE TABLE kept (name TEXT)")
    other.execute("INSERT INTO kept VALUES ('what only the log holds')")
    other.execute("PRAGMA user_version = 1")
    Catalog(path).close()
    (aside,) = (name for name in contents(path.parent) if ".broken-" in name)
    with sqlite3.connect(path.with_name(aside)) as database:
        assert database.execute("SELECT name FROM kept").fetchall() == [("what only the log holds",)]
    database.close()
    other.close()


# ---- one record that cannot be kept


@pytest.mark.parametrize("facts", [{"dataset": "\ud800"}, {"layer_ids": (2**70,)}, {"created": float("nan")}])
def test_a_record_that_cannot_be_kept_stops_no_other(
    catalog: Catalog, facts: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    good, bad, later = record(), record(**facts), record()
    put(catalog, good, bad, later)
    assert f"capture {bad.capture_id}: the index cannot hold it" in caplog.text
    assert [catalog.get(each.capture_id) for each in (good, bad, later)] == [good, None, later]
    assert catalog._pending == {}


# ---- what is forgotten


def test_what_ended_long_ago_is_forgotten(path: Path, catalog: Catalog) -> None:
    old = [record(state, created=1, finished=100) for state in (CaptureState.FAILED, CaptureState.EXPIRED)]
    begun_long_ago = record(CaptureState.EXPIRED, created=1)
    live = [record(state, created=1, finished=100) for state in (CaptureState.READY, CaptureState.QUARANTINED)]
    receiving = record(CaptureState.RECEIVING, created=1, finished=None)
    put(catalog, *old, begun_long_ago, *live, receiving)
    assert [catalog.forget(1000, 1) for _ in range(3)] == [1, 1, 0]
    assert [catalog.get(each.capture_id) for each in old] == [None, None]
    left = {each.capture_id for each in (begun_long_ago, *live, receiving)}
    assert {each.capture_id for each in catalog.page(Filter(), limit=10).records} == left
    assert {each.capture_id for each in catalog.page(Filter(client_id="x"), limit=10).records} == left
    with sqlite3.connect(path) as database:
        names = {row[0] for row in database.execute("SELECT DISTINCT capture_id FROM client_ids")}
    database.close()
    assert names == left


def test_what_comes_after_forgetting_is_lent(path: Path, catalog: Catalog) -> None:
    """A queue knows what it has lent by SQLite's row numbers, which must not begin again."""
    old = [record(created=1) for _ in range(20)]
    put(catalog, *old)
    leases = Leases(path, Metrics())
    try:
        lease = leases.take(Wanted(consumer="c", count=100))
        leases.ack(lease.lease_id, remove=True)
        assert leases.take(Wanted(consumer="c", count=100)).captures == ()
        put(catalog, *(msgspec.structs.replace(each, state=CaptureState.EXPIRED, finished=2.0) for each in old))
        assert catalog.forget(1000, 500) == 19
        new = [record(created=3) for _ in range(15)]
        put(catalog, *new)
        lent = leases.take(Wanted(consumer="c", count=100)).captures
        assert {each.record.capture_id for each in lent} == {each.capture_id for each in new}
    finally:
        leases.close()


def test_a_capture_that_left_keeps_no_verdict(catalog: Catalog) -> None:
    """Most of a record's bytes. What the store lost may come back, and failures say why they are."""
    removed = record(CaptureState.EXPIRED)
    lost = record(CaptureState.EXPIRED, reason=FailReason.STORE_ERROR)
    failed = record(CaptureState.FAILED, reason=FailReason.UNSOUND)
    put(catalog, removed, lost, failed)
    kept = {each.capture_id: each.verdict for each in catalog.page(Filter(), limit=3).records}
    assert kept == {removed.capture_id: None, lost.capture_id: VERDICT, failed.capture_id: VERDICT}
    shown = catalog.get(removed.capture_id)
    assert shown is not None and describe(shown, "", None)["verdict"] is None


def test_start_and_sweep_pass_over_what_has_ended(path: Path, catalog: Catalog) -> None:
    steps: list[str] = []
    put(catalog, ready := record(created=1), *(record(CaptureState.EXPIRED, created=1) for _ in range(50)))
    catalog._finder._driver.set_trace_callback(steps.append)
    assert [name for number in range(256) for name in catalog.live(f"{number:02x}")] == [ready.capture_id]
    assert "captures_live_folder" in plan(path, steps[0])
    leases = Leases(path, Metrics())
    leases._index._driver.set_trace_callback(steps.append)
    assert [each.capture_id for each in leases.unheld(Unheld.ANY, created_before=10)] == [ready.capture_id]
    leases.close()
    assert "captures_live" in plan(path, next(step for step in steps if "INDEXED BY" in step))


def test_a_capture_is_found_while_a_listing_reads(catalog: Catalog) -> None:
    """What the writer asks for every capture that is opened waits for no reader."""
    put(catalog, known := record())
    reading, done = threading.Event(), threading.Event()

    def slow(*_: object) -> int:
        reading.set()
        return 0 if done.wait(30) else 1

    catalog._reader._driver.create_function("slow", 0, slow)
    slow_query = Statement(sa.select(sa.func.slow()).select_from(captures))
    scan = threading.Thread(target=lambda: catalog._reader.rows(slow_query))
    scan.start()
    try:
        assert reading.wait(30)
        found: list[object] = []
        asking = threading.Thread(target=lambda: found.extend([catalog.get(known.capture_id), catalog.receiving()]))
        asking.start()
        asking.join(10)
        assert found == [known, []]
    finally:
        done.set()
        scan.join()
