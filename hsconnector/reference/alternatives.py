"""What a slot holds that is not what it should be: another layer, another row, another dtype's bytes, or noise.

An alternative is named where it fits the wrong rows better than what the slot claims: where their median distance,
relative to the length of the alternative, is under `NEARER` of the claim's and under `_FITS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hsconnector.reference.comparison import NEARER, Difference, Expected, ranges

__all__ = ["explain"]

_FITS = 0.5
"""Two unrelated rows are about 1.4 lengths apart."""
_NOISE = 0.25
"""Rows that are nearer than this in every slot are the claimed ones, whatever was added to them."""
_MAX_SHIFT = 4
_LOOKED_AT = 64
"""Wrong rows of which each is looked for in every other row."""
_SIXTEEN_BITS = {"bfloat16": "float16", "float16": "bfloat16"}


def explain(states: Any, expected: Expected, difference: Difference) -> str:
    """What the first wrong slot of `states` `[T, L, H]` holds, as part of a sentence; `expected` names every layer."""
    slot = _Slot(states, expected, difference.wrong, difference.first[1])
    found = (
        slot.another_reading()
        or slot.not_a_state()
        or slot.another_state()
        or slot.shifted()
        or slot.other_rows()
        or slot.noise()
        or slot.unknown()
    )
    right = len(states) - len(slot.rows)
    return f"{found}; it is so in {ranges(slot.rows)}, the other {right} rows match" if right else found


class _Slot:
    """One slot with wrong rows; each question answers with part of a sentence, or with nothing."""

    def __init__(self, states: Any, expected: Expected, wrong: Any, slot: int) -> None:
        self.states, self.expected, self.wrong, self.slot = states, expected, wrong, slot
        self.rows: list[int] = wrong[:, slot].nonzero().flatten().tolist()
        self.claim = expected.claims[slot]
        self.held = states[:, slot].float()
        self.limit = min(_FITS, NEARER * self._misfit_of(slot))

    def another_reading(self) -> str:
        """16-bit values that were read as the other 16-bit type."""
        import torch

        stored = str(self.states.dtype).removeprefix("torch.")
        other = _SIXTEEN_BITS.get(stored, "")
        if not other:
            return ""
        reading = self.states[:, self.slot].contiguous().view(getattr(torch, other)).float()
        fits = self._fits(reading[self.rows], self._of(self.claim)[self.rows])
        return f"holds the bytes of {other} values, which are read as {stored}" if fits else ""

    def not_a_state(self) -> str:
        held = self.held[self.rows]
        if not bool(held.isfinite().all()):
            return "holds values that are not finite"
        return "" if bool(held.any()) else "is all zero"

    def another_state(self) -> str:
        """Another layer in the same rows, on either side of the final norm."""
        name = self._nearest(self.held, self.rows)
        if not name:
            return ""
        claims = self.expected.claims
        if name in claims and self._is_claims(claims.index(name)):
            return f"holds {name} instead of {self.claim}: slots {self.slot} and {claims.index(name)} are swapped"
        return f"holds {name} instead of {self.claim}"

    def shifted(self) -> str:
        """Row `t` holds what row `t + shift` should: of the claimed layer first, then of any other."""
        for name in [self.claim, *(name for name in self.expected.named if name != self.claim)]:
            for shift in (sign * step for step in range(1, _MAX_SHIFT + 1) for sign in (1, -1)):
                rows = [row for row in self.rows if 0 <= row + shift < len(self.held)]
                there = self._of(name)[[row + shift for row in rows]]
                if len(rows) > 2 and self._fits(self.held[rows], there):
                    what = "" if name == self.claim else f"{name} and "
                    later = "later" if shift > 0 else "earlier"
                    return f"holds {what}rows {abs(shift)} {later} than it should (row t holds row t{shift:+d})"
        return ""

    def other_rows(self) -> str:
        """Wrong rows that are each some other row, in every slot that is wrong there."""
        pairs = list(self._found_rows())
        if not pairs or len(pairs) < min(len(self.rows), _LOOKED_AT):
            return ""
        row, other = pairs[0]
        if (other, row) in pairs:
            return f"holds row {other} in row {row} and the other way round: rows are swapped"
        return f"holds in row {row} what row {other} should hold"

    def noise(self) -> str:
        """The claimed rows, moved: in all slots that are wrong there, for shallow layers alone look alike."""
        slots = self.wrong[self.rows].any(dim=0).nonzero().flatten().tolist()
        if max(self._misfit_of(slot) for slot in slots) > _NOISE:
            return ""
        away = self.expected.distances(self.held, self.claim) / self.expected.scales[:, self.slot]
        return (
            f"is nearer to {self.claim} than to anything else, but {float(away[self.rows].median()):.2g} times as far "
            "from it as rounding explains: noise, a quantised KV cache or slightly other weights"
        )

    def unknown(self) -> str:
        rows = self.wrong.any(dim=1).nonzero().flatten().tolist()
        first, count = rows[0], len(rows)
        if count == len(self.held):
            return "matches no layer of this model, normed or shifted: was another checkpoint captured?"
        if count > 1 and rows == list(range(first, len(self.held))):
            return f"holds states of other tokens from row {first} on: another text or another tokenisation?"
        return "holds states of other tokens: another request's block, or a stale row?"

    def _found_rows(self) -> Iterator[tuple[int, int]]:
        there = self._of(self.claim)
        lengths = there.norm(dim=-1).clamp(min=1e-30)
        for row in self.rows[:_LOOKED_AT]:
            misfits = (self.held[row] - there).norm(dim=-1) / lengths
            other = int(misfits.argmin())
            if other != row and self._is_row_everywhere(row, other):
                yield row, other

    def _is_row_everywhere(self, row: int, other: int) -> bool:
        """In every slot that is wrong there; embeddings do not count, for they repeat with their token."""
        slots = [slot for slot in self.wrong[row].nonzero().flatten() if self.expected.claims[slot] != "layer 0"]
        return bool(slots) and all(self._is_row(slot, row, other) for slot in slots)

    def _is_row(self, slot: int, row: int, other: int) -> bool:
        held, there = self.states[row, slot].float(), self._of(self.expected.claims[slot])
        limit = min(_FITS, NEARER * self._misfit(held[None], there[[row]]))
        return self._misfit(held[None], there[[other]]) < limit

    def _is_claims(self, other: int) -> bool:
        """Whether the slot `other` holds what this one claims."""
        held = self.states[:, other].float()
        there = self.expected.claims[other]
        fit = self._misfit(held[self.rows], self._of(self.claim)[self.rows])
        return fit < min(_FITS, NEARER * self._misfit(held[self.rows], self._of(there)[self.rows]))

    def _nearest(self, held: Any, rows: list[int]) -> str:
        misfits = {name: self._misfit(held[rows], there[rows]) for name, there in self.expected.named.items()}
        name = min(misfits, key=lambda name: misfits[name])
        return name if name != self.claim and misfits[name] < self.limit else ""

    def _misfit_of(self, slot: int) -> float:
        return self._misfit(self.states[self.rows, slot].float(), self._of(self.expected.claims[slot])[self.rows])

    def _of(self, name: str) -> Any:
        return self.expected.named[name]

    def _fits(self, held: Any, there: Any) -> bool:
        return self._misfit(held, there) < self.limit

    @staticmethod
    def _misfit(held: Any, there: Any) -> float:
        """The median distance of rows `[n, H]`, relative to the lengths of those they may be."""
        away = (held - there).norm(dim=-1) / there.norm(dim=-1).clamp(min=1e-30)
        return float(away.nan_to_num(nan=float("inf")).median())
