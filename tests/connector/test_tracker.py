from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from hsconnector.capture.protocol import FailReason, RowsKind, pack_token_ids
from hsconnector.connector.step import Failure, Finish, Step, TableChange
from hsconnector.connector.tracker import Arrival, Ended, Ending, Progress, Scheduled, Tracker, Wish
from tests.connector.scheduling import BLOCK
from tests.connector.tracker_machine import OUTPUT, TrackerMachine, tracker
from tests.examples import examples


def arrival(name: str, blocks: list[int], num_prompt: int, num_computed: int = 0, **more: Any) -> Arrival:
    return Arrival(name, blocks, num_computed, num_prompt, **more)


def step(
    into: Tracker,
    *arrivals: Arrival,
    progress: tuple[Progress, ...] = (),
    preempted: tuple[str, ...] = (),
    **counts: int,
) -> Step:
    return into.step(Scheduled(preempted, arrivals, progress, counts))


def ended(name: str, num_prompt: int, outputs: int = 1, computed: int | None = None, **more: Any) -> Ended:
    tokens = list(range(num_prompt + outputs))
    computed = num_prompt + max(0, outputs - 1) if computed is None else computed
    return Ended(name, num_prompt, tokens, computed, **{"reason": "length", **more})


class TestReadable:
    def test_nothing_in_the_first_step_not_even_hits(self) -> None:
        t = tracker()
        first = step(t, arrival("a", [3, 4, 5], 10, num_computed=8), a=2)
        assert [info.request_id for info in first.begun] == ["a"]
        assert first.tables == [TableChange("a", (3, 4, 5), start_over=True)]
        assert first.readable == []
        assert step(t).readable == [("a", 10)]

    def test_each_chunk_a_step_later(self) -> None:
        t = tracker()
        step(t, arrival("a", [3], 10), a=4)
        second = step(t, progress=(Progress("a", [7], 4),), a=4)
        assert second.readable == [("a", 4)]
        assert second.tables == [TableChange("a", (7,))]
        third = step(t, progress=(Progress("a", [9], 8),), a=2)
        assert third.readable == [("a", 8)]
        assert step(t).readable == [("a", 10)]
        assert step(t).readable == []

    def test_a_request_that_is_not_scheduled_again_is_readable_all_the_same(self) -> None:
        t = tracker()
        step(t, arrival("a", [3], 4), a=4)
        assert step(t).readable == [("a", 4)]

    def test_output_rows_are_not_while_they_may_be_rejected(self) -> None:
        t = tracker()
        step(t, arrival("a", [3], 3, wish=lambda: OUTPUT), a=3)
        assert step(t, progress=(Progress("a", [], 3),), a=2).readable == [("a", 3)]
        assert step(t, progress=(Progress("a", [4], 4),), a=2).readable == []

    def test_a_chunk_whose_rows_the_next_step_computes_again(self) -> None:
        """What the engine says it has is believed, not what was scheduled."""
        t = tracker()
        step(t, arrival("a", [3, 4], 8), a=4)
        assert step(t, progress=(Progress("a", [], 2),), a=4).readable == [("a", 2)]


