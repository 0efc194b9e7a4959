"""What has become of the rows so far."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hsconnector.extraction.book import Book, MissingRows, RowSet
from hsconnector.prompts.preparation import DropReason
from hsconnector.prompts.prompt import Dropped, Missing, Prompt

__all__ = ["Fate", "Ledger"]


class Fate(enum.StrEnum):
    """How a row ended."""

    STORED = "stored"
    """Its capture was there already."""
    CAPTURED = "captured"
    """Its capture was made now."""
    REPEATED = "repeated"
    """The same tokens as an earlier row of the data set, and one capture for both."""
    DROPPED = "dropped"
    """Not wanted, by the options of the run."""
    REFUSED = "refused"
    """It cannot be asked for: no tokens, too long, not readable."""
    FAILED = "failed"
    """Asked for as often as allowed, in vain."""


@dataclass
class Ledger:
    """Rows by their end; `total` is how many there are."""

    total: int
    counts: Counter[Fate] = field(default_factory=Counter)
    retries: int = 0
    tokens: int = 0
    """Of the captures made now."""
    doubles: int = 0
    """Second captures of a sample that were removed."""
    stored_meanwhile: int = 0
    """Of the stored ones, those that another run captured while this one was at work."""
    dropped_for: Counter[DropReason] = field(default_factory=Counter)
    thoughts_left_out: int = 0
    """Thoughts of earlier turns that the chat template does not render."""
    local: int = 0
    """Conversations asked for as they are rendered here, since their engine renders none."""
    of_another_day: int = 0
    """The same for conversations with the date of another day, where the engine would write today's."""
    other_weights: int = 0
    """Captures of the data set that are of other weights than the engine's, and were not there for this run."""
    with_capture: RowSet = field(default_factory=RowSet)
    book: Book = field(default_factory=Book, repr=False)
    waits: str = ""
    """Who waits for whom now."""
    failed_in_a_row: int = 0
    """Rows asked for in vain since the last one that was captured."""

    @property
    def missing(self) -> MissingRows:
        """The rows that should have a capture and have none."""
        return self.book.missing

    @property
    def done(self) -> int:
        """Rows whose end is known."""
        return self.counts.total()

    @property
    def complete(self) -> bool:
        """Whether each row that is wanted has its capture."""
        return not self.missing and self.done == self.total

    def stored(self, prompt: Prompt) -> None:
        """A row whose capture was there."""
        self.counts[Fate.STORED] += 1
        self.with_capture.add(prompt.row)

    def repeated(self, row: int) -> None:
        """A row whose tokens an earlier row has."""
        self.counts[Fate.REPEATED] += 1
        self.with_capture.add(row)

    def dropped(self, dropped: Dropped) -> None:
        """A row that the options leave out."""
        self.counts[Fate.DROPPED] += 1
        self.dropped_for[dropped.why] += 1

    def captured(self, prompt: Prompt) -> None:
        """A row that was captured now."""
        self.counts[Fate.CAPTURED] += 1
        self.tokens += len(prompt.token_ids)
        self.with_capture.add(prompt.row)
        self.failed_in_a_row = 0

    def refused(self, missing: Missing, *, in_vain: bool = False) -> None:
        """A row that cannot be asked for; `in_vain` where an engine says so."""
        self.counts[Fate.REFUSED] += 1
        self.missing.add(missing)
        self.failed_in_a_row += in_vain

    def failed(self, missing: Missing, *, in_vain: bool = False) -> None:
        """A row without a capture; `in_vain` where all attempts were used up, for which the engine may be to blame."""
        self.counts[Fate.FAILED] += 1
        self.missing.add(missing)
        self.failed_in_a_row += in_vain

    def lost(self, missing: Missing, fate: Fate, tokens: int) -> None:
        """A row booked as stored or captured, with so many tokens, whose capture is not there any more."""
        self.counts[fate] -= 1
        self.with_capture.discard(missing.row)
        self.tokens -= tokens if fate is Fate.CAPTURED else 0
        self.failed(missing)

    def numbers(self) -> dict[str, Any]:
        """What became of how many rows, by name."""
        return {
            **{str(fate): self.counts[fate] for fate in Fate},
            "dropped_for": {str(why): count for why, count in self.dropped_for.items()},
            "total": self.total,
            "complete": self.complete,
            "tokens": self.tokens,
            "retries": self.retries,
            "stored_meanwhile": self.stored_meanwhile,
            "thoughts_left_out": self.thoughts_left_out,
            "local_rendering": self.local + self.of_another_day,
            "of_other_weights": self.other_weights,
        }

    def sentence(self) -> str:
        """What became of how many rows."""
        captured = f"{self.counts[Fate.CAPTURED]} captured ({self.tokens} tokens)"
        parts = [f"{self.total} rows", captured, f"{self.counts[Fate.STORED]} were there"]
        for fate in (Fate.REPEATED, Fate.DROPPED, Fate.REFUSED, Fate.FAILED):
            why = f" ({_counted(self.dropped_for)})" if fate is Fate.DROPPED else ""
            parts += [f"{self.counts[fate]} {fate}{why}"] if self.counts[fate] else []
        if self.total > self.done:
            parts.append(f"{self.total - self.done} not reached")
        more = {
            "retries": self.retries,
            "second captures removed": self.doubles,
            "stored by another run on the same data meanwhile (--shard I/N gives each its own part)": (
                self.stored_meanwhile
            ),
            "thoughts of earlier turns left out by the template": self.thoughts_left_out,
            "not compared with the engine's rendering": self.local,
            "not compared with the engine's rendering, which is of another day": self.of_another_day,
            "stored captures left alone, as they are of other weights": self.other_weights,
        }
        return ", ".join([*parts, *(f"{count} {what}" for what, count in more.items() if count)])


def _counted(reasons: Counter[DropReason]) -> str:
    return ", ".join(f"{reasons[why]} {why.replace('_', ' ')}" for why in DropReason if reasons[why])
