from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from hsconnector.capture.protocol import CaptureInfo, FailReason
from hsconnector.connector.reader import Cursor, Reader
from hsconnector.connector.step import Failure, Finish, Step, TableChange
from hsconnector.connector.tracker import Wish
from tests.connector.scheduling import BLOCK, Engine, Request
from tests.connector.tracker_machine import OUTPUT, TrackerMachine, tracker
from tests.examples import examples


def info(name: str, num_prompt: int = 10) -> CaptureInfo:
    return CaptureInfo(capture_id=f"capture of {name}", request_id=name, num_prompt_tokens=num_prompt, created=0.0)


def step(**news: object) -> Step:
    return Step(1, BLOCK, **news)  # type: ignore[arg-type]


def reading(name: str = "a", blocks: tuple[int, ...] = (3, 4, 5), readable: int = 10) -> Reader:
    """A reader with one capture that has rows to read."""
    reader = Reader(BLOCK)
    reader.apply(step(begun=[info(name)], tables=[TableChange(name, blocks, start_over=True)]), 0.0)
    reader.apply(step(readable=[(name, readable)]), 1.0)
    return reader


def only(reader: Reader) -> Cursor:
    (capture,) = reader.pending()
    return capture


class TestReading:
    def test_in_order_as_far_as_memory_allows(self) -> None:
        reader = reading()
        capture = only(reader)
        assert reader.next_rows(capture, 4) == range(4)
        reader.advance(capture, 4, 2.0)
        assert reader.next_rows(capture, 100) == range(4, 10)
        reader.advance(capture, 6, 2.0)
        assert list(reader.pending()) == []
        assert capture.moved == 2.0

    def test_never_beyond_the_table(self) -> None:
        reader = reading(blocks=(3, 4))
        assert reader.next_rows(only(reader), 100) == range(8)

    def test_those_that_hold_blocks_come_first(self) -> None:
        reader = reading("a")
        reader.apply(step(begun=[info("b")], tables=[TableChange("b", (7,), True)], readable=[("b", 4)]), 0.0)
        reader.apply(step(finished=[Finish("b", 4, b"", "stop")]), 0.0)
        assert [capture.info.request_id for capture in reader.pending()] == ["b", "a"]

    def test_a_lost_table_keeps_the_cursor(self) -> None:
        reader = reading()
        reader.advance(only(reader), 6, 2.0)
        reader.apply(step(lost=["a"]), 3.0)
        assert list(reader.pending()) == []
        reader.apply(step(tables=[TableChange("a", (8, 9, 10), True)]), 4.0)
        assert list(reader.pending()) == []
        reader.apply(step(readable=[("a", 9)]), 5.0)
        capture = only(reader)
        assert reader.next_rows(capture, 100) == range(6, 9)
        assert capture.table == [8, 9, 10]

    def test_tables_are_forgotten_before_new_ones_come(self) -> None:
        reader = reading()
        reader.apply(step(lost=["a"], tables=[TableChange("a", (8,), True)]), 3.0)
        assert reader.find(["capture of a"])[0].table == [8]

    def test_a_table_grows(self) -> None:
        reader = reading(blocks=(3,))
        reader.apply(step(tables=[TableChange("a", (4, 5))]), 3.0)
        assert only(reader).table == [3, 4, 5]

    def test_news_of_unknown_captures_is_ignored(self) -> None:
        reader = Reader(BLOCK)
        news = step(
            lost=["x"],
            failed=[Failure("x", FailReason.ABORTED, "")],
            tables=[TableChange("x", (1,)), TableChange("x", (2,), True)],
            readable=[("x", 3)],
        )
        assert reader.apply(news, 0.0) == []
        assert len(reader) == 0


