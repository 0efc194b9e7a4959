"""Two runs on the same data, as from two machines: what one has captured the other does not ask for, and says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hsconnector.capture.content import Content
from hsconnector.capture.protocol import new_capture_id, pack_token_ids
from hsconnector.extraction.ledger import Fate, Ledger
from tests.extraction.fake_engine import LAYERS, FakeEngine
from tests.extraction.test_extraction import Run, assert_each_once, captures, fresh_rows
from tests.sidecar import SidecarThread, start_sidecar


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarThread]:
    running = start_sidecar(tmp_path_factory.mktemp("sidecar") / "store")
    yield running
    running.stop()


@pytest.fixture
def engine(sidecar: SidecarThread) -> Iterator[FakeEngine]:
    running = FakeEngine(sidecar.url)
    yield running
    running.stop()


@pytest.fixture
def other(sidecar: SidecarThread) -> Iterator[FakeEngine]:
    running = FakeEngine(sidecar.url)
    yield running
    running.stop()


def test_what_another_run_has_captured_since_is_not_asked_for_and_said(
    sidecar: SidecarThread, engine: FakeEngine, other: FakeEngine
) -> None:
    """The other run goes through all rows while the first request of this one is at its engine."""
    rows = fresh_rows(40)
    theirs: list[Ledger] = []

    def run_the_other(number: int, sample: str) -> str:
        if number == 0:
            theirs.append(Run([other.url], sidecar.url, "since")(rows))
        return ""

    engine.fault = run_the_other
    ours = Run([engine.url], sidecar.url, "since", concurrency=1)(rows)
    assert theirs[0].counts == {Fate.CAPTURED: 40}
    assert engine.asked == ["0", "1"], "it had looked at the second just before"
    assert ours.complete
    assert ours.counts == {Fate.CAPTURED: 2, Fate.STORED: 38}
    assert ours.doubles == 2
    assert (
        "38 stored by another run on the same data meanwhile (--shard I/N gives each its own part)" in ours.sentence()
    )
    assert "another run" not in theirs[0].sentence()
    found = captures(sidecar, "since")
    assert len(found) == 42
    assert_each_once([record for record in found if record.final and record.reason is None and record.num_rows], rows)


def test_what_another_run_has_under_way_is_waited_for(sidecar: SidecarThread, engine: FakeEngine) -> None:
    rows, capture_id = fresh_rows(8), new_capture_id()
    token_ids: list[int] = rows[5]["input_ids"]  # type: ignore[assignment]
    digest = Content("tiny", "", LAYERS).hash_of(pack_token_ids(token_ids))
    about = {"dataset": "under way", "sample_id": "5", "tags": {}, "expected_content_hash": digest}

    def theirs(number: int, sample: str) -> str:
        if sample == "0":
            engine.open(capture_id, token_ids, about, engine.cuts)
        if sample == "6":
            engine.end(capture_id, token_ids, "", engine.cuts)
        return ""

    engine.fault = theirs
    ledger = Run([engine.url], sidecar.url, "under way", concurrency=2)(rows)
    assert sorted(engine.asked) == ["0", "1", "2", "3", "4", "6", "7"]
    assert ledger.counts == {Fate.CAPTURED: 7, Fate.STORED: 1}
    assert ledger.stored_meanwhile == 1
    assert_each_once(captures(sidecar, "under way"), rows)


def test_two_runs_at_once_share_the_work_and_each_row_has_one_capture_in_the_end(
    sidecar: SidecarThread, engine: FakeEngine, other: FakeEngine
) -> None:
    rows = fresh_rows(60)
    ledgers: list[Ledger] = []
    runs = [Run([each.url], sidecar.url, "at once", concurrency=3) for each in (engine, other)]
    threads = [threading.Thread(target=lambda run=run: ledgers.append(run(rows))) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ledger.complete for ledger in ledgers)
    print(f"{len(engine.asked) + len(other.asked)} requests for {len(rows)} rows")
    Run([engine.url], sidecar.url, "at once")(rows)
    ready = [record.sample_id for record in captures(sidecar, "at once") if record.state == "ready"]
    assert sorted(ready, key=int) == [str(row) for row in range(60)]
