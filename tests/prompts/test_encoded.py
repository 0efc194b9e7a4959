"""What the engine renders is compared with what was rendered here, and a difference is named by what lies there."""

from __future__ import annotations

import pytest

from hsconnector.prompts.encoded import check_ids
from hsconnector.prompts.prompt import RowRefused
from tests.prompts.shapes import chat_of, tokenizer_of
from tests.prompts.talks import ADDED, calls, says, user

TALK = [user("3?"), calls(("add", {"a": 3, "b": 51}), thought="adding"), ADDED, says("It is 54.", "added")]
LOCAL = chat_of("qwen3").encode(TALK)


def refusal(engine_ids: list[int]) -> str:
    with pytest.raises(RowRefused) as caught:
        check_ids(engine_ids, LOCAL, tokenizer_of("qwen3").convert_ids_to_tokens)
    return str(caught.value)


def test_the_same_ids_pass() -> None:
    check_ids(tuple(LOCAL.token_ids), LOCAL)


@pytest.mark.parametrize(
    ("talk", "what"),
    [
        ([user("4?"), *TALK[1:]], "in or after turn 0 (user), content"),
        ([TALK[0], calls(("add", {"a": 3, "b": 51})), *TALK[2:]], "in or after turn 0 (user), content"),
        ([TALK[0], calls(("add", {"a": 3, "b": 51}), thought="a sum"), *TALK[2:]], "turn 1 (assistant), reasoning"),
        ([*TALK[:1], calls(("add", {"a": 3, "c": 51}), thought="adding"), *TALK[2:]], "the key 'b' of tool_calls[0]"),
        ([*TALK[:3], says("It was 54.", "added")], "in or after turn 3 (assistant), content"),
    ],
)
def test_the_first_difference_is_named_by_turn_and_key(talk: list[object], what: str) -> None:
    assert what in refusal(chat_of("qwen3").encode(talk).token_ids)


def test_tokens_before_after_and_missing() -> None:
    ids = LOCAL.token_ids
    assert "from token 0 on: '<|endoftext|>' there, '<|im_start|>' here, before the first message" in refusal(
        [tokenizer_of("qwen3").convert_tokens_to_ids("<|endoftext|>"), *ids]
    )
    assert f"from token {len(ids)} on: 'a' there, nothing more here" in refusal(
        [*ids, tokenizer_of("qwen3").convert_tokens_to_ids("a")]
    )
    assert f"from token {len(ids) - 1} on: nothing more there, 'Ċ' here" in refusal(ids[:-1])