class TestEnding:
    def test_complete_when_read_and_arrived(self) -> None:
        reader = reading()
        capture = only(reader)
        reader.advance(capture, 10, 2.0)
        reader.apply(step(finished=[Finish("a", 10, b"", "stop")]), 3.0)
        assert reader.complete(lambda capture: False) == []
        assert reader.take_released() == set()
        assert reader.complete() == [capture]
        assert reader.take_released() == {"a"}
        assert reader.take_released() == set()
        assert len(reader) == 0

    def test_not_before_every_row_is_read(self) -> None:
        reader = reading()
        reader.advance(only(reader), 9, 2.0)
        reader.apply(step(finished=[Finish("a", 10, b"", "stop")]), 3.0)
        assert reader.complete() == []
        assert reader.next_rows(only(reader), 100) == range(9, 10)

    def test_an_unknown_capture_gives_its_blocks_back_at_once(self) -> None:
        reader = Reader(BLOCK)
        reader.apply(step(finished=[Finish("a", 10, b"", "stop")]), 3.0)
        assert reader.take_released() == {"a"}

    def test_failed_before_it_is_held(self) -> None:
        reader = reading()
        failure = Failure("a", FailReason.ABORTED, "half")
        assert reader.apply(step(failed=[failure]), 2.0) == [(info("a"), FailReason.ABORTED, "half")]
        assert reader.take_released() == set()

    def test_failed_while_it_is_held(self) -> None:
        reader = reading()
        reader.apply(step(finished=[Finish("a", 10, b"", "stop")]), 2.0)
        assert reader.apply(step(failed=[Failure("a", FailReason.CACHE_RESET, "new")]), 3.0)
        assert reader.take_released() == {"a"}
        assert reader.apply(step(failed=[Failure("a", FailReason.CACHE_RESET, "new")]), 3.0) == []
        assert reader.take_released() == set()

    def test_failed_and_finished_in_one_step(self) -> None:
        """A cache reset between the end of a request and the next step."""
        reader = reading()
        news = step(failed=[Failure("a", FailReason.CACHE_RESET, "")], finished=[Finish("a", 10, b"", "stop")])
        assert len(reader.apply(news, 2.0)) == 1
        assert reader.take_released() == {"a"}
        assert len(reader) == 0

    def test_begun_and_failed_in_one_step(self) -> None:
        reader = Reader(BLOCK)
        news = step(begun=[info("a")], failed=[Failure("a", FailReason.BAD_REQUEST, "tags")])
        assert reader.apply(news, 0.0) == [(info("a"), FailReason.BAD_REQUEST, "tags")]
        assert len(reader) == 0

    def test_dropped_captures_release_what_they_hold(self) -> None:
        reader = reading("a")
        reader.apply(step(begun=[info("b")], finished=[Finish("a", 10, b"", "stop")]), 2.0)
        assert [capture.info.request_id for capture in reader.drop_all()] == ["a", "b"]
        assert reader.take_released() == {"a"}
        assert reader.drop("a") is None

    def test_released_from_outside(self) -> None:
        reader = reading()
        reader.apply(step(finished=[Finish("a", 10, b"", "stop")]), 2.0)
        reader.release("a")
        reader.drop_all()
        assert reader.take_released() == {"a"}

    def test_stalled_are_those_that_hold_blocks_and_do_not_move(self) -> None:
        reader = reading()
        assert reader.stalled(1000.0, 5.0) == []
        reader.apply(step(finished=[Finish("a", 10, b"", "stop")]), 10.0)
        assert reader.stalled(15.0, 5.0) == []
        assert len(reader.stalled(15.1, 5.0)) == 1
        reader.advance(only(reader), 1, 15.1)
        assert reader.stalled(20.0, 5.0) == []

    def test_one_that_waits_behind_others_that_move_is_not_stalled(self) -> None:
        """A sidecar slower than the engine: all are held until their turn comes, however long that takes."""
        reader = reading()
        also = TableChange("b", (6, 7, 8), start_over=True)
        reader.apply(step(begun=[info("b")], tables=[also], finished=[Finish("a", 10, b"", "stop")]), 10.0)
        reader.apply(step(finished=[Finish("b", 10, b"", "stop")]), 10.0)
        first, second = reader.pending()
        for second_hand in range(11, 100):
            reader.advance(first, 0, float(second_hand))
            assert reader.stalled(float(second_hand), 5.0) == []
        assert reader.stalled(104.2, 5.0) == [first, second]

    def test_one_that_cannot_move_is_stalled_while_others_do(self) -> None:
        reader = reading()
        reader.apply(step(begun=[info("b")], finished=[Finish("a", 10, b"", "stop")]), 10.0)
        reader.apply(step(finished=[Finish("b", 10, b"", "stop")]), 10.0)
        moving, stuck = reader.pending()
        reader.advance(moving, 1, 15.0)
        assert reader.stalled(15.1, 5.0) == [stuck]

    @pytest.mark.parametrize("missing", [0, 1])
    def test_the_end_of_a_request_without_blocks_is_judged_by_the_rows_read(self, missing: int) -> None:
        """Aborted while preempted, a stop string for instance: whole where every row had been read before."""
        reader = reading()
        reader.advance(only(reader), 10 - missing, 1.0)
        ended = reader.apply(step(lost=["a"], finished=[Finish("a", 10, b"", "abort", held=False)]), 2.0)
        said = "the request ended (abort) while it was preempted, with 9 of 10 rows read"
        assert [(reason, detail) for _, reason, detail in ended] == [(FailReason.ABORTED, said)] * missing
        assert list(reader.pending()) == []
        assert len(reader.complete()) == 1 - missing
        assert reader.take_released() == set()


