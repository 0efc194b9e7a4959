from __future__ import annotations

import pytest
import torch

from hsconnector.errors import SettingsError
from hsconnector.reference.comparison import (
    CEILING,
    FLOORS,
    MEDIAN_LIMIT,
    ROUTED_FLOOR,
    ROW_LIMIT,
    Expected,
    compare,
    ranges,
    scales,
)

LAYERS = torch.randn(20, 7, 16, generator=torch.Generator().manual_seed(0))
NAMES = tuple(f"layer {layer}" for layer in range(7))
CLAIMS = (0, 3, 6)


def expected(layers: torch.Tensor = LAYERS, rounding: float = 0.0) -> Expected:
    named = {name: layers[:, layer] for layer, name in enumerate(NAMES)}
    beside = tuple(tuple(NAMES[near] for near in (layer - 1, layer + 1) if 0 <= near < 7) for layer in CLAIMS)
    exact = layers[:, list(CLAIMS)]
    return Expected(tuple(NAMES[i] for i in CLAIMS), beside, named, scales(exact, exact * (1 + rounding), "float32"))


def captured() -> torch.Tensor:
    return LAYERS[:, list(CLAIMS)].clone()


def test_equal_states_are_right() -> None:
    found = compare(captured() * (1 + 1e-6), expected())
    assert found.ok and found.wrong_rows == [] and 0 < found.largest_relative < 1e-5
    assert found.median == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("value", [3.0, float("nan"), float("inf")])
def test_the_first_row_and_slot_that_differ_are_named(value: float) -> None:
    states = captured()
    states[5, 2, 9] = value
    states[5, 1, 0] = value
    states[17, 0, 0] = value
    found = compare(states, expected())
    assert not found.ok
    assert (found.first, found.wrong_rows) == ((5, 1), [5, 17])


def test_a_row_is_held_to_its_own_size() -> None:
    layers = LAYERS.clone()
    layers[4] *= 1e-3
    states = layers[:, list(CLAIMS)].clone()
    states[4, 0, 0] += 1e-5
    assert compare(states, expected(layers)).first == (4, 0)


def test_what_rounding_explains_is_right_and_what_it_does_not_is_wrong() -> None:
    inside, beyond = 0.01 * (MEDIAN_LIMIT - 0.1), 0.01 * (MEDIAN_LIMIT + 0.1)
    assert compare(captured() * (1 + inside), expected(rounding=0.01)).ok
    assert len(compare(captured() * (1 + beyond), expected(rounding=0.01)).wrong_rows) == 20
    assert not compare(captured() * (1 + inside), expected()).ok


def test_a_row_may_be_further_away_than_the_median() -> None:
    for factor, wrong in ((ROW_LIMIT - 0.5, []), (ROW_LIMIT + 0.5, [7])):
        states = captured()
        states[7] *= 1 + 0.01 * factor
        assert compare(states, expected(rounding=0.01)).wrong_rows == wrong


def test_few_rows_have_no_median() -> None:
    few = expected(LAYERS[:7], rounding=0.01)
    assert compare(captured()[:7] * 1.05, few).ok


def test_a_neighbour_that_is_nearer_is_wrong_within_every_limit() -> None:
    """Where layers are alike and rounding is coarse, the limits alone cannot tell them apart."""
    layers = LAYERS[:, [0]] + 0.01 * LAYERS
    assert compare(layers[:, [0, 3, 6]], expected(layers, rounding=0.1)).ok
    found = compare(layers[:, [0, 2, 6]], expected(layers, rounding=0.1))
    assert found.first == (0, 1) and len(found.wrong_rows) == 20 and found.row < MEDIAN_LIMIT


def test_a_row_that_rounding_hardly_moved_or_moved_out_of_range_has_the_scale_of_its_slot() -> None:
    exact = captured()
    rounded = exact * 1.01
    rounded[3], rounded[4, 0, 0] = exact[3], float("inf")
    scale = scales(exact, rounded, "bfloat16") / exact.norm(dim=-1)
    torch.testing.assert_close(scale, torch.full_like(scale, 0.01), rtol=1e-3, atol=0)
    least = scales(exact, exact, "float16") / exact.norm(dim=-1)
    torch.testing.assert_close(least, torch.full_like(least, FLOORS["float16"]))


def test_a_pass_that_went_wrong_is_no_measure() -> None:
    scale = scales(captured(), captured() * 1.5, "bfloat16") / captured().norm(dim=-1)
    torch.testing.assert_close(scale, torch.full_like(scale, CEILING))


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", ROUTED_FLOOR), ("float32", FLOORS["float32"])])
def test_routed_experts_are_coarser_in_16_bits(dtype: str, least: float) -> None:
    scale = scales(captured(), captured(), dtype, routed=True) / captured().norm(dim=-1)
    torch.testing.assert_close(scale, torch.full_like(scale, least))


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"\[19, 3, 16\] with \[20, 3, 16\]"):
        compare(captured()[1:], expected())


def test_rows_are_told_as_ranges() -> None:
    assert ranges([3]) == "row 3"
    assert ranges([3, 16, 17, 18]) == "rows 3, 16 to 18"
    assert ranges(range(0, 40, 2)).endswith("10 and more")
