"""Which part of a capture is read: a range of its rows, and some of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from hsconnector.errors import SettingsError

__all__ = ["RowRange", "resolve_rows", "resolve_slots"]

RowRange = slice | tuple[int | None, int | None]
"""First row and the one after the last, of which either may be left out."""


def resolve_rows(rows: RowRange | None, total: int) -> tuple[int, int]:
    """A row range as first and one-past-last row of `total`; raises SettingsError."""
    if rows is None:
        return 0, total
    asked = rows if isinstance(rows, slice) else slice(*rows)
    start, stop, step = asked.indices(total)
    if step != 1 or start >= stop or (asked.stop is not None and asked.stop > total):
        shown = ":".join("" if end is None else str(end) for end in (asked.start, asked.stop))
        raise SettingsError(f"rows {shown} is no range within the {total} rows of this capture")
    return start, stop


def resolve_slots(layers: Sequence[int] | None, layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The slots of the asked layer ids, ascending, or of all; raises SettingsError for one that was not captured."""
    if layers is None:
        return tuple(range(len(layer_ids)))
    missing = sorted(set(layers) - set(layer_ids))
    if missing or not layers:
        raise SettingsError(f"layers {missing or list(layers)} are not among the captured {list(layer_ids)}")
    return tuple(slot for slot, layer in enumerate(layer_ids) if layer in layers)
