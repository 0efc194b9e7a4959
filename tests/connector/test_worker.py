from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hsconnector.capture.protocol import CaptureInfo, CaptureState, FailReason
from hsconnector.connector.gather import HostGather, gather_for
from hsconnector.connector.memory_transport import InMemoryTransport
from hsconnector.connector.step import Failure, Finish, Step
from hsconnector.connector.stream import Ticket
from tests.connector.lab import BLOCK, HIDDEN, LAYERS, LONG, ROW, Lab, bounded, ship
from tests.connector.test_gather import Untouchable


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def connected(clock: Clock, **settings: Any) -> Lab:
    """A lab whose sender turns only when it is told to."""
    lab = Lab(InMemoryTransport(), now=clock, **settings)
    lab.sender.pump()
    return lab


def rows_of(lab: Lab, info: CaptureInfo) -> torch.Tensor:
    data = lab.twin.captures[info.capture_id].data
    return torch.frombuffer(data, dtype=torch.float32).view(-1, len(LAYERS), HIDDEN)


def ring_rows(lab: Lab) -> int:
    stream = lab.sender.stream
    assert stream is not None
    return stream.ring.used // ROW


class TestReading:
    def test_a_prompt_many_times_the_ring(self, clock: Clock) -> None:
        """vllm#49301: staging never grows with the request, and the bytes are those of one great gather."""
        lab = connected(clock)
        count = 4000
        info = lab.begin(count)
        lab.turn()
        lab.finish(info)
        turns = 0
        for _ in bounded(lambda: lab.released):
            lab.turn()
            stream = lab.sender.stream
            assert stream is not None
            assert stream.ring.used <= stream.ring.size == 1 << 16
            ship(lab)
            turns += 1
        assert turns > count * ROW // (1 << 16)
        ship(lab)
        assert torch.equal(rows_of(lab, info), lab.expected(info))

    def test_a_cpu_never_meets_cuda(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "cuda", Untouchable())
            lab = connected(clock)
            info = lab.whole(LONG)
            for _ in bounded(lambda: lab.released):
                ship(lab)
                lab.turn()
            ship(lab)
        assert torch.equal(rows_of(lab, info), lab.expected(info))

    def test_rows_of_many_requests_do_not_mix(self, clock: Clock) -> None:
        lab = connected(clock)
        infos = [lab.begin(count) for count in (1, 15, 16, 17, 100, 90)]
        lab.turn()
        for readable in (1, 10, 50, 90):
            for info in infos:
                lab.readable(info, min(readable, info.num_prompt_tokens))
            lab.turn()
            ship(lab)
        for info in infos:
            lab.finish(info)
        lab.turn()
        for _ in bounded(lambda: len(lab.released) == len(infos)):
            lab.turn()
            ship(lab)
        ship(lab)
        for info in infos:
            assert torch.equal(rows_of(lab, info), lab.expected(info))

    def test_a_capture_lost_and_found_goes_on_where_it_was(self, clock: Clock) -> None:
        lab = connected(clock)
        info = lab.begin(60)
        lab.turn()
        lab.readable(info, 30)
        lab.turn()
        lab.next.lost.append(info.request_id)
        lab.turn()
        lab.next.tables.append(_table(lab, info))
        lab.turn()
        lab.finish(info)
        lab.turn()
        ship(lab)
        assert torch.equal(rows_of(lab, info), lab.expected(info))


def _table(lab: Lab, info: CaptureInfo) -> Any:
    from hsconnector.connector.step import TableChange

    return TableChange(info.request_id, lab.tables[info.request_id], start_over=True)


