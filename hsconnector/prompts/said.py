"""Where in a rendered conversation the model speaks: from the end of a generation prompt to the token it stops at."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hsconnector.prompts.conversation import Message
from hsconnector.prompts.row import RowRefused
from hsconnector.prompts.stops import Stops
from hsconnector.prompts.tags import Rendering, last_run
from hsconnector.prompts.template import MARK_END, MARK_START, Template, TemplateSaysNo
from hsconnector.prompts.tokens import Tokens

__all__ = ["Said", "Speech"]

_TAG = r"<([^<>|｜/\s]+)>\s*(?:</\1>\s*)?|</[^<>|｜/\s]+>\s*|\[([A-Z]+)\]\s*(?:\[/\2\]\s*)?"
_THOUGHT_PROMPT = re.compile(rf"(?:{_TAG})\Z")
"""What a generation prompt has after the role where it opens a thought, or closes one at once."""
_EMPTY_THOUGHT = re.compile(r"\s*(?:<([^<>|｜/\s]+)>\s*</\1>|</[^<>|｜/\s]+>|\[([A-Z]+)\]\s*\[/\2\])\s*")
"""What a template writes before an answer without thought; no model says it."""
_PROBE: Message = {"role": "user", "content": "\U00031340"}


@dataclass(frozen=True, slots=True)
class Said:
    """What a model says without stopping."""

    turn: int
    first: int
    last: int
    """Tokens, both included."""


class Speech:
    """Finds what is said in one rendered conversation; `told` names a turn in a refusal."""

    def __init__(
        self,
        rendering: Rendering,
        tokens: Tokens,
        template: Template,
        tools: Any,
        stops: Stops,
        told: Callable[[int], str],
        *,
        open_end: bool,
    ) -> None:
        self._rendering = rendering
        self._tokens = tokens
        self._template = template
        self._tools = tools
        self._stops = stops
        self._told = told
        self._open_end = open_end
        self._run_starts = [run.start for run in rendering.runs]

    def is_asked_for(self, turn: int) -> bool:
        """Whether the template adds a generation prompt to what comes before a turn."""
        return next(self._headers(turn), None) is not None

    def of_turn(self, turn: int) -> list[Said]:
        """What an assistant's turn says, in the order in which it does; raises `RowRefused`."""
        start, end = self._extent(turn)
        begin = self._first_token(turn, self._start(turn, start))
        return list(self._split(turn, begin, self._stop(turn, start, end)))

    def by_marks(self, turn: int, marked: str) -> list[Said]:
        """What `{% generation %}` encloses of a turn, in a rendering with marks."""
        start, end = self._extent(turn)
        spans = [(a, b) for a, b in _marks(marked) if a < max(end, start + 1) and b > start]
        return [Said(turn, self._tokens.reaching(a), self._tokens.from_character(b) - 1) for a, b in spans]

    def _extent(self, turn: int) -> tuple[int, int]:
        places = [placed.copies[0] for placed in self._rendering.placed if placed.text.turn == turn and placed.copies]
        if not places:
            raise RowRefused(f"has a conversation whose {self._told(turn)} the chat template does not render")
        return min(start for start, _ in places), max(end for _, end in places)

    def _start(self, turn: int, first: int) -> int:
        """The character at which the answer to everything before a turn begins."""
        run = self._rendering.runs[at - 1] if (at := bisect_left(self._run_starts, first)) else None
        behind, before = (run.end, run.text) if run else (0, -1)
        gap = self._rendering.text[behind:first]
        text, asked = self._asked(turn)
        if text == before and asked is not None and gap.startswith(asked):
            start = behind + len(asked)
        else:
            start = behind + self._after_header(turn, gap)
        empty = _EMPTY_THOUGHT.match(self._rendering.text, start, first)
        return empty.end() if empty else start

    def _first_token(self, turn: int, start: int) -> int:
        """The first token after a prompt. One that spaces on both sides share is the prompt's."""
        token = self._tokens.reaching(start)
        begins, ends = self._tokens.characters(token, token)
        if begins >= start:
            return token
        if self._rendering.text[start:ends].isspace():
            return token + 1
        raise RowRefused(
            f"has a conversation whose {self._told(turn)} begins within a token of the prompt: give input_ids and "
            "loss_mask"
        )

    def _asked(self, turn: int) -> tuple[int, str | None]:
        """How the prompt for a turn ends: the last text in it, and what the template writes after that."""
        try:
            prompt = self._prompt(self._rendering.tagged.messages[:turn])
        except TemplateSaysNo:
            return -1, None
        text, end = last_run(prompt)
        return text, prompt[end:]

    def _after_header(self, turn: int, gap: str) -> int:
        """Where a turn begins whose prompt is not rendered alike within the conversation.

        An earlier turn may have lost its thoughts there, or the prompt opens a thought that this turn has not; either
        way the part that asks for an answer is still there, once.
        """
        for header in self._headers(turn):
            if gap.count(header) == 1:
                return gap.index(header) + len(header)
        raise RowRefused(
            f"has a conversation whose {self._told(turn)} does not begin where the chat template asks for one: give "
            "input_ids and loss_mask"
        )

    def _headers(self, turn: int) -> Iterator[str]:
        """What a generation prompt adds to a conversation; then without the thought that it opens."""
        before = self._rendering.tagged.messages[:turn]
        for messages in (before, [*before, _PROBE], [_PROBE]):
            try:
                plain, prompt = self._render(messages), self._prompt(messages)
            except TemplateSaysNo:
                continue
            if prompt.startswith(plain) and len(prompt) > len(plain):
                header = prompt[len(plain) :]
                yield from (each for each in (header, _THOUGHT_PROMPT.sub("", header)) if each)
                return

    def _prompt(self, messages: list[Message]) -> str:
        return self._render(messages, add_generation_prompt=True)

    def _render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        return self._template.render(messages, self._tools, add_generation_prompt=add_generation_prompt)

    def _stop(self, turn: int, start: int, end: int) -> int:
        """The token at which a turn stops: the first that can, after its last text and before another's."""
        following = (run.start for run in self._rendering.runs[bisect_left(self._run_starts, end) :])
        limit = next((place for place in following if place >= end and place > start), len(self._rendering.text))
        last = self._tokens.from_character(limit) if limit < len(self._rendering.text) else len(self._tokens.ids)
        for token in range(self._tokens.from_character(end), last):
            if self._tokens.ids[token] in self._stops:
                return token
        if self._open_end and limit == len(self._rendering.text):
            return len(self._tokens.ids) - 1
        raise RowRefused(
            f"has a conversation whose {self._told(turn)} the chat template ends without a token at which the model "
            "stops; where that is so after last turns only, --open-end train trains on them without one"
        )

    def _split(self, turn: int, first: int, last: int) -> Iterator[Said]:
        """Parts a turn that the engine would generate in several requests: each begins with a prompt of its own."""
        for token in [at for at in range(first, last) if self._tokens.ids[at] in self._stops.engine]:
            yield Said(turn, first, token)
            behind = self._tokens.ends[token]
            header = next((each for each in self._headers(turn) if self._rendering.text.startswith(each, behind)), None)
            if header is None:
                raise RowRefused(
                    f"has a conversation whose {self._told(turn)} goes on after a token at which the model stops"
                )
            first = self._first_token(turn, behind + len(header))
        yield Said(turn, first, last)


def _marks(marked: str) -> Iterator[tuple[int, int]]:
    """The spans between marks, in characters of the text without them."""
    start = 0
    for behind, found in enumerate(re.finditer(f"[{MARK_START}{MARK_END}]", marked)):
        if found[0] == MARK_START:
            start = found.start() - behind
        else:
            yield start, found.start() - behind
