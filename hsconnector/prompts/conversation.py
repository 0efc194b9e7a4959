"""A data set's conversation -> the messages that vLLM hands to a chat template, whatever they were called before.

What vLLM does with each field was read in `vllm/renderers/chat_utils.py` of 0.32: a thought is given as `reasoning`
and `reasoning_content`, the arguments of a call as an object, parts of text joined by line ends, calls and tools with
their keys in the order of its protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hsconnector.prompts.roles import CALL, role_of
from hsconnector.prompts.row import RowRefused, without_nulls

__all__ = ["Conversation", "Message", "engine_messages", "read_conversation", "read_tools"]

Message = dict[str, Any]

_THOUGHTS = ("reasoning", "reasoning_content", "thinking")
_FLAGS = ("loss", "train", "weight")
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as a chat template sees them."""

    messages: list[Message]
    trained: tuple[bool, ...]
    """For each message, whether it is an assistant's that its row does not exclude."""
    made_ids: frozenset[str] = frozenset()
    """Ids of calls that had none; no model said them."""


def read_conversation(value: Any, roles: Mapping[str, str] | None = None) -> Conversation:
    """Messages with `role` and `content`, or ShareGPT's `from` and `value`, as objects or JSON text.

    Raises `RowRefused`.
    """
    turns = _parsed(value, "a conversation")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise RowRefused(f"has a conversation that is no list of messages, but a {type(turns).__name__}")
    if not turns:
        raise RowRefused("has a conversation without messages")
    messages, trained = [], []
    for position, turn in enumerate(turns):
        message = _message(turn, position, roles or {})
        messages.append(message)
        trained.append(message["role"] == "assistant" and _counts(turn, position))
    _check_order(messages)
    return Conversation(messages, tuple(trained), _with_ids(messages))


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a row as vLLM's protocol writes them out, None for none; raises `RowRefused`."""
    tools = _parsed(value, "tools") if value else None
    if not tools:
        return None
    if not isinstance(tools, Sequence):
        raise RowRefused(f"has tools that are no list, but a {type(tools).__name__}")
    return [_tool(_parsed(tool, f"tool {position}"), position) for position, tool in enumerate(tools)]


def engine_messages(conversation: Conversation) -> list[Message]:
    """The messages as a request for `/tokenize` or `/v1/chat/completions` carries them."""
    return [_for_request(message) for message in conversation.messages]