class TestFullMemory:
    def test_wait_leaves_rows_in_their_blocks(self, clock: Clock) -> None:
        lab = connected(clock)
        info = lab.whole(LONG)
        used = ring_rows(lab)
        assert 0 < used < LONG
        for _ in range(5):
            lab.turn()
        assert (lab.released, ring_rows(lab)) == ([], used)
        ship(lab)
        lab.turn()
        ship(lab)
        lab.turn()
        ship(lab)
        lab.turn()
        assert lab.released == [info.request_id]

    def test_drop_gives_up_at_once(self, clock: Clock) -> None:
        lab = connected(clock, on_overflow="drop")
        first = lab.whole(LONG)
        second = lab.whole(20)
        assert lab.released == [first.request_id, second.request_id]
        ship(lab)
        states = lab.twin.captures
        assert {states[info.capture_id].reason for info in (first, second)} == {FailReason.OVERFLOW}
        assert "65536 bytes" in states[first.capture_id].detail
        later = lab.whole(20)
        ship(lab)
        assert states[later.capture_id].state is CaptureState.READY

    def test_unread_memory_is_never_overwritten(self, clock: Clock) -> None:
        """Model-Optimizer#1611: a consumer that takes nothing, and one request more than the pool has room for."""
        lab = connected(clock)
        stream = lab.sender.stream
        assert stream is not None
        infos = [lab.whole(30) for _ in range(5)]
        before = bytes(stream.ring.memory[: stream.ring.used])
        more = lab.whole(100)
        for _ in range(10):
            lab.turn()
        assert bytes(stream.ring.memory[: len(before)]) == before
        assert more.request_id not in lab.released
        for _ in bounded(lambda: more.request_id in lab.released):
            lab.turn()
            ship(lab)
        ship(lab)
        for info in [*infos, more]:
            assert torch.equal(rows_of(lab, info), lab.expected(info))

    def test_a_capture_that_does_not_move_is_stalled(self, clock: Clock) -> None:
        lab = connected(clock, stall_timeout_s=5.0)
        info = lab.whole(LONG)
        clock.seconds += 5.0
        lab.turn()
        assert lab.released == []
        clock.seconds += 0.1
        lab.turn()
        assert lab.released == [info.request_id]
        ship(lab)
        stored = lab.twin.captures[info.capture_id]
        assert stored.reason is FailReason.STALLED
        assert "of 400 rows were shipped and none for 5 s" in stored.detail

    def test_one_that_moves_a_little_is_not(self, clock: Clock) -> None:
        lab = connected(clock, stall_timeout_s=5.0)
        info = lab.whole(4 * LONG)
        for _ in bounded(lambda: lab.released):
            clock.seconds += 4.0
            lab.sender.pump()
            lab.turn()
        ship(lab)
        assert lab.twin.captures[info.capture_id].state is CaptureState.READY

    def test_a_running_request_does_not_stall(self, clock: Clock) -> None:
        lab = connected(clock, stall_timeout_s=5.0)
        lab.begin(LONG)
        lab.turn()
        clock.seconds += 1000
        lab.turn()
        assert len(lab.worker.reader) == 1

    def test_no_patience_at_all(self, clock: Clock) -> None:
        lab = connected(clock, stall_timeout_s=0.0)
        info = lab.whole(LONG)
        clock.seconds += 0.001
        lab.turn()
        assert lab.released == [info.request_id]

    def test_a_row_of_odd_size_in_a_small_ring(self, clock: Clock) -> None:
        lab = connected(clock, ring_bytes=ROW * 3 + 1)
        info = lab.whole(10)
        for _ in bounded(lambda: lab.released):
            lab.turn()
            ship(lab)
        ship(lab)
        assert torch.equal(rows_of(lab, info), lab.expected(info))


