"""Worker side, each step: copies rows from the paged cache into staging memory, queues messages for the sender."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from hsconnector.capture.protocol import CaptureInfo, Commit, FailReason
from hsconnector.connector.current import Current
from hsconnector.connector.gather import BUFFER_BYTES, Gather, rows_tensor
from hsconnector.connector.reader import Cursor, Reader
from hsconnector.connector.ring import Ring
from hsconnector.connector.sender import Sender
from hsconnector.connector.step import Step
from hsconnector.connector.stream import Stream, Ticket

__all__ = ["Worker"]

_STALE = (
    "its first rows are in the prefix cache since before the engine's weights changed; reset the prefix cache after "
    "changing weights"
)


class Worker:
    """The rank that reads and sends.

    `on_ring` sees the staging memory of each new stream before it is used, to page-lock it for instance.
    """

    def __init__(
        self,
        gather: Gather,
        sender: Sender,
        on_ring: Callable[[Ring], None] = lambda ring: None,
        weights: Current | None = None,
    ) -> None:
        self.reader = Reader(gather.blocks.spec_block_size)
        self.sender = sender
        self._gather = gather
        self._settings = sender.settings
        self._on_ring = on_ring
        self._weights = weights
        self._proofs: dict[str, int] = {}
        """Of a request that has ended: which look at the weights must have found nothing before its commit."""
        self._stream: Stream | None = None
        self._copies: dict[str, Ticket] = {}
        """The last copy of each capture that may still be under way."""
        self._chunk_rows = 1

    def step(self, step: Step) -> None:
        """Takes the scheduler's news and reads what may be read, before this step's forward.

        When it raises, every open capture has failed and no request's blocks are held any more.
        """
        try:
            self._step(step)
        except Exception as error:
            self._abandon(step, f"{type(error).__name__}: {error}")
            raise

    def _step(self, step: Step) -> None:
        now = self.sender.now()
        self.follow_stream()
        begun = self._look_at_weights(step)
        ended = self.reader.apply(step, now) + self._of_old_weights(step)
        over = {info.capture_id for info, _, _ in ended}
        for info in begun:
            if info.capture_id not in over and not self.sender.begin(self._stream, info):
                self.reader.drop(info.request_id)
        for info, reason, detail in ended:
            self.sender.fail(info, reason, detail)
        for capture in self.reader.find(self.sender.take_refused()):
            self.reader.drop(capture.info.request_id)
        if self._stream is not None:
            self._read(self._stream, now)
            self._commit(self._stream)
        self._give_up_stalled(now)

    def _look_at_weights(self, step: Step) -> list[CaptureInfo]:
        """What was open fails if they have changed; what begins is of the weights that are there now."""
        if self._weights is None:
            return step.begun
        if self._weights.look(step):
            self.fail_all(FailReason.WEIGHTS_CHANGED, "the engine's weights became others while the capture was open")
        kept = {name: look for name, look in self._proofs.items() if look > self._weights.settled}
        self._proofs = kept | {finish.request_id: self._weights.looks for finish in step.finished}
        return [msgspec.structs.replace(info, weights_id=self._weights.changed_id) for info in step.begun]

    def _of_old_weights(self, step: Step) -> list[tuple[CaptureInfo, FailReason, str]]:
        """Captures that begin with rows which weights before the last change have computed."""
        if self._weights is None or not self._weights.stale:
            return []
        hits = [info for info in step.begun if info.request_id in step.hits and self.reader.drop(info.request_id)]
        return [(info, FailReason.WEIGHTS_CHANGED, _STALE) for info in hits]

    def _abandon(self, step: Step, detail: str) -> None:
        """Part of the step's news may not have been taken: its ends give their blocks back, its beginnings fail."""
        open_now = [capture.info for capture in self.reader.drop_all()]
        for finish in step.finished:
            if finish.held:
                self.reader.release(finish.request_id)
        for info in {info.capture_id: info for info in [*open_now, *step.begun]}.values():
            self.sender.fail(info, FailReason.INTERNAL_ERROR, detail)

    def fail_all(self, reason: FailReason, detail: str) -> None:
        """Ends every open capture."""
        for capture in self.reader.drop_all():
            self.sender.fail(capture.info, reason, detail)

    def take_released(self) -> set[str]:
        """Held requests whose blocks this rank needs no more, each once; their last rows have left the cache."""
        return self.reader.take_released()

    def close(self, timeout: float) -> None:
        """Ends what is open and ships what is staged, for up to `timeout` seconds."""
        self.fail_all(FailReason.ENGINE_SHUTDOWN, "the engine shut down before every row was read")
        self.sender.close(timeout)

    def follow_stream(self) -> None:
        """Takes the stream that is open now; the captures of one that is gone have failed with it."""
        self._copies = {name: ticket for name, ticket in self._copies.items() if not ticket.done()}
        stream = self.sender.stream
        if stream is self._stream:
            return
        for ticket in self._copies.values():
            ticket.wait()
        self._copies.clear()
        self._stream = stream
        self.reader.drop_all()
        if stream is not None:
            self._on_ring(stream.ring)
            self._chunk_rows = self._rows_a_piece(stream)

    def _rows_a_piece(self, stream: Stream) -> int:
        most = min(BUFFER_BYTES, self._settings.ring_bytes // 4)
        if not stream.accepted.shm:
            most = min(most, stream.accepted.max_payload_bytes)
        return max(1, most // self.sender.row_bytes)

    def _read(self, stream: Stream, now: float) -> None:
        for capture in self.reader.pending():
            while capture.waiting:
                room = self.sender.largest(stream) // self.sender.row_bytes
                most = min(room, self._chunk_rows, self._gather.largest())
                if most < 1:
                    if room < 1 and self._settings.on_overflow == "drop":
                        self._drop(capture, FailReason.OVERFLOW, self._overflow())
                        break
                    return
                if not self._read_some(stream, capture, most, now):
                    break

    def _read_some(self, stream: Stream, capture: Cursor, most: int, now: float) -> bool:
        rows = self.reader.next_rows(capture, most)
        offset = self.sender.reserve(stream, len(rows) * self.sender.row_bytes) if rows else None
        if offset is None:
            return False
        try:
            out = rows_tensor(stream.ring.memory, offset, len(rows), self._gather.blocks.view)
            ticket = self._gather.copy(capture.table, rows, out)
        except BaseException:
            self.sender.cancel(stream)
            raise
        self._copies[capture.info.capture_id] = ticket
        self.sender.rows(stream, capture.info.capture_id, rows, offset, ticket)
        self.reader.advance(capture, len(rows), now)
        return True

    def _commit(self, stream: Stream) -> None:
        for capture in self.reader.complete(self._arrived):
            finish = capture.finish
            if finish is not None:
                commit = Commit(capture.info.capture_id, finish.num_rows, finish.token_ids, finish.reason)
                self.sender.commit(stream, commit)

    def _arrived(self, capture: Cursor) -> bool:
        ticket = self._copies.get(capture.info.capture_id)
        return (ticket is None or ticket.done()) and self._proved(capture)

    def _proved(self, capture: Cursor) -> bool:
        """Whether the weights were seen to be the same from its first step to its last."""
        return self._weights is None or self._proofs.get(capture.info.request_id, 0) <= self._weights.settled

    def _give_up_stalled(self, now: float) -> None:
        timeout = self._settings.stall_timeout_s
        for capture in self.reader.stalled(now, timeout):
            total = capture.finish.num_rows if capture.finish is not None else 0
            detail = f"{capture.cursor} of {total} rows were shipped and none for {timeout:g} s (stall_timeout_s)"
            self._drop(capture, FailReason.STALLED, detail)

    def _drop(self, capture: Cursor, reason: FailReason, detail: str) -> None:
        self.reader.drop(capture.info.request_id)
        self.sender.fail(capture.info, reason, detail)

    def _overflow(self) -> str:
        return f"staging memory of {self._settings.ring_bytes} bytes was full and on_overflow is 'drop'"
