from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsconnector.capture.protocol import pack_token_ids
from hsconnector.capture.record import Finding, Verdict
from server.verdict import LISTED, MIN_RUN, NORM_EVERY, Judge
from tests.examples import examples

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Values = torch.Tensor


def judge(
    values: Values, tokens: list[int] | None = None, chunks: list[int] | None = None, first_layer: int = 1
) -> Verdict:
    rows, slots, hidden = values.shape
    name = next(name for name, dtype in DTYPES.items() if dtype == values.dtype)
    judging = Judge(name, tuple(range(first_layer, first_layer + slots)), hidden)
    row = 0
    for size in chunks or [rows]:
        part = values[row : row + size].contiguous()
        if len(part):
            judging.take(memoryview(part.view(torch.uint8).numpy().tobytes()))
        row += size
    return judging.verdict(pack_token_ids(tokens if tokens is not None else range(rows)))


def finding(verdict: Verdict, reason: str) -> Finding:
    return next(found for found in verdict.findings if found.reason == reason)


def random(rows: int = 64, slots: int = 5, hidden: int = 32, dtype: torch.dtype = torch.float32) -> Values:
    return torch.randn((rows, slots, hidden), generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.fixture(params=list(DTYPES))
def values(request: pytest.FixtureRequest) -> Values:
    return random(dtype=DTYPES[request.param])


def test_random_rows_are_sound(values: Values) -> None:
    verdict = judge(values)
    assert verdict.sound
    assert (verdict.reasons, verdict.findings) == ((), ())


def test_zero_rows_are_listed(values: Values) -> None:
    """vllm#51328: rows 16 to 31 of 64 x 5 x 32 are zero."""
    values[16:32] = 0
    values[20] = -0.0
    verdict = judge(values)
    assert not verdict.sound
    assert verdict.reasons == ("zero_rows",)
    assert finding(verdict, "zero_rows") == Finding("zero_rows", 16, tuple(range(16, 32)))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite(values: Values, bad: float) -> None:
    """NaN that a trainer went on with (speculators#615): the verdict says slot and row."""
    values[17, 3, 5] = bad
    verdict = judge(values)
    assert verdict.reasons == ("non_finite",)
    assert finding(verdict, "non_finite") == Finding("non_finite", 1, (17,), (3,))
    assert (verdict.slots[3].maximum, verdict.slots[3].non_finite_rows) == (None, 1)
    assert verdict.slots[2].non_finite_rows == 0


def test_the_largest_finite_values_are_sound(values: Values) -> None:
    limits = torch.finfo(values.dtype)
    values[3, 1, 1], values[3, 1, 2] = limits.max, limits.min
    verdict = judge(values)
    assert verdict.sound
    assert (verdict.slots[1].maximum, verdict.slots[1].minimum) == (limits.max, limits.min)


def test_a_run_of_equal_rows(values: Values) -> None:
    values[10:18] = values[10]
    verdict = judge(values)
    assert finding(verdict, "constant_rows") == Finding("constant_rows", 8, tuple(range(10, 18)))


def test_a_run_may_lie_across_chunks(values: Values) -> None:
    values[10:18] = values[10]
    for cut in range(9, 20):
        assert finding(judge(values, chunks=[cut, 64 - cut]), "constant_rows").count == 8
    assert finding(judge(values, chunks=[1] * 64), "constant_rows").count == 8


def test_a_short_run_is_sound(values: Values) -> None:
    values[10 : 10 + MIN_RUN - 1] = values[10]
    assert judge(values).sound


def test_equal_rows_of_one_repeated_token_are_sound(values: Values) -> None:
    """A causal model may give the same row for the same token again and again."""
    values[10:18] = values[10]
    tokens = list(range(64))
    tokens[10:18] = [7] * 8
    assert judge(values, tokens).sound
    tokens[17] = 8
    assert judge(values, tokens).reasons == ("constant_rows",)


def test_rows_equal_in_all_slots_but_one_are_sound(values: Values) -> None:
    """Embeddings repeat whenever a token does."""
    values[10:18, :4] = values[10, :4]
    assert judge(values).sound


def test_a_row_of_one_value_a_slot(values: Values) -> None:
    values[9] = torch.arange(1, 6)[:, None].to(values.dtype)
    assert finding(judge(values), "constant_rows") == Finding("constant_rows", 1, (9,))


def test_equal_slots_are_named(values: Values) -> None:
    values[:, 4] = values[:, 1]
    found = finding(judge(values, chunks=[20, 20, 24]), "equal_slots")
    assert (found.count, found.slots, found.detail) == (2, (1, 4), "layer ids [[2, 5]]")
    values[40, 4, 31] += 1
    assert judge(values, chunks=[20, 20, 24]).sound


def test_equal_slots_are_told_apart_in_groups(values: Values) -> None:
    """Two pairs, a slot equal to a pair in its first rows only, and one that is alone."""
    rows = torch.cat([values, values.flip(0)[:, :1]], dim=1)
    rows[:, 2], rows[:, 3], rows[:, 4] = rows[:, 0], rows[:, 1], rows[:, 0]
    rows[50, 4, 31] += 1
    found = finding(judge(rows, chunks=[20, 20, 24]), "equal_slots")
    assert (found.slots, found.detail) == ((0, 1, 2, 3), "layer ids [[1, 3], [2, 4]]")
    assert finding(judge(rows), "equal_slots") == found


def test_a_zero_slot_is_named(values: Values) -> None:
    values[:, 2] = 0
    verdict = judge(values)
    assert finding(verdict, "zero_slots") == Finding("zero_slots", 1, slots=(2,))
    assert verdict.slots[2].zero_fraction == 1.0


def test_one_slot_of_one_row_zero_is_named(values: Values) -> None:
    """Also beside rows that are zero in every slot, and wherever the chunks end."""
    values[17, 3], values[5] = 0, 0
    for chunks in ([64], [17, 47], [18, 46]):
        verdict = judge(values, chunks=chunks)
        assert verdict.findings == (Finding("zero_rows", 2, (5, 17), (3,)),)


def test_the_embedding_of_a_padding_token_may_be_zero(values: Values) -> None:
    """PyTorch's `Embedding(padding_idx=…)` keeps that row at zero; what leaves a layer is not."""
    values[17, 0] = 0
    assert judge(values, first_layer=0).sound
    assert judge(values, first_layer=1).reasons == ("zero_rows",)
    values[17, 1] = 0
    assert finding(judge(values, first_layer=0), "zero_rows") == Finding("zero_rows", 1, (17,), (1,))


def test_all_zero() -> None:
    """A wrong block size gives this and a loss that looks fine (vllm#46301)."""
    verdict = judge(torch.zeros(200, 5, 32))
    assert set(verdict.reasons) == {"zero_rows", "equal_slots"}
    found = finding(verdict, "zero_rows")
    assert (found.count, len(found.rows)) == (200, LISTED)


def test_one_row_and_one_slot() -> None:
    assert judge(random(1, 1, 8)).sound
    assert judge(torch.ones(1, 1, 1)).sound


@pytest.mark.parametrize("kind", ["rows", "flat rows", "slots"])
def test_what_differs_in_one_element_is_sound(values: Values, kind: str) -> None:
    """A few elements are compared first; that they are equal must not be the last word, whichever one differs."""
    for element in range(1, 63):
        wide = random(rows=8, slots=2, hidden=64, dtype=values.dtype)
        if kind == "rows":
            wide[:] = wide[0]
            wide[1::2, 1, element] += 1
        elif kind == "flat rows":
            wide[3] = torch.tensor([[1.0], [2.0]]).to(values.dtype)
            wide[3, 1, element] = 5
        else:
            wide[:, 1] = wide[:, 0]
            wide[5, 1, element] += 1
        assert judge(wide).sound and judge(wide, chunks=[4, 4]).sound, element


def oracle(values: Values) -> dict[str, Any]:
    """The same questions in plain floats."""
    wide = values.double().numpy()
    bits = values.view({2: torch.int16, 4: torch.int32}[values.element_size()]).numpy()
    flat = bits.reshape(len(bits), -1)
    zero = (wide == 0).all(axis=(1, 2))
    runs, start = [], 0
    for row in range(1, len(flat) + 1):
        same = row < len(flat) and (flat[row] == flat[row - 1]).all() and not zero[row] and not zero[row - 1]
        if not same:
            if row - start >= MIN_RUN:
                runs.append((start, row))
            start = row
    constant = (bits == bits[:, :, :1]).all(axis=(1, 2)) & ~zero if bits.shape[2] > 1 else np.zeros(len(bits), bool)
    slots = range(bits.shape[1])
    equal = {s for s in slots for o in slots if s != o and (bits[:, s] == bits[:, o]).all()}
    return {
        "bad": (~np.isfinite(wide)).any(axis=2),
        "zero": zero,
        "gaps": (wide == 0).all(axis=2).any(axis=1) & ~zero,
        "zero slots": (wide == 0).all(axis=(0, 2)),
        "constant": int(constant.sum()) + sum(stop - start for start, stop in runs),
        "equal": equal,
        "norms": np.sqrt((wide[::NORM_EVERY] ** 2).sum(axis=2)).mean(axis=0),
        "wide": wide,
    }


CODES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -60000.0, math.inf, -math.inf, math.nan])