class TestEnds:
    def test_without_a_stream_nothing_is_held(self, clock: Clock) -> None:
        lab = Lab(InMemoryTransport(), now=clock)
        info = lab.begin(20)
        lab.turn()
        assert len(lab.worker.reader) == 0
        lab.finish(info)
        lab.turn()
        assert lab.released == [info.request_id]

    def test_a_stream_lost_in_the_middle(self, clock: Clock) -> None:
        lab = connected(clock)
        running, held = lab.begin(LONG), lab.whole(LONG)
        lab.sender._lose(FailReason.SIDECAR_UNREACHABLE, "gone")
        lab.turn()
        assert lab.released == [held.request_id]
        assert len(lab.worker.reader) == 0
        clock.seconds += 10
        ship(lab)
        reasons = {lab.twin.captures[info.capture_id].reason for info in (running, held)}
        assert reasons == {FailReason.SIDECAR_UNREACHABLE}

    def test_a_stream_lost_between_two_lines_of_a_step(self, clock: Clock) -> None:
        """Whatever the other thread does meanwhile, each capture ends once and every block comes back."""
        lab = connected(clock)
        held = lab.whole(LONG)
        reserve = lab.sender.reserve

        def lose(*args: Any) -> int | None:
            lab.sender._lose(FailReason.SIDECAR_UNREACHABLE, "gone")
            return reserve(*args)

        lab.sender.reserve = lose  # type: ignore[assignment, method-assign]
        stream = lab.sender.stream
        assert stream is not None
        for item in list(stream.queue):
            if item.ticket is not None:
                stream.ring.release()
        late = lab.whole(20)
        lab.sender.reserve = reserve  # type: ignore[method-assign]
        clock.seconds += 10
        ship(lab)
        lab.turn()
        ship(lab)
        assert sorted(lab.released) == sorted([held.request_id, late.request_id])
        states = [lab.twin.captures[info.capture_id].state for info in (held, late)]
        assert states == [CaptureState.FAILED] * 2

    def test_what_fails_in_the_scheduler(self, clock: Clock) -> None:
        lab = connected(clock)
        info = lab.begin(20)
        lab.turn()
        lab.fail(info, Failure(info.request_id, FailReason.ABORTED, "half"))
        lab.turn()
        early = lab.begin(20)
        lab.fail(early, Failure(early.request_id, FailReason.BAD_REQUEST, "tags"))
        lab.turn()
        ship(lab)
        states = lab.twin.captures
        assert states[info.capture_id].reason is FailReason.ABORTED
        assert states[early.capture_id].reason is FailReason.BAD_REQUEST
        assert len(lab.worker.reader) == 0

    def test_everything_fails(self, clock: Clock) -> None:
        lab = connected(clock)
        infos = [lab.begin(20), lab.whole(LONG)]
        lab.worker.fail_all(FailReason.CACHE_RESET, "new")
        lab.turn()
        assert lab.released == [infos[1].request_id]
        ship(lab)
        assert {lab.twin.captures[i.capture_id].reason for i in infos} == {FailReason.CACHE_RESET}

    def test_a_prompt_without_rows(self, clock: Clock) -> None:
        lab = connected(clock)
        info = lab.whole(0)
        assert lab.released == [info.request_id]
        ship(lab)
        assert lab.twin.captures[info.capture_id].reason is FailReason.BAD_MESSAGE


class Broken(HostGather):
    """A gather that raises when it is told to."""

    trouble = False

    def copy(self, table: Sequence[int], rows: range, out: torch.Tensor) -> Ticket:
        if self.trouble:
            raise RuntimeError("CUDA error: an illegal memory access")
        return super().copy(table, rows, out)


