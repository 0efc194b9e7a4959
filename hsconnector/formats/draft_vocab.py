"""The draft vocabulary: how often each token is trained on, and the few tokens that a drafter may say.

Trainers keep it as two tables over the chosen tokens in ascending order: `d2t` `[N]` int64 holds what is added to a
draft id to get the target's id, `t2d` `[V]` bool tells which of the target's ids are among the N. Which tokens are
chosen where several are equally frequent, or where fewer than N occur, is each trainer's own rule and stands in its
format module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hsconnector.errors import SettingsError

__all__ = ["DraftVocabulary", "Ids", "TokenCounts", "count_tokens", "mappings"]

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


class DraftVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of one draft vocabulary."""

    size: int
    """N, what the trainer calls the draft vocabulary's size."""
    vocab_size: int
    """V, the target's."""
    rows: int
    """How many samples were counted."""
    trained_tokens: int
    """How many of their tokens count for the loss."""
    covered_tokens: int
    """How many of these are among the N."""
    filled: int
    """How many of the N are never trained on; they are there because the table must be full."""
    files: dict[str, str]
    """SHA-256 (hex) by file name."""


@dataclass(frozen=True)
class TokenCounts:
    """How often each token is trained on.

    `tokens` and `counts` `[K]` int64: the ids that occur, ordered by the row they occur in first and then by id.
    """

    vocab_size: int
    tokens: Ids
    counts: Ids

    def by_frequency(self) -> Ids:
        """The tokens, most frequent first; equally frequent ones stay in their order."""
        return self.tokens[np.argsort(-self.counts, kind="stable")]

    def sorted_by_id(self) -> TokenCounts:
        """The same counts, ordered by id alone."""
        order = np.argsort(self.tokens)
        return TokenCounts(self.vocab_size, self.tokens[order], self.counts[order])

    def vocabulary(self, size: int, *, rows: int, files: dict[str, str]) -> DraftVocabulary:
        """What a manifest says of the `size` most frequent tokens, which each trainer takes."""
        return DraftVocabulary(
            size=size,
            vocab_size=self.vocab_size,
            rows=rows,
            trained_tokens=int(self.counts.sum()),
            covered_tokens=int(np.sort(self.counts)[::-1][:size].sum()),
            filled=max(size - len(self.tokens), 0),
            files=files,
        )


def count_tokens(rows: Iterable[tuple[Ids, Ids]], vocab_size: int) -> TokenCounts:
    """Counts the tokens whose mask is not 0, over pairs of token ids and mask, `[T]` each.

    Raises SettingsError where there are none, or where an id is not below `vocab_size`.
    """
    counts, first = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    number = 0
    for number, (token_ids, loss_mask) in enumerate(rows, start=1):
        seen, often = np.unique(token_ids[loss_mask != 0], return_counts=True)
        if len(seen) and seen[-1] >= vocab_size:
            raise SettingsError(
                f"the data set trains on token {seen[-1]}, and the model has {vocab_size} (0 to {vocab_size - 1}): "
                "is it another model's data set? Else name the model that was captured with --model"
            )
        first[seen[counts[seen] == 0]] = number
        counts[seen] += often
    tokens = np.flatnonzero(counts).astype(np.int64)
    if not len(tokens):
        raise SettingsError(
            f"no token of the {number} exported rows counts for the loss: there is nothing to choose a draft "
            "vocabulary from"
        )
    tokens = tokens[np.argsort(first[tokens], kind="stable")]
    return TokenCounts(vocab_size, tokens, counts[tokens])


def mappings(chosen: Iterable[int], vocab_size: int) -> tuple[Any, Any]:
    """`d2t` `[N]` int64 and `t2d` `[V]` bool of the chosen ids, which are all different."""
    ids = np.sort(np.fromiter(chosen, np.int64))
    t2d = np.zeros(vocab_size, np.bool_)
    t2d[ids] = True
    return ids - np.arange(len(ids)), t2d
