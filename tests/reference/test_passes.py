from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hsconnector.reference.comparison import Difference, compare
from hsconnector.reference.model import ReferenceModel
from hsconnector.reference.passes import compare_twice
from tests.models import random_token_ids, tiny_qwen3

TOKENS = random_token_ids(12)
LAYER_IDS = (3, 1, 6)


class Counted(ReferenceModel):
    """A model that notes its passes, of which those in `off` go wrong."""

    off: tuple[int, ...] = ()

    def states(self, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
        self.asked = [*getattr(self, "asked", ()), list(layer_ids)]
        states: torch.Tensor = super().states(token_ids, layer_ids).clone()
        return states * 1.5 if len(self.asked) in self.off else states


@pytest.fixture
def model(tmp_path: Path) -> Counted:
    return Counted(tiny_qwen3(tmp_path))


def compared(model: Counted, captured: torch.Tensor) -> tuple[bool, Difference | None, torch.Tensor | None]:
    passes = compare_twice(model, TOKENS, LAYER_IDS, lambda expected: compare(captured, expected, 1e-4))
    return passes.decisive.ok, passes.second, passes.layers


def test_a_first_pass_that_matches_is_the_only_one(model: Counted) -> None:
    assert compared(model, ReferenceModel(model.name).states(TOKENS, LAYER_IDS)) == (True, None, None)
    assert model.asked == [[3, 1, 6]]


def test_the_second_pass_decides_and_holds_every_layer(model: Counted) -> None:
    right = ReferenceModel(model.name).states(TOKENS, range(7))
    model.off = (1,)
    ok, second, layers = compared(model, right[:, list(LAYER_IDS)])
    assert ok and second is not None and layers is not None
    assert model.asked == [[3, 1, 6], [0, 1, 2, 3, 4, 5, 6]]
    torch.testing.assert_close(layers, right, rtol=0, atol=1e-5)


def test_what_differs_twice_differs(model: Counted) -> None:
    ok, second, _ = compared(model, ReferenceModel(model.name).states(TOKENS, (2, 1, 6)))
    assert not ok and second is not None and (second.first_row, second.first_slot) == (0, 0)
