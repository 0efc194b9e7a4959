"""What is handed to a template here is what vLLM's own code hands to it for the request that is sent."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.renderers.chat_utils import parse_chat_messages

from hsconnector.prompts.chat import as_given
from hsconnector.prompts.conversation import engine_messages, read_conversation, read_tools
from hsconnector.prompts.template import Template
from tests.prompts.shapes import SHAPES, TODAY
from tests.prompts.talks import TALKS, calls, user

TOOLS = [
    {"function": {"parameters": {"type": "object"}, "name": "add", "strict": True}, "type": "function"},
    {"name": "look", "description": "around"},
]
PARTS = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
MODEL = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)


def engines(messages: list[Any], content_format: Any) -> list[Any]:
    request = TokenizeChatRequest(messages=messages)
    conversation, _, _ = parse_chat_messages(request.messages, MODEL, content_format)
    return conversation


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("kind", ["string", "openai"])
def test_messages_reach_the_template_as_from_the_engine(talk: str, kind: str) -> None:
    read = read_conversation(TALKS[talk])
    template = Template(PARTS if kind == "openai" else SHAPES["chatml"].template, {}, TODAY)
    ours = [dict(sorted(each.items())) for each in as_given(read.messages, template)]
    theirs = [dict(sorted(each.items())) for each in engines(engine_messages(read), kind)]
    assert json.dumps(ours) == json.dumps(theirs)


def test_calls_without_ids_pass_the_engines_protocol() -> None:
    talk = [user("a"), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"b": [1, "é"]}}]}]
    read = read_conversation(talk)
    assert engines(engine_messages(read), "string")[1]["tool_calls"] == read.messages[1]["tool_calls"]
    named = [user("a"), calls(("f", '{"b": [1, "é"]}'))]
    sent = engine_messages(read_conversation(named))
    assert engines(sent, "string")[1]["tool_calls"][0]["function"]["arguments"] == {"b": [1, "é"]}


def test_tools_are_written_out_as_by_the_engine() -> None:
    tools = read_tools(TOOLS)
    assert tools is not None
    request = TokenizeChatRequest(messages=[user("a")], tools=tools)
    assert json.dumps([tool.model_dump() for tool in request.tools or ()]) == json.dumps(tools)
