from __future__ import annotations

import pytest
import torch

from hsconnector.errors import SettingsError
from hsconnector.reference.comparison import compare, explain, ranges

LAYERS = torch.randn(20, 7, 16, generator=torch.Generator().manual_seed(0))
NORMED = LAYERS[:, 6] / LAYERS[:, 6].norm(dim=-1, keepdim=True)


def captured() -> torch.Tensor:
    return LAYERS[:, [0, 3, 6]].clone()


def explained(slot: torch.Tensor, layer_id: int = 3) -> str:
    return explain(slot, LAYERS, NORMED, layer_id=layer_id, tolerance=1e-4)


def test_equal_states_have_no_first_difference() -> None:
    found = compare(captured() * (1 + 1e-6), captured(), 1e-4)
    assert found.ok and found.wrong_rows == () and 0 < found.largest_relative < 1e-5


@pytest.mark.parametrize("value", [3.0, float("nan"), float("inf")])
def test_the_first_row_and_slot_that_differ_are_named(value: float) -> None:
    states = captured()
    states[5, 2, 9] = value
    states[5, 1, 0] = value
    states[17, 0, 0] = value
    found = compare(states, captured(), 1e-4)
    assert not found.ok
    assert (found.first_row, found.first_slot, found.wrong_rows) == (5, 1, (5, 17))


def test_a_small_row_is_held_to_its_own_size() -> None:
    expected = captured()
    expected[4] *= 1e-3
    states = expected.clone()
    states[4, 0, 0] += 1e-4
    assert compare(states, expected, 1e-2).first_row == 4


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"\[19, 3, 16\] with \[20, 3, 16\]"):
        compare(captured()[1:], captured(), 1e-4)


@pytest.mark.parametrize("other", [2, 4])
def test_another_layer_is_recognised(other: int) -> None:
    assert explained(LAYERS[:, other]) == f"holds layer {other} instead of layer 3"


def test_post_norm_states_are_recognised() -> None:
    assert "holds the last layer 6 after the final norm" in explained(NORMED, 6)


@pytest.mark.parametrize("shift", [1, -1, 4])
def test_shifted_rows_are_recognised(shift: int) -> None:
    assert f"(row t holds row t{shift:+d})" in explained(LAYERS[:, 3].roll(-shift, dims=0))
    assert f"holds layer 2 and rows {abs(shift)} " in explained(LAYERS[:, 2].roll(-shift, dims=0))


def test_zero_and_broken_rows_are_recognised_and_counted() -> None:
    slot = LAYERS[:, 3].clone()
    slot[8:12] = 0
    assert explained(slot) == "is all zero; it is so in rows 8 to 11, the other 16 rows match"
    slot[8, 2] = float("nan")
    assert explained(slot).startswith("holds values that are not finite; it is so in rows 8 to 11")


def test_rows_of_another_block_match_nothing() -> None:
    slot = LAYERS[:, 3].clone()
    slot[16] = LAYERS[2, 3]
    assert explained(slot).startswith("matches no layer of this model")
    assert "in row 16, the other 19 rows match" in explained(slot)


def test_rows_are_told_as_ranges() -> None:
    assert ranges([3]) == "row 3"
    assert ranges([3, 16, 17, 18]) == "rows 3, 16 to 18"
    assert ranges(range(0, 40, 2)).endswith("10 and more")
