"""Scheduler side: which request owns which blocks, and how many of its rows may be read. Pure Python.

A row may be read from the step after the one that computed it, while its request still owns its blocks. Nothing is
read in the step that schedules a request for the first time or brings it back, prefix-cache hits included: the engine
registers a block as cached when it is allocated, so a hit may be a block that the same step is about to compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hsconnector.capture.protocol import CaptureInfo, FailReason, RowsKind, new_capture_id, pack_token_ids
from hsconnector.connector.external_rows import ExternalRows
from hsconnector.connector.step import Failure, Finish, Step, TableChange

__all__ = ["Arrival", "Ended", "Ending", "Progress", "Scheduled", "Tracker", "Wish"]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the settings and the request's own parameters ask for; `problem` fails the capture by name."""

    capture: bool = True
    rows: RowsKind = RowsKind.PROMPT
    dataset: str = ""
    sample_id: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    expected_content_hash: str = ""
    problem: tuple[FailReason, str] | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as `scheduled_new_reqs` shows it: its first time, or back from preemption (V2 runner)."""

    request_id: str
    blocks: Sequence[int]
    num_computed: int
    num_prompt: int
    lora: str = ""
    lora_weights_id: str = ""
    mm_hashes: tuple[str, ...] = ()
    wish: Callable[[], Wish] = Wish
    """Asked once, when the request is seen for the first time."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A request as `scheduled_cached_reqs` shows it; `resumed` means that `new_blocks` are its whole table."""

    request_id: str
    new_blocks: Sequence[int]
    num_computed: int
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One scheduler step in the tracker's words."""

    preempted: Sequence[str] = ()
    arrivals: Sequence[Arrival] = ()
    progress: Sequence[Progress] = ()
    num_scheduled: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """A request as it is when the scheduler has finished it."""

    request_id: str
    num_prompt: int
    token_ids: Sequence[int]
    """Prompt and output, the last sampled token included."""
    num_computed: int
    reason: str
    problem: tuple[FailReason, str] | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """What to tell the engine: whether the blocks are held, and the capture to name to the client, if any."""

    hold: bool
    capture_id: str | None


@dataclass(slots=True)
class _Tracked:
    info: CaptureInfo
    table: list[int] = field(default_factory=list)
    owned: bool = True
    readable: int = 0
    """How many rows the worker may read, as the last step told it."""
    computed: int = 0
    """Rows that are computed once the steps scheduled so far have run."""
    failed: bool = False


