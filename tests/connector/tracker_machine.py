"""Random scheduling told to a tracker, and what must be true of its news."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hsconnector.capture.protocol import FailReason, RowsKind
from hsconnector.connector.step import Finish, Step
from hsconnector.connector.tracker import Tracker, Wish
from tests.connector.scheduling import BLOCK, PREEMPTED, RUNNING, WAITING, Engine, Request, counted_ids

OUTPUT = Wish(rows=RowsKind.PROMPT_AND_OUTPUT)


def tracker(block_size: int = BLOCK) -> Tracker:
    return Tracker(1, block_size, counted_ids(), now=lambda: 12.5)


class TrackerMachine(RuleBasedStateMachine):
    """Random scheduling; every step told to the worker is compared with what is true of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = tracker()
        self.engine = Engine(self.tracker)
        self.tables: dict[str, list[int]] = {}
        self.readable: dict[str, int] = {}
        self.begun: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.doomed: set[str] = set()
        """Captures that must not come to a good end."""

    @rule(
        num_prompt=st.integers(1, 20),
        wish=st.sampled_from([Wish(), OUTPUT, OUTPUT, Wish(capture=False)]),
    )
    def add(self, num_prompt: int, wish: Wish) -> None:
        self.engine.add(num_prompt, wish)

    @precondition(lambda self: self.engine.live())
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.engine.begin_step()
        for request in self.engine.live():
            self._schedule(request, data)
        self._check(self.engine.end_step())

    def _schedule(self, request: Request, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 9))
        hits = data.draw(st.integers(0, request.num_prompt - 1)) // BLOCK * BLOCK
        if request.status == WAITING:
            if data.draw(st.booleans()):
                self.engine.arrive(request, count, hits)
        elif request.status == PREEMPTED:
            way = data.draw(st.sampled_from([None, self.engine.arrive, self.engine.resume]))
            if way is not None:
                way(request, count, hits)
        else:
            self._go_on(request, count, hits, data.draw(st.sampled_from(["run", "run", "stay", "out", "v1", "v2"])))

    def _go_on(self, request: Request, count: int, hits: int, action: str) -> None:
        if action == "run":
            self.engine.run(request, count, rejected=count % 2)
        elif action != "stay":
            self.engine.preempt(request)
            if action == "v1":
                self.engine.resume(request, count, hits)
            elif action == "v2":
                self.engine.arrive(request, count, hits)

    @precondition(lambda self: self.engine.live())
    @rule(data=st.data(), reason=st.sampled_from(["stop", "length", "abort"]), again=st.booleans())
    def finish(self, data: st.DataObject, reason: str, again: bool) -> None:
        request = data.draw(st.sampled_from(self.engine.live()))
        captured = request.wish.capture and request.name in self.begun
        expected = captured and request.name not in self.doomed and self._whole(request)
        assert self.engine.finish(request, reason) is expected
        if captured and not expected:
            self.doomed.add(request.name)
        if again:
            assert not self.tracker.finish(self.engine.as_ended(request), tuple(request.table)).hold

    def _whole(self, request: Request) -> bool:
        return request.status == RUNNING and request.computed >= request.wanted

    @precondition(lambda self: self.engine.held)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.held)))
        if self.finished[name]:
            del self.engine.held[name]
            self.tracker.reported([name])

    @rule()
    def reset_cache(self) -> None:
        self.doomed.update(r.name for r in self.engine.live() if r.name in self.begun)
        self.doomed.update(self.engine.held)
        self.tracker.fail_all(FailReason.CACHE_RESET, "new weights")

    @precondition(lambda self: self.engine.live(WAITING, PREEMPTED))
    @rule(data=st.data())
    def load_from_outside(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.engine.live(WAITING, PREEMPTED)))
        self.doomed.add(request.name)
        self.tracker.fail(request.name, FailReason.EXTERNAL_PREFIX, "loaded")

    def _check(self, told: Step) -> None:
        assert (told.group, told.block_size) == (1, BLOCK)
        for name in told.lost:
            self.tables.pop(name, None)
            self.readable.pop(name, None)
        self.begun.update(info.request_id for info in told.begun)
        self.failed.update(failure.request_id for failure in told.failed)
        for change in told.tables:
            if change.start_over:
                self.tables[change.request_id] = []
                self.readable.pop(change.request_id, None)
            self.tables[change.request_id].extend(change.blocks)
        for name, rows in told.readable:
            self._check_readable(name, rows)
        for finish in told.finished:
            self._check_finish(finish)
        for request in self.engine.live(RUNNING):
            self._check_progress(request)

    def _check_readable(self, name: str, rows: int) -> None:
        request = self.engine.requests[name]
        assert not request.ended
        assert request.status == RUNNING
        assert not request.returned
        assert self.readable.get(name, 0) < rows <= min(request.rows_before, request.num_prompt)
        assert self.tables[name] == request.table[: len(self.tables[name])]
        assert len(self.tables[name]) * BLOCK >= rows
        self.readable[name] = rows

    def _check_finish(self, finish: Finish) -> None:
        self.finished[finish.request_id] += 1
        request = self.engine.requests[finish.request_id]
        assert finish.num_rows == request.wanted
        assert len(finish.token_ids) == 8 * finish.num_rows
        if not finish.held:
            assert request.status == PREEMPTED
            return
        held = self.engine.held[finish.request_id]
        assert self.tables[finish.request_id][: len(held)] == held

    def _check_progress(self, request: Request) -> None:
        """Nothing is kept back: every prompt row that may be read has been told."""
        if not request.returned and request.wish.capture and request.name not in self.doomed:
            assert self.readable.get(request.name, 0) == min(request.rows_before, request.num_prompt)

    @invariant()
    def told_at_most_once(self) -> None:
        assert all(count == 1 for count in self.begun.values())
        assert all(count == 1 for count in self.finished.values())
        assert all(count == 1 for name, count in self.failed.items() if not self.finished[name])
        assert self.failed.keys() <= self.doomed

    @invariant()
    def nothing_is_kept(self) -> None:
        live = {request.name for request in self.engine.live()}
        assert self.tracker.tracked <= len(live)
        assert self.tracker.held == set(self.engine.held)
        assert set(self.tracker._early) <= live
        assert self.tracker._advanced <= live

    def teardown(self) -> None:
        for request in self.engine.live():
            self.engine.finish(request, "abort")
        self.engine.begin_step()
        self._check(self.engine.end_step())
        for name in self.begun:
            assert self.finished[name] or self.failed[name]
        assert self.tracker.tracked == 0
        assert all(self.finished[name] for name in self.engine.held)
        assert all(self.finished[name] or name in self.failed for name in self.begun)