class TestComingBack:
    """The three shapes, and the two in which it happens within one step."""

    def started(self) -> Tracker:
        t = tracker()
        step(t, arrival("a", [3, 4], 8), a=8)
        assert step(t, progress=(Progress("a", [5], 8),), a=1).readable == [("a", 8)]
        return t

    def test_resumed_as_the_v1_runner_shows_it(self) -> None:
        t = self.started()
        assert step(t, preempted=("a",)).lost == ["a"]
        back = step(t, progress=(Progress("a", [7, 8, 9], 4, resumed=True),), a=4)
        assert (back.begun, back.readable) == ([], [])
        assert back.tables == [TableChange("a", (7, 8, 9), start_over=True)]
        assert step(t).readable == [("a", 8)]

    def test_again_among_the_new_as_the_v2_runner_shows_it(self) -> None:
        t = self.started()
        step(t, preempted=("a",))
        back = step(t, arrival("a", [7, 8, 9], 8, num_computed=4), a=4)
        assert (back.begun, back.readable) == ([], [])
        assert back.tables == [TableChange("a", (7, 8, 9), start_over=True)]
        assert step(t).readable == [("a", 8)]

    @pytest.mark.parametrize("v2", [False, True])
    def test_preempted_and_back_within_one_step(self, v2: bool) -> None:
        t = self.started()
        if v2:
            back = step(t, arrival("a", [7, 8], 8), preempted=("a",), a=8)
        else:
            back = step(t, progress=(Progress("a", [7, 8], 0, resumed=True),), preempted=("a",), a=8)
        assert back.lost == ["a"]
        assert back.tables == [TableChange("a", (7, 8), start_over=True)]
        assert (back.begun, back.readable) == ([], [])
        assert step(t).readable == [("a", 8)]

    def test_back_without_word_of_it(self) -> None:
        """Its blocks are gone, so what comes is its whole table though nobody says so."""
        t = self.started()
        step(t, preempted=("a",))
        back = step(t, progress=(Progress("a", [7, 8], 0),), a=8)
        assert back.tables == [TableChange("a", (7, 8), start_over=True)]
        assert back.readable == []

    def test_rows_due_are_lost_with_the_blocks(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 8), a=8)
        gone = step(t, preempted=("a",))
        assert (gone.lost, gone.readable) == (["a"], [])
        assert step(t).readable == []

    def test_a_skipped_request_stays_skipped(self) -> None:
        t = tracker()
        assert step(t, arrival("a", [3], 4, wish=lambda: Wish(capture=False)), a=4) == Step(1, BLOCK)
        step(t, preempted=("a",))
        assert step(t, arrival("a", [3], 4, wish=lambda: Wish()), a=4) == Step(1, BLOCK)
        assert t.finish(ended("a", 4), [3]) == Ending(False, None)
        assert t.tracked == 0

    def test_a_prompt_that_grew_is_a_session(self) -> None:
        t = self.started()
        (failure,) = step(t, arrival("a", [3, 4, 5], 12, num_computed=8), a=4).failed
        assert failure.reason is FailReason.UNSUPPORTED_REQUEST
        assert "8 to 12" in failure.detail