@settings(max_examples=examples(200), deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from(list(DTYPES)),
    rows=st.integers(1, 24),
    slots=st.integers(1, 4),
    hidden=st.integers(1, 12),
)
def test_agrees_with_plain_floats(data: st.DataObject, dtype: str, rows: int, slots: int, hidden: int) -> None:
    pool = [
        data.draw(st.lists(CODES, min_size=slots * hidden, max_size=slots * hidden))
        if data.draw(st.booleans())
        else [data.draw(CODES)] * (slots * hidden)
        for _ in range(2)
    ] + random(2, slots, hidden).reshape(2, -1).tolist()
    chosen = [pool[data.draw(st.integers(0, 3))] for _ in range(rows)]
    values = torch.tensor(chosen, dtype=torch.float32).reshape(rows, slots, hidden).to(DTYPES[dtype])
    if slots > 1 and data.draw(st.booleans()):
        values[:, 1] = values[:, 0]
    chunks = data.draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows))
    verdict = judge(values, chunks=chunks)
    expected = oracle(values)
    counts = {found.reason: found.count for found in verdict.findings}
    assert counts.get("non_finite", 0) == expected["bad"].any(axis=1).sum()
    gaps = 0 if expected["zero slots"].any() else expected["gaps"].sum()
    assert counts.get("zero_rows", 0) == expected["zero"].sum() + gaps
    assert counts.get("constant_rows", 0) == expected["constant"]
    assert counts.get("equal_slots", 0) == len(expected["equal"])
    assert verdict.sound is (not counts)
    for slot, stats in enumerate(verdict.slots):
        column = expected["wide"][:, slot]
        assert stats.non_finite_rows == expected["bad"][:, slot].sum()
        assert stats.zero_fraction == (column == 0).all(axis=1).mean()
        if not expected["bad"][:, slot].any():
            assert (stats.minimum, stats.maximum) == (column.min(), column.max())
            assert stats.mean_norm == pytest.approx(expected["norms"][slot], rel=1e-6)
