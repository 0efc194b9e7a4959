"""One row of a data set, and how it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Row", "RowRefused"]


class RowRefused(Exception):
    """A row that cannot be asked for; the message is a phrase that follows "row 7"."""


Row = Mapping[str, Any] | RowRefused
"""A row as its file gives it, or why the file has none there."""