class ReaderMachine(TrackerMachine):
    """The tracker's machine with a reader behind it, and memory that comes and goes.

    Each row is read once, in order, from a block that is the request's own and holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(BLOCK)
        self.cursors: dict[str, int] = {}
        self.ended_at: dict[str, str] = {}
        self.released: set[str] = set()
        self.memory = 0
        self.clock = 0.0

    @rule(rows=st.integers(0, 30))
    def allow_memory(self, rows: int) -> None:
        self.memory = rows

    def report(self) -> None:
        """Only what the reader releases is reported here."""

    def _check(self, told: Step) -> None:
        super()._check(told)
        self.clock += 1
        for ended, _, _ in self.reader.apply(told, self.clock):
            self._end(ended.request_id, "failed")
        for capture in self.reader.pending():
            self._read(capture)
        for capture in self.reader.complete():
            assert capture.finish is not None
            assert self.cursors[capture.info.request_id] == capture.finish.num_rows
            self._end(capture.info.request_id, "whole")
        self._report()

    def _read(self, capture: Cursor) -> None:
        rows = self.reader.next_rows(capture, self.memory)
        name = capture.info.request_id
        request = self.engine.requests[name]
        assert rows.start == self.cursors.get(name, 0)
        for row in rows:
            assert capture.table[row // BLOCK] == self._table(request)[row // BLOCK]
            assert row < (request.wanted if request.ended else request.rows_before)
        self.reader.advance(capture, len(rows), self.clock)
        self.cursors[name] = rows.stop
        self.memory -= len(rows)

    def _table(self, request: Request) -> list[int]:
        return self.engine.held[request.name] if request.ended else request.table

    def _end(self, name: str, how: str) -> None:
        assert name not in self.ended_at
        self.ended_at[name] = how

    def _report(self) -> None:
        for name in self.reader.take_released():
            assert name in self.engine.held
            assert name not in self.released
            self.released.add(name)
            del self.engine.held[name]
            self.tracker.reported([name])

    def teardown(self) -> None:
        for request in self.engine.live():
            self.engine.finish(request, "abort")
        for _ in range(3):
            self.memory = 10_000
            self.engine.begin_step()
            self._check(self.engine.end_step())
        assert self.ended_at.keys() == self.begun.keys()
        assert self.engine.held == {}
        assert len(self.reader) == 0
        assert not self.reader._held
        assert (self.tracker.tracked, self.tracker.holds_blocks) == (0, False)


TestReaderMachine = ReaderMachine.TestCase
TestReaderMachine.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)

moves = st.lists(
    st.tuples(st.sampled_from(["run", "finish", "abort", "again", "preempt", "reset", "step"]), st.integers(0, 3)),
    max_size=25,
)


@settings(max_examples=examples(1000), deadline=None)
@given(moves)
def test_reported_at_most_once_and_only_what_was_held(sequence: list[tuple[str, int]]) -> None:
    """vllm#43226 and its kin: a stale or repeated report of a finished request ends the engine."""
    news = tracker()
    engine, reader = Engine(news), Reader(BLOCK)
    promised: set[str] = set()
    reported: list[str] = []
    for index in range(4):
        engine.add(3 + index, OUTPUT if index % 2 else Wish())

    def turn() -> None:
        reader.apply(engine.end_step(), 0.0)
        for capture in reader.pending():
            reader.advance(capture, len(reader.next_rows(capture, 3)), 0.0)
        reader.complete()
        released = reader.take_released()
        reported.extend(released)
        news.reported(released)

    engine.begin_step()
    for move, index in sequence:
        request = engine.requests[f"r{index}"]
        if move == "step":
            turn()
            engine.begin_step()
        elif move == "reset":
            news.fail_all(FailReason.CACHE_RESET, "")
        elif move == "again":
            if request.ended:
                assert not news.finish(engine.as_ended(request), tuple(request.table)).hold
        elif not request.ended:
            _move(engine, request, move, promised)
    for _ in range(8):
        turn()
        engine.begin_step()
    assert len(reported) == len(set(reported))
    assert set(reported) == promised
    assert not news.holds_blocks


def _move(engine: Engine, request: Request, move: str, promised: set[str]) -> None:
    scheduled = request.name in engine.scheduled().num_scheduled
    if move in ("finish", "abort"):
        if not scheduled and engine.finish(request, move):
            promised.add(request.name)
    elif move == "preempt":
        if request.status == "running" and not scheduled:
            engine.preempt(request)
    elif request.status == "running":
        if not scheduled:
            engine.run(request, 2)
    else:
        engine.arrive(request, 2)
