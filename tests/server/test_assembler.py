from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hsconnector.capture.protocol import (
    CaptureInfo,
    CaptureState,
    Commit,
    FailReason,
    MessageStatus,
    Rows,
    Span,
    new_capture_id,
)
from server.assembler import Action, Assembly
from tests.examples import examples

ROW = 12


def assembly() -> Assembly:
    info = CaptureInfo(capture_id=new_capture_id(), request_id="r", num_prompt_tokens=4, created=0.0)
    return Assembly(info, ROW)


def rows(start: int, count: int, length: int | None = None) -> Rows:
    return Rows("c", start, count, Span(0, count * ROW if length is None else length))


def commit(num_rows: int, token_bytes: int | None = None) -> Commit:
    return Commit("c", num_rows, bytes(8 * num_rows if token_bytes is None else token_bytes))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (rows(5, 1), "rows from 5 came where row 4 was next"),
        (rows(3, 2), "rows from 3 came where row 4 was next"),
        (rows(4, 0), "0 rows from row 4"),
        (rows(-1, 2), "2 rows from row -1"),
        (rows(4, 2, 23), "2 rows of 12 bytes are 24 bytes, the span has 23"),
        (rows(4, 2, -24), "2 rows of 12 bytes are 24 bytes, the span has -24"),
    ],
)
def test_rows_that_contradict_fail_the_capture_by_name(message: Rows, words: str) -> None:
    capture = assembly()
    capture.wrote(4)
    assert capture.action_on_rows(message) is Action.REFUSED
    answer = capture.answer(MessageStatus.FAILED)
    assert (answer.state, answer.reason) == (CaptureState.FAILED, FailReason.BAD_MESSAGE)
    assert words in answer.detail


@pytest.mark.parametrize(
    ("received", "message", "words"),
    [
        (4, commit(5), "the commit names 5 rows, 4 were received"),
        (4, commit(4, 31), "4 rows need 32 bytes of token ids, the commit has 31"),
        (0, commit(0), "a capture without rows"),
        (0, commit(-1, 0), "the commit names -1 rows, 0 were received"),
    ],
)
def test_a_commit_must_agree_with_what_was_received(received: int, message: Commit, words: str) -> None:
    capture = assembly()
    capture.wrote(received)
    assert capture.action_on_commit(message) is Action.REFUSED
    assert capture.reason is FailReason.BAD_MESSAGE
    assert words in capture.detail


@pytest.mark.parametrize(("start", "count"), [(0, 4), (0, 1), (3, 1), (1, 2)])
def test_rows_had_before_are_duplicates(start: int, count: int) -> None:
    capture = assembly()
    capture.wrote(4)
    assert capture.action_on_rows(rows(start, count)) is Action.DUPLICATE
    assert capture.state is CaptureState.RECEIVING


def test_the_first_failure_stays() -> None:
    capture = assembly()
    assert capture.fail(FailReason.ABORTED, "first")
    assert not capture.fail(FailReason.STALLED, "second")
    assert (capture.reason, capture.detail) == (FailReason.ABORTED, "first")


class OneCapture(RuleBasedStateMachine):
    """Against a list of row numbers: rows are taken once, in order, and nothing follows the end."""

    def __init__(self) -> None:
        super().__init__()
        self.capture = assembly()
        self.written: list[int] = []
        self.end: CaptureState | None = None

    @rule(start=st.integers(-2, 12), count=st.integers(-1, 5), length_off=st.sampled_from([0, 0, 0, 1, -1]))
    def send(self, start: int, count: int, length_off: int) -> None:
        action = self.capture.action_on_rows(rows(start, count, count * ROW + length_off))
        valid = count >= 1 and start >= 0
        if self.end is not None:
            assert action is (Action.REFUSED if self.end is CaptureState.FAILED else Action.DUPLICATE)
        elif valid and start + count <= len(self.written):
            assert action is Action.DUPLICATE
        elif valid and start == len(self.written) and length_off == 0:
            assert action is Action.APPLY
            self.written += range(start, start + count)
            self.capture.wrote(count)
        else:
            assert action is Action.REFUSED
            self.end = CaptureState.FAILED

    @precondition(lambda self: self.end is None)
    @rule()
    def send_the_next_row(self) -> None:
        self.send(len(self.written), 1, 0)

    @precondition(lambda self: self.end is None and self.written)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.written) - 1))
        self.send(start, data.draw(st.integers(1, len(self.written) - start)), 0)

    @rule(off=st.sampled_from([0, 0, 1, -1]), short=st.sampled_from([0, 0, 1]))
    def commit(self, off: int, short: int) -> None:
        named = len(self.written) + off
        action = self.capture.action_on_commit(commit(named, max(0, 8 * named - short)))
        if self.end is not None:
            assert action is (Action.REFUSED if self.end is CaptureState.FAILED else Action.DUPLICATE)
        elif off == 0 and self.written and not short:
            assert action is Action.APPLY
            self.end = CaptureState.READY
            self.capture.finish(CaptureState.READY)
        else:
            assert action is Action.REFUSED
            self.end = CaptureState.FAILED

    @rule(reason=st.sampled_from(list(FailReason)))
    def fail(self, reason: FailReason) -> None:
        assert self.capture.fail(reason, "x") is (self.end is None)
        self.end = self.end or CaptureState.FAILED

    @invariant()
    def rows_are_in_order_and_once(self) -> None:
        assert self.written == list(range(self.capture.rows))

    @invariant()
    def the_state_is_the_end(self) -> None:
        assert self.capture.state is (self.end or CaptureState.RECEIVING)
        assert (self.capture.reason is None) is (self.end is not CaptureState.FAILED)


TestOneCapture = OneCapture.TestCase
TestOneCapture.settings = settings(max_examples=examples(150), stateful_step_count=25, deadline=None)
