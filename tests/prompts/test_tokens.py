"""A tokenizer's offsets become characters without holes, whatever it leaves out of them."""

from __future__ import annotations

import pytest

from hsconnector.prompts.tokens import Tokens
from tests.prompts.shapes import chat_of, tokenizer_of


def test_spaces_that_a_tokenizer_leaves_out_belong_to_the_token_after_them() -> None:
    tokens = Tokens.of([7, 8, 9], [(0, 1), (4, 4), (5, 6)])
    assert [tokens.characters(at, at) for at in range(3)] == [(0, 1), (1, 4), (4, 6)]
    assert [tokens.reaching(at) for at in range(7)] == [0, 1, 1, 1, 2, 2, 3]
    assert [tokens.from_character(at) for at in (0, 1, 5, 6)] == [0, 1, 2, 3]


def test_a_token_that_ends_before_an_earlier_one_covers_nothing() -> None:
    tokens = Tokens.of([7, 8, 9], [(0, 3), (1, 2), (3, 4)])
    assert tokens.characters(1, 1) == (3, 3)
    assert tokens.reaching(2) == 0


def test_no_tokens() -> None:
    assert Tokens.of([], []).reaching(0) == 0


@pytest.mark.parametrize("shape", ["llama3", "qwen3", "phi"])
@pytest.mark.parametrize("text", ["a  b\n\n c", "e\u0301 é", "👩‍👩‍👧 日本\n", "<|end|>  x"])
def test_every_character_has_a_token(shape: str, text: str) -> None:
    tokens = chat_of(shape).tokens(text)
    ends = [tokens.characters(at, at)[1] for at in range(len(tokens.ids))]
    assert ends == sorted(ends) and all(tokens.reaching(at) < len(tokens.ids) for at in range(ends[-1]))
    assert tokenizer_of(shape).decode(tokens.ids)
