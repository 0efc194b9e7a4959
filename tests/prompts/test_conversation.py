"""Conversations in every spelling that data sets use become the messages that vLLM hands to a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsconnector.prompts.conversation import engine_messages, read_conversation, read_tools
from hsconnector.prompts.files import open_rows
from hsconnector.prompts.prompt import Missing, PromptReader, RowRefused
from tests.examples import examples
from tests.prompts.shapes import chat_of

CALL = {"id": "c1", "function": {"arguments": {"a": 3}, "name": "add"}, "type": "function"}


def messages(*turns: Any, **roles: str) -> list[dict[str, Any]]:
    return read_conversation(list(turns), roles).messages


def said(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **more}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("gpt", "assistant"),
        ("system", "system"),
        ("observation", "tool"),
        ("tool", "tool"),
        ("function", "tool"),
        ("villain", "user"),
    ],
)
def test_sharegpt_and_roles_of_ones_own(name: str, role: str) -> None:
    assert messages({"from": name, "value": "x"}, villain="user") == [{"role": role, "content": "x"}]


def test_a_role_of_ones_own_goes_before_a_known_one() -> None:
    assert messages({"role": "tool", "content": "x"}, tool="user") == [{"role": "user", "content": "x"}]


def test_a_function_call_turn_is_the_assistants() -> None:
    """LlamaFactory#3330: human, function_call, observation, gpt."""
    read = read_conversation(
        [
            {"from": "human", "value": "3?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 3}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4."},
        ]
    )
    call = {"id": "call00000", **{key: CALL[key] for key in ("function", "type")}}
    assert read.messages == [
        {"role": "user", "content": "3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "4."},
    ]
    assert (read.trained, read.made_ids) == ((False, True, False, True), frozenset({"call00000"}))


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        json.dumps([CALL]),
        [json.dumps(CALL)],
        [{**CALL, "function": {"name": "add", "arguments": '{"a": 3}'}}],
        [{"id": "c1", "name": "add", "arguments": {"a": 3, "b": None}}],
        [{"id": "c1", "type": None, "function": {"name": "add", "arguments": {"a": 3}, "strict": None}}],
    ],
)
def test_calls_are_the_same_however_they_are_spelled(calls: Any) -> None:
    """QwenLM/Qwen3#1894, oumi#2599: arguments are an object, with the keys of a call in vLLM's order."""
    (message,) = messages(said(tool_calls=calls))
    assert json.dumps(message["tool_calls"]) == json.dumps([CALL])


def test_a_null_within_json_text_is_said_and_stays() -> None:
    (message,) = messages(said(tool_calls=[{"name": "f", "arguments": '{"a": null}'}]))
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": None}


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_a_call_without_arguments_has_none(arguments: Any) -> None:
    (message,) = messages(said(tool_calls=[{"name": "f", "arguments": arguments}]))
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_a_thought_is_given_as_the_engine_gives_it() -> None:
    for field in ("reasoning", "reasoning_content", "thinking"):
        assert messages(said(**{field: "hm"})) == [said(reasoning="hm", reasoning_content="hm")]
    assert messages(said(reasoning="", thinking=None, tool_calls=[], name=None)) == [said()]


def test_parts_of_text_are_joined_as_the_engine_joins_them() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "output_text", "text": "lo"}, "you", {"text": "all"}]
    assert messages({"role": "user", "content": parts}) == [{"role": "user", "content": "hel\nlo\nyou\nall"}]


def test_a_conversation_and_tools_may_be_json_text() -> None:
    """Automodel#2324, maxtext#3559."""
    turns = [{"role": "user", "content": "x"}]
    assert read_conversation(json.dumps(turns)).messages == turns
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    written = [{"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}]
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)], [tool["function"]]):
        assert json.dumps(read_tools(tools)) == json.dumps(written)
    assert read_tools(None) is read_tools([]) is read_tools("") is read_tools("[]") is None