class Tracker:
    """Follows every request from its first step to the end of its blocks.

    `group` and `block_size` are those of the hidden-state group, `hit_size` is the scheduler's block size (default: the
    same). Ids of skipped requests are kept too, until they finish: a request that comes back is never new.
    """

    def __init__(
        self,
        group: int,
        block_size: int,
        new_id: Callable[[], str] = new_capture_id,
        now: Callable[[], float] = time.time,
        hit_size: int | None = None,
    ) -> None:
        self.group = group
        self.block_size = block_size
        self._new_id = new_id
        self._now = now
        self.external = ExternalRows(block_size, hit_size or block_size)
        self._requests: dict[str, _Tracked | None] = {}
        self._advanced: set[str] = set()
        self._failures: list[Failure] = []
        self._finishes: list[Finish] = []
        self._final_blocks: list[TableChange] = []
        self._held: set[str] = set()
        self._early: dict[str, tuple[FailReason, str]] = {}
        self._reset = self._emptied = False
        self._adapters: dict[str, str] = {}
        """By name, the weights of the adapter that was last asked for."""
        self._mixed: set[str] = set()
        """Names of adapters of which the prefix cache may hold rows of two."""
        self._current = Step(group, block_size)

    @property
    def holds_blocks(self) -> bool:
        """Whether finished requests keep blocks that the worker will give back."""
        return bool(self._held)

    @property
    def held(self) -> frozenset[str]:
        """Requests whose blocks wait for every rank's report."""
        return frozenset(self._held)

    @property
    def tracked(self) -> int:
        """Requests that are known and have not finished."""
        return len(self._requests)

    def step(self, scheduled: Scheduled) -> Step:
        """The worker's news of this step; call once per scheduler step, in order."""
        step = self._current = self._begin_step()
        for request_id in scheduled.preempted:
            self._lose(request_id, step)
        self._release(scheduled, step)
        self._refuse_outside(scheduled)
        for arrival in scheduled.arrivals:
            self._arrive(arrival, scheduled, step)
        for progress in scheduled.progress:
            self._proceed(progress, scheduled, step)
        self._drain(step)
        self._current = Step(self.group, self.block_size)
        return step

    def salvage(self) -> Step:
        """In place of a step that could not be built: the captures that began in it, and every end."""
        broken, self._current = self._current, Step(self.group, self.block_size)
        step = replace(broken, failed=[], tables=[], readable=[], finished=[])
        self._drain(step)
        return step

    def caches_reset(self) -> None:
        """The engine resets its caches, as it does for new weights: what is open would mix two models."""
        self._reset = True
        self.fail_all(FailReason.CACHE_RESET, "the engine's caches were reset while the capture was open")

    def prefix_cache_emptied(self) -> None:
        """Nothing computed before the next step can be hit any more."""
        self._emptied = True
        self._mixed.clear()

    def _begin_step(self) -> Step:
        step = Step(self.group, self.block_size, self._reset, self._emptied)
        self._reset = self._emptied = False
        return step

    def finish(self, ended: Ended, table: Sequence[int]) -> Ending:
        """The request is over. `table` is what it owns of the hidden group now, empty while preempted.

        The end is judged by rows, not by status: where every wanted row was scheduled the capture is finished like
        any other, though the request was aborted (a stop string reaches the scheduler as an abort). A request that was
        preempted and not scheduled since has lost its rows, also where `table` is not empty because another connector
        is about to fill it: nothing is held, and the capture is whole only if the worker has read every row before.
        """
        self._advanced.discard(ended.request_id)
        self._early.pop(ended.request_id, None)
        self.external.arrived(ended.request_id, table, ended.num_computed)
        tracked = self._requests.pop(ended.request_id, None)
        if tracked is None:
            return Ending(False, None)
        capture_id = tracked.info.capture_id
        if tracked.failed:
            return Ending(False, capture_id)
        num_rows = self._num_rows(tracked, ended)
        hold = tracked.owned and bool(table)
        problem = ended.problem or _grown(tracked, ended.num_prompt)
        if problem is None and hold:
            problem = self._shortfall(ended, table, num_rows)
        if problem is not None:
            self._failures.append(Failure(ended.request_id, *problem))
            return Ending(False, capture_id)
        if hold:
            self._hand_over(tracked, ended, table)
        token_ids = pack_token_ids(ended.token_ids[:num_rows])
        self._finishes.append(Finish(ended.request_id, num_rows, token_ids, ended.reason, hold))
        return Ending(hold, capture_id)

    def reported(self, request_ids: Iterable[str]) -> None:
        """Every rank has reported these: their blocks are the engine's again."""
        self._held.difference_update(request_ids)

    def fail(self, request_id: str, reason: FailReason, detail: str) -> None:
        """Ends a capture whose request goes on, or is still to be scheduled for the first time."""
        if request_id not in self._requests:
            self._early.setdefault(request_id, (reason, detail))
            return
        tracked = self._requests[request_id]
        if tracked is not None and not tracked.failed:
            tracked.failed = True
            self._failures.append(Failure(request_id, reason, detail))

    def abandon(self, request_id: str, detail: str) -> None:
        """Forgets a request whose end went wrong on our side; its blocks are not held."""
        self._requests.pop(request_id, None)
        self._early.pop(request_id, None)
        self.external.forget(request_id)
        self._held.discard(request_id)
        self._finishes = [finish for finish in self._finishes if finish.request_id != request_id]
        self._failures.append(Failure(request_id, FailReason.INTERNAL_ERROR, detail))

    def fail_all(self, reason: FailReason, detail: str) -> None:
        """Ends every capture that is open, those that hold blocks too."""
        for request_id in list(self._requests):
            self.fail(request_id, reason, detail)
        self._failures.extend(Failure(request_id, reason, detail) for request_id in sorted(self._held))

    def _lose(self, request_id: str, step: Step) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.owned = False
        tracked.table = []
        tracked.readable = tracked.computed = 0
        step.lost.append(request_id)

    def _refuse_outside(self, scheduled: Scheduled) -> None:
        """Fails requests whose first rows another connector loaded, for them or for one whose blocks they hit.

        All loads and all newly computed blocks of the step are taken in before any hit is looked at: a request may hit
        blocks that were given to another one in the same step.
        """
        back = [(each.request_id, each.blocks, each.num_computed) for each in scheduled.arrivals]
        back += [(each.request_id, each.new_blocks, each.num_computed) for each in scheduled.progress if each.resumed]
        if self.external.mixed:
            for _, blocks, num_computed in back:
                self.external.computed(self.external.fresh(blocks, num_computed))
            for progress in scheduled.progress:
                if not progress.resumed:
                    self.external.computed(progress.new_blocks)
        loaded = {name: self.external.arrived(name, blocks, num_computed) for name, blocks, num_computed in back}
        for request_id, blocks, num_computed in back:
            outside = loaded[request_id] or self.external.hit(blocks, num_computed)
            if outside is not None:
                self.fail(request_id, FailReason.EXTERNAL_PREFIX, outside)

    def _arrive(self, arrival: Arrival, scheduled: Scheduled, step: Step) -> None:
        request_id = arrival.request_id
        if request_id in self._requests:
            tracked = self._requests[request_id]
            if tracked is not None:
                self._come_back(tracked, arrival, scheduled, step)
            return
        wish = _ask(arrival)
        early = self._early.pop(request_id, None)
        if not wish.capture:
            self._requests[request_id] = None
            return
        info = self._describe(arrival, wish)
        tracked = self._requests[request_id] = _Tracked(info)
        step.begun.append(info)
        if arrival.num_computed:
            step.hits.add(request_id)
        problem = wish.problem or early or self._of_old_adapter(arrival)
        if problem is not None:
            self.fail(request_id, *problem)
            return
        self._own(tracked, arrival.blocks, step)
        self._count(tracked, arrival.num_computed, scheduled)

    def _of_old_adapter(self, arrival: Arrival) -> tuple[FailReason, str] | None:
        """Why a capture that begins may hold rows of an adapter that had its adapter's name before.

        An adapter that is loaded in place of another keeps the name, by which the engine tells cached blocks apart.
        """
        name, weights = arrival.lora, arrival.lora_weights_id
        if not name:
            return None
        if self._adapters.setdefault(name, weights) != weights:
            self._adapters[name] = weights
            self._mixed.add(name)
            for request_id, tracked in self._requests.items():
                if tracked is not None and tracked.info.lora == name and tracked.info.lora_weights_id != weights:
                    detail = f"another adapter was loaded as {name!r} while the capture was open"
                    self.fail(request_id, FailReason.WEIGHTS_CHANGED, detail)
        if name in self._mixed and arrival.num_computed:
            detail = f"it begins with cached rows, which may be of the adapter that was {name!r} before"
            return FailReason.WEIGHTS_CHANGED, f"{detail}: reset the prefix cache"
        return None

    def _come_back(self, tracked: _Tracked, arrival: Arrival, scheduled: Scheduled, step: Step) -> None:
        problem = _grown(tracked, arrival.num_prompt)
        if problem is not None:
            self.fail(arrival.request_id, *problem)
        if not tracked.failed:
            self._own(tracked, arrival.blocks, step)
            self._count(tracked, arrival.num_computed, scheduled)

    def _proceed(self, progress: Progress, scheduled: Scheduled, step: Step) -> None:
        tracked = self._requests.get(progress.request_id)
        if tracked is None or tracked.failed:
            return
        if progress.resumed or not tracked.owned:
            self._own(tracked, progress.new_blocks, step)
        else:
            self._extend(tracked, progress, step)
        self._count(tracked, progress.num_computed, scheduled)

    def _own(self, tracked: _Tracked, blocks: Sequence[int], step: Step) -> None:
        """A whole new table; nothing of it is readable in this step."""
        request_id = tracked.info.request_id
        tracked.owned = True
        tracked.table = list(blocks)
        tracked.readable = 0
        step.tables.append(TableChange(request_id, tuple(blocks), start_over=True))
        self._refuse_null_block(request_id, blocks)

    def _extend(self, tracked: _Tracked, progress: Progress, step: Step) -> None:
        taken_back = min(tracked.readable, tracked.info.num_prompt_tokens)
        if progress.num_computed < taken_back:
            self.fail(
                progress.request_id,
                FailReason.EXTERNAL_PREFIX,
                f"the engine took back rows {progress.num_computed} to {taken_back}, which were already read",
            )
            return
        if progress.new_blocks:
            tracked.table.extend(progress.new_blocks)
            step.tables.append(TableChange(progress.request_id, tuple(progress.new_blocks)))
            self._refuse_null_block(progress.request_id, progress.new_blocks)

    def _refuse_null_block(self, request_id: str, blocks: Sequence[int]) -> None:
        if 0 in blocks:
            self.fail(
                request_id,
                FailReason.LAYOUT,
                "the block table holds block 0, the null block: some rows were never kept",
            )

    def _count(self, tracked: _Tracked, num_computed: int, scheduled: Scheduled) -> None:
        """Rows readable from the next step on. Output rows may still be rejected, so only prompt rows count."""
        request_id = tracked.info.request_id
        after = num_computed + scheduled.num_scheduled.get(request_id, 0)
        tracked.computed = min(after, tracked.info.num_prompt_tokens)
        self._advanced.add(request_id)

    def _release(self, scheduled: Scheduled, step: Step) -> None:
        """Rows that the steps before this one computed, of requests that did not lose their blocks since."""
        due, self._advanced = self._advanced, set()
        returning = {arrival.request_id for arrival in scheduled.arrivals}
        returning.update(progress.request_id for progress in scheduled.progress if progress.resumed)
        confirmed = {progress.request_id: progress.num_computed for progress in scheduled.progress}
        for request_id in due - returning:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.failed or not tracked.owned:
                continue
            rows = min(tracked.computed, confirmed.get(request_id, tracked.computed))
            if rows > tracked.readable:
                tracked.readable = rows
                step.readable.append((request_id, rows))

    def _drain(self, step: Step) -> None:
        step.failed.extend(self._failures)
        step.tables.extend(self._final_blocks)
        step.finished.extend(self._finishes)
        self._failures, self._final_blocks, self._finishes = [], [], []

    def _num_rows(self, tracked: _Tracked, ended: Ended) -> int:
        """The last sampled token was never an input, so it has no row."""
        if tracked.info.rows is RowsKind.PROMPT:
            return ended.num_prompt
        return max(ended.num_prompt, len(ended.token_ids) - 1)

    def _shortfall(self, ended: Ended, table: Sequence[int], num_rows: int) -> tuple[FailReason, str] | None:
        covered = min(ended.num_computed, len(table) * self.block_size)
        if covered < num_rows:
            return FailReason.ABORTED, f"the request ended ({ended.reason}) with {covered} of {num_rows} rows computed"
        if 0 in table[: -(-num_rows // self.block_size)]:
            return FailReason.LAYOUT, "the final block table holds block 0, the null block: some rows were never kept"
        return None

    def _hand_over(self, tracked: _Tracked, ended: Ended, table: Sequence[int]) -> None:
        """The blocks stay until every rank has reported them."""
        request_id = ended.request_id
        known = len(tracked.table)
        common = min(known, len(table))
        if list(table[:common]) != tracked.table[:common]:
            self._final_blocks.append(TableChange(request_id, tuple(table), start_over=True))
        elif len(table) > known:
            self._final_blocks.append(TableChange(request_id, tuple(table[known:])))
        self._held.add(request_id)

    def _describe(self, arrival: Arrival, wish: Wish) -> CaptureInfo:
        return CaptureInfo(
            capture_id=self._new_id(),
            request_id=arrival.request_id,
            num_prompt_tokens=arrival.num_prompt,
            rows=wish.rows,
            created=self._now(),
            dataset=wish.dataset,
            sample_id=wish.sample_id,
            tags=wish.tags,
            lora=arrival.lora,
            lora_weights_id=arrival.lora_weights_id,
            mm_hashes=arrival.mm_hashes,
            expected_content_hash=wish.expected_content_hash,
        )


def _grown(tracked: _Tracked, num_prompt: int) -> tuple[FailReason, str] | None:
    before = tracked.info.num_prompt_tokens
    if num_prompt == before:
        return None
    detail = f"the prompt grew from {before} to {num_prompt} tokens: resumable sessions cannot be captured"
    return FailReason.UNSUPPORTED_REQUEST, detail


def _ask(arrival: Arrival) -> Wish:
    """What a request wants; a bug in finding out is that request's problem alone."""
    try:
        return arrival.wish()
    except Exception as error:
        return Wish(problem=(FailReason.INTERNAL_ERROR, f"reading the request: {type(error).__name__}: {error}"))
