"""Token ids with the characters that each stands for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Tokens"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a text, by a tokenizer's offsets.

    Some tokenizers leave a token's spaces out of its offsets, some give every byte of a character the whole of it, and
    a normalised character may count as its first half only. So a token reaches from where the one before it ends.
    """

    ids: Sequence[int]
    starts: Sequence[int]
    """Where each begins, as the tokenizer says."""
    ends: Sequence[int]
    """Where each ends, never before an earlier one does."""

    @classmethod
    def of(cls, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Tokens:
        """From a tokenizer's answer: ids `[T]` and as many pairs of characters."""
        starts, ends = zip(*offsets, strict=True) if offsets else ((), ())
        return cls(ids, starts, list(accumulate(ends, max)))

    def reaching(self, position: int) -> int:
        """The first token that reaches beyond a character; `T` for none."""
        return bisect_right(self.ends, position)

    def from_character(self, position: int) -> int:
        """The first token that begins at a character or later; `T` for none."""
        return bisect_left(self.starts, position)

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """What the tokens from `first` to `last`, both included, stand for."""
        return (self.ends[first - 1] if first else 0), self.ends[last]
