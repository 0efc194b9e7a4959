"""Worker side: the cursor of each capture, and what to read in this step. Pure Python.

The worker owns the cursor. It copies from there as far as memory allows, in order, each row exactly once. A capture
that loses its table keeps its cursor: the rows already read stay right, and the same request brings the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from hsconnector.capture.protocol import CaptureInfo, FailReason
from hsconnector.connector.step import Finish, Step, TableChange

__all__ = ["Cursor", "Reader"]


@dataclass(slots=True)
class Cursor:
    """One capture on its way: rows `0 .. cursor` are read, rows `cursor .. readable` may be."""

    info: CaptureInfo
    table: list[int] = field(default_factory=list)
    cursor: int = 0
    readable: int = 0
    finish: Finish | None = None
    moved: float = 0.0
    """When its cursor last moved, or its blocks began to be held."""

    @property
    def waiting(self) -> int:
        """Rows that may be read now."""
        return max(0, self.readable - self.cursor)

    @property
    def complete(self) -> bool:
        """Every wanted row is read."""
        return self.finish is not None and self.cursor >= self.finish.num_rows


class Reader:
    """Applies the scheduler's steps and hands out captures with rows to read.

    `released` are held requests whose blocks this rank needs no more; the caller reports each once.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._captures: dict[str, Cursor] = {}
        self._moved = 0.0
        """When any row was last read."""
        self._held: set[str] = set()
        self._released: set[str] = set()

    def __len__(self) -> int:
        return len(self._captures)

    def apply(self, step: Step, now: float) -> list[tuple[CaptureInfo, FailReason, str]]:
        """Takes one step's news; gives the captures that it ends without a shard."""
        for request_id in step.lost:
            self._forget_table(request_id)
        for info in step.begun:
            self._captures[info.request_id] = Cursor(info, moved=now)
        ended = []
        for failure in step.failed:
            capture = self.drop(failure.request_id)
            if capture is not None:
                ended.append((capture.info, failure.reason, failure.detail))
        for change in step.tables:
            self._change_table(change)
        for request_id, rows in step.readable:
            self._allow(request_id, rows)
        for finish in step.finished:
            short = self._finish(finish, now)
            if short is not None:
                ended.append((short.info, FailReason.ABORTED, _aborted(short, finish)))
        return ended

    def pending(self) -> Iterator[Cursor]:
        """Captures with rows to read: those that hold blocks first, then in order of arrival."""
        waiting = [capture for capture in self._captures.values() if capture.waiting]
        yield from sorted(waiting, key=lambda capture: capture.finish is None)

    def next_rows(self, capture: Cursor, most: int) -> range:
        """The next rows to read of a capture, at most so many, never beyond its table."""
        covered = len(capture.table) * self.block_size
        return range(capture.cursor, min(capture.readable, covered, capture.cursor + most))

    def advance(self, capture: Cursor, count: int, now: float) -> None:
        """`count` more rows of the capture were read."""
        capture.cursor += count
        capture.moved = self._moved = now

    def complete(self, arrived: Callable[[Cursor], bool] = lambda capture: True) -> list[Cursor]:
        """Captures whose every row is read and has arrived; they are forgotten and their blocks released."""
        done = [capture for capture in self._captures.values() if capture.complete and arrived(capture)]
        for capture in done:
            self.drop(capture.info.request_id)
        return done

    def stalled(self, now: float, timeout: float) -> list[Cursor]:
        """Captures that hold blocks while no row of any capture was read for longer than `timeout` seconds.

        One with rows to read that waits for its turn behind others that move is not stuck: the sidecar is slower than
        the engine, and the engine's own admission slows the load.
        """
        held = [capture for capture in self._captures.values() if capture.finish is not None]
        return [capture for capture in held if now - self._last_move(capture) > timeout]

    def _last_move(self, capture: Cursor) -> float:
        return max(capture.moved, self._moved) if self.next_rows(capture, 1) else capture.moved

    def drop(self, request_id: str) -> Cursor | None:
        """Forgets a capture; blocks that it holds are released."""
        if request_id in self._held:
            self._held.remove(request_id)
            self._released.add(request_id)
        return self._captures.pop(request_id, None)

    def drop_all(self) -> list[Cursor]:
        """Forgets every capture and releases every block."""
        return [capture for request_id in list(self._captures) if (capture := self.drop(request_id))]

    def release(self, request_id: str) -> None:
        """Gives back the blocks of a request that has ended and is not followed here."""
        self._held.discard(request_id)
        self._released.add(request_id)

    def find(self, capture_ids: Iterable[str]) -> list[Cursor]:
        """The open captures with these capture ids."""
        wanted = set(capture_ids)
        return [capture for capture in self._captures.values() if capture.info.capture_id in wanted]

    def take_released(self) -> set[str]:
        """Held requests to report to the engine now, each exactly once."""
        released, self._released = self._released, set()
        return released

    def _forget_table(self, request_id: str) -> None:
        capture = self._captures.get(request_id)
        if capture is not None:
            capture.table = []
            capture.readable = 0

    def _change_table(self, change: TableChange) -> None:
        capture = self._captures.get(change.request_id)
        if capture is None:
            return
        if change.start_over:
            self._forget_table(change.request_id)
        capture.table.extend(change.blocks)

    def _allow(self, request_id: str, rows: int) -> None:
        capture = self._captures.get(request_id)
        if capture is not None:
            capture.readable = rows

    def _finish(self, finish: Finish, now: float) -> Cursor | None:
        """Gives the capture back where its blocks are gone and rows are missing."""
        capture = self._captures.get(finish.request_id)
        if capture is None:
            if finish.held:
                self.release(finish.request_id)
            return None
        capture.finish = finish
        capture.moved = now
        if finish.held:
            self._held.add(finish.request_id)
            capture.readable = finish.num_rows
            return None
        self._forget_table(finish.request_id)
        return None if capture.complete else self.drop(finish.request_id)


def _aborted(capture: Cursor, finish: Finish) -> str:
    return (
        f"the request ended ({finish.reason}) while it was preempted, "
        f"with {capture.cursor} of {finish.num_rows} rows read"
    )
