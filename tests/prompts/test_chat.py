"""Conversations become what the model's own chat template makes of them, masked to what the model says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsconnector.errors import SettingsError
from hsconnector.prompts.chat import ChatTokenizer, load_tokenizer
from hsconnector.prompts.preparation import Preparation
from hsconnector.prompts.prompt import RowRefused
from tests.examples import examples
from tests.models import tiny_tokenizer
from tests.prompts.shapes import chat_of, tokenizer_of
from tests.prompts.talks import TALKS, calls, says, user

MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>"
    "{% endif %}{% endfor %}"
)
"""Without a generation prompt: only the marks tell where an answer begins."""
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
NEEDS_A_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list == [] %}{{ raise_exception('no user turn') }}"
    "{% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi there"},
    {"role": "user", "content": "and now"},
    {"role": "assistant", "content": "bye"},
]


def chat(template: str | None = None, **options: Any) -> tuple[ChatTokenizer, Any]:
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return ChatTokenizer(tokenizer, "tiny", Preparation(**options)), tokenizer


def said(template: str | None, talk: Sequence[Any], **options: Any) -> list[str]:
    """The texts under the mask, one for each run of ones."""
    chats, tokenizer = chat(template, **options)
    encoded = chats.encode(talk)
    runs = itertools.groupby(zip(encoded.token_ids, encoded.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for flag, run in runs if flag]


def test_token_ids_are_the_templates_and_the_mask_covers_the_answers_and_their_end() -> None:
    chats, tokenizer = chat()
    ids = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert chats.encode(TALK).token_ids == ids
    assert said(None, TALK) == ["hi there<|end|>", "bye<|end|>"]


def test_marks_serve_where_nothing_else_tells_where_an_answer_begins() -> None:
    assert said(MARKED, TALK) == ["hi there<|end|>", "bye<|end|>"]


def test_marks_that_leave_the_end_out_are_refused() -> None:
    wrong = MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    with pytest.raises(RowRefused, match=r"turn 2 \(assistant\) does not end with a token at which the model stops"):
        said(wrong, TALK)


def test_marks_that_leave_a_thought_out_are_refused() -> None:
    wrong = MARKED.replace("{% generation %}", "{{ message.reasoning }}{% generation %}")
    with pytest.raises(RowRefused, match=r"turn 1 \(assistant\) is not trained on whole: its reasoning lies outside"):
        said(wrong, [user("a"), says("b", "C")])


def test_marks_that_take_in_what_others_say_are_refused() -> None:
    wrong = "{% generation %}" + PLAIN.replace("{% if add_generation_prompt %}<|assistant|>{% endif %}", "")
    with pytest.raises(RowRefused, match=r"turn 0 \(system\) would be trained on, though no model says it"):
        said(wrong + "{% endgeneration %}", TALK)


def test_a_marked_turn_of_one_token_at_the_start_ends_where_it_ends() -> None:
    """transformers#47325: the mask that transformers makes runs on where a span ends at token 0."""
    template = MARKED.replace("<|{{ message['role'] }}|>", "")
    talk = [{"role": "assistant", "content": ""}, {"role": "user", "content": "b"}]
    _, tokenizer = chat(template)
    theirs = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    assert theirs["assistant_masks"] == [1, 1, 1]
    chats, _ = chat(template)
    assert chats.encode(talk).loss_mask == [1, 0, 0]


def test_sharegpt_is_the_same_conversation() -> None:
    chats, _ = chat()
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TALK]
    assert chats.encode(shared) == chats.encode(TALK)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text("ab c\n", max_size=9)), min_size=1, max_size=6)
)
def test_whoever_speaks_the_mask_covers_the_assistant_only(turns: list[tuple[str, str]]) -> None:
    chats, tokenizer = chat()
    messages = [{"role": role, "content": content} for role, content in turns]
    encoded = chats.encode(messages)
    assert encoded.token_ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    covered = [token for token, flag in zip(encoded.token_ids, encoded.loss_mask, strict=True) if flag]
    assert tokenizer.decode(covered) == "".join(f"{text}<|end|>" for role, text in turns if role == "assistant")


def test_a_template_that_drops_earlier_thoughts_and_ends_turns_with_a_line() -> None:
    talk = [{**turn, "reasoning": "hm"} if turn["role"] == "assistant" else turn for turn in TALK]
    assert said(FORGETS_THOUGHTS, talk) == ["hi there<|end|>", "think hm endbye<|end|>"]
    assert chat(FORGETS_THOUGHTS)[0].encode(talk).left_out == 1


