"""Proves a loss mask before a row is asked for, by three rules.

1. Every text of a trained turn lies inside the mask. Only a thought of an assistant's turn before the last may be
   missing, where the template leaves out what earlier turns thought.
2. No text of any other turn does.
3. What is said ends with a token at which the model stops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

from hsconnector.prompts.row import RowRefused
from hsconnector.prompts.said import Said
from hsconnector.prompts.stops import Stops
from hsconnector.prompts.tags import Placed, Rendering
from hsconnector.prompts.tokens import Tokens

__all__ = ["Proof"]


class Proof:
    """Checks what is said in one rendered conversation; `told` names a turn in a refusal."""

    def __init__(
        self, rendering: Rendering, tokens: Tokens, stops: Stops, told: Callable[[int], str], *, open_end: bool
    ) -> None:
        self._rendering = rendering
        self._tokens = tokens
        self._stops = stops
        self._told = told
        self._open_end = open_end

    def check(self, said: Sequence[Said], trained: Collection[int], last: int) -> int:
        """How many thoughts the template left out; `last` is the last assistant turn. Raises `RowRefused`."""
        spans = [self._tokens.characters(each.first, each.last) for each in said]
        self._check_ends(said)
        left_out = 0
        for placed in self._rendering.placed:
            turn = placed.text.turn
            if turn not in trained:
                self._check_outside(placed, spans)
            elif placed.copies:
                self._check_inside(placed, [span for each, span in zip(said, spans, strict=True) if each.turn == turn])
            elif placed.text.tagged:
                self._check_left_out(placed, last)
                left_out += 1
        return left_out

    def _check_ends(self, said: Sequence[Said]) -> None:
        for each in said:
            if each.first > each.last or self._tokens.ids[each.last] not in self._stops:
                if self._open_end and each.last == len(self._tokens.ids) - 1:
                    continue
                raise RowRefused(f"{self._of(each.turn)} does not end with a token at which the model stops")

    def _check_inside(self, placed: Placed, spans: Sequence[tuple[int, int]]) -> None:
        start, end = placed.copies[0]
        inside = next((span for span in spans if span[0] <= start and end <= span[1]), None)
        if inside is None:
            raise RowRefused(
                f"{self._of(placed.text.turn)} is not trained on whole: its {placed.text.key} lies outside"
            )
        for literal in placed.text.literals:
            if not self._holds(literal, *inside):
                raise RowRefused(
                    f"{self._of(placed.text.turn)} is not rendered with {literal} in its {placed.text.key}"
                )

    def _holds(self, literal: str, start: int, end: int) -> bool:
        python = {"true": "True", "false": "False", "null": "None"}.get(literal, literal)
        return any(self._rendering.text.find(each, start, end) >= 0 for each in (literal, python))

    def _check_outside(self, placed: Placed, spans: Sequence[tuple[int, int]]) -> None:
        if not placed.copies and placed.text.tagged and not placed.text.is_thought:
            raise RowRefused(f"{self._of(placed.text.turn)} is not rendered: its {placed.text.key} is left out")
        starts = [span[0] for span in spans]
        for start, end in placed.copies:
            at = bisect_left(starts, end) - 1
            if at >= 0 and spans[at][0] < end and start < spans[at][1]:
                raise RowRefused(f"{self._of(placed.text.turn)} would be trained on, though no model says it")

    def _check_left_out(self, placed: Placed, last: int) -> None:
        if not placed.text.is_thought or placed.text.turn == last:
            raise RowRefused(f"{self._of(placed.text.turn)} is not rendered whole: its {placed.text.key} is left out")

    def _of(self, turn: int) -> str:
        return f"has a conversation whose {self._told(turn)}"
