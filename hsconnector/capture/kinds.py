"""Captures of several models, weights or settings in one place: which of them belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from hsconnector.capture.content import Content, WeightsHeld, choose_weights
from hsconnector.capture.record import CaptureRecord

__all__ = ["OfRows", "held_by", "of_one_weights"]


class _Recorded(Protocol):
    @property
    def record(self) -> CaptureRecord: ...


_T = TypeVar("_T", bound="CaptureRecord | _Recorded")


def held_by(records: Iterable[CaptureRecord]) -> list[WeightsHeld]:
    """Whose weights captures are of, the newest last."""
    held: dict[str, tuple[int, str]] = {}
    for record in records:
        count, newest = held.get(record.weights_id, (0, ""))
        held[record.weights_id] = (count + 1, max(newest, record.capture_id))
    return sorted((WeightsHeld(name, *about) for name, about in held.items()), key=lambda each: each.newest)


def of_one_weights(found: Sequence[_T], wanted: str | None) -> tuple[list[_T], list[WeightsHeld]]:
    """The captures of the weights whose id `wanted` begins, and what there is of others, which counts as not there.

    Without `wanted` all must be of the same: the newest are not always the right ones, so nobody guesses. Raises
    SettingsError.
    """
    held = held_by(map(_record, found))
    chosen = choose_weights(held, wanted)
    kept = [each for each in found if _record(each).weights_id == chosen]
    return kept, [each for each in held if each.weights_id != chosen]


class OfRows:
    """Finds the captures of a data set's rows by content alone, whatever names they carry."""

    def __init__(self, records: Iterable[CaptureRecord]) -> None:
        self._by_hash: dict[str, list[CaptureRecord]] = {}
        kinds: dict[tuple[object, ...], Content] = {}
        for record in records:
            self._by_hash.setdefault(record.content_hash, []).append(record)
            kinds[record.content.head] = record.content
        self.kinds = tuple(kinds.values())
        """The different contents that captures are of, apart from tokens."""
        self.found: dict[str, CaptureRecord] = {}
        """By capture id, those of the rows that were met."""

    def meet(self, token_ids: bytes) -> str:
        """Notes the captures of a row's tokens (int64 little-endian); its content hash where there is one kind."""
        hashes = [kind.hash_of(token_ids) for kind in self.kinds]
        for digest in hashes:
            self.found |= {record.capture_id: record for record in self._by_hash.get(digest, ())}
        return hashes[0] if len(hashes) == 1 else ""


def _record(found: CaptureRecord | _Recorded) -> CaptureRecord:
    return found if isinstance(found, CaptureRecord) else found.record
