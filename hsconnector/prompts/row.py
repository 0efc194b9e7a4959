"""One row of a data set, and how it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Row", "RowRefused", "without_nulls"]


class RowRefused(Exception):
    """A row that cannot be asked for; the message is a phrase that follows "row 7"."""


def without_nulls(value: Any) -> Any:
    """Objects without the keys that hold null: Arrow gives every object of a column each key that any of them has."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list) and value and isinstance(value[0], (Mapping, list)):
        return [without_nulls(each) for each in value]
    return value


Row = Mapping[str, Any] | RowRefused
"""A row as its file gives it, or why the file has none there."""