def test_a_template_that_raises_on_the_beginning_of_what_it_accepts() -> None:
    """THUDM/slime#1742: a template that raises without a user turn, and an assistant who speaks first."""
    talk = [TALK[0], {"role": "assistant", "content": "welcome"}, *TALK[1:3]]
    assert said(NEEDS_A_USER, talk) == ["welcome<|end|>", "hi there<|end|>"]


def test_a_prompt_that_could_end_in_two_places_is_refused() -> None:
    twice = NEEDS_A_USER.replace("<|{{ message.role }}|>", "<|{{ message.role }}|>" * 2)
    with pytest.raises(RowRefused, match=r"turn 1 \(assistant\) does not begin where the chat template asks for one"):
        said(twice, [TALK[0], {"role": "assistant", "content": "welcome"}, *TALK[1:3]])


def test_a_call_without_text_is_trained_on() -> None:
    """THUDM/slime#1159, vllm-project/speculators#300: a call, its text and the end token of both turns."""
    for content in ("", "I call it."):
        encoded = chat_of("qwen3").encode([user("3?"), calls(("add", {"a": 3}), content=content)])
        assert sum(encoded.loss_mask) > 30
        assert encoded.loss_mask[-2:] == [1, 0]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_a_thought_is_trained_on_whatever_its_field_is_called(field: str) -> None:
    """vllm#38488, vllm#33616."""
    tokenizer = tokenizer_of("qwen3")
    encoded = chat_of("qwen3").encode([user("2+2?"), {**says("4"), field: "two and two"}])
    assert "<think>\ntwo and two\n</think>\n\n4" in tokenizer.decode(encoded.token_ids)


def test_an_empty_thought_is_not_trained_on_with_thinking_on_or_off() -> None:
    """vllm#17356."""
    for options in ({}, {"template_kwargs": {"enable_thinking": False}}):
        encoded = chat_of("qwen3", **options).encode(TALKS["plain"])
        covered = [token for token, flag in zip(encoded.token_ids, encoded.loss_mask, strict=True) if flag]
        assert tokenizer_of("qwen3").decode(covered) == "Hi.<|im_end|>"
        assert "<think>\n\n</think>\n\nHi." in tokenizer_of("qwen3").decode(encoded.token_ids)


def test_the_date_is_the_one_given() -> None:
    """verifiers#1068, sglang#3296: a template that writes today's date makes other ids the next day."""
    one, other = (chat_of("llama3", date=date(2024, 2, day)).encode(TALKS["plain"]) for day in (3, 4))
    text = tokenizer_of("llama3").decode(one.token_ids)
    assert "Today: 03 Feb 2024" in text
    assert one != other
    assert one == chat_of("llama3", date=date(2024, 2, 3)).encode(TALKS["plain"])


def test_a_turn_that_its_row_excludes_is_not_trained_on_whatever_the_flag() -> None:
    """LoongForge#89, LlamaFactory#9630."""
    for flag in ({"loss": False}, {"train": False}, {"weight": 0}, {"weight": 0.0}):
        talk = [TALK[1], {**TALK[2], **flag}, *TALK[3:]]
        assert said(None, talk) == ["bye<|end|>"]


def test_the_last_turn_only() -> None:
    """sgl-project/SpecForge#419."""
    assert said(None, TALK, train_on="last") == ["bye<|end|>"]
    assert said(None, [*TALK[:4], {**TALK[4], "loss": False}], train_on="last") == []


def test_a_turn_that_the_engine_would_make_in_two_requests_is_two_parts() -> None:
    template = PLAIN.replace("{{ message.content }}", "{{ message.content | replace('&', '<|end|><|assistant|>') }}")
    with pytest.raises(RowRefused, match="renders differently within it"):
        said(template, [user("a"), says("b&c")])
    twice = PLAIN.replace(
        "{{ message.content }}<|end|>",
        "{{ message.content }}<|end|>{% for call in message.tool_calls %}<|assistant|>{{ call.function.name }}<|end|>"
        "{% endfor %}",
    )
    assert said(twice, [user("a"), calls(("b", {}), ("c", {}), content="d")]) == ["d<|end|>", "b<|end|>", "c<|end|>"]


def test_a_stop_token_in_the_middle_of_an_answer_is_refused() -> None:
    with pytest.raises(RowRefused, match=r"turn 1 \(assistant\) goes on after a token at which the model stops"):
        said(None, [user("a"), says("b<|end|>c")])


CALLS = PLAIN.replace(
    "<|end|>",
    "{% for call in message.tool_calls %}{{ call.function.name }}({% for name, value in "
    "call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}){% endfor %}<|end|>",
)


