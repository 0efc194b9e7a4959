"""One row of a data set -> the token ids to ask for, and their loss mask. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hsconnector.capture.protocol import MAX_TEXT_BYTES

__all__ = ["Encode", "Missing", "Prompt", "PromptReader", "Row", "RowRefused"]

_LARGEST_ID = 2**31 - 1
_CONVERSATIONS = ("messages", "conversations")

Encode = Callable[[Sequence[Any], Any], tuple[list[int], list[int]]]
"""A conversation and its tools -> token ids and loss mask, of equal length; raises `RowRefused`."""


class RowRefused(Exception):
    """A row that cannot be asked for; the message is a phrase that follows "row 7"."""


Row = Mapping[str, Any] | RowRefused
"""A row as its file gives it, or why the file has none there."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked of the engine for one row."""

    row: int
    """Counted from 0 over the whole data set."""
    sample_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """0 or 1 for each token."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A row that has no capture, and why."""

    row: int
    sample_id: str
    reason: str

    def __str__(self) -> str:
        name = f"row {self.row}" if self.sample_id in ("", str(self.row)) else f"row {self.row} ({self.sample_id})"
        return f"{name}: {self.reason}"


@dataclass(frozen=True)
class PromptReader:
    """Turns rows into prompts.

    A row holds `input_ids`, and perhaps `loss_mask` (else every token counts), or a conversation under `messages` or
    `conversations`, which needs `encode`. `max_tokens` is the longest prompt the engine takes; 0 for unknown.
    `id_field` names the field with the sample's id; without one the row's number is its id.
    """

    encode: Encode | None = None
    id_field: str = ""
    max_tokens: int = 0

    def read(self, row: Row, index: int) -> Prompt | Missing:
        """The prompt of a row, or a sentence that says what is wrong with the row."""
        sample_id = str(index)
        try:
            if isinstance(row, RowRefused):
                raise row
            if not isinstance(row, Mapping):
                raise RowRefused(f"is no object with fields, but a {type(row).__name__}")
            sample_id = self._sample_id(row, index)
            token_ids, mask = self._tokens(row)
            self._check_length(token_ids)
        except RowRefused as refused:
            return Missing(index, sample_id, str(refused))
        return Prompt(index, sample_id, tuple(token_ids), tuple(mask))

    def _sample_id(self, row: Mapping[str, Any], index: int) -> str:
        if not self.id_field:
            return str(index)
        value = row.get(self.id_field)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise RowRefused(f"has no id under {self.id_field!r} (got {value!r:.80})")
        text = str(value)
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_TEXT_BYTES:
            raise RowRefused(f"has an id of {size} bytes, at most {MAX_TEXT_BYTES} are allowed: {text[:40]!r}…")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise RowRefused(f"has an id with half a surrogate pair, which is no text: {text[:40]!r}")
        return text

    def _tokens(self, row: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int]]:
        if row.get("input_ids") is not None:
            token_ids = _token_ids(row["input_ids"])
            return token_ids, _loss_mask(row.get("loss_mask"), len(token_ids))
        for field in _CONVERSATIONS:
            if row.get(field) is not None:
                return self._encoded(row[field], row.get("tools"))
        fields = ", ".join(list(row)[:10]) or "none"
        raise RowRefused(f"has neither input_ids nor messages nor conversations; its fields: {fields}")

    def _encoded(self, conversation: Any, tools: Any) -> tuple[Sequence[int], Sequence[int]]:
        if self.encode is None:
            raise RowRefused("is a conversation, and there is no tokenizer to encode it with: give --tokenizer")
        if isinstance(conversation, str) or not isinstance(conversation, Sequence):
            raise RowRefused(f"has a conversation that is no list of messages, but a {type(conversation).__name__}")
        return self.encode(conversation, tools)

    def _check_length(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise RowRefused("has no tokens")
        if self.max_tokens and len(token_ids) > self.max_tokens:
            raise RowRefused(
                f"has {len(token_ids)} tokens, the engine takes {self.max_tokens} and one to generate: "
                "shorten it or raise the engine's --max-model-len"
            )


def _token_ids(value: Any) -> list[int]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RowRefused(f"has input_ids that are no list, but a {type(value).__name__}")
    for position, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RowRefused(f"has {token!r:.40} at position {position} of input_ids, which is no token id")
        if not 0 <= token <= _LARGEST_ID:
            raise RowRefused(f"has token id {token} at position {position}, which no vocabulary holds")
    return list(value)


def _loss_mask(value: Any, length: int) -> list[int]:
    if value is None:
        return [1] * length
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RowRefused(f"has a loss_mask that is no list, but a {type(value).__name__}")
    if len(value) != length:
        raise RowRefused(f"has {length} token ids and a loss_mask of {len(value)}")
    for position, flag in enumerate(value):
        if flag not in (0, 1):
            raise RowRefused(f"has {flag!r:.40} at position {position} of loss_mask, which holds 0 and 1 only")
    return [int(flag) for flag in value]
