"""Fourteen shapes of chat template, each with every talk: the mask is the one written down, or the row is refused."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from datetime import datetime, time
from typing import Any

import pytest

from hsconnector.prompts.conversation import read_conversation
from hsconnector.prompts.prompt import RowRefused
from tests.prompts.masks import EARLIER_ENDS, ENDS, MASKS
from tests.prompts.shapes import SHAPES, TODAY, chat_of, tokenizer_of
from tests.prompts.talks import LONG, TALKS

# A template whose last turn has no stop token is asked to be taken as it is.
OPTIONS: dict[str, dict[str, Any]] = {"glm": {"open_end": "train"}}
CASES = [(shape, talk) for shape in SHAPES for talk in TALKS]


def given(shape: str, talk: str) -> list[Any]:
    """A talk with ids of calls as the shape wants them."""
    turns = copy.deepcopy(TALKS[talk])
    if shape != "mistral":
        return turns
    short: dict[str, str] = {}
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            call["id"] = short.setdefault(call["id"], f"{len(short) + 1:09d}")
        if "tool_call_id" in turn:
            turn["tool_call_id"] = short[turn["tool_call_id"]]
    return turns


def parts(shape: str, token_ids: Sequence[int], mask: Sequence[int]) -> list[str]:
    """The texts under the mask, one for each run of ones."""
    runs = itertools.groupby(zip(token_ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer_of(shape).decode([token for token, _ in run]) for flag, run in runs if flag]


def written(shape: str, talk: str) -> list[str]:
    line = MASKS[shape][talk].replace("$", ENDS[shape]).replace("^", EARLIER_ENDS.get(shape, ENDS[shape]))
    return line.replace("LONG", LONG).split(" ¦ ")


def test_there_are_fourteen_shapes_and_at_least_twenty_talks() -> None:
    assert len(SHAPES) >= 14 and len(TALKS) >= 20
    assert {shape: set(lines) for shape, lines in MASKS.items()} == {shape: set(TALKS) for shape in SHAPES}


@pytest.mark.parametrize(("shape", "talk"), CASES)
def test_the_mask_is_the_one_written_down(shape: str, talk: str) -> None:
    chats = chat_of(shape, **OPTIONS.get(shape, {}))
    line = MASKS[shape][talk]
    if line.startswith("refused: "):
        with pytest.raises(RowRefused) as caught:
            chats.encode(given(shape, talk))
        assert line.removeprefix("refused: ") in str(caught.value)
        return
    encoded = chats.encode(given(shape, talk))
    assert parts(shape, encoded.token_ids, encoded.loss_mask) == written(shape, talk)


@pytest.mark.parametrize(("shape", "talk"), CASES)
def test_the_ids_are_those_of_transformers_under_the_pinned_date(shape: str, talk: str) -> None:
    if MASKS[shape][talk].startswith("refused: "):
        return
    messages = read_conversation(given(shape, talk)).messages
    if shape == "harmony":
        messages = [{**each, "thinking": each["reasoning"]} if "reasoning" in each else each for each in messages]
    theirs = tokenizer_of(shape).apply_chat_template(
        messages, return_dict=True, strftime_now=datetime.combine(TODAY, time()).strftime
    )
    assert chat_of(shape, **OPTIONS.get(shape, {})).encode(given(shape, talk)).token_ids == theirs["input_ids"]


def test_the_marker_that_ends_an_earlier_turn_is_trained_on_though_it_is_not_called_special() -> None:
    """huggingface/trl#5988, huggingface/trl#5109: Harmony ends every turn but the last with another marker."""
    tokenizer = tokenizer_of("harmony")
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in tokenizer.all_special_ids
    encoded = chat_of("harmony").encode(TALKS["two turns"])
    first, last = parts("harmony", encoded.token_ids, encoded.loss_mask)
    assert first.endswith("Hi.<|end|>") and last.endswith("Bye.<|return|>")


def test_the_answer_is_told_from_the_same_words_in_the_question() -> None:
    encoded = chat_of("chatml").encode(TALKS["the same"])
    text = "".join(
        f"[[{tokenizer_of('chatml').decode([token])}]]" if flag else tokenizer_of("chatml").decode([token])
        for token, flag in zip(encoded.token_ids, encoded.loss_mask, strict=True)
    ).replace("]][[", "")
    turn = "<|im_start|>user\nEcho.<|im_end|>\n<|im_start|>assistant\n[[Echo.<|im_end|>]]\n"
    assert text == turn * 2


def test_without_leave_a_last_turn_that_no_stop_token_ends_is_refused() -> None:
    with pytest.raises(RowRefused, match=r"turn 4 \(assistant\) the chat template ends without.*--open-end train"):
        chat_of("glm").encode(TALKS["two turns"])


def test_thoughts_that_the_template_leaves_out_are_counted() -> None:
    left_out = {talk: chat_of("qwen3").encode(TALKS[talk]).left_out for talk in TALKS}
    assert {talk: count for talk, count in left_out.items() if count} == {
        "thoughts": 1,
        "first thought": 1,
        "thoughts before": 2,
    }


def test_the_tokens_and_masks_are_the_same_however_a_call_is_spelled() -> None:
    """QwenLM/Qwen3#1894 and oumi#2599: arguments as JSON text are parsed before a template iterates or writes them."""
    for shape in ("chatml", "qwen3-coder", "granite"):
        chats = chat_of(shape)
        assert chats.encode(TALKS["as text"]) == chats.encode(TALKS["call"])
        assert chats.encode(json.dumps(TALKS["call"])) == chats.encode(TALKS["call"])
