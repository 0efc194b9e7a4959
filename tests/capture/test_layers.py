from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsconnector.capture import layers
from hsconnector.capture.layers import (
    choose_layers,
    dflash_layers,
    eagle3_layers,
    parse_layer_ids,
    slot_name,
    trainer_counting,
)
from hsconnector.errors import SettingsError


@pytest.mark.parametrize(
    ("layers", "ids"),
    [(36, (2, 18, 33, 36)), (80, (2, 40, 77, 80)), (32, (2, 16, 29, 32)), (6, (2, 3, 6)), (2, (1, 2)), (1, (1,))],
)
def test_eagle3(layers: int, ids: tuple[int, ...]) -> None:
    assert eagle3_layers(layers) == ids


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, (2, 10, 18, 26, 34, 36)),
        (36, 3, (2, 18, 34, 36)),
        (48, 5, (2, 13, 24, 35, 46, 48)),
        (28, 3, (2, 14, 26, 28)),
        (36, 1, (19, 36)),
    ],
)
def test_dflash(layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert dflash_layers(layers, count) == ids


def test_trainers_count_one_lower() -> None:
    assert trainer_counting(dflash_layers(36)) == (1, 9, 17, 25, 33, 35)
    assert trainer_counting(eagle3_layers(36)) == (1, 17, 32, 35)
    assert (slot_name(0), slot_name(36)) == ("embed", "after_layer_35")


@pytest.mark.parametrize(
    ("asked", "preset", "ids"),
    [
        ("auto", "eagle3", (2, 18, 33, 36)),
        ("EAGLE3", "eagle3", (2, 18, 33, 36)),
        ("dflash", "dflash:5", (2, 10, 18, 26, 34, 36)),
        ("dflash:3", "dflash:3", (2, 18, 34, 36)),
        ("33, 2,18", "given", (2, 18, 33)),
        ("0", "given", (0,)),
    ],
)
def test_asking(asked: str, preset: str, ids: tuple[int, ...]) -> None:
    choice = choose_layers(asked, 36)
    assert (choice.preset, choice.layer_ids) == (preset, ids)
    assert choice.has_last == (36 in ids)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("2,37", r"layer 37 is outside this model's 0 to 36"),
        ("-1,2", r"layer -1 is outside"),
        ("2,18,2", r"layer 2 is given twice in --layers 2,18,2"),
        ("eagle4", r"--layers 'eagle4' is none of auto, eagle3, dflash, dflash:K, nor ids such as 2,18,33,36"),
        ("2,,3", r"is none of"),
        ("", r"is none of"),
        ("2.5", r"is none of"),
        ("--5", r"is none of"),
        ("dflash:x", r"is none of"),
        ("dflash:0", r"at least one layer, not 0"),
    ],
)
def test_bad_layers_are_one_line(asked: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        choose_layers(asked, 36)
    assert "\n" not in str(refused.value)


def test_ids_are_read_alike_whichever_option_gives_them() -> None:
    assert parse_layer_ids(" 33 ,2,18", 36) == parse_layer_ids("2,18,33", 36, option="--hsc-layers") == (2, 18, 33)
    for text in ("eagle3", "", "1;2", "2,,3", "2 3"):
        with pytest.raises(SettingsError, match=f"--hsc-layers takes layer ids such as 2,18,33,36, not '{text}'"):
            parse_layer_ids(text, 36, option="--hsc-layers")
    with pytest.raises(SettingsError, match="layer 2 is given twice in --hsc-layers 2,2;"):
        parse_layer_ids("2,2", 36, option="--hsc-layers")


@given(st.integers(1, 200), st.integers(1, 12))
def test_presets_are_ascending_distinct_and_end_with_the_last_layer(layers: int, count: int) -> None:
    for ids in (eagle3_layers(layers), dflash_layers(layers, count)):
        assert list(ids) == sorted(set(ids))
        assert ids[0] > 0 and ids[-1] == layers


def test_all_names_exist() -> None:
    assert [name for name in layers.__all__ if not hasattr(layers, name)] == []
