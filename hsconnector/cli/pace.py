"""How far an extraction is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hsconnector.extraction.ledger import Fate, Ledger

__all__ = ["show_progress"]

_LINE_EVERY_S = 10.0
"""Between lines of progress where no terminal shows the bar."""


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
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    pace = _Pace(ledger)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task: TaskID = bar.add_task("extract", total=ledger.total, rate="")
        said = time.monotonic()

        def changed() -> None:
            nonlocal said
            bar.update(task, completed=ledger.done, rate=pace.text())
            if bar.disable and time.monotonic() - said > _LINE_EVERY_S:
                said = time.monotonic()
                console.print(f"{ledger.done}/{ledger.total} rows, {pace.text()}, {pace.left()}", highlight=False)

        yield changed


class _Pace:
    """How fast captures come."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._start = time.monotonic()

    def text(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-3)
        failed = self._ledger.counts[Fate.FAILED] + self._ledger.counts[Fate.REFUSED]
        captures, tokens = self._ledger.counts[Fate.CAPTURED] / seconds, self._ledger.tokens / seconds
        rate = f"{captures:.1f} captures/s, {tokens:.0f} tokens/s"
        return f"{rate}, {failed} failed" if failed else rate

    def left(self) -> str:
        done = self._ledger.done
        if not done:
            return "time left unknown"
        seconds = (time.monotonic() - self._start) * (self._ledger.total - done) / done
        return f"{seconds / 60:.0f} min left" if seconds > 90 else f"{seconds:.0f} s left"
