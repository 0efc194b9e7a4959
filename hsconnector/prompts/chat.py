"""Conversations -> token ids and a loss mask over what the assistant says, by a model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hsconnector.errors import SettingsError, UnsupportedError
from hsconnector.prompts.prompt import RowRefused

__all__ = ["ChatTokenizer", "load_tokenizer", "normalized"]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKER = "\u2983hsc-marker\u2984"
Message = dict[str, Any]


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> ChatTokenizer:
    """The tokenizer of a checkpoint, with its chat template; raises SettingsError or UnsupportedError."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnsupportedError(
            "conversations are encoded with transformers, which is not installed: "
            "pip install 'hsconnector[verify]', or give rows with input_ids"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"no tokenizer can be loaded from {name!r}: {_first_line(error)}") from error
    return ChatTokenizer(tokenizer, name)


class ChatTokenizer:
    """Encodes conversations with a Hugging Face tokenizer that has a chat template and knows offsets."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise SettingsError(f"the tokenizer of {name!r} has no chat template: give another with --tokenizer")
        if not getattr(tokenizer, "is_fast", False):
            raise SettingsError(
                f"the tokenizer of {name!r} is a slow one and knows no offsets, which the loss mask is made from: "
                "give rows with input_ids and loss_mask"
            )
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        template = tokenizer.chat_template
        texts = template.values() if isinstance(template, Mapping) else [template]
        self._marks_turns = any(_MARKED.search(text) for text in texts)

    def encode(self, conversation: Sequence[Any], tools: Any = None) -> tuple[list[int], list[int]]:
        """Token ids and the mask of equal length: 1 on assistant turns, their closing token included.

        A template with `{% generation %}` says itself what the assistant's part is; otherwise an assistant turn is
        what a conversation up to it has more than the prompt for generating it.
        """
        messages = normalized(conversation)
        if self._marks_turns:
            return self._by_marks(messages, tools)
        text = self._render(messages, tools)
        coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids, offsets = list(coded["input_ids"]), coded["offset_mapping"]
        mask = [0] * len(token_ids)
        for start, end in self._spans(messages, tools, text):
            self._cover(mask, token_ids, offsets, start, end)
        return token_ids, mask

    def _by_marks(self, messages: list[Message], tools: Any) -> tuple[list[int], list[int]]:
        coded = self._applied(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(coded["input_ids"]), [int(flag) for flag in coded["assistant_masks"]]

    def _spans(self, messages: list[Message], tools: Any, text: str) -> Iterator[tuple[int, int]]:
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            span = self._by_prefix(messages, tools, text, position) or self._by_marker(messages, tools, text, position)
            if span is None:
                raise RowRefused(
                    f"has a conversation whose turn {position} the chat template renders differently within it: give "
                    "input_ids and loss_mask, or a tokenizer whose template marks turns with {% generation %}"
                )
            yield span

    def _by_prefix(self, messages: list[Message], tools: Any, text: str, position: int) -> tuple[int, int] | None:
        start = self._start(messages, tools, text, position)
        through = self._render(messages[: position + 1], tools)
        return (start, len(through)) if start is not None and text.startswith(through) else None

    def _by_marker(self, messages: list[Message], tools: Any, text: str, position: int) -> tuple[int, int] | None:
        """The place of a turn's content, found by rendering a marker there: some templates drop earlier thoughts."""
        marked = [*messages[:position], {**messages[position], "content": _MARKER}, *messages[position + 1 :]]
        rendered = self._render(marked, tools)
        before, found, after = rendered.partition(_MARKER)
        if not found or not text.endswith(after):
            return None
        start = self._start(messages, tools, text, position)
        if start is None:
            start = len(before) if text.startswith(before) else None
        return None if start is None else (start, len(text) - len(after))

    def _start(self, messages: list[Message], tools: Any, text: str, position: int) -> int | None:
        """Where the answer to everything before a turn begins; None where that cannot be told."""
        if position == 0:
            return None
        prompt = self._render(messages[:position], tools, add_generation_prompt=True)
        return len(prompt) if text.startswith(prompt) else None

    def _cover(
        self, mask: list[int], token_ids: list[int], offsets: Sequence[tuple[int, int]], start: int, end: int
    ) -> None:
        inside = [i for i, (first, last) in enumerate(offsets) if first < end and last > start]
        closing = [i for i in inside if token_ids[i] in self._special]
        following = next((i for i, (first, _) in enumerate(offsets) if first >= end), None)
        if not closing and following is not None and token_ids[following] in self._special:
            closing, inside = [following], [*inside, following]
        for i in inside:
            mask[i] = 1 if not closing or i <= closing[-1] else 0

    def _render(self, messages: list[Message], tools: Any, *, add_generation_prompt: bool = False) -> str:
        return str(self._applied(messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt))

    def _applied(self, messages: list[Message], tools: Any, **how: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools or None, **how)
        except Exception as error:  # templates are programs of other people and raise what they like
            raise RowRefused(f"has a conversation that the chat template rejects: {_first_line(error)}") from error


def normalized(conversation: Sequence[Any]) -> list[Message]:
    """Messages with `role` and `content`, from these or from ShareGPT's `from` and `value`; raises `RowRefused`."""
    if not conversation:
        raise RowRefused("has a conversation without messages")
    return [_message(turn, position) for position, turn in enumerate(conversation)]


def _message(turn: Any, position: int) -> Message:
    if not isinstance(turn, Mapping):
        raise RowRefused(f"has a message {position} that is no object, but a {type(turn).__name__}")
    said = turn.get("role", turn.get("from"))
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise RowRefused(f"has a message {position} of the role {said!r:.40}; known: {', '.join(_ROLES)}")
    content = turn.get("content", turn.get("value"))
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "".join(_text_part(part, position) for part in content)
    if not isinstance(content, str):
        raise RowRefused(f"has a message {position} whose content is no text, but a {type(content).__name__}")
    return {"role": role, "content": content, **{key: turn[key] for key in _KEPT if turn.get(key)}}


def _text_part(part: Any, position: int) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RowRefused(f"has a message {position} with a part {kind!r:.40}; token ids carry text only")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
