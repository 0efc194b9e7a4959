"""What the scheduler side tells the worker side in one engine step. Plain data; travels pickled inside vLLM's metadata.

The worker applies the fields in the order they are declared here, and reads only after the last of them: first it
forgets the tables that are gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hsconnector.capture.protocol import CaptureInfo, FailReason

__all__ = ["Failure", "Finish", "Step", "TableChange"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A capture is over without a shard; its request may go on."""

    request_id: str
    reason: FailReason
    detail: str


@dataclass(frozen=True, slots=True)
class TableChange:
    """Block ids of the hidden group: appended to the capture's table, or a new table from the start."""

    request_id: str
    blocks: tuple[int, ...]
    start_over: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """The request has ended; `token_ids` are those of its rows `0 .. num_rows`, int64 little-endian.

    `held`: it keeps its blocks until every rank has reported it, and all these rows may be read now. Otherwise its
    blocks are gone, and the capture is whole only if every row has been read before.
    """

    request_id: str
    num_rows: int
    token_ids: bytes
    reason: str
    held: bool = True


@dataclass(slots=True)
class Step:
    """One step's news of every capture, for every rank."""

    group: int
    block_size: int
    reset: bool = False
    """The engine was told to reset its caches before this step: its weights may be others."""
    emptied: bool = False
    """Its prefix cache holds nothing that was computed before this step."""
    lost: list[str] = field(default_factory=list)
    """Requests that own no blocks any more, though they may come back: preempted."""
    begun: list[CaptureInfo] = field(default_factory=list)
    hits: set[str] = field(default_factory=set)
    """Requests of those that begin with rows from the prefix cache."""
    failed: list[Failure] = field(default_factory=list)
    tables: list[TableChange] = field(default_factory=list)
    readable: list[tuple[str, int]] = field(default_factory=list)
    """Request id and how many of its rows, from row 0, may be read before this step's forward."""
    finished: list[Finish] = field(default_factory=list)

    def refused(self, detail: str) -> Step:
        """The same news with every capture that begins in it failed; blocks that are held are given back."""
        failed = [Failure(info.request_id, FailReason.LAYOUT, detail) for info in self.begun]
        return replace(self, lost=[], failed=failed, tables=[], readable=[])
