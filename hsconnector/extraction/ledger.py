"""What has become of the rows so far. Pure."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from hsconnector.prompts.prompt import Missing, Prompt

__all__ = ["Fate", "Ledger"]


class Fate(enum.StrEnum):
    """How a row ended."""

    STORED = "stored"
    """Its capture was there already."""
    CAPTURED = "captured"
    """Its capture was made now."""
    REPEATED = "repeated"
    """The same tokens as an earlier row of the data set, and one capture for both."""
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
    missing: list[Missing] = field(default_factory=list)
    failed_in_a_row: int = 0
    """Rows asked for in vain since the last one that was captured."""

    @property
    def done(self) -> int:
        """Rows whose end is known."""
        return self.counts.total()

    @property
    def complete(self) -> bool:
        """Whether each row has its capture."""
        return not self.missing and self.done == self.total

    def stored(self, prompt: Prompt) -> None:
        """A row whose capture was there."""
        self.counts[Fate.STORED] += 1

    def repeated(self, prompt: Prompt) -> None:
        """A row whose tokens an earlier row has."""
        self.counts[Fate.REPEATED] += 1

    def captured(self, prompt: Prompt) -> None:
        """A row that was captured now."""
        self.counts[Fate.CAPTURED] += 1
        self.tokens += len(prompt.token_ids)
        self.failed_in_a_row = 0

    def refused(self, missing: Missing) -> None:
        """A row that cannot be asked for."""
        self.counts[Fate.REFUSED] += 1
        self.missing.append(missing)

    def failed(self, missing: Missing, *, in_vain: bool = False) -> None:
        """A row without a capture; `in_vain` where all attempts were used up, for which the engine may be to blame."""
        self.counts[Fate.FAILED] += 1
        self.missing.append(missing)
        self.failed_in_a_row += in_vain

    def lost(self, missing: Missing, fate: Fate, tokens: int) -> None:
        """A row booked as stored or captured, with so many tokens, whose capture is not there any more."""
        self.counts[fate] -= 1
        self.tokens -= tokens if fate is Fate.CAPTURED else 0
        self.failed(missing)

    def sentence(self) -> str:
        """What became of how many rows."""
        captured = f"{self.counts[Fate.CAPTURED]} captured ({self.tokens} tokens)"
        parts = [f"{self.total} rows", captured, f"{self.counts[Fate.STORED]} were there"]
        parts += [
            f"{self.counts[fate]} {fate}" for fate in (Fate.REPEATED, Fate.REFUSED, Fate.FAILED) if self.counts[fate]
        ]
        if self.total > self.done:
            parts.append(f"{self.total - self.done} not reached")
        if self.retries:
            parts.append(f"{self.retries} retries")
        if self.doubles:
            parts.append(f"{self.doubles} second captures removed")
        return ", ".join(parts)