class TestEnd:
    def test_held_when_every_row_was_scheduled(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 6), a=6)
        ending = t.finish(ended("a", 6), [3, 4])
        assert ending == Ending(True, f"{0:032x}")
        assert t.holds_blocks
        assert step(t).finished == [Finish("a", 6, pack_token_ids(range(6)), "length")]
        assert t.tracked == 0
        assert t.held == {"a"}
        t.reported(["a", "a", "other"])
        assert not t.holds_blocks

    def test_a_stop_string_is_an_abort_with_every_row(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 6), a=6)
        assert t.finish(ended("a", 6, reason="abort"), [3, 4]).hold
        assert step(t).finished[0].reason == "abort"

    def test_an_abort_in_the_middle_of_the_prompt(self) -> None:
        t = tracker()
        step(t, arrival("a", [3], 6), a=4)
        assert t.finish(ended("a", 6, outputs=0, computed=4, reason="abort"), [3]) == Ending(False, f"{0:032x}")
        told = step(t)
        assert told.finished == []
        assert told.failed == [Failure("a", FailReason.ABORTED, "the request ended (abort) with 4 of 6 rows computed")]

    def test_an_abort_while_preempted_comes_with_an_empty_table(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 6), a=6)
        step(t, preempted=("a",))
        assert not t.finish(ended("a", 6, computed=0, reason="abort"), []).hold
        told = step(t)
        assert told.failed == [] and t.held == set()
        assert [(finish.num_rows, finish.held) for finish in told.finished] == [(6, False)]

    def test_an_abort_while_another_connector_fills_the_blocks_again(self) -> None:
        """Preempted, given blocks that are still being loaded, aborted: its table holds no row of its own."""
        t = tracker()
        step(t, arrival("a", [3, 4], 6), a=6)
        step(t, preempted=("a",))
        assert not t.finish(ended("a", 6, computed=6, reason="abort"), [7, 8]).hold
        told = step(t)
        assert told.tables == [] and [finish.held for finish in told.finished] == [False]

    @pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
    def test_a_hit_on_what_another_connector_brings_in_the_same_step(self, v2: bool) -> None:
        """`a` was computed here, lost its blocks and is given them back loaded; `b` hits them at once."""
        t = tracker()
        step(t, arrival("a", [1, 2], 6), a=6)
        step(t, preempted=("a",))
        t.external.offered("a", 0)
        t.external.offered("b", 4)
        new = arrival("b", [7, 9], 6, 4)
        if v2:
            told = step(t, new, arrival("a", [7, 8], 6, 4), a=2, b=2)
        else:
            told = step(t, new, progress=(Progress("a", [7, 8], 4, resumed=True),), a=2, b=2)
        assert {(failure.request_id, failure.reason) for failure in told.failed} == {
            ("a", FailReason.EXTERNAL_PREFIX),
            ("b", FailReason.EXTERNAL_PREFIX),
        }

    @pytest.mark.parametrize("how", ["arrives", "resumes", "goes on"])
    def test_blocks_that_held_loaded_rows_are_ours_once_they_are_computed_here(self, how: str) -> None:
        """`a` was given blocks 7 and 8 loaded; then another request computes them, and `c` hits what that one wrote."""
        t = tracker()
        t.external.offered("a", 0)
        step(t, arrival("a", [7, 8], 9, 8), arrival("b", [3], 12), a=1, b=4)
        t.finish(ended("a", 9), [7, 8, 5])
        if how == "arrives":
            step(t, arrival("d", [7, 8], 8), d=8)
        elif how == "resumes":
            step(t, preempted=("b",))
            step(t, progress=(Progress("b", [7, 8, 9], 0, resumed=True),), b=12)
        else:
            step(t, progress=(Progress("b", [7, 8], 4),), b=8)
        assert step(t, arrival("c", [7, 8, 6], 9, 8), c=1).failed == []

    def test_a_load_for_a_request_that_ends_before_it_is_scheduled(self) -> None:
        t = tracker()
        t.external.offered("a", 0)
        assert not t.finish(ended("a", 6, computed=4, reason="abort"), [7, 8]).hold
        (failure,) = step(t, arrival("b", [7, 9], 6, 4), b=2).failed
        assert (failure.request_id, failure.reason) == ("b", FailReason.EXTERNAL_PREFIX)

    def test_a_table_that_does_not_cover_the_rows(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 6), a=6)
        assert not t.finish(ended("a", 6), [3]).hold
        assert step(t).failed[0].detail.endswith("4 of 6 rows computed")

    def test_a_request_that_never_ran(self) -> None:
        t = tracker()
        assert t.finish(ended("a", 6, computed=0), []) == Ending(False, None)
        assert step(t) == Step(1, BLOCK)

    def test_finished_twice(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 6), a=6)
        assert t.finish(ended("a", 6), [3, 4]).hold
        assert t.finish(ended("a", 6), [3, 4]) == Ending(False, None)
        assert len(step(t).finished) == 1

    def test_output_rows_are_all_but_the_last_token(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 6, wish=lambda: OUTPUT), a=6)
        assert t.finish(ended("a", 6, outputs=4), [3, 4, 5]).hold
        told = step(t)
        assert told.finished == [Finish("a", 9, pack_token_ids(range(9)), "length")]
        assert told.tables == [TableChange("a", (5,))]

    def test_max_tokens_of_one_has_the_prompt_only(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 6, wish=lambda: OUTPUT), a=6)
        t.finish(ended("a", 6, outputs=1), [3, 4])
        assert step(t).finished[0].num_rows == 6

    def test_no_output_at_all_has_the_prompt_too(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 6, wish=lambda: OUTPUT), a=6)
        t.finish(ended("a", 6, outputs=0, computed=6), [3, 4])
        assert step(t).finished[0].num_rows == 6

    def test_another_table_at_the_end_replaces_the_old_one(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 6), a=6)
        t.finish(ended("a", 6), [3, 9])
        assert step(t).tables == [TableChange("a", (3, 9), start_over=True)]

    def test_a_session_that_ends(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 6), a=6)
        problem = (FailReason.UNSUPPORTED_REQUEST, "resumable sessions are not captured")
        assert not t.finish(ended("a", 6, problem=problem), [3, 4]).hold
        assert step(t).failed == [Failure("a", *problem)]

    def test_a_prompt_without_tokens(self) -> None:
        t = tracker()
        step(t, arrival("a", [], 0), a=1)
        assert t.finish(ended("a", 0, outputs=1, computed=1), [3]).hold
        assert step(t).finished[0].num_rows == 0


