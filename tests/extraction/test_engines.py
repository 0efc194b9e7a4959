"""Several engines, of which one is slow, hangs, restarts or dies: its rows go to others, and it is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from hsconnector.extraction.engine import EngineUnusable
from hsconnector.extraction.ledger import Fate
from tests.extraction.fake_engine import FakeEngine
from tests.extraction.test_extraction import Run, assert_each_once, captures, fresh_rows
from tests.sidecar import SidecarThread, start_sidecar

LIMIT_S = 60.0


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


def until(done: threading.Event) -> None:
    assert done.wait(LIMIT_S)


def test_an_engine_gets_as_much_as_it_answers(sidecar: SidecarThread, engine: FakeEngine, other: FakeEngine) -> None:
    """Not its turn: by turns the slow one would get half of the rows."""
    many = threading.Event()
    engine.point = lambda: many.set() if len(engine.asked) >= 34 else None
    other.point = lambda: until(many)
    rows = fresh_rows(40)
    assert Run([engine.url, other.url], sidecar.url, "slow", concurrency=4)(rows).complete
    assert len(other.asked) <= 6
    assert_each_once(captures(sidecar, "slow"), rows)


def test_the_rows_of_an_engine_that_hangs_go_to_the_other(
    sidecar: SidecarThread, engine: FakeEngine, other: FakeEngine
) -> None:
    """It takes requests and answers none, while the other has nothing more to do."""
    over = threading.Event()
    other.point = lambda: until(over)
    rows = fresh_rows(30)
    try:
        ledger = Run([engine.url, other.url], sidecar.url, "hangs", concurrency=6, quiet_s=0.5)(rows)
    finally:
        other.cut()
        over.set()
    assert ledger.complete, list(ledger.missing)
    assert ledger.counts == {Fate.CAPTURED: 30}
    assert other.asked
    other.rest()
    assert_each_once(captures(sidecar, "hangs"), rows)


def test_an_engine_that_restarts_is_waited_for_and_no_row_is_given_up(sidecar: SidecarThread) -> None:
    first = FakeEngine(sidecar.url)
    port = int(first.url.rpartition(":")[2])
    stopping = threading.Event()
    first.point = lambda: stopping.set() if len(first.asked) >= 12 else None
    second: list[FakeEngine] = []

    def restart() -> None:
        until(stopping)
        first.stop()
        time.sleep(1.0)
        second.append(FakeEngine(sidecar.url, port=port))

    restarting = threading.Thread(target=restart)
    restarting.start()
    rows = fresh_rows(60)
    try:
        ledger = Run([first.url], sidecar.url, "restarts", concurrency=8, pause_s=0.05)(rows)
    finally:
        stopping.set()
        restarting.join()
        second[0].stop()
    assert ledger.complete, list(ledger.missing)
    assert second[0].asked
    assert_each_once(captures(sidecar, "restarts"), rows)


def test_a_run_ends_when_no_engine_comes_back(sidecar: SidecarThread) -> None:
    gone = FakeEngine(sidecar.url)
    run = Run([gone.url], sidecar.url, "gone for good", away_s=0.5)
    gone.stop()
    sidecar_hears = FakeEngine(sidecar.url)
    try:
        with pytest.raises(EngineUnusable, match=r"no engine has done anything for 0\.5 s.*no engine answers at"):
            run(fresh_rows(5))
    finally:
        sidecar_hears.stop()