def test_what_parquet_fills_in_is_no_content(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "assistant", "content": "", "calls": [{"name": "f", "arguments": {"a": 1}}]}]},
        {"messages": [{"role": "assistant", "content": "x", "calls": [{"name": "g", "arguments": {"b": [{"c": 2}]}}]}]},
        {"messages": [{"role": "user", "content": "y"}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert list(open_rows(tmp_path / "d.parquet").read()) == rows


def test_a_request_carries_what_the_protocol_takes() -> None:
    read = read_conversation([said(thinking="hm", tool_calls=[CALL])])
    (sent,) = engine_messages(read)
    assert sent == said(reasoning="hm", tool_calls=[{**CALL, "function": {"arguments": '{"a":3}', "name": "add"}}])
    assert read.messages[0]["tool_calls"] == [CALL]


@pytest.mark.parametrize(
    ("turn", "trained"),
    [({}, True), ({"loss": None}, True), ({"loss": 1, "weight": 0}, False), ({"train": False}, False)],
)
def test_flags_are_kept_apart_from_what_the_template_sees(turn: dict[str, Any], trained: bool) -> None:
    read = read_conversation([{"role": "user", "content": "a", "train": True}, said(**turn)])
    assert read.trained == (False, trained)
    assert read.messages[1] == said()


@pytest.mark.parametrize(
    ("conversation", "fault"),
    [
        ([], "without messages"),
        ("[", "a conversation as text that is no JSON"),
        ("3", "a conversation that is no list of messages, but a int"),
        ({"a": 1}, "a conversation that is no list of messages, but a dict"),
        (["hello"], "message 0 that is no object, but a str"),
        ([{"role": "narrator", "content": "x"}], "message 0 of the role 'narrator'; known: system, developer, user"),
        ([{"content": "x"}], "message 0 of the role None"),
        ([{"role": ["user"], "content": "x"}], "message 0 of the role"),
        ([{"role": "user", "content": 3}], "message 0 whose content is no text, but a int"),
        ([{"role": "user", "content": [{"type": "image", "url": "u"}]}], "message 0 with a part 'image'"),
        ([{"role": "user", "content": [{"type": ["a"], "text": "u"}]}], "message 0 with a part"),
        ([said(tool_calls="{")], "message 0 with calls as text that is no JSON"),
        ([said(tool_calls=3)], "message 0 whose calls are no list of objects"),
        ([said(tool_calls=[{"type": "custom"}])], "message 0 with a call that names no function"),
        (
            [said(tool_calls=[{"name": "f", "arguments": "{"}])],
            "message 0 with arguments of 'f' as text that is no JSON",
        ),
        ([said(tool_calls=[{"name": "f", "arguments": "[1]"}])], "arguments of 'f' that are no object, but a list"),
        ([{"from": "function_call", "value": "add(3)"}], "message 0 with calls as text that is no JSON"),
        ([said(reasoning="a", thinking="b")], "message 0 with different thoughts under reasoning"),
        ([said(tool_calls=[{"id": 3, "name": "f"}])], "message 0 with the id 3 of a call, which is no text"),
        ([said(loss="no")], "message 0 with loss 'no', which is neither yes nor no"),
        ([{"role": "user", "content": ""}, {"role": "system", "content": ""}], "message 1 of the role 'system' after"),
    ],
)
def test_messages_that_are_none_are_named(conversation: Any, fault: str) -> None:
    with pytest.raises(RowRefused) as caught:
        read_conversation(conversation)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("tools", "fault"),
    [
        ("[", "has tools as text that is no JSON"),
        (3, "has tools that are no list, but a int"),
        ({"name": "f"}, "has tools that are no list, but a dict"),
        (["{"], "has tool 0 as text that is no JSON"),
        ([{"type": "function"}], "has a tool 0 that names no function"),
    ],
)
def test_tools_that_are_none_are_named(tools: Any, fault: str) -> None:
    with pytest.raises(RowRefused) as caught:
        read_tools(tools)
    assert fault in str(caught.value)


NAMES = ["role", "from", "content", "value", "tool_calls", "function", "name", "arguments", "id", "type", "text"]
NAMES += ["tool_call_id", "reasoning", "thinking", "loss", "weight", "function_call"]
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.text("ab<\ud800é{}", max_size=5)) | st.sampled_from(
    ["user", "assistant", "tool", "system", "gpt", "human", "function_call", "text", "{}", '{"name": "f"}']
)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6)
)


@settings(max_examples=examples(300), deadline=None, database=None)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=6) | ANYTHING, max_size=4) | ANYTHING)
def test_whatever_a_row_holds_it_is_encoded_or_refused(conversation: Any) -> None:
    chats = chat_of("chatml")
    prompt = PromptReader(chats.encode).read({"messages": conversation, "tools": conversation}, 0)
    assert "\n" not in str(prompt) if isinstance(prompt, Missing) else prompt.token_ids
