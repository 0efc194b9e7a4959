"""Conversations become what the model's own chat template makes of them, masked to what the assistant says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsconnector.errors import SettingsError
from hsconnector.prompts.chat import ChatTokenizer, load_tokenizer, normalized
from hsconnector.prompts.prompt import RowRefused
from tests.models import tiny_tokenizer

MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETS_THOUGHTS = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' and message.reasoning_content and loop.last %}"
    "think {{ message.reasoning_content }} end{% endif %}{{ message['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ALTERNATES = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
)
COUNTS = "{{ messages | length }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | upper }}{% endfor %}"
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi there"},
    {"role": "user", "content": "and now"},
    {"role": "assistant", "content": "bye"},
]


def chat(template: str | None = None) -> tuple[ChatTokenizer, Any]:
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return ChatTokenizer(tokenizer, "tiny"), tokenizer


def covered(tokenizer: Any, token_ids: Sequence[int], mask: Sequence[int]) -> list[str]:
    """The texts under the mask, one for each run of ones."""
    texts, run = [], []
    for token, flag in [*zip(token_ids, mask, strict=True), (0, 0)]:
        if flag:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return texts


@pytest.mark.parametrize("template", [None, MARKED])
def test_token_ids_are_the_templates_and_the_mask_covers_the_answers_and_their_end(template: str | None) -> None:
    chats, tokenizer = chat(template)
    token_ids, mask = chats.encode(TALK)
    assert token_ids == tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert covered(tokenizer, token_ids, mask) == ["hi there<|end|>", "bye<|end|>"]


def test_sharegpt_is_the_same_conversation() -> None:
    chats, _ = chat()
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TALK]
    assert chats.encode(shared) == chats.encode(TALK)


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert normalized([{"role": "user", "content": parts}]) == [{"role": "user", "content": "hello"}]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text("ab c\n", max_size=9)), min_size=1, max_size=6)
)
def test_whoever_speaks_the_mask_covers_the_assistant_only(turns: list[tuple[str, str]]) -> None:
    chats, tokenizer = chat()
    messages = [{"role": role, "content": content} for role, content in turns]
    token_ids, mask = chats.encode(messages)
    assert token_ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert len(token_ids) == len(mask)
    said = "".join(f"{content}<|end|>" for role, content in turns if role == "assistant")
    assert "".join(covered(tokenizer, token_ids, mask)) == said


def test_a_template_that_drops_earlier_thoughts_and_ends_turns_with_a_line() -> None:
    chats, tokenizer = chat(FORGETS_THOUGHTS)
    talk = [{**turn, "reasoning_content": "hm"} if turn["role"] == "assistant" else turn for turn in TALK]
    token_ids, mask = chats.encode(talk)
    assert covered(tokenizer, token_ids, mask) == ["hi there<|end|>", "think hm endbye<|end|>"]


def test_a_template_that_says_no_is_named_with_its_reason() -> None:
    chats, _ = chat(ALTERNATES)
    with pytest.raises(RowRefused, match="the chat template rejects: roles must alternate"):
        chats.encode([TALK[1], TALK[1]])


def test_a_template_whose_turns_cannot_be_told_apart_is_refused_not_guessed() -> None:
    chats, _ = chat(COUNTS)
    with pytest.raises(RowRefused, match="turn 1 the chat template renders differently"):
        chats.encode(TALK[1:3])


@pytest.mark.parametrize(
    ("conversation", "fault"),
    [
        ([], "without messages"),
        (["hello"], "message 0 that is no object, but a str"),
        ([{"role": "narrator", "content": "x"}], "message 0 of the role 'narrator'; known: human, user"),
        ([{"content": "x"}], "message 0 of the role None"),
        ([{"role": ["user"], "content": "x"}], "message 0 of the role"),
        ([{"role": "user", "content": 3}], "message 0 whose content is no text, but a int"),
        ([{"role": "user", "content": [{"type": "image", "url": "u"}]}], "message 0 with a part 'image'"),
    ],
)
def test_messages_that_are_none_are_named(conversation: list[Any], fault: str) -> None:
    with pytest.raises(RowRefused, match=fault.replace("[", r"\[")):
        normalized(conversation)


def test_a_tokenizer_that_cannot_do_it_is_refused_at_once() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(SettingsError, match=r"'tiny' has no chat template.*--tokenizer"):
        ChatTokenizer(tokenizer, "tiny")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Any) -> None:
    with pytest.raises(SettingsError, match="no tokenizer can be loaded from"):
        load_tokenizer(str(tmp_path))