class TestBugs:
    def broken(self, clock: Clock) -> tuple[Lab, Broken]:
        lab = connected(clock)
        gather = gather_for(lab.cache, BLOCK)
        assert isinstance(gather, HostGather)
        broken = Broken(gather.blocks)
        lab.worker._gather = broken
        return lab, broken

    def test_blocks_come_back_and_captures_fail(self, clock: Clock) -> None:
        """Whatever of a step was taken before it broke: each end is reported once, each beginning is failed."""
        lab, gather = self.broken(clock)
        running, held = lab.begin(20), lab.whole(LONG)
        gather.trouble = True
        late = lab.begin(20)
        lab.finish(running)
        ship(lab)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            lab.turn()
        gather.trouble = False
        lab.turn()
        lab.turn()
        assert sorted(lab.released) == sorted([running.request_id, held.request_id])
        ship(lab)
        for info in (running, held, late):
            assert lab.twin.captures[info.capture_id].reason is FailReason.INTERNAL_ERROR

    def test_no_staging_memory_is_lost(self, clock: Clock) -> None:
        lab, gather = self.broken(clock)
        for _ in range(300):
            gather.trouble = True
            lab.begin(20)
            lab.turn()
            info = lab.begin(30)
            lab.turn()
            lab.readable(info, 30)
            with pytest.raises(RuntimeError):
                lab.turn()
            gather.trouble = False
            ship(lab)
        assert ring_rows(lab) == 0
        good = lab.whole(100)
        ship(lab)
        lab.turn()
        ship(lab)
        assert torch.equal(rows_of(lab, good), lab.expected(good))

    @pytest.mark.parametrize("where", ["apply", "find", "pending", "complete", "stalled"])
    def test_a_bug_anywhere_in_a_step(self, clock: Clock, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        lab = connected(clock)
        running, held = lab.begin(20), lab.whole(LONG)
        late = lab.begin(20)
        lab.finish(running)

        def broken(*args: Any) -> Any:
            raise ZeroDivisionError(where)

        with monkeypatch.context() as patch:
            patch.setattr(lab.worker.reader, where, broken)
            with pytest.raises(ZeroDivisionError):
                lab.turn()
        lab.turn()
        lab.finish(late)
        lab.turn()
        assert sorted(lab.released) == sorted([running.request_id, held.request_id, late.request_id])
        ship(lab)
        for info in (running, held, late):
            assert lab.twin.captures[info.capture_id].state is CaptureState.FAILED
        assert len(lab.worker.reader) == 0
        assert not lab.worker.reader._held


class Slow(HostGather):
    """Copies that arrive when they are told to."""

    def __init__(self, inner: HostGather) -> None:
        super().__init__(inner.blocks)
        self.arrived = False
        self.waits = 0

    def copy(self, table: Sequence[int], rows: range, out: torch.Tensor) -> Ticket:
        super().copy(table, rows, out)
        return SlowTicket(self)


class SlowTicket:
    def __init__(self, gather: Slow) -> None:
        self._gather = gather

    def done(self) -> bool:
        return self._gather.arrived

    def wait(self) -> None:
        self._gather.waits += 1


class TestCopiesUnderWay:
    def slow(self, clock: Clock) -> tuple[Lab, Slow]:
        lab = connected(clock)
        gather = gather_for(lab.cache, BLOCK)
        assert isinstance(gather, HostGather)
        slow = lab.worker._gather = Slow(gather)
        return lab, slow

    def test_nothing_is_committed_before_it_has_arrived(self, clock: Clock) -> None:
        lab, gather = self.slow(clock)
        info = lab.whole(20)
        lab.turn()
        assert lab.released == []
        gather.arrived = True
        lab.turn()
        assert lab.released == [info.request_id]

    def test_the_first_of_a_batch_is_waited_for(self, clock: Clock) -> None:
        lab, gather = self.slow(clock)
        info = lab.begin(20)
        lab.turn()
        lab.readable(info, 20)
        lab.turn()
        lab.sender.pump()
        lab.sender.pump()
        assert gather.waits >= 1
        assert lab.twin.captures[info.capture_id].rows == 20

    def test_a_lost_stream_waits_for_its_copies(self, clock: Clock) -> None:
        """Or a copy would still write into memory that is gone."""
        lab, gather = self.slow(clock)
        info = lab.begin(20)
        lab.turn()
        lab.readable(info, 20)
        lab.turn()
        lab.sender._stream = None
        lab.turn()
        assert gather.waits == 1
        assert lab.worker._copies == {}

    def test_copies_of_dropped_captures_are_not_kept(self, clock: Clock) -> None:
        lab, gather = self.slow(clock)
        for _ in range(10):
            info = lab.begin(5)
            lab.turn()
            lab.readable(info, 5)
            lab.turn()
            lab.fail(info, Failure(info.request_id, FailReason.ABORTED, ""))
            lab.turn()
            gather.arrived = True
            ship(lab)
            lab.turn()
            gather.arrived = False
        assert lab.worker._copies == {}


def test_a_step_of_nothing(clock: Clock) -> None:
    lab = connected(clock)
    lab.turn()
    lab.worker.step(Step(0, BLOCK, finished=[Finish("unknown", 4, bytes(32), "stop")]))
    assert lab.worker.take_released() == {"unknown"}
