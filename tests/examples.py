"""How many random examples a test draws."""

from __future__ import annotations

import os

__all__ = ["examples"]

_SHARE = float(os.environ.get("HSC_EXAMPLES", "1"))


def examples(number: int) -> int:
    """`number` times what the variable `HSC_EXAMPLES` says, and at least 10."""
    return max(10, round(number * _SHARE))
