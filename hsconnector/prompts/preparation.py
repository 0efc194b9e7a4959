"""How rows become token ids and a mask: what a run decides once and keeps beside the data set."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from enum import StrEnum
from typing import Any, Literal

import msgspec

from hsconnector.errors import SettingsError
from hsconnector.prompts.roles import MEANINGS

__all__ = ["DropReason", "Preparation"]

_GIVEN = frozenset({"messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "strftime_now", "range"})
"""What a template is given by whoever renders it, and no option may replace."""


class DropReason(StrEnum):
    """Why a row that could be asked for is not: the selection says so."""

    TOO_LONG = "too_long"
    UNTRAINED = "untrained"
    """Fewer tokens count than `min_trained_tokens`."""


class Preparation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a run; `msgspec.json` writes and reads them, so that a second run decides as the first.

    Raises SettingsError for values that contradict each other.
    """

    train_on: Literal["all", "last"] = "all"
    """Every assistant turn of a conversation, or the last one only."""
    max_tokens: int = 0
    """The longest row wanted; 0 for as long as the engine takes."""
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    """What becomes of a longer one; `truncate` cuts ids and mask at their end."""
    min_trained_tokens: int = 1
    """A row in which fewer tokens count is dropped."""
    roles: dict[str, str] = {}
    """Names that a data set has for roles, beside those that are known."""
    template_kwargs: dict[str, Any] = {}
    """Handed to the chat template, as vLLM does with `chat_template_kwargs`."""
    date: date = msgspec.field(default_factory=date.today)
    """The day that a template sees as today."""
    open_end: Literal["refuse", "train"] = "refuse"
    """What becomes of a last turn after which the template writes no stop token, as GLM's does."""

    def __post_init__(self) -> None:
        if self.max_tokens < 0 or self.min_trained_tokens < 0:
            raise SettingsError(
                f"max_tokens={self.max_tokens} and min_trained_tokens={self.min_trained_tokens}: neither is below 0"
            )
        _check_roles(self.roles)
        taken = sorted(_GIVEN & self.template_kwargs.keys())
        if taken:
            raise SettingsError(f"template_kwargs cannot set {', '.join(taken)}: rendering sets it itself")


def _check_roles(roles: Mapping[str, str]) -> None:
    for name, role in roles.items():
        if not name or role not in MEANINGS:
            raise SettingsError(f"role {name!r}={role!r} is not NAME=ROLE with one of {', '.join(MEANINGS)}")
