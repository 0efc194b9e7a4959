"""The three rules of the proof, checked on drawn conversations by looking for words in decoded text.

Nothing of the product is asked how it came to its mask: every text is made of words that occur nowhere else, so where
a word is decoded from tells whether its token counts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsconnector.prompts.prompt import RowRefused
from tests.examples import examples
from tests.prompts.masks import EARLIER_ENDS, ENDS
from tests.prompts.shapes import SHAPES, chat_of, tokenizer_of
from tests.prompts.talks import answers, calls, says, user

PIECES = ["", " ", "\n", "\n\n", '"', "\\", "é", "e\u0301", "日本", "😀", "{}", "</b>", "naïve", ": "]
ENDINGS = {
    **{name: {end, EARLIER_ENDS.get(name, end)} for name, end in ENDS.items()},
    "harmony": {"<|return|>", "<|end|>", "<|call|>"},
    "glm": {"<|user|>", "<|observation|>"},
}


class Words:
    """Texts of words that no other text has."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._numbers = itertools.count(100)

    def text(self, speaker: str) -> str:
        pieces = [self._draw(st.sampled_from(PIECES)) for _ in range(self._draw(st.integers(1, 3)))]
        return "".join(f"{piece}{speaker}{next(self._numbers)}q" for piece in pieces) + self._draw(
            st.sampled_from(PIECES[:4])
        )


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, Any]]:
    words = Words(draw)
    turns: list[dict[str, Any]] = [{"role": "system", "content": words.text("other")}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns.append(user(words.text("other")))
        turns += [*_called(draw, words), says(words.text("said"), _thought(draw, words))]
    return turns


def _called(draw: st.DrawFn, words: Words) -> Iterator[dict[str, Any]]:
    for _ in range(draw(st.integers(0, 2))):
        arguments = {words.text("said").strip(): words.text("said"), "n": draw(st.integers(-5, 500))}
        content = words.text("said") if draw(st.booleans()) else ""
        yield calls(("f" + words.text("said").strip(), arguments), content=content, thought=_thought(draw, words))
        yield answers(words.text("other"), "functions.f:0")


def _thought(draw: st.DrawFn, words: Words) -> str:
    return words.text("thought") if draw(st.booleans()) else ""


def decoded(shape: str, token_ids: list[int], mask: list[int], flag: int) -> list[str]:
    runs = itertools.groupby(zip(token_ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer_of(shape).decode([token for token, _ in run]) for found, run in runs if found == flag]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_three_rules(shape: str) -> None:
    proved = 0

    @settings(
        max_examples=examples(25),
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(talks())
    def holds(talk: list[dict[str, Any]]) -> None:
        nonlocal proved
        try:
            encoded = chat_of(shape, **({"open_end": "train"} if shape == "glm" else {})).encode(talk)
        except RowRefused:
            return
        proved += 1
        inside = decoded(shape, encoded.token_ids, encoded.loss_mask, 1)
        outside = "".join(decoded(shape, encoded.token_ids, encoded.loss_mask, 0))
        given_words = set(re.findall(r"(?:said|thought)\d+q", repr(talk)))
        trained = set(re.findall(r"(?:said|thought)\d+q", "".join(inside)))
        last = max(at for at, turn in enumerate(talk) if turn["role"] == "assistant")
        earlier = set(re.findall(r"thought\d+q", repr(talk[:last])))
        assert trained <= given_words and given_words - trained <= earlier
        assert "other" not in "".join(inside)
        assert not re.search(r"thought\d+q", outside)
        ends = inside[:-1] if shape == "glm" else inside
        assert all(any(part.endswith(end) for end in ENDINGS[shape]) for part in ends)
        assert len(inside) == sum(turn["role"] == "assistant" for turn in talk)

    holds()
    assert proved
