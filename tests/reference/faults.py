"""Ways in which a capture's states can be wrong, each with what `verify` calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hsconnector.reference.model import ReferenceModel

__all__ = ["FAULTS", "Fault", "Right"]


@dataclass(frozen=True)
class Right:
    """A right capture `[T, L, H]` and what it takes to spoil it."""

    states: torch.Tensor
    token_ids: Sequence[int]
    layer_ids: tuple[int, ...]
    reference: ReferenceModel
    other_model: ReferenceModel

    def computed(self, layer: int) -> torch.Tensor:
        """`[T, H]`, another layer as this model computes it in the capture's dtype."""
        own = self.reference.in_dtype(str(self.states.dtype).removeprefix("torch."))
        return own.states(self.token_ids, [layer])[:, 0]

    def of_other_tokens(self, model: ReferenceModel | None = None) -> torch.Tensor:
        """What another request of the same length holds."""
        tokens = list(reversed(self.token_ids))
        return (model or self.reference).states(tokens, self.layer_ids).to(self.states.dtype)


Spoil = Callable[[Right, torch.Tensor], None]


@dataclass(frozen=True)
class Fault:
    """Changes a copy of the states in place; `says` is part of the diagnosis."""

    name: str
    spoil: Spoil
    says: str

    def shows_in(self, right: Right) -> bool:
        """Float32 captures have no other dtype's bytes, and routed experts in 16 bits are noisier than the noise."""
        if self.name == "another dtype's bytes":
            return right.states.dtype != torch.float32
        return self.name != "noise" or right.states.dtype == torch.float32 or not right.reference.is_routed


def wrong_layer(right: Right, states: torch.Tensor) -> None:
    states[:, 2] = right.computed(right.layer_ids[2] + 1)


def swapped_slots(_right: Right, states: torch.Tensor) -> None:
    states[:, [1, 2]] = states[:, [2, 1]]


def shifted(_right: Right, states: torch.Tensor) -> None:
    states[:] = states.roll(1, dims=0)


def normed(right: Right, states: torch.Tensor) -> None:
    states[:, -1] = right.reference.normed(states[:, -1]).to(states.dtype)


def other_dtype(_right: Right, states: torch.Tensor) -> None:
    other = torch.float16 if states.dtype == torch.bfloat16 else torch.bfloat16
    states[:] = states.clone().to(other).view(states.dtype)


def another_model(right: Right, states: torch.Tensor) -> None:
    states[:] = right.other_model.states(right.token_ids, right.layer_ids).to(states.dtype)


def swapped_rows(_right: Right, states: torch.Tensor) -> None:
    states[[5, 9]] = states[[9, 5]]


def noise(right: Right, states: torch.Tensor) -> None:
    """Of 1 % in float32, of four times what rounding moves a row by in the 16-bit types."""
    exact = right.reference.states(right.token_ids, right.layer_ids).float()
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(states.shape, generator=generator)
    length = exact.norm(dim=-1, keepdim=True) * 0.01
    if states.dtype != torch.float32:
        own = right.reference.in_dtype(str(states.dtype).removeprefix("torch."))
        length = 4 * (own.states(right.token_ids, right.layer_ids).float() - exact).norm(dim=-1, keepdim=True)
    states[:] = (states.float() + random / random.norm(dim=-1, keepdim=True) * length).to(states.dtype)


def foreign_block(right: Right, states: torch.Tensor) -> None:
    states[4:12] = right.of_other_tokens()[4:12]


def stale_last_row(right: Right, states: torch.Tensor) -> None:
    states[-1] = right.of_other_tokens()[-3]


def high_bit(_right: Right, states: torch.Tensor) -> None:
    bits = states[7, 1, 5:6].view(torch.int16 if states.element_size() == 2 else torch.int32)
    bits ^= 1 << (8 * states.element_size() - 2)


def zero_slot_of_a_row(_right: Right, states: torch.Tensor) -> None:
    states[6, 2] = 0


def zeros(_right: Right, states: torch.Tensor) -> None:
    states[:] = 0


def repeated_slot(_right: Right, states: torch.Tensor) -> None:
    states[:, 2] = states[:, 1]


def nan(_right: Right, states: torch.Tensor) -> None:
    states[3, 1, 4] = float("nan")


def infinity(_right: Right, states: torch.Tensor) -> None:
    states[3, 1, 4] = float("inf")


def other_tokens(right: Right, states: torch.Tensor) -> None:
    """What another tokenisation would give from its first other token on."""
    tokens = [*right.token_ids[:10], *reversed(right.token_ids[10:])]
    own = right.reference.in_dtype(str(states.dtype).removeprefix("torch."))
    states[:] = own.states(tokens, right.layer_ids).to(states.dtype)


FAULTS = (
    Fault("wrong layer", wrong_layer, "instead of layer"),
    Fault("swapped slots", swapped_slots, "slots 1 and 2 are swapped"),
    Fault("shift by one", shifted, "rows 1 earlier than it should"),
    Fault("after the norm", normed, "after the final norm instead of the last layer"),
    Fault("another dtype's bytes", other_dtype, "holds the bytes of"),
    Fault("another model", another_model, "was another checkpoint captured?"),
    Fault("rows swapped", swapped_rows, "rows are swapped; it is so in rows 5, 9"),
    Fault("noise", noise, "as rounding explains: noise"),
    Fault("a block of another request", foreign_block, "another request's block"),
    Fault("a stale last row", stale_last_row, "a stale row?"),
    Fault("a high bit flipped", high_bit, "it is so in row 7"),
    Fault("one slot of one row zero", zero_slot_of_a_row, "is all zero; it is so in row 6"),
    Fault("zeros", zeros, "is all zero"),
    Fault("a repeated slot", repeated_slot, "instead of"),
    Fault("NaN", nan, "holds values that are not finite"),
    Fault("infinity", infinity, "holds values that are not finite"),
    Fault("another tokenisation", other_tokens, "another tokenisation?"),
)
