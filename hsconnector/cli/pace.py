"""How far an extraction is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from hsconnector.extraction.ledger import Fate, Ledger

__all__ = ["show_progress"]

_LINE_EVERY_S = 10.0
"""Between lines of progress where no terminal shows the bar."""
_WINDOW_S = 60.0


@contextlib.contextmanager
def show_progress(ledger: Ledger) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    pace = _Pace(ledger)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task: TaskID = bar.add_task("extract", total=ledger.total, rate="", left="")
        said = time.monotonic()

        def changed() -> None:
            nonlocal said
            bar.update(task, completed=ledger.done, rate=pace.text(), left=pace.left())
            if bar.disable and time.monotonic() - said > _LINE_EVERY_S:
                said = time.monotonic()
                line = f"{ledger.done}/{ledger.total} rows, {pace.text()}, {pace.left()}"
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        yield changed


class _Pace:
    """How fast rows are done, over the last while: a restart begins with many that are there."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._past = deque([(time.monotonic(), 0, 0)])

    def text(self) -> str:
        rows, tokens = self._rates()
        failed = self._ledger.counts[Fate.FAILED] + self._ledger.counts[Fate.REFUSED]
        parts = [
            f"{rows:.1f} rows/s",
            f"{tokens:.0f} tokens/s",
            f"{failed} failed" if failed else "",
            self._ledger.waits,
        ]
        return ", ".join(filter(None, parts))

    def left(self) -> str:
        rows, _ = self._rates()
        if not rows:
            return "time left unknown"
        seconds = (self._ledger.total - self._ledger.done) / rows
        return f"{seconds / 60:.0f} min left" if seconds > 90 else f"{seconds:.0f} s left"

    def _rates(self) -> tuple[float, float]:
        now = (time.monotonic(), self._ledger.done, self._ledger.tokens)
        if now[0] - self._past[-1][0] > 1:
            self._past.append(now)
        while len(self._past) > 2 and now[0] - self._past[1][0] > _WINDOW_S:
            self._past.popleft()
        seconds, done, tokens = (new - old for new, old in zip(now, self._past[0], strict=True))
        return max(done, 0) / max(seconds, 1e-3), max(tokens, 0) / max(seconds, 1e-3)