class TestFailures:
    def test_a_null_block_in_the_first_table(self) -> None:
        t = tracker()
        (failure,) = step(t, arrival("a", [3, 0], 8), a=8).failed
        assert failure.reason is FailReason.LAYOUT
        assert "block 0" in failure.detail
        assert step(t).readable == []
        assert not t.finish(ended("a", 8), [3, 0]).hold

    def test_a_null_block_later(self) -> None:
        t = tracker()
        step(t, arrival("a", [3], 8), a=4)
        (failure,) = step(t, progress=(Progress("a", [0], 4),), a=4).failed
        assert failure.reason is FailReason.LAYOUT

    def test_a_null_block_in_the_last_table(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 8), a=8)
        assert not t.finish(ended("a", 8), [0, 4]).hold
        assert step(t).failed[0].reason is FailReason.LAYOUT

    def test_a_null_block_beyond_the_wanted_rows_does_not_matter(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 8), a=8)
        assert t.finish(ended("a", 8), [3, 4, 0]).hold

    def test_rows_taken_back_after_they_were_read(self) -> None:
        t = tracker()
        step(t, arrival("a", [3, 4], 8), a=8)
        step(t, progress=(Progress("a", [5], 8),), a=1)
        (failure,) = step(t, progress=(Progress("a", [], 4),), a=4).failed
        assert failure.reason is FailReason.EXTERNAL_PREFIX
        assert "rows 4 to 8" in failure.detail

    def test_rows_from_outside_are_known_before_the_request_is(self) -> None:
        """The engine says so while it allocates, before the step in which the request is new."""
        t = tracker()
        t.fail("a", FailReason.EXTERNAL_PREFIX, "16 tokens")
        first = step(t, arrival("a", [3, 4], 8), a=8)
        assert [info.request_id for info in first.begun] == ["a"]
        assert first.failed == [Failure("a", FailReason.EXTERNAL_PREFIX, "16 tokens")]
        assert not t.finish(ended("a", 8), [3, 4]).hold

    def test_rows_from_outside_for_a_request_that_never_runs(self) -> None:
        t = tracker()
        t.fail("a", FailReason.EXTERNAL_PREFIX, "16 tokens")
        assert t.finish(ended("a", 8, computed=0), []) == Ending(False, None)
        assert not t._early

    def test_rows_from_outside_for_a_skipped_request(self) -> None:
        t = tracker()
        t.fail("a", FailReason.EXTERNAL_PREFIX, "16 tokens")
        assert step(t, arrival("a", [3], 4, wish=lambda: Wish(capture=False)), a=4) == Step(1, BLOCK)
        t.fail("a", FailReason.EXTERNAL_PREFIX, "16 tokens")
        assert step(t) == Step(1, BLOCK)

    def test_only_the_first_failure_is_told(self) -> None:
        t = tracker()
        step(t, arrival("a", [3], 4), a=4)
        t.fail("a", FailReason.LAYOUT, "first")
        t.fail("a", FailReason.INTERNAL_ERROR, "second")
        assert step(t).failed == [Failure("a", FailReason.LAYOUT, "first")]
        assert t.finish(ended("a", 4), [3]) == Ending(False, f"{0:032x}")
        assert step(t) == Step(1, BLOCK)

    def test_a_bad_wish_fails_its_own_capture(self) -> None:
        t = tracker()
        wish = Wish(problem=(FailReason.BAD_REQUEST, "tags"))
        first = step(t, arrival("a", [3], 4, wish=lambda: wish), arrival("b", [4], 4), a=4, b=4)
        assert first.failed == [Failure("a", FailReason.BAD_REQUEST, "tags")]
        assert [info.request_id for info in first.begun] == ["a", "b"]
        assert step(t).readable == [("b", 4)]

    def test_a_wish_that_raises_fails_its_own_capture(self) -> None:
        def broken() -> Wish:
            raise TypeError("what is this")

        t = tracker()
        first = step(t, arrival("a", [3], 4, wish=broken), arrival("b", [4], 4), a=4, b=4)
        assert [(f.request_id, f.reason) for f in first.failed] == [("a", FailReason.INTERNAL_ERROR)]
        assert "what is this" in first.failed[0].detail
        assert step(t).readable == [("b", 4)]

    def test_everything_fails_held_ones_too(self) -> None:
        t = tracker()
        step(t, arrival("a", [3], 4), arrival("b", [4], 4), arrival("c", [5], 4), a=4, b=4, c=4)
        t.finish(ended("a", 4), [3])
        step(t)
        t.finish(ended("b", 4), [4])
        t.fail_all(FailReason.CACHE_RESET, "new weights")
        told = step(t)
        assert sorted((f.request_id, f.reason) for f in told.failed) == [
            (name, FailReason.CACHE_RESET) for name in "abc"
        ]
        assert [finish.request_id for finish in told.finished] == ["b"]
        assert t.held == {"a", "b"}

    def test_abandoned_requests_hold_nothing(self) -> None:
        t = tracker()
        step(t, arrival("a", [3], 4), arrival("b", [4], 4), a=4, b=4)
        t.finish(ended("a", 4), [3])
        t.abandon("a", "went wrong")
        t.abandon("b", "went wrong")
        told = step(t)
        assert not told.finished
        assert [(f.request_id, f.reason) for f in told.failed] == [
            ("a", FailReason.INTERNAL_ERROR),
            ("b", FailReason.INTERNAL_ERROR),
        ]
        assert (t.tracked, t.holds_blocks) == (0, False)


