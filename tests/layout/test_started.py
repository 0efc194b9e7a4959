from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hsconnector.errors import LayoutError
from hsconnector.layout.specs import Composite, FullAttention, Group, HiddenState, Mamba
from hsconnector.layout.started import check_started

FULL = FullAttention(block_size=544, num_kv_heads=2, head_size=256, dtype="bfloat16")
MAMBA = Mamba(block_size=544, shapes=((4, 4),), dtypes=("float32",), page_size_padded=1_114_112, cache_mode="align")
HIDDEN = HiddenState(block_size=136, num_kv_heads=3, head_size=1024, dtype="bfloat16", page_size_padded=1_114_112)
GROUPS = [Group(("a",), FULL), Group(("m",), MAMBA), Group(("cache_only_layers.40",), HIDDEN)]
ENGINE: dict[str, Any] = {"cache_block_size": 544, "prefix_caching": True}


def test_one_line_with_group_block_size_waste_and_granularity() -> None:
    report = check_started(GROUPS, **ENGINE, hash_block_size=136, num_slots=3, hidden_size=1024)
    assert (report.hidden.index, report.hidden.block_size) == (2, 136)
    assert report.line == (
        "hidden states in KV-cache group 2 of 3 (cache_only_layers.40); 136 tokens a block; 278,528 of 1,114,112 bytes "
        "of each page unused (25%); scheduler block 544, hash block 136, prefix-cache hits every 136 tokens"
    )


def test_a_composite_and_what_the_scheduler_sees_of_it() -> None:
    inner = replace(HIDDEN, block_size=16, page_size_padded=None)
    full = FULL.with_block_size(16)
    composite = Composite(block_size=16, layers=(("a", full), ("h", inner)))
    worker = check_started([Group(("a", "h"), composite)], cache_block_size=16, prefix_caching=False)
    scheduler = check_started([Group(("a", "h"), full)], cache_block_size=16, prefix_caching=False)
    assert (worker.hidden.index, worker.hidden.block_size) == (scheduler.hidden.index, scheduler.hidden.block_size)
    assert "0 of 98,304 bytes of each page unused" in worker.line and "unused" not in scheduler.line
    assert "no prefix cache" in worker.line


def test_without_a_config() -> None:
    report = check_started(None, cache_block_size=16, prefix_caching=True)
    assert report.line == "hidden states in KV-cache group 0 of 1; 16 tokens a block"


def test_what_is_sound_but_unexpected_is_a_note() -> None:
    groups = [*GROUPS[:2], Group(("h",), HIDDEN.with_block_size(68))]
    report = check_started(groups, **ENGINE, hash_block_size=34)
    assert report.line.endswith(
        "136 tokens a block were expected beside group 0: full attention, 544 tokens a block; "
        "group 1: Mamba, 544 tokens "
        "a block; group 2: hidden states, 68 tokens a block; the engine hashes 34 tokens where 68 were expected"
    )


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (replace(HIDDEN, dtype="float8_e4m3fn"), "kept as float8_e4m3fn .* --kv-cache-dtype auto"),
        (replace(HIDDEN, quant_mode="fp8_per_tensor"), "quantisation fp8_per_tensor"),
        (replace(HIDDEN, tokens_per_state=4), "packed by its attention backend"),
        (replace(HIDDEN, num_kv_heads=2), "has 2 slots where 3 layers were asked for"),
        (replace(HIDDEN, head_size=512), "rows of 512 where the model's size is 1024"),
        (replace(HIDDEN, block_size=181), "181.*least common multiple is 98,464"),
    ],
)
def test_what_is_known_to_be_wrong_is_refused(hidden: HiddenState, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_started([*GROUPS[:2], Group(("h",), hidden)], **ENGINE, num_slots=3, hidden_size=1024)


def test_a_hash_block_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match="hashes cover 100, which does not divide 544"):
        check_started(GROUPS, **ENGINE, hash_block_size=100)