def test_numbers_and_constants_of_a_call_have_to_be_rendered() -> None:
    talk = [user("a"), calls(("f", {"b": True, "c": 3}))]
    assert said(CALLS, talk) == ["f(b=Truec=3)<|end|>"]
    with pytest.raises(RowRefused, match=r"turn 1 \(assistant\) is not rendered with true in its tool_calls\[0\].name"):
        said(CALLS.replace("={{ value }}", ""), talk)


def test_arguments_that_a_template_sorts_are_still_found() -> None:
    talk = [user("a"), calls(("f", {"c": "x", "b": "y"}))]
    assert said(CALLS.replace(".items()", " | dictsort"), talk) == ["f(b=yc=x)<|end|>"]


def test_characters_that_stand_for_texts_are_refused_not_mistaken() -> None:
    with pytest.raises(RowRefused, match="CJK extension G"):
        said(None, [user("a\U00030001"), says("b")])


def test_an_id_that_no_model_said_is_not_trained_on() -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    with pytest.raises(RowRefused, match=r"turn 1 \(assistant\) calls without an id"):
        chat_of("mistral").encode([user("a"), {**says(""), "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (ALTERNATES, "the chat template rejects: roles must alternate"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "over 2000000 steps"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "the chat template rejects: maximum recursion"),
        ("{{ documents.first.title }}", "the chat template rejects: 'None' has no attribute"),
        ("{% for a in range(99999) %}" + "again and " * 999 + "{% endfor %}", "of which the chat template makes 67"),
        ("{{ missing.field }}", "the chat template rejects: 'missing' is undefined"),
        ("{{ messages | length }}" + PLAIN.replace("content }}", "content | upper }}"), "turn 0 (user)"),
        (PLAIN.replace("<|end|>", ""), "ends without a token at which the model stops"),
        (PLAIN.replace("message.content", "message.content[:3]"), "renders differently within it"),
        ("{{ messages[-1].content }}<|end|>", "turn 1 (assistant) does not begin where the chat template asks for one"),
        ("always the same", "turn 1 (assistant) the chat template does not render"),
    ],
)
def test_a_template_that_cannot_be_followed_is_named_with_its_reason(template: str, fault: str) -> None:
    with pytest.raises(RowRefused) as caught:
        said(template, [TALK[1], TALK[1]] if template is ALTERNATES else TALK[1:3])
    assert fault in str(caught.value)


def test_what_a_turn_is_answered_with_may_not_be_left_out() -> None:
    forgetful = PLAIN.replace("for message in messages", "for message in messages if message.role != 'system'")
    with pytest.raises(RowRefused, match=r"turn 0 \(system\) is not rendered: its content is left out"):
        said(forgetful, TALK)


def test_a_developer_is_a_system_where_the_template_knows_none() -> None:
    talk = [{"role": "system", "content": "be"}, {"role": "developer", "content": "brief"}, *TALK[1:3]]
    merged = [{"role": "system", "content": "be\n\nbrief"}, *TALK[1:3]]
    chats, _ = chat()
    assert chats.encode(talk).token_ids == chats.encode(merged).token_ids
    assert sum(chats.encode(talk).loss_mask) == sum(chats.encode(merged).loss_mask) > 0


def test_a_template_that_loops_over_parts_gets_parts() -> None:
    parts = PLAIN.replace("{{ message.content }}", "{% for part in message.content %}{{ part.text }}{% endfor %}")
    assert said(parts, TALK) == ["hi there<|end|>", "bye<|end|>"]


def test_a_tokenizer_that_cannot_do_it_is_refused_at_once() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(SettingsError, match=r"'tiny' has no chat template.*--tokenizer"):
        ChatTokenizer(tokenizer, "tiny")
    with pytest.raises(SettingsError, match="the chat template is none: "):
        chat("{% for %}")
    with pytest.raises(SettingsError, match="names no chat template to use"):
        chat({"rag": PLAIN})  # type: ignore[arg-type]


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Any) -> None:
    with pytest.raises(SettingsError, match="no tokenizer can be loaded from"):
        load_tokenizer(str(tmp_path))


def test_a_checkpoint_brings_the_tokens_at_which_its_engine_stops(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = PLAIN.replace("<|end|>", "{{ '<|system|>' if message.role == 'assistant' else '' }}")
    tokenizer.save_pretrained(tmp_path)
    stop = tokenizer.convert_tokens_to_ids("<|system|>")
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{tokenizer.eos_token_id}, {stop}]}}')
    encoded = load_tokenizer(str(tmp_path)).encode(TALK[1:3])
    assert encoded.token_ids[-1] == stop and encoded.loss_mask[-1] == 1