class TestSalvage:
    def broken_step(self, t: Tracker) -> Step:
        """A step that raises after `b` has begun, dealt with as the connector does."""
        bad = Progress("a", None, 4)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            step(t, arrival("b", [4], 4), progress=(Progress("c", None, 0, resumed=True), bad), preempted=("c",))  # type: ignore[arg-type]
        t.fail_all(FailReason.INTERNAL_ERROR, "a bug")
        return t.salvage()

    def test_beginnings_and_ends_are_told(self) -> None:
        t = tracker()
        step(t, *(arrival(name, [ord(name)], 4) for name in "acd"), a=4, c=4, d=4)
        t.finish(ended("d", 4), [ord("d")])
        told = self.broken_step(t)
        assert told.lost == ["c"]
        assert [info.request_id for info in told.begun] == ["b"]
        assert {f.request_id for f in told.failed} == {"a", "b", "c", "d"}
        assert [f.request_id for f in told.finished] == ["d"]
        for name in "abc":
            assert not t.finish(ended(name, 4), [1]).hold
        assert t.held == {"d"}

    def test_nothing_begins_again(self) -> None:
        """Where the step was never reached, the beginnings of the one before are not told a second time."""
        t = tracker()
        step(t, arrival("a", [3], 4), a=4)
        t.fail_all(FailReason.INTERNAL_ERROR, "a bug")
        first = t.salvage()
        assert first.begun == []
        assert [f.request_id for f in first.failed] == ["a"]
        t.fail_all(FailReason.INTERNAL_ERROR, "a bug")
        assert t.salvage() == Step(1, BLOCK)

    def test_a_step_after_a_broken_one(self) -> None:
        t = tracker()
        step(t, arrival("a", [3], 4), arrival("c", [3], 4), a=4, c=4)
        self.broken_step(t)
        after = step(t, arrival("e", [9], 4), e=4)
        assert [info.request_id for info in after.begun] == ["e"]
        assert step(t).readable == [("e", 4)]


def test_a_reset_of_the_caches_is_told_once_and_survives_a_step_that_could_not_be_built() -> None:
    t = tracker()
    step(t, arrival("a", [3], 4), a=4)
    t.caches_reset()
    t.prefix_cache_emptied()
    with pytest.raises(TypeError):
        t.step(Scheduled(arrivals=None))  # type: ignore[arg-type]
    news = t.salvage()
    assert (news.reset, news.emptied) == (True, True)
    assert [(f.request_id, f.reason) for f in news.failed] == [("a", FailReason.CACHE_RESET)]
    assert step(t) == Step(1, BLOCK)


def test_a_reset_between_two_steps_is_told_by_the_next_one() -> None:
    t = tracker()
    t.caches_reset()
    assert t.salvage() == Step(1, BLOCK)
    news = step(t)
    assert (news.reset, news.emptied) == (True, False)


def test_a_request_that_begins_with_rows_of_the_prefix_cache_is_named() -> None:
    t = tracker()
    news = step(t, arrival("a", [3, 4], 8, num_computed=4), arrival("b", [5], 4), a=4, b=4)
    assert news.hits == {"a"}


def test_a_capture_says_what_its_request_is() -> None:
    t = tracker()
    wish = Wish(dataset="d", sample_id="s", tags={"k": "v"}, expected_content_hash="ab", rows=OUTPUT.rows)
    first = step(t, arrival("a", [3], 4, lora="adapter", mm_hashes=("x",), wish=lambda: wish), a=4)
    (info,) = first.begun
    assert (info.request_id, info.num_prompt_tokens, info.created) == ("a", 4, 12.5)
    assert (info.dataset, info.sample_id, info.tags) == ("d", "s", {"k": "v"})
    assert (info.lora, info.mm_hashes, info.expected_content_hash) == ("adapter", ("x",), "ab")
    assert info.rows is RowsKind.PROMPT_AND_OUTPUT


TestTrackerMachine = TrackerMachine.TestCase
TestTrackerMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
