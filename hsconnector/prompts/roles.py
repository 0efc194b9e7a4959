"""The roles of a conversation, and the names that data sets have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsconnector.prompts.row import RowRefused

__all__ = ["CALL", "MEANINGS", "role_of"]

CALL = "function_call"
"""ShareGPT's turn that holds nothing but the assistant's calls, as JSON text."""
MEANINGS = ("system", "developer", "user", "assistant", "tool", CALL)
_NAMES = {
    **{name: name for name in MEANINGS},
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}


def role_of(said: Any, position: int, more: Mapping[str, str]) -> str:
    """What a message's role means, one of `MEANINGS`; `more` adds to the names that are known."""
    role = more.get(said) or _NAMES.get(said) if isinstance(said, str) else None
    if role is None:
        known = ", ".join([*more, *_NAMES])
        raise RowRefused(
            f"has a message {position} of the role {said!r:.40}; known: {known}; --role NAME=ROLE adds one"
        )
    return role