def _for_request(message: Message) -> Message:
    sent = {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
            for call in sent["tool_calls"]
        ]
    return sent


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _parsed(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise RowRefused(f"has {what} as text that is no JSON: {error}") from error


def _message(turn: Any, position: int, roles: Mapping[str, str]) -> Message:
    if not isinstance(turn, Mapping):
        raise RowRefused(f"has a message {position} that is no object, but a {type(turn).__name__}")
    given = {key: value for key, value in turn.items() if value is not None}
    role = role_of(given.get("role", given.get("from")), position, roles)
    content = given.get("content", given.get("value", ""))
    if role == CALL:
        return {"role": "assistant", "content": "", "tool_calls": _calls(content, position)}
    message: Message = {"role": role, "content": _content(content, position)}
    if role == "assistant":
        message.update(_thought(given, position))
        calls = given.get("tool_calls") or given.get("function_call")
        if calls:
            message["tool_calls"] = _calls(calls, position)
    elif given.get("tool_call_id"):
        message["tool_call_id"] = _id(given["tool_call_id"], position)
    if isinstance(given.get("name"), str) and given["name"]:
        message["name"] = given["name"]
    return message


def _content(content: Any, position: int) -> str:
    if isinstance(content, list):
        return "\n".join(_text_part(part, position) for part in content)
    if not isinstance(content, str):
        raise RowRefused(f"has a message {position} whose content is no text, but a {type(content).__name__}")
    return content


def _text_part(part: Any, position: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") or "text" if isinstance(part, Mapping) else type(part).__name__
    field = _TEXT_PARTS.get(kind) if isinstance(part, Mapping) and isinstance(kind, str) else None
    text = part.get(field) if field else None
    if not isinstance(text, str):
        raise RowRefused(f"has a message {position} with a part {kind!r:.40}; token ids carry text only")
    return text


def _thought(given: Mapping[str, Any], position: int) -> dict[str, str]:
    said = {given[key] for key in _THOUGHTS if isinstance(given.get(key), str) and given[key]}
    if len(said) > 1:
        raise RowRefused(f"has a message {position} with different thoughts under {', '.join(_THOUGHTS)}: keep one")
    return dict.fromkeys(("reasoning", "reasoning_content"), said.pop()) if said else {}


def _calls(value: Any, position: int) -> list[dict[str, Any]]:
    calls = _parsed(value, f"a message {position} with calls")
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, Sequence) or not calls:
        raise RowRefused(f"has a message {position} whose calls are no list of objects")
    return [_call(_parsed(call, f"a message {position} with a call"), position) for call in calls]


def _call(call: Any, position: int) -> dict[str, Any]:
    function = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowRefused(f"has a message {position} with a call that names no function: {call!r:.80}")
    arguments = _arguments(function.get("arguments", function.get("parameters")), function["name"], position)
    written = {"function": {"arguments": arguments, "name": function["name"]}, "type": "function"}
    return {"id": _id(call["id"], position), **written} if call.get("id") else written


def _id(value: Any, position: int) -> str:
    if not isinstance(value, str):
        raise RowRefused(f"has a message {position} with the id {value!r:.40} of a call, which is no text")
    return value


def _arguments(value: Any, name: str, position: int) -> dict[str, Any]:
    """As an object; in one that came as an object a null is what Arrow fills an absent key with, and goes."""
    if isinstance(value, str):
        arguments = value.strip() and _parsed(value, f"a message {position} with arguments of {name!r:.40}")
    else:
        arguments = without_nulls(value)
    if not arguments:
        return {}
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise RowRefused(f"has a message {position} with arguments of {name!r:.40} that are no object, but a {kind}")
    return arguments


def _tool(tool: Any, position: int) -> dict[str, Any]:
    function = tool.get("function") or tool if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowRefused(f"has a tool {position} that names no function: {tool!r:.80}")
    first = {key: function.get(key) for key in ("name", "description", "parameters")}
    more = {key: value for key, value in function.items() if key not in {*first, "type"} and value is not None}
    return {"type": "function", "function": {**first, **more}}


def _counts(turn: Mapping[str, Any], position: int) -> bool:
    counts = True
    for flag in _FLAGS:
        value = turn.get(flag)
        if value is not None and not isinstance(value, (bool, int, float)):
            raise RowRefused(f"has a message {position} with {flag} {value!r:.40}, which is neither yes nor no")
        counts = counts and (value is None or bool(value))
    return counts


def _check_order(messages: list[Message]) -> None:
    """Most templates forget or refuse a system's message that comes late, and vLLM moves a developer's to the front."""
    begun = False
    for position, message in enumerate(messages):
        if message["role"] not in ("system", "developer"):
            begun = True
        elif begun:
            raise RowRefused(f"has a message {position} of the role {message['role']!r} after others: put it first")


def _with_ids(messages: list[Message]) -> frozenset[str]:
    """Gives ids to calls without one, for vLLM's protocol asks for them, and to the answers in their order."""
    made: set[str] = set()
    waiting: list[str] = []
    for message in messages:
        for position, call in enumerate(message.get("tool_calls", ())):
            if "id" not in call:
                made.add(name := f"call{len(made):05d}")
                message["tool_calls"][position] = {"id": name, **call}
                waiting.append(name)
        if message["role"] == "tool" and waiting and "tool_call_id" not in message:
            message["tool_call_id"] = waiting.pop(0)
    return frozenset(made)
