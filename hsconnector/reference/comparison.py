"""Captured states against what they should be, measured in what rounding alone moves them by.

Two implementations of a model never agree to the last bit, and in bfloat16 they differ by a percent. So the same tokens
are computed twice, in float32 and in the dtype of the captures; what these two passes differ by, in each row and slot,
is the row's scale, and a capture is as many scales away as its row is from the float32 pass (all lengths Euclidean).

| a capture is right where | limit |
| --- | --- |
| the median row of each slot is | within `MEDIAN_LIMIT` scales, from `MEDIAN_ROWS` rows on |
| each row of each slot is | within `ROW_LIMIT` scales |
| no neighbouring layer is | nearer to a slot within these limits than `NEARER` of the distance of its own |

A row's scale is at least its slot's median, for a row may be rounded well by chance, and at least `FLOORS`, for what is
not rounded twice (embeddings, float32 captures) still meets other kernels; it is at most `CEILING`, for no rounding
moves a row so far, only a pass that went wrong. Where a router chooses experts, rounding to 16 bits lets a near tie
fall to another one, in the capture or in the pass: that row is then another by up to two thirds of its length, and
later ones, which attend to it, by a tenth. There the scale is at least `ROUTED_FLOOR`: other layers, rows and tokens
are found as anywhere, noise under a seventh of a row's length is not.

`hsconnector verify`, `export --check` and the demos know no other rule. Everything here takes torch tensors and needs
no engine, sidecar or checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hsconnector.errors import SettingsError

__all__ = [
    "CEILING",
    "FLOORS",
    "MEDIAN_LIMIT",
    "MEDIAN_ROWS",
    "NEARER",
    "ROUTED_FLOOR",
    "ROW_LIMIT",
    "Difference",
    "Expected",
    "compare",
    "ranges",
    "scales",
]

MEDIAN_LIMIT = 2.5
MEDIAN_ROWS = 8
ROW_LIMIT = 12.0
NEARER = 0.7
FLOORS: Mapping[str, float] = {"float32": 1e-5, "float16": 3e-4, "bfloat16": 2e-3}
"""The least scale by stored dtype, relative to the length of the row: the last bit of the 16-bit types, and about
seven times what two kernels in float32 were seen to differ by (1.5e-6)."""

CEILING = 0.1
ROUTED_FLOOR = 0.065
"""The least scale in 16 bits for a model with routed experts."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What each slot of a capture of T rows should hold, and what it may hold instead."""

    claims: tuple[str, ...]
    """By slot, the name of what it should hold."""
    neighbours: tuple[tuple[str, ...], ...]
    """By slot, the names of the layers before and after it."""
    named: Mapping[str, Any]
    """`[T, H]` in float32 by name: what is claimed, its neighbours and, for an explanation, everything else."""
    scales: Any
    """`[T, L]`, what rounding moves each row by."""

    def distances(self, states: Any, name: str) -> Any:
        """`[T]`: how far `states` `[T, H]` are from those of that name; infinite where they are not finite."""
        return (states.float() - self.named[name]).norm(dim=-1).nan_to_num(nan=float("inf"))


@dataclass(frozen=True, eq=False)
class Difference:
    """How far a capture is from what it should be."""

    largest: float
    """Largest absolute difference of any element."""
    largest_relative: float
    """Largest distance of a row in a slot, relative to the length that the row should have."""
    median: float
    """The median row of the worst slot, in scales."""
    row: float
    """The worst row of any slot, in scales."""
    wrong: Any
    """`[T, L]`, true for what is beyond a limit."""

    @property
    def ok(self) -> bool:
        return not bool(self.wrong.any())

    @property
    def wrong_rows(self) -> list[int]:
        """Rows with at least one slot that is wrong."""
        rows: list[int] = self.wrong.any(dim=1).nonzero().flatten().tolist()
        return rows

    @property
    def first(self) -> tuple[int, int]:
        """The first wrong row, and the first slot that is wrong there."""
        row = self.wrong_rows[0]
        return row, int(self.wrong[row].nonzero()[0])


def scales(exact: Any, rounded: Any, dtype: str, *, routed: bool = False) -> Any:
    """`[T, L]`: what rounding to `dtype` moves each row by; both passes are `[T, L, H]`, `exact` in float32."""
    lengths = exact.norm(dim=-1)
    moved = (rounded.float() - exact).norm(dim=-1) / lengths.clamp(min=1e-30)
    moved = moved.nan_to_num(nan=0.0, posinf=0.0)
    floor = ROUTED_FLOOR if routed and dtype != "float32" else FLOORS[dtype]
    return moved.maximum(moved.median(dim=0).values).clamp(min=floor, max=CEILING) * lengths.clamp(min=1e-30)


def compare(states: Any, expected: Expected) -> Difference:
    """Compares `[T, L, H]` with what it should be; anything not finite is wrong. Raises SettingsError on shapes."""
    import torch

    wanted = torch.stack([expected.named[name] for name in expected.claims], dim=1)
    if states.shape != wanted.shape or not states.numel():
        raise SettingsError(f"cannot compare {list(states.shape)} with {list(wanted.shape)}")
    slots = range(len(expected.claims))
    distances = torch.stack([expected.distances(states[:, slot], expected.claims[slot]) for slot in slots], dim=1)
    away = distances / expected.scales
    medians = away.median(dim=0).values
    beyond = (medians > MEDIAN_LIMIT) & (len(away) >= MEDIAN_ROWS)
    wrong = (away > ROW_LIMIT) | (beyond & (away > MEDIAN_LIMIT))
    mistaken = ~wrong.any(dim=0) & torch.tensor([_another_is_nearer(states[:, slot], expected, slot) for slot in slots])
    lengths = wanted.norm(dim=-1).clamp(min=1e-30)
    return Difference(
        largest=float((states.float() - wanted).abs().max()),
        largest_relative=float((distances / lengths).max()),
        median=float(medians.max()),
        row=float(away.max()),
        wrong=wrong | mistaken,
    )


def _another_is_nearer(states: Any, expected: Expected, slot: int) -> bool:
    own = expected.distances(states, expected.claims[slot]).median()
    return any(
        bool(expected.distances(states, name).median() < NEARER * own) and bool(own > 0)
        for name in expected.neighbours[slot]
    )


def ranges(rows: Sequence[int]) -> str:
    """Ascending row numbers as text: "rows 3, 16 to 31"."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], row]
        else:
            runs.append([row, row])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in runs[:6]]
    return ("row " if len(rows) == 1 else "rows ") + ", ".join(shown) + (" and more" if len(runs) > 6 else "")
