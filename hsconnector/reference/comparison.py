"""Captured states against what they should be: where they first differ, and what they are instead.

Everything here takes torch tensors and needs no engine, sidecar or checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hsconnector.errors import SettingsError

__all__ = ["DEFAULT_TOLERANCES", "Difference", "compare", "explain", "ranges"]

DEFAULT_TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""By stored dtype: the largest difference of a row from its reference, relative to that row's largest value.

Two implementations in float32 stay below 1e-5; neighbouring layers of real models differ by more than 1e-1.
"""

_MAX_SHIFT = 4


@dataclass(frozen=True)
class Difference:
    """How far captured rows are from their reference, each row and slot relative to its own largest value."""

    largest: float
    """Largest absolute difference of any element."""
    largest_relative: float
    wrong_rows: tuple[int, ...]
    """Rows with at least one slot beyond the tolerance."""
    first_row: int | None = None
    first_slot: int | None = None

    @property
    def ok(self) -> bool:
        return self.first_row is None


def compare(captured: Any, expected: Any, tolerance: float) -> Difference:
    """Compares `[T, L, H]` with `[T, L, H]`; anything not finite is a difference. Raises SettingsError on shapes."""
    if captured.shape != expected.shape or not captured.numel():
        raise SettingsError(f"cannot compare {list(captured.shape)} with {list(expected.shape)}")
    relative = _relative(captured, expected)
    wrong = ~(relative <= tolerance)
    largest = float((captured.float() - expected.float()).abs().max())
    rows = wrong.any(dim=1).nonzero().flatten().tolist()
    if not rows:
        return Difference(largest, float(relative.max()), ())
    slot = int(wrong[rows[0]].nonzero()[0])
    return Difference(largest, float(relative.max()), tuple(rows), rows[0], slot)


def explain(
    captured: Any,
    layers: Any,
    normed: Any,
    *,
    layer_id: int,
    tolerance: float,
) -> str:
    """What a wrong slot holds, as part of a sentence.

    `captured` `[T, H]` is the slot, `layers` `[T, N + 1, H]` every layer of the reference, `normed` `[T, H]` its last
    layer after the final norm, `layer_id` what the slot claims to hold.
    """
    expected = layers[:, layer_id]
    wrong = (~(_relative(captured, expected) <= tolerance)).nonzero().flatten().tolist()
    if not wrong:
        return "matches when it is computed again: arithmetic on this machine does not repeat"
    found = (
        _not_a_state(captured, wrong)
        or _another_layer(captured[wrong], layers[wrong], layer_id, tolerance)
        or _post_norm(captured[wrong], normed[wrong], layers.shape[1] - 1, tolerance)
        or _shifted(captured, layers, layer_id, tolerance)
        or "matches no layer of this model, normed or shifted: was another checkpoint captured?"
    )
    if len(wrong) < len(captured):
        return f"{found}; it is so in {ranges(wrong)}, the other {len(captured) - len(wrong)} rows match"
    return found


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


def _relative(captured: Any, expected: Any) -> Any:
    """The largest difference over the last dimension, relative to the reference's largest value there."""
    reference = expected.float()
    scale = reference.abs().amax(dim=-1)
    floor = scale.max().clamp(min=1e-30) * 1e-6
    return (captured.float() - reference).abs().amax(dim=-1) / scale.clamp(min=floor)


def _matches(captured: Any, expected: Any, tolerance: float) -> bool:
    return bool((_relative(captured, expected) <= tolerance).all())


def _not_a_state(captured: Any, wrong: Sequence[int]) -> str:
    rows = captured[wrong].float()
    if not bool(rows.isfinite().all()):
        return "holds values that are not finite"
    return "" if bool(rows.any()) else "is all zero"


def _another_layer(captured: Any, layers: Any, layer_id: int, tolerance: float) -> str:
    for other in range(layers.shape[1]):
        if other != layer_id and _matches(captured, layers[:, other], tolerance):
            return f"holds layer {other} instead of layer {layer_id}"
    return ""


def _post_norm(captured: Any, normed: Any, last: int, tolerance: float) -> str:
    if _matches(captured, normed, tolerance):
        return f"holds the last layer {last} after the final norm, where it should be before"
    return ""


def _shifted(captured: Any, layers: Any, layer_id: int, tolerance: float) -> str:
    """Row `t` holds what row `t + shift` should: of the claimed layer first, then of any other."""
    total = len(captured)
    order = [layer_id, *(layer for layer in range(layers.shape[1]) if layer != layer_id)]
    for layer in order:
        for shift in (shift for step in range(1, _MAX_SHIFT + 1) for shift in (step, -step) if step < total):
            here = captured[max(-shift, 0) : total - max(shift, 0)]
            there = layers[max(shift, 0) : total - max(-shift, 0), layer]
            if _matches(here, there, tolerance):
                later = "later" if shift > 0 else "earlier"
                what = "" if layer == layer_id else f"layer {layer} and "
                return f"holds {what}rows {abs(shift)} {later} than it should (row t holds row t{shift:+d})"
    return ""
