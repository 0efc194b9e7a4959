"""One pass of a reference accuses nobody: where it differs, a second one decides.

On a busy machine a pass was seen to be off by itself, by a hundredth in a few rows, and right when it was repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from hsconnector.reference.model import ReferenceModel

__all__ = ["Passes", "compare_twice"]


class _Compared(Protocol):
    @property
    def ok(self) -> bool: ...


_T = TypeVar("_T", bound=_Compared)


@dataclass(frozen=True)
class Passes(Generic[_T]):
    """What the comparison with a first pass found and, where it differed, with a second one."""

    first: _T
    second: _T | None = None
    layers: Any = None
    """`[T, N + 1, H]`, every layer of the second pass, to tell what the differing states are instead."""

    @property
    def decisive(self) -> _T:
        """The finding that counts."""
        return self.first if self.second is None else self.second


def compare_twice(
    reference: ReferenceModel, token_ids: Sequence[int], layer_ids: Sequence[int], compare: Callable[[Any], _T]
) -> Passes[_T]:
    """Gives `compare` what the states `[T, L, H]` of these layers should be, and once more where it finds a difference.

    Raises SettingsError where the reference has no such layer, and what `compare` raises.
    """
    first = compare(reference.states(token_ids, layer_ids))
    if first.ok:
        return Passes(first)
    layers = reference.states(token_ids, range(reference.num_layers + 1))
    return Passes(first, compare(layers[:, list(layer_ids)]), layers)
