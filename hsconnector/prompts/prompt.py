"""One row of a data set -> the token ids to ask for, and their loss mask. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec

from hsconnector.capture.protocol import MAX_TEXT_BYTES
from hsconnector.prompts.encoded import Encoded
from hsconnector.prompts.preparation import DropReason, Preparation
from hsconnector.prompts.row import Row, RowRefused

__all__ = ["Dropped", "Encode", "Missing", "Prompt", "PromptReader", "Row", "RowRefused"]

_LARGEST_ID = 2**31 - 1
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_ID)]
_CONVERSATIONS = ("messages", "conversations")
_EVERY_ROW = Preparation(min_trained_tokens=0)

Encode = Callable[[Any, Any], Encoded]
"""A conversation and its tools -> token ids and loss mask, of equal length; raises `RowRefused`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked of the engine for one row."""

    row: int
    """Counted from 0 over the whole data set."""
    sample_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """0 or 1 for each token."""
    thoughts_left_out: int = 0
    """Thoughts of earlier turns that the chat template does not render."""
    whole: Encoded | None = None
    """Of a conversation: what it was encoded to, before it was cut."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A row that has no capture, and why."""

    row: int
    sample_id: str
    reason: str

    def __str__(self) -> str:
        name = f"row {self.row}" if self.sample_id in ("", str(self.row)) else f"row {self.row} ({self.sample_id})"
        return f"{name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Dropped(Missing):
    """A row that the selection leaves out, though it could be asked for."""

    why: DropReason


class _LeftOut(Exception):
    """The selection drops the row."""

    def __init__(self, why: DropReason, reason: str) -> None:
        super().__init__(reason)
        self.why = why


@dataclass(frozen=True)
class PromptReader:
    """Turns rows into prompts.

    A row holds `input_ids`, and perhaps `loss_mask` (else every token counts), or a conversation under `messages` or
    `conversations`, which needs `encode`. `max_tokens` is the longest prompt the engine takes; 0 for unknown.
    `id_field` names the field with the sample's id; without one the row's number is its id. `preparation` says which
    rows are wanted; without one every row is that can be asked for.
    """

    encode: Encode | None = None
    id_field: str = ""
    max_tokens: int = 0
    preparation: Preparation = _EVERY_ROW

    def read(self, row: Row, index: int) -> Prompt | Missing:
        """The prompt of a row, or a sentence that says what is wrong with the row, or why it is not wanted."""
        sample_id = str(index)
        try:
            if isinstance(row, RowRefused):
                raise row
            if not isinstance(row, Mapping):
                raise RowRefused(f"is no object with fields, but a {type(row).__name__}")
            sample_id = self._sample_id(row, index)
            whole = self._encoded(row)
            encoded = self._selected(whole)
        except RowRefused as refused:
            return Missing(index, sample_id, str(refused))
        except _LeftOut as dropped:
            return Dropped(index, sample_id, str(dropped), dropped.why)
        token_ids, loss_mask = tuple(encoded.token_ids), tuple(encoded.loss_mask)
        conversation = whole if whole.request else None
        return Prompt(index, sample_id, token_ids, loss_mask, encoded.left_out, conversation)

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

    def _encoded(self, row: Mapping[str, Any]) -> Encoded:
        if row.get("input_ids") is not None:
            token_ids = _token_ids(row["input_ids"])
            return Encoded(token_ids, _loss_mask(row.get("loss_mask"), len(token_ids)))
        for field in _CONVERSATIONS:
            if row.get(field) is None:
                continue
            if self.encode is None:
                raise RowRefused("is a conversation, and there is no tokenizer to encode it with: give --tokenizer")
            return self.encode(row[field], row.get("tools"))
        fields = ", ".join(list(row)[:10]) or "none"
        raise RowRefused(f"has neither input_ids nor messages nor conversations; its fields: {fields}")

    def _selected(self, encoded: Encoded) -> Encoded:
        if not encoded.token_ids:
            raise RowRefused("has no tokens")
        cut = self._cut(encoded)
        trained = sum(cut.loss_mask)
        if trained < self.preparation.min_trained_tokens:
            raise _LeftOut(
                DropReason.UNTRAINED,
                f"has {trained} tokens that count, wanted are {self.preparation.min_trained_tokens} or more",
            )
        return cut

    def _cut(self, encoded: Encoded) -> Encoded:
        """Not longer than wanted."""
        wanted, taken, length = self.preparation.max_tokens, self.max_tokens, len(encoded.token_ids)
        longest = min(filter(None, (wanted, taken)), default=length)
        if length <= longest:
            return encoded
        if self.preparation.too_long == "truncate":
            return replace(encoded, token_ids=encoded.token_ids[:longest], loss_mask=encoded.loss_mask[:longest])
        if longest == wanted:
            reason = f"has {length} tokens, at most {wanted} are wanted"
        else:
            reason = f"has {length} tokens, the engine takes {taken} and one to generate"
        if self.preparation.too_long == "drop":
            raise _LeftOut(DropReason.TOO_LONG, reason)
        raise RowRefused(
            f"{reason}: shorten it, raise the engine's --max-model-len, or give --too-long truncate or drop"
        )


def _token_ids(value: Any) -> list[int]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RowRefused(f"has input_ids that are no list, but a {type(value).__name__}")
    try:
        token_ids: list[int] = msgspec.convert(value, list[_TokenId])
        return token_ids
    except msgspec.ValidationError:
        raise _no_token_id(value) from None


def _no_token_id(value: Sequence[Any]) -> RowRefused:
    for position, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            return RowRefused(f"has {token!r:.40} at position {position} of input_ids, which is no token id")
        if not 0 <= token <= _LARGEST_ID:
            return RowRefused(f"has token id {token} at position {position}, which no vocabulary holds")
    return RowRefused(f"has input_ids of a {type(value).__name__}, which is no list")


def _loss_mask(value: Any, length: int) -> list[int]:
    if value is None:
        return [1] * length
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RowRefused(f"has a loss_mask that is no list, but a {type(value).__name__}")
    if len(value) != length:
        raise RowRefused(f"has {length} token ids and a loss_mask of {len(value)}")
    try:
        flags: list[int] = msgspec.convert(value, list[Literal[0, 1]])
        return flags
    except msgspec.ValidationError:
        return [_flag(flag, position) for position, flag in enumerate(value)]


def _flag(value: Any, position: int) -> int:
    if value not in (0, 1):
        raise RowRefused(f"has {value!r:.40} at position {position} of loss_mask, which holds 0 and 1 only")
    return int(value)
