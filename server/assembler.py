"""The state machine of one capture: what each message may do next. Pure, no I/O."""

from __future__ import annotations

import enum

from hsconnector.capture.protocol import (
    CaptureInfo,
    CaptureState,
    Commit,
    FailReason,
    MessageAnswer,
    MessageStatus,
    Rows,
)

__all__ = ["Action", "Assembly"]


class Action(enum.Enum):
    """What the caller has to do about a message."""

    APPLY = "apply"
    """Write the rows or publish the shard, then call `wrote` or `finish`."""
    DUPLICATE = "duplicate"
    """Nothing: the sidecar has these rows, or this commit, already."""
    REFUSED = "refused"
    """Nothing more: the capture has failed, over this message or before it."""


class Assembly:
    """One capture between its Open and its end.

        receiving --rows--> receiving --commit--> ready | quarantined
            |                    |
            +--fail, contradiction, I/O error, lost producer--> failed

    Rows are taken in order and once. A capture that has failed keeps its first reason.
    """

    __slots__ = ("detail", "info", "reason", "row_bytes", "rows", "state")

    def __init__(self, info: CaptureInfo, row_bytes: int) -> None:
        self.info = info
        self.row_bytes = row_bytes
        self.rows = 0
        self.state = CaptureState.RECEIVING
        self.reason: FailReason | None = None
        self.detail = ""

    def action_on_rows(self, message: Rows) -> Action:
        """What to do about rows `start .. start + count`."""
        if self.state is not CaptureState.RECEIVING:
            return self._after_the_end()
        if message.count < 1 or message.start < 0:
            return self._contradiction(f"{message.count} rows from row {message.start} is not a range of rows")
        if message.start + message.count <= self.rows:
            return Action.DUPLICATE
        if message.start != self.rows:
            return self._contradiction(f"rows from {message.start} came where row {self.rows} was next")
        wanted = message.count * self.row_bytes
        if message.span.length != wanted:
            return self._contradiction(
                f"{message.count} rows of {self.row_bytes} bytes are {wanted} bytes, the span has {message.span.length}"
            )
        return Action.APPLY

    def action_on_commit(self, message: Commit) -> Action:
        """What to do about the claim that everything was sent."""
        if self.state is not CaptureState.RECEIVING:
            return self._after_the_end()
        if message.num_rows != self.rows:
            return self._contradiction(f"the commit names {message.num_rows} rows, {self.rows} were received")
        if self.rows == 0:
            return self._contradiction("a capture without rows cannot be committed")
        if len(message.token_ids) != 8 * self.rows:
            return self._contradiction(
                f"{self.rows} rows need {8 * self.rows} bytes of token ids, the commit has {len(message.token_ids)}"
            )
        return Action.APPLY

    def wrote(self, count: int) -> None:
        """`count` more rows lie in the shard."""
        self.rows += count

    def finish(self, state: CaptureState, detail: str = "") -> None:
        """The shard has its name: ready or quarantined; `detail` says what is unsound about it."""
        self.state, self.detail = state, detail

    def fail(self, reason: FailReason, detail: str) -> bool:
        """Ends the capture without a shard; False where it had ended before."""
        if self.state is not CaptureState.RECEIVING:
            return False
        self.state, self.reason, self.detail = CaptureState.FAILED, reason, detail
        return True

    def answer(self, status: MessageStatus) -> MessageAnswer:
        """The answer to a message, with where the capture stands after it."""
        return MessageAnswer(status, self.state, self.reason, self.detail)

    def _after_the_end(self) -> Action:
        return Action.REFUSED if self.state is CaptureState.FAILED else Action.DUPLICATE

    def _contradiction(self, detail: str) -> Action:
        self.fail(FailReason.BAD_MESSAGE, detail)
        return Action.REFUSED
