"""An engine's scheduler in a hundred lines, for property tests: it says what is true of every request and block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hsconnector.capture.protocol import RowsKind
from hsconnector.connector.step import Step
from hsconnector.connector.tracker import Arrival, Ended, Progress, Scheduled, Tracker, Wish

BLOCK = 4
WAITING, RUNNING, PREEMPTED = "waiting", "running", "preempted"


@dataclass
class Request:
    """One request as the engine knows it."""

    name: str
    num_prompt: int
    wish: Wish
    status: str = WAITING
    table: list[int] = field(default_factory=list)
    computed: int = 0
    """Rows that are right in its blocks once the steps scheduled so far have run."""
    rows_before: int = 0
    """Rows that were right, in blocks that it still has, before the step scheduled last."""
    returned: bool = False
    """Scheduled for the first time, or brought back, in the last step."""
    ended: bool = False

    @property
    def wanted(self) -> int:
        """Rows a capture needs if the request ends now; every output but the last was an input."""
        outputs = max(0, self.computed - self.num_prompt)
        return self.num_prompt + (outputs if self.wish.rows is RowsKind.PROMPT_AND_OUTPUT else 0)


class Engine:
    """Schedules as it is told, hands each step to a tracker, and remembers what is true."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.requests: dict[str, Request] = {}
        self.blocks = 0
        self.held: dict[str, list[int]] = {}
        """Requests whose blocks stay until they are reported, with their tables."""
        self._preempted: list[str] = []
        self._arrivals: list[Arrival] = []
        self._progress: list[Progress] = []
        self._counts: dict[str, int] = {}

    def add(self, num_prompt: int, wish: Wish) -> Request:
        request = Request(f"r{len(self.requests)}", num_prompt, wish)
        self.requests[request.name] = request
        return request

    def live(self, *statuses: str) -> list[Request]:
        return [r for r in self.requests.values() if not r.ended and r.status in (statuses or (r.status,))]

    # ---- what one step does with a request

    def arrive(self, request: Request, count: int, hits: int = 0) -> None:
        """For the first time, or back as the V2 runner shows it; `hits` rows come from the prefix cache."""
        self._return(request, count, hits)
        computed = request.computed - count
        self._arrivals.append(
            Arrival(request.name, tuple(request.table), computed, request.num_prompt, wish=lambda: request.wish)
        )

    def resume(self, request: Request, count: int, hits: int = 0) -> None:
        """Back as the V1 runner shows it."""
        self._return(request, count, hits)
        computed = request.computed - count
        self._progress.append(Progress(request.name, tuple(request.table), computed, resumed=True))

    def run(self, request: Request, count: int, rejected: int = 0) -> None:
        """`count` more tokens, after `rejected` drafts of the step before; prompt rows are never taken back."""
        request.computed = max(request.computed - rejected, min(request.computed, request.num_prompt))
        before = request.computed
        request.rows_before = min(request.rows_before, before)
        request.computed += count
        new = self._grow(request)
        self._progress.append(Progress(request.name, tuple(new), before))
        self._counts[request.name] = count

    def preempt(self, request: Request) -> None:
        request.status = PREEMPTED
        request.table = []
        request.computed = request.rows_before = 0
        self._preempted.append(request.name)

    def _return(self, request: Request, count: int, hits: int) -> None:
        request.status = RUNNING
        request.returned = True
        request.table = []
        request.computed = hits + count
        request.rows_before = 0
        self._grow(request)
        self._counts[request.name] = count

    def _grow(self, request: Request) -> list[int]:
        new = []
        while len(request.table) * BLOCK < request.computed:
            self.blocks += 1
            new.append(self.blocks)
            request.table.append(self.blocks)
        return new

    # ---- turns

    def begin_step(self) -> None:
        """Every row that the steps so far compute is there from now on."""
        for request in self.requests.values():
            request.rows_before = request.computed
            request.returned = False
        self._preempted, self._arrivals, self._progress, self._counts = [], [], [], {}

    def end_step(self) -> Step:
        return self.tracker.step(self.scheduled())

    def scheduled(self) -> Scheduled:
        return Scheduled(tuple(self._preempted), self._arrivals, self._progress, dict(self._counts))

    def finish(self, request: Request, reason: str = "length") -> bool:
        """The request ends; whether its blocks are held."""
        request.ended = True
        held = self.tracker.finish(self.as_ended(request, reason), tuple(request.table)).hold
        if held:
            self.held[request.name] = list(request.table)
        return held

    def as_ended(self, request: Request, reason: str = "length") -> Ended:
        outputs = max(0, request.computed - request.num_prompt + 1) if request.computed >= request.num_prompt else 0
        tokens = range(request.num_prompt + outputs)
        return Ended(request.name, request.num_prompt, tokens, request.computed, reason)


def counted_ids() -> Callable[[], str]:
    """Capture ids that say in which order they were given."""
    given = iter(range(1 << 30))
    return lambda: f"{next(given):032x}"
