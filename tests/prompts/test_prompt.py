"""Rows become prompts, or a line that says what is wrong with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsconnector.prompts.prompt import Missing, Prompt, PromptReader, RowRefused


def read(row: object, **reader: object) -> Prompt | Missing:
    return PromptReader(**reader).read(row, 7)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1))
def test_token_ids_and_mask_go_through_unchanged(pairs: list[tuple[int, bool]]) -> None:
    token_ids, mask = zip(*pairs, strict=True)
    prompt = read({"input_ids": list(token_ids), "loss_mask": list(mask)})
    assert prompt == Prompt(7, "7", token_ids, tuple(map(int, mask)))


def test_without_a_mask_every_token_counts() -> None:
    assert read({"input_ids": [5, 6]}) == Prompt(7, "7", (5, 6), (1, 1))


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"input_ids": []}, "row 7: has no tokens"),
        ({"input_ids": [1] * 9}, "row 7: has 9 tokens, the engine takes 8 and one to generate"),
        ({"input_ids": "12"}, "row 7: has input_ids that are no list, but a str"),
        ({"input_ids": [[1, 2]]}, "row 7: has [1, 2] at position 0 of input_ids, which is no token id"),
        ({"input_ids": [1, True]}, "row 7: has True at position 1 of input_ids"),
        ({"input_ids": [1, 2.0]}, "row 7: has 2.0 at position 1 of input_ids"),
        ({"input_ids": [1, -100]}, "row 7: has token id -100 at position 1, which no vocabulary holds"),
        ({"input_ids": [10**30]}, "row 7: has token id 1000000000000000000000000000000 at position 0"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "row 7: has 2 token ids and a loss_mask of 1"),
        ({"input_ids": [1], "loss_mask": [2]}, "row 7: has 2 at position 0 of loss_mask, which holds 0 and 1 only"),
        ({"input_ids": [1], "loss_mask": "1"}, "row 7: has a loss_mask that is no list, but a str"),
        ({"text": "a", "b": 1}, "row 7: has neither input_ids nor messages nor conversations; its fields: text, b"),
        ({}, "row 7: has neither input_ids nor messages nor conversations; its fields: none"),
        ({"messages": [{"role": "user"}]}, "row 7: is a conversation, and there is no tokenizer"),
        ({"messages": "hello"}, "row 7: is a conversation, and there is no tokenizer"),
        ([1, 2], "row 7: is no object with fields, but a list"),
        (None, "row 7: is no object with fields, but a NoneType"),
        (RowRefused("(line 9) is no JSON"), "row 7: (line 9) is no JSON"),
    ],
)
def test_a_row_that_cannot_be_asked_is_named_with_its_fault(row: object, line: str) -> None:
    missing = read(row, max_tokens=8)
    assert isinstance(missing, Missing)
    assert str(missing).startswith(line)
    assert "\n" not in str(missing)


def test_the_id_comes_from_its_field_and_the_line_names_both() -> None:
    assert read({"input_ids": [1], "id": "a-1"}, id_field="id") == Prompt(7, "a-1", (1,), (1,))
    assert read({"input_ids": [1], "id": 12}, id_field="id") == Prompt(7, "12", (1,), (1,))
    assert str(read({"input_ids": [], "id": "a-1"}, id_field="id")) == "row 7 (a-1): has no tokens"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (None, "no id under 'id' (got None)"),
        ("", "no id under 'id'"),
        (True, "no id under 'id'"),
        ({"a": 1}, "no id under 'id'"),
        ("ä" * 129, "an id of 258 bytes, at most 256"),
        ("\ud800", "half a surrogate pair"),
    ],
)
def test_an_id_that_no_capture_can_carry_is_refused(value: object, fault: str) -> None:
    missing = read({"input_ids": [1], "id": value}, id_field="id")
    assert isinstance(missing, Missing)
    assert fault in missing.reason
