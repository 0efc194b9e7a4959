"""Is this capture sound? Judged on the raw bits of every row, as the rows arrive.

What can be wrong is listed in `FindingKind`. A run counts as `constant_rows` from `MIN_RUN` rows on and only where
its token ids are not all the same, for a model may well give equal rows for one token repeated; rows of zeros are
`zero_rows` and not counted there again. `wrong_content_hash` is not judged here: it needs no row.

A row that is zero in some slots only is a `zero_rows` finding which names them, but not in slots that are zero in every
row (`zero_slots`), and not for layer id 0: the embedding of a padding token is zero in many checkpoints, and what
leaves a layer is not, unless the row is zero from the embedding on.

bfloat16, float16 and float32 compare as integers once the sign is looked at apart, so the largest unsigned and the
largest signed element of a slot tell at memory speed whether it is finite, whether it is zero, and its extremes.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsconnector.capture.record import Finding, FindingKind, SlotStats, Verdict

__all__ = ["LISTED", "MIN_RUN", "NORM_EVERY", "Judge"]

MIN_RUN = 4
"""Equal consecutive rows that count: fewer can be legitimate (a token repeated in a model's first layers)."""
LISTED = 32
"""Rows or slots listed of one finding; `count` is the full number."""
NORM_EVERY = 16
"""Norms are taken of every 16th row, beginning with row 0; everything else of all rows."""
_PROBES = 8

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class FloatBits:
    """How to read the bits of an element type."""

    unsigned: str
    signed: str
    infinity: int
    sign: int

    def floats(self, bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """The values behind the bits."""
        if self is FORMATS["bfloat16"]:
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(np.float16).astype(np.float32) if bits.dtype.itemsize == 2 else bits.view(np.float32)


FORMATS = {
    "bfloat16": FloatBits("<u2", "<i2", 0x7F80, 0x8000),
    "float16": FloatBits("<u2", "<i2", 0x7C00, 0x8000),
    "float32": FloatBits("<u4", "<i4", 0x7F800000, 0x80000000),
}


@dataclass
class RowList:
    """Row numbers, the first `LISTED` kept and all counted."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, flags: Flags, offset: int) -> None:
        """Adds the rows that are set, counting from `offset`."""
        (rows,) = np.nonzero(flags)
        self.count += len(rows)
        self.first += [offset + int(row) for row in rows[: LISTED - len(self.first)]]


class Judge:
    """Takes rows in order, in chunks of whole rows, and says in the end what is wrong with them."""

    def __init__(self, dtype: str, layer_ids: tuple[int, ...], hidden_size: int) -> None:
        self.format = FORMATS[dtype]
        self.layer_ids = layer_ids
        self.rows = 0
        slots = len(layer_ids)
        self._shape = (-1, slots, hidden_size)
        self._row_probe = _spread(slots * hidden_size)
        self._slot_probe = _spread(hidden_size)
        self._maximum = np.full(slots, -np.inf)
        self._minimum = np.full(slots, np.inf)
        self._norms = np.zeros(slots)
        self._normed = 0
        self._zero_count = np.zeros(slots, np.int64)
        self._bad_count = np.zeros(slots, np.int64)
        self._bad, self._zero, self._flat, self._gaps = RowList(), RowList(), RowList(), RowList()
        self._may_gap = np.array(layer_ids) == 0
        self._groups = [list(range(slots))] if slots > 1 else []
        self._last: npt.NDArray[Any] | None = None
        self._last_zero = False
        self._run_start = 0
        self._runs: list[tuple[int, int]] = []

    def take(self, data: memoryview) -> None:
        """Looks at the next rows: row-major `[n, L, H]` in the producer's dtype."""
        bits = np.frombuffer(data, self.format.unsigned).reshape(self._shape)
        with np.errstate(all="ignore"):
            zero = self._extremes(bits)
            self._flat_rows(bits, zero)
            self._equal_rows(bits.reshape(len(bits), -1), zero)
            self._groups = [part for group in self._groups for part in _refine(bits, group, self._slot_probe)]
            self._add_norms(bits)
        self.rows += len(bits)

    def verdict(self, token_ids: bytes) -> Verdict:
        """The judgement over all rows; `token_ids` as int64 little-endian, one a row."""
        self._end_run(self.rows)
        tokens = np.frombuffer(token_ids, "<i8")
        found = (
            self._non_finite(),
            self._zero_rows(),
            self._zero_slots(),
            self._constant(tokens),
            self._equal_slots(),
        )
        findings = tuple(finding for finding in found if finding.count)
        return Verdict(not findings, tuple(finding.reason for finding in findings), findings, self._stats())

    def _extremes(self, bits: npt.NDArray[Any]) -> Flags:
        sign, infinity = self.format.sign, self.format.infinity
        unsigned = bits.max(axis=2)
        signed = bits.view(self.format.signed).max(axis=2)
        bad = (signed >= infinity) | (unsigned >= (sign | infinity))
        zero = (unsigned <= sign) & (signed <= 0)
        self._bad_count += bad.sum(axis=0)
        self._zero_count += zero.sum(axis=0)
        self._bad.add(bad.any(axis=1), self.rows)
        zero_rows: Flags = zero.all(axis=1)
        self._zero.add(zero_rows, self.rows)
        self._gaps.add((zero & ~self._may_gap).any(axis=1) & ~zero_rows, self.rows)
        high, low = signed.max(axis=0), unsigned.max(axis=0)
        maximum = self.format.floats(high.view(bits.dtype)).astype(np.float64)
        minimum = self.format.floats(low).astype(np.float64)
        for slot in np.nonzero((high < 0) | (low < sign))[0]:
            values = self.format.floats(np.ascontiguousarray(bits[:, slot]))
            maximum[slot], minimum[slot] = values.max(), values.min()
        self._maximum = np.maximum(self._maximum, maximum)
        self._minimum = np.minimum(self._minimum, minimum)
        return zero_rows

    def _flat_rows(self, bits: npt.NDArray[Any], zero: Flags) -> None:
        if self._shape[2] == 1:
            return
        probe = bits[:, :, self._slot_probe]
        flat: Flags = (probe == probe[:, :, :1]).all(axis=(1, 2)) & ~zero
        for row in np.nonzero(flat)[0]:
            flat[row] = (bits[row] == bits[row, :, :1]).all()
        self._flat.add(flat, self.rows)

    def _equal_rows(self, flat: npt.NDArray[Any], zero: Flags) -> None:
        probe = flat[:, self._row_probe]
        same = np.zeros(len(flat), np.bool_)
        same[1:] = (probe[1:] == probe[:-1]).all(axis=1)
        for row in np.nonzero(same)[0]:
            same[row] = np.array_equal(flat[row], flat[row - 1])
        same[0] = self._last is not None and np.array_equal(flat[0], self._last)
        before = np.append(self._last_zero, zero[:-1])
        for row in np.nonzero(~same | zero | before)[0]:
            self._end_run(self.rows + int(row))
        self._last, self._last_zero = flat[-1].copy(), bool(zero[-1])

    def _end_run(self, row: int) -> None:
        if row - self._run_start >= MIN_RUN:
            self._runs.append((self._run_start, row))
        self._run_start = row

    def _add_norms(self, bits: npt.NDArray[Any]) -> None:
        chosen = bits[-self.rows % NORM_EVERY :: NORM_EVERY]
        values = self.format.floats(np.ascontiguousarray(chosen)).astype(np.float64)
        self._norms += np.sqrt((values * values).sum(axis=2)).sum(axis=0)
        self._normed += len(chosen)

    def _non_finite(self) -> Finding:
        slots = np.nonzero(self._bad_count)[0][:LISTED]
        return Finding(
            FindingKind.NON_FINITE, self._bad.count, tuple(self._bad.first), tuple(int(slot) for slot in slots)
        )

    def _zero_rows(self) -> Finding:
        """Rows of zeros in every slot and, where no slot is all zero, in some slots, which are named."""
        if not self._gaps.count or (self._zero_count == self.rows).any():
            return Finding(FindingKind.ZERO_ROWS, self._zero.count, tuple(self._zero.first))
        rows = sorted({*self._zero.first, *self._gaps.first})[:LISTED]
        slots = np.nonzero((self._zero_count > self._zero.count) & ~self._may_gap)[0][:LISTED]
        return Finding(
            FindingKind.ZERO_ROWS, self._zero.count + self._gaps.count, tuple(rows), tuple(int(slot) for slot in slots)
        )

    def _zero_slots(self) -> Finding:
        slots = [int(slot) for slot in np.nonzero(self._zero_count == self.rows)[0]]
        if len(slots) == len(self.layer_ids):
            return Finding(FindingKind.ZERO_SLOTS, 0)
        return Finding(FindingKind.ZERO_SLOTS, len(slots), slots=tuple(slots[:LISTED]))

    def _constant(self, tokens: npt.NDArray[Any]) -> Finding:
        rows = set(self._flat.first)
        count = self._flat.count
        for start, stop in self._runs:
            if (tokens[start:stop] != tokens[start]).any():
                count += stop - start
                rows.update(range(start, min(stop, start + LISTED)))
        return Finding(FindingKind.CONSTANT_ROWS, count, tuple(sorted(rows)[:LISTED]))

    def _equal_slots(self) -> Finding:
        slots = sorted(slot for group in self._groups for slot in group)
        named = [[self.layer_ids[slot] for slot in group] for group in self._groups]
        return Finding(
            FindingKind.EQUAL_SLOTS,
            len(slots),
            slots=tuple(slots[:LISTED]),
            detail=f"layer ids {named}" if named else "",
        )

    def _stats(self) -> tuple[SlotStats, ...]:
        return tuple(
            SlotStats(
                slot=slot,
                layer_id=layer_id,
                mean_norm=_finite(self._norms[slot] / max(self._normed, 1)),
                minimum=None if self._bad_count[slot] else _finite(self._minimum[slot]),
                maximum=None if self._bad_count[slot] else _finite(self._maximum[slot]),
                zero_fraction=float(self._zero_count[slot] / max(self.rows, 1)),
                non_finite_rows=int(self._bad_count[slot]),
            )
            for slot, layer_id in enumerate(self.layer_ids)
        )


@functools.lru_cache
def _spread(size: int) -> npt.NDArray[np.int64]:
    return np.unique(np.linspace(0, size - 1, _PROBES).astype(np.int64))


def _refine(bits: npt.NDArray[Any], group: list[int], probe: npt.NDArray[np.int64]) -> list[list[int]]:
    """The slots of a group that are equal in these rows too, by groups of two and more; linear in the slots."""
    probed = _alike(group, lambda slot: bits[0, slot, probe].tobytes())
    return [equal for slots in probed for equal in _alike(slots, lambda slot: bits[:, slot].tobytes())]


def _alike(slots: list[int], look: Callable[[int], bytes]) -> list[list[int]]:
    by_look: dict[bytes, list[int]] = defaultdict(list)
    for slot in slots:
        by_look[look(slot)].append(slot)
    return [same for same in by_look.values() if len(same) > 1]


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
