"""A capture against two passes of a reference, in float32 and in the capture's own dtype, and what it holds instead.

One pass accuses nobody: where it differs, a second one decides. On a busy machine a pass was seen to be off by itself,
by a hundredth in a few rows, and right when it was repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hsconnector.reference.alternatives import explain
from hsconnector.reference.comparison import Difference, Expected, compare, ranges, scales
from hsconnector.reference.model import ReferenceModel

__all__ = ["Claim", "Judgement"]


@dataclass(frozen=True)
class Judgement:
    """How far states are from their reference, and where there is anything to say, what they are instead."""

    difference: Difference
    diagnosis: str = ""


@dataclass(frozen=True)
class Claim:
    """What states `[T, L, H]` say of themselves."""

    token_ids: Sequence[int]
    layer_ids: tuple[int, ...]
    last_is_normed: bool = False
    """Whether the layer before the final norm is held after it."""

    def judge(self, states: Any, reference: ReferenceModel) -> Judgement:
        """Compares, and once more where it differs; raises SettingsError where the reference has no such layer."""
        near = {layer + step for layer in self.layer_ids for step in (-1, 0, 1)}
        every = range(reference.num_layers + 1)
        first = compare(states, self._expected(states, reference, sorted(near.intersection(every) | {*self.layer_ids})))
        if first.ok:
            return Judgement(first)
        expected = self._expected(states, reference, every)
        second = compare(states, expected)
        return Judgement(second, _unrepeated(first) if second.ok else explain(states, expected, second))

    def _expected(self, states: Any, reference: ReferenceModel, layers: Sequence[int]) -> Expected:
        dtype = str(states.dtype).removeprefix("torch.")
        exact = reference.states(self.token_ids, layers).float()
        named = {_name(layer, reference, False): exact[:, index] for index, layer in enumerate(layers)}
        if reference.num_layers in layers:
            named[_name(reference.num_layers, reference, True)] = reference.normed(exact[:, -1]).float()
        claims = tuple(_name(layer, reference, self.last_is_normed) for layer in self.layer_ids)
        return Expected(claims, self._neighbours(reference), named, self._scales(reference, claims, named, dtype))

    def _neighbours(self, reference: ReferenceModel) -> tuple[tuple[str, ...], ...]:
        beside = ([layer - 1, layer + 1] for layer in self.layer_ids)
        every = range(reference.num_layers + 1)
        return tuple(tuple(_name(layer, reference, False) for layer in pair if layer in every) for pair in beside)

    def _scales(self, reference: ReferenceModel, claims: Sequence[str], named: dict[str, Any], dtype: str) -> Any:
        import torch

        exact = torch.stack([named[claim] for claim in claims], dim=1)
        own = reference.in_dtype(dtype)
        if own is reference:
            return scales(exact, exact, dtype)
        rounded = own.states(self.token_ids, self.layer_ids)
        for slot, layer in enumerate(self.layer_ids):
            if self.last_is_normed and layer == reference.num_layers:
                rounded[:, slot] = own.normed(rounded[:, slot])
        return scales(exact, rounded, dtype, routed=reference.is_routed)


def _name(layer: int, reference: ReferenceModel, normed: bool) -> str:
    if layer != reference.num_layers:
        return f"layer {layer}"
    return f"the last layer {layer} {'after' if normed else 'before'} the final norm"


def _unrepeated(first: Difference) -> str:
    where = f"by {first.largest_relative:.1g} in {ranges(first.wrong_rows)}"
    return f"Hugging Face's first pass was off {where}, its second was not: arithmetic on this machine does not repeat"
