"""A data set driven through an OpenAI server into a real sidecar: each row exactly once, whatever happens between."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsconnector.capture.content import Content
from hsconnector.capture.protocol import CaptureState, new_capture_id, pack_token_ids
from hsconnector.capture.record import CaptureRecord
from hsconnector.client import Client
from hsconnector.client.async_client import AsyncClient
from hsconnector.client.connection import connect_async
from hsconnector.dataset import LeasedDataset
from hsconnector.errors import HSConnectorError, SidecarUnreachable
from hsconnector.extraction.content import CaptureUnfit, choose_content, judge
from hsconnector.extraction.engine import Engine, EngineUnusable
from hsconnector.extraction.extraction import Extraction, ExtractionStopped, Order
from hsconnector.extraction.ledger import Fate, Ledger
from hsconnector.prompts.prompt import Missing, Prompt, PromptReader
from tests.examples import examples
from tests.extraction.fake_engine import LAYERS, MAX_MODEL_LEN, FakeEngine
from tests.sidecar import SidecarThread, start_sidecar

_numbers = itertools.count()


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarThread]:
    running = start_sidecar(tmp_path_factory.mktemp("sidecar") / "store")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def engine(sidecar: SidecarThread) -> Iterator[FakeEngine]:
    running = FakeEngine(sidecar.url)
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def unspoilt(engine: FakeEngine) -> Iterator[None]:
    yield
    engine.fault = lambda number, sample: ""
    engine.point = lambda: None


def fresh_rows(count: int) -> list[dict[str, object]]:
    """Rows that no sidecar has seen: their first two tokens count this call."""
    number = next(_numbers)
    return [{"input_ids": [number // 900, number % 900, row, *range(row % 7)]} for row in range(count)]


def samples(rows: Sequence[object]) -> Iterator[Prompt | Missing]:
    reader = PromptReader(max_tokens=MAX_MODEL_LEN - 1)
    return (reader.read(row, index) for index, row in enumerate(rows))  # type: ignore[arg-type]


class Run:
    """One run of an extraction, on the calling thread; `kill` from any other ends it at once."""

    def __init__(self, engines: Sequence[str], sidecar: str, dataset: str, **order: object) -> None:
        self.engines = engines
        self.sidecar = sidecar
        self.over = threading.Event()
        self.order = Order(**{"model": "served", "dataset": dataset, "pause_s": 0.01, **order})  # type: ignore[arg-type]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def __call__(self, rows: Sequence[object]) -> Ledger:
        ledger = Ledger(len(rows))
        try:
            asyncio.run(self._run(rows, ledger))
        except asyncio.CancelledError:
            pass
        finally:
            self.over.set()
        return ledger

    def kill(self) -> None:
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.over.wait()

    async def _run(self, rows: Sequence[object], ledger: Ledger) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        clients = [connect_async(url, key="", timeout_s=30, connections=50) for url in (*self.engines, self.sidecar)]
        try:
            sidecar = AsyncClient(self.sidecar, clients[-1], patience_s=1)
            engines = [Engine(url, http) for url, http in zip(self.engines, clients, strict=False)]
            content = choose_content(await sidecar.producers(), model="tiny", sidecar=self.sidecar)
            await Extraction(self.order, engines, sidecar, content, ledger).run(samples(rows))
        finally:
            for client in clients:
                await client.aclose()


def captures(sidecar: SidecarThread, dataset: str) -> list[CaptureRecord]:
    with Client(sidecar.url) as client:
        return client.find(dataset=dataset)


def assert_each_once(found: list[CaptureRecord], rows: Sequence[dict[str, object]]) -> None:
    """Exactly one capture of each row, sound, under its own sample id and of its own tokens."""
    content = Content("tiny", "", LAYERS)
    ready = {(r.sample_id, r.content_hash): r for r in found if r.state is CaptureState.READY}
    wanted = {(str(i), content.hash_of(pack_token_ids(row["input_ids"]))) for i, row in enumerate(rows)}  # type: ignore[arg-type]
    assert set(ready) == wanted
    whole = [r for r in found if r.state in (CaptureState.READY, CaptureState.QUARANTINED)]
    assert Counter(r.sample_id for r in whole) == {str(i): 1 for i in range(len(rows))}


def waited_for(sidecar: SidecarThread) -> bool:
    """Whether someone waits for a capture's end, by the sidecar's own metrics."""
    lines = httpx.get(f"{sidecar.url}/metrics").text.splitlines()
    return any(line.startswith("hsconnector_waiting_readers ") and float(line.split()[-1]) > 0 for line in lines)


def test_every_row_is_captured_with_its_ids_and_nothing_is_asked_twice(
    sidecar: SidecarThread, engine: FakeEngine
) -> None:
    rows = fresh_rows(40)
    ledger = Run([engine.url], sidecar.url, "plain", tags={"kind": "test"})(rows)
    assert ledger.complete
    assert ledger.counts == {Fate.CAPTURED: 40}
    assert_each_once(captures(sidecar, "plain"), rows)
    assert {tuple(r.tags.items()) for r in captures(sidecar, "plain") if r.sample_id == "3"} == {
        (("kind", "test"), ("row", "3"))
    }
    body = engine.bodies[-1]
    assert (body["model"], body["max_tokens"]) == ("served", 1)
    assert all(isinstance(token, int) for token in body["prompt"])
    before = len(engine.asked)
    again = Run([engine.url], sidecar.url, "plain")(rows)
    assert again.complete
    assert again.counts == {Fate.STORED: 40}
    assert len(engine.asked) == before


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kills=st.lists(st.integers(0, 20), min_size=1, max_size=2),
    finishing=st.lists(st.booleans(), min_size=1, max_size=5),
    concurrency=st.integers(1, 5),
    faults=st.lists(st.sampled_from(["", "", "", "", "busy", "failed"]), min_size=1, max_size=7),
)
def test_killed_at_any_point_and_started_again_each_row_is_captured_once(
    sidecar: SidecarThread,
    engine: FakeEngine,
    kills: list[int],
    finishing: list[bool],
    concurrency: int,
    faults: list[str],
) -> None:
    dataset, rows = f"killed-{next(_numbers)}", fresh_rows(6)
    choices, lock = itertools.cycle(finishing), threading.Lock()
    endings = itertools.cycle(faults)
    engine.fault = lambda number, sample: next(endings)
    engine.after_cut = lambda: next(choices)
    for kill_at in kills:
        run = Run([engine.url], sidecar.url, dataset, concurrency=concurrency, attempts=9)
        points = itertools.count()

        def point(run: Run = run, points: Iterator[int] = points, kill_at: int = kill_at) -> None:
            with lock:
                dies = next(points) == kill_at
                if dies:
                    engine.cut()
            if dies:
                run.kill()

        engine.point = point
        run(rows)
        engine.point = lambda: None
        if kill_at % 2:
            engine.rest()
    engine.fault = lambda number, sample: ""
    ledger = Run([engine.url], sidecar.url, dataset, concurrency=concurrency)(rows)
    engine.rest()
    assert ledger.complete
    assert_each_once(captures(sidecar, dataset), rows)


def test_one_in_ten_failing_is_asked_again_and_all_is_captured(sidecar: SidecarThread, engine: FakeEngine) -> None:
    kinds = itertools.cycle(["busy", "failed", "drop", "unsound"])
    engine.fault = lambda number, sample: next(kinds) if number % 10 == 3 else ""
    rows = fresh_rows(60)
    ledger = Run([engine.url], sidecar.url, "tenth", concurrency=4)(rows)
    assert ledger.complete
    assert ledger.retries >= 6
    ready = [r for r in captures(sidecar, "tenth") if r.state is CaptureState.READY]
    assert Counter(r.sample_id for r in ready) == {str(i): 1 for i in range(60)}


def test_what_fails_each_time_is_listed_and_the_rest_goes_on(sidecar: SidecarThread, engine: FakeEngine) -> None:
    fates = {"3": "busy", "7": "failed", "11": "unsound", "15": "refused", "19": "unheard", "23": "endless"}
    engine.fault = lambda number, sample: fates.get(sample, "")
    rows = fresh_rows(30)
    ledger = Run([engine.url], sidecar.url, "listed", attempts=2, capture_timeout_s=0.3)(rows)
    missing = {m.sample_id: str(m) for m in ledger.missing}
    assert set(missing) == set(fates)
    assert "503" in missing["3"] and "made up: busy" in missing["3"] and "attempt 2 of 2" in missing["3"]
    assert "stalled" in missing["7"]
    assert "unsound" in missing["11"] and "zero" in missing["11"]
    assert "refused it (400)" in missing["15"]
    assert "not heard of" in missing["19"]
    assert "still receiving" in missing["23"]
    assert not ledger.complete
    assert ledger.counts[Fate.CAPTURED] == 24
    asked = Counter(engine.asked[-(24 + 2 * 5 + 1) :])
    assert {sample: asked[sample] for sample in fates} == {s: 1 if s == "15" else 2 for s in fates}


def test_a_row_unsound_as_often_as_allowed_is_not_asked_for_again(sidecar: SidecarThread, engine: FakeEngine) -> None:
    engine.fault = lambda number, sample: "unsound"
    rows = fresh_rows(1)
    Run([engine.url], sidecar.url, "unsound", attempts=2)(rows)
    before = len(engine.asked)
    engine.fault = lambda number, sample: ""
    ledger = Run([engine.url], sidecar.url, "unsound", attempts=2)(rows)
    assert len(engine.asked) == before
    assert "2 captures of it are unsound" in str(ledger.missing[0])
    assert "zero" in str(ledger.missing[0])
    assert Run([engine.url], sidecar.url, "unsound", attempts=3)(rows).complete


def test_a_capture_of_other_tokens_is_never_taken(sidecar: SidecarThread, engine: FakeEngine) -> None:
    engine.fault = lambda number, sample: "shifted"
    ledger = Run([engine.url], sidecar.url, "shifted")(fresh_rows(1))
    assert "token ids are others than were sent" in str(ledger.missing[0])
    assert [r.state for r in captures(sidecar, "shifted")] == [CaptureState.QUARANTINED]


def test_an_engine_without_the_connector_is_named(sidecar: SidecarThread, engine: FakeEngine) -> None:
    engine.fault = lambda number, sample: "bare"
    ledger = Run([engine.url], sidecar.url, "bare")(fresh_rows(1))
    assert "names no capture" in str(ledger.missing[0])
    assert "hsconnector launch" in str(ledger.missing[0])


def test_equal_rows_share_one_capture(sidecar: SidecarThread, engine: FakeEngine) -> None:
    (row,) = fresh_rows(1)
    ledger = Run([engine.url], sidecar.url, "equal")([row, row, row])
    assert ledger.complete
    assert ledger.counts == {Fate.CAPTURED: 1, Fate.REPEATED: 2}
    assert [r.sample_id for r in captures(sidecar, "equal")] == ["0"]
    engine.fault = lambda number, sample: "refused"
    (other,) = fresh_rows(1)
    failed = Run([engine.url], sidecar.url, "equal")([other, other])
    assert [str(m) for m in failed.missing][1] == "row 1: has the tokens of row 0, which failed"


def test_what_an_earlier_run_began_is_waited_for_and_not_asked_again(
    sidecar: SidecarThread, engine: FakeEngine
) -> None:
    rows, capture_id, before = fresh_rows(2), new_capture_id(), len(engine.asked)
    token_ids: list[int] = rows[0]["input_ids"]  # type: ignore[assignment]
    digest = Content("tiny", "", LAYERS).hash_of(pack_token_ids(token_ids))
    about = {"dataset": "begun", "sample_id": "0", "tags": {}, "expected_content_hash": digest}
    engine.open(capture_id, token_ids, about, engine.cuts)
    run = Run([engine.url], sidecar.url, "begun", capture_timeout_s=10)

    def end_once_waited_for() -> None:
        while not run.over.is_set() and not waited_for(sidecar) and len(engine.asked) == before:
            time.sleep(0.01)
        engine.end(capture_id, token_ids, "", engine.cuts)

    ending = threading.Thread(target=end_once_waited_for)
    ending.start()
    ledger = run(rows)
    ending.join()
    assert engine.asked[before:] == ["1"]
    assert ledger.counts == {Fate.STORED: 1, Fate.CAPTURED: 1}
    assert_each_once(captures(sidecar, "begun"), rows)


def test_second_captures_of_a_sample_are_removed_the_older_stays(sidecar: SidecarThread, engine: FakeEngine) -> None:
    (row,) = fresh_rows(1)
    for name in ("doubled", "doubled-elsewhere"):
        Run([engine.url], sidecar.url, name)([row])
    assert captures(sidecar, "doubled-elsewhere") == []
    content = Content("tiny", "", LAYERS)
    digest = content.hash_of(pack_token_ids(row["input_ids"]))  # type: ignore[arg-type]
    about = {"dataset": "doubled", "sample_id": "0", "tags": {}, "expected_content_hash": digest}
    for name in ("doubled", "doubled-elsewhere"):
        capture_id = new_capture_id()
        engine.open(capture_id, row["input_ids"], {**about, "dataset": name}, engine.cuts)  # type: ignore[arg-type]
        engine.end(capture_id, row["input_ids"], "", engine.cuts)  # type: ignore[arg-type]
    ledger = Run([engine.url], sidecar.url, "doubled")([row])
    assert (ledger.doubles, ledger.counts[Fate.STORED]) == (1, 1)
    states = {r.capture_id: r.state for r in captures(sidecar, "doubled")}
    assert [states[name] for name in sorted(states)] == [CaptureState.READY, CaptureState.EXPIRED]
    assert [r.state for r in captures(sidecar, "doubled-elsewhere")] == [CaptureState.READY]


def test_a_row_whose_double_was_removed_and_whose_capture_was_used_up_is_not_lost(
    sidecar: SidecarThread, engine: FakeEngine
) -> None:
    row, other = fresh_rows(2)
    assert Run([engine.url], sidecar.url, "pair")([row]).complete
    (first,) = captures(sidecar, "pair")
    about = {"dataset": "pair", "sample_id": "0", "tags": {}, "expected_content_hash": first.content_hash}
    double = new_capture_id()
    engine.open(double, row["input_ids"], about, engine.cuts)  # type: ignore[arg-type]
    engine.end(double, row["input_ids"], "", engine.cuts)  # type: ignore[arg-type]

    def use_up(number: int, sample: str) -> str:
        dataset = LeasedDataset(sidecar.url, dataset="pair", idle_s=0.2, delete=True)
        for lent in dataset:
            dataset.ack(lent)
        engine.fault = lambda number, sample: ""
        return ""

    engine.fault = use_up
    ledger = Run([engine.url], sidecar.url, "pair")([row, other])
    assert ledger.complete, ledger.missing
    states = {r.capture_id: (r.state, r.reason) for r in captures(sidecar, "pair") if r.sample_id == "0"}
    assert states == {
        first.capture_id: (CaptureState.EXPIRED, "consumed"),
        double: (CaptureState.EXPIRED, None),
    }


def test_what_the_sidecar_removed_before_the_end_is_listed(tmp_path: Path) -> None:
    """A store of eight captures, and 24 rows: of which the first were there, and the last repeats one of them."""
    small = start_sidecar(tmp_path / "store", quota=8 * 2048, evict="oldest")
    engine = FakeEngine(small.url)
    try:
        rows = fresh_rows(24)
        assert Run([engine.url], small.url, "small")(rows[:4]).complete
        ledger = Run([engine.url], small.url, "small", concurrency=2)([*rows, rows[0]])
        ready = {r.sample_id for r in captures(small, "small") if r.state is CaptureState.READY}
        assert 0 < len(ready) < 20
        lost = {str(row) for row in range(24)} - ready
        assert {"0", "1", "2", "3"} < lost
        lines = {missing.sample_id: str(missing) for missing in ledger.missing}
        assert set(lines) == lost | {"24"}
        assert lines["0"].startswith("row 0: was stored, and is not in the sidecar any more")
        assert lines["4"].startswith("row 4: was captured, and is not in the sidecar any more")
        assert "it was among the oldest" in lines["4"]
        assert lines["24"] == "row 24: has the tokens of row 0, which failed"
        assert not ledger.complete
        assert ledger.counts == {Fate.CAPTURED: len(ready), Fate.STORED: 0, Fate.FAILED: len(lines)}
        assert ledger.tokens == sum(len(rows[int(row)]["input_ids"]) for row in ready)  # type: ignore[arg-type, misc]
    finally:
        engine.stop()
        small.stop()


@pytest.mark.parametrize("remove", [True, False], ids=["asked", "room"])
def test_what_a_consumer_has_used_up_is_not_lost(tmp_path: Path, remove: bool) -> None:
    """Training beside the extraction, with a store that holds a part of the data set."""
    small = start_sidecar(tmp_path / "store", quota=8 * 2048)
    engine = FakeEngine(small.url)
    done, used = threading.Event(), []

    def train() -> None:
        dataset = LeasedDataset(small.url, idle_s=0.5, delete=remove)
        while not done.is_set():
            for sample in dataset:
                dataset.ack(sample)
                used.append(sample["sample_id"])

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        ledger = Run([engine.url], small.url, "used", concurrency=2)(fresh_rows(24))
        assert ledger.complete, ledger.missing
        assert ledger.counts[Fate.CAPTURED] == 24
        gone = [r for r in captures(small, "used") if r.state is CaptureState.EXPIRED]
        assert len(gone) >= 16 and {r.reason for r in gone} == {"consumed"}
    finally:
        done.set()
        trainer.join()
        engine.stop()
        small.stop()
    assert sorted(used, key=int) == [str(row) for row in range(24)]


@pytest.mark.parametrize("state", CaptureState)
def test_only_a_ready_capture_is_taken(state: CaptureState) -> None:
    """One that retention removed while it was waited for has the right hash and the right number of rows."""
    prompt, content = Prompt(0, "0", (1, 2, 3), (1, 1, 1)), Content("tiny", "", LAYERS)
    record = CaptureRecord(
        capture_id=new_capture_id(),
        state=state,
        content_hash=content.hash_of(pack_token_ids(prompt.token_ids)),
        num_rows=3,
        detail="removed to make room",
    )
    if state is CaptureState.READY:
        judge(record, prompt, content, waited_s=1)
        return
    with pytest.raises(CaptureUnfit, match=f"its capture {record.capture_id}") as unfit:
        judge(record, prompt, content, waited_s=1)
    assert unfit.value.again
    if state is CaptureState.EXPIRED:
        assert str(unfit.value).endswith("was removed: removed to make room")


def test_a_run_stops_when_nothing_works_any_more(sidecar: SidecarThread, engine: FakeEngine) -> None:
    engine.fault = lambda number, sample: "busy"
    rows, before = fresh_rows(100), len(engine.asked)
    with pytest.raises(ExtractionStopped, match=r"stopped after 10 rows failed one after the other.*503.*go on"):
        Run([engine.url], sidecar.url, "stopped", concurrency=2, attempts=1)(rows)
    assert len(engine.asked) - before < 20


def test_a_wrong_key_stops_the_run_at_once(sidecar: SidecarThread, engine: FakeEngine) -> None:
    engine.fault = lambda number, sample: "key"
    with pytest.raises(EngineUnusable, match="wants a key"):
        Run([engine.url], sidecar.url, "key")(fresh_rows(50))


def test_bad_rows_are_named_and_the_rest_goes_on(sidecar: SidecarThread, engine: FakeEngine) -> None:
    good = fresh_rows(4)
    bad: list[object] = [
        {"input_ids": []},
        {"input_ids": list(range(MAX_MODEL_LEN))},
        {"input_ids": [1, 2, 3], "loss_mask": [1]},
        {"input_ids": [999, 1000]},
        {"text": "hello"},
    ]
    ledger = Run([engine.url], sidecar.url, "bad")([*good[:2], *bad, *good[2:]])
    lines = sorted(str(missing) for missing in ledger.missing)
    assert [line.partition(":")[0] for line in lines] == [f"row {i}" for i in range(2, 7)]
    assert "no tokens" in lines[0]
    assert "has 64 tokens, the engine takes 63" in lines[1]
    assert "3 token ids and a loss_mask of 1" in lines[2]
    assert "Token id 1000 is out of vocabulary" in lines[3]
    assert "neither input_ids nor messages" in lines[4]
    assert ledger.counts == {Fate.CAPTURED: 4, Fate.REFUSED: 4, Fate.FAILED: 1}


def test_two_engines_take_turns_and_one_that_is_gone_is_made_up_for(sidecar: SidecarThread, engine: FakeEngine) -> None:
    other = FakeEngine(sidecar.url)
    try:
        rows = fresh_rows(20)
        ledger = Run([engine.url, other.url], sidecar.url, "turns", concurrency=1)(rows)
        assert ledger.complete
        assert len(other.asked) == 10
    finally:
        other.stop()
    rows = fresh_rows(20)
    ledger = Run([engine.url, other.url], sidecar.url, "gone")(rows)
    assert ledger.complete
    assert_each_once(captures(sidecar, "gone"), rows)


def test_a_sidecar_that_goes_away_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    alone = start_sidecar(tmp_path / "store")
    engine = FakeEngine(alone.url)
    try:
        stopper = threading.Thread(target=alone.stop)
        engine.point = lambda: None if stopper.ident else stopper.start()
        with pytest.raises((SidecarUnreachable, ExtractionStopped)) as caught:
            Run([engine.url], alone.url, "away", concurrency=1)(fresh_rows(30))
        assert isinstance(caught.value, HSConnectorError)
        stopper.join()
    finally:
        engine.stop()
        alone.stop()


def test_what_changes_is_told(sidecar: SidecarThread, engine: FakeEngine) -> None:
    seen: list[int] = []

    async def run() -> None:
        async with (
            connect_async(engine.url, key="", timeout_s=9, connections=4) as to_engine,
            connect_async(sidecar.url, key="", timeout_s=9, connections=4) as to_sidecar,
        ):
            ledger = Ledger(5)
            order = Order(model="served", dataset="told")
            content = Content("tiny", "", LAYERS)
            told: Callable[[], None] = lambda: seen.append(ledger.done)  # noqa: E731
            sidecar_there = AsyncClient(sidecar.url, to_sidecar)
            extraction = Extraction(
                order, [Engine(engine.url, to_engine)], sidecar_there, content, ledger, changed=told
            )
            await extraction.run(samples(fresh_rows(5)))

    asyncio.run(run())
    assert sorted(set(seen)) == [0, 1, 2, 3, 4, 5]
