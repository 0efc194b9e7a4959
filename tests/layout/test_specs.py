from __future__ import annotations

from typing import Any

import pytest

from hsconnector.errors import LayoutError
from hsconnector.layout import specs
from hsconnector.layout.specs import (
    MLA,
    ChunkedLocal,
    Composite,
    FullAttention,
    Group,
    HiddenState,
    KernelBlocks,
    Mamba,
    Other,
    SlidingWindow,
    SlidingWindowMLA,
)

KV: dict[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


def test_a_page_is_keys_and_values_of_all_heads() -> None:
    assert FullAttention(block_size=16, **KV).page_size_bytes == 16 * 8 * (128 + 128) * 2
    assert SlidingWindow(block_size=16, sliding_window=128, **KV).page_size_bytes == 65_536
    assert ChunkedLocal(block_size=16, attention_chunk_size=128, **KV).page_size_bytes == 65_536


def test_a_value_head_may_be_narrower_and_a_latent_has_none() -> None:
    assert FullAttention(block_size=1, head_size_v=64, **KV).page_size_bytes == 8 * 192 * 2
    assert MLA(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16").page_size_bytes == 64 * 576 * 2


def test_packing_backends_publish_slots_and_bytes() -> None:
    spec = FullAttention(block_size=16, num_head_slots=1, state_content_bytes=656, **KV)
    assert spec.page_size_bytes == 16 * 656
    assert MLA(block_size=64, num_kv_heads=1, head_size=512, dtype="uint8", tokens_per_state=4).page_size_bytes == 8_192


def test_padding_counts_and_may_not_shrink() -> None:
    assert FullAttention(block_size=16, page_size_padded=70_000, **KV).page_size_bytes == 70_000
    with pytest.raises(LayoutError, match=r"65,536 bytes and cannot be padded to 100"):
        _ = FullAttention(block_size=16, page_size_padded=100, **KV).page_size_bytes


def test_alignment_pads_a_latent_page_upwards() -> None:
    assert MLA(block_size=1, num_kv_heads=1, head_size=584, dtype="uint8", alignment=576).page_size_bytes == 1_152
    aligned = SlidingWindowMLA(
        block_size=1, num_kv_heads=1, head_size=576, dtype="uint8", alignment=576, sliding_window=8
    )
    assert aligned.page_size_padded is None


def test_a_mamba_page_is_its_states() -> None:
    spec = Mamba(block_size=528, shapes=((3, 10), (4, 8, 2)), dtypes=("bfloat16", "float32"))
    assert spec.page_size_bytes == 3 * 10 * 2 + 64 * 4
    assert Mamba(block_size=1, shapes=((1,),), dtypes=("uint8",), page_size_padded=9).page_size_bytes == 9


def test_a_hidden_page_and_its_waste() -> None:
    spec = HiddenState(block_size=136, num_kv_heads=3, head_size=1024, dtype="bfloat16", page_size_padded=1_114_112)
    assert (spec.row_bytes, spec.waste_bytes) == (6_144, 278_528)


def test_a_composite_has_the_pages_of_its_layers() -> None:
    full = FullAttention(block_size=16, **KV)
    hidden = HiddenState(block_size=16, num_kv_heads=4, head_size=256, dtype="bfloat16")
    spec = Composite(block_size=16, layers=(("a", full), ("b", full), ("h", hidden)))
    assert spec.page_size_bytes == 2 * 65_536 + 16 * 2_048
    assert spec.described == "composite of 2 full attention + 1 hidden states"
    assert Group(("a", "b", "h"), spec).members[2] == ("h", hidden)


def test_stride_alignment_in_kernel_blocks() -> None:
    assert FullAttention(block_size=48, block_stride_alignment=KernelBlocks(64), **KV).stride_alignment_bytes == 65_536
    assert FullAttention(block_size=16, block_stride_alignment=KernelBlocks(16), **KV).stride_alignment_bytes == 1
    assert FullAttention(block_size=16, block_stride_alignment=512, **KV).stride_alignment_bytes == 512


def test_specs_are_values() -> None:
    assert FullAttention(block_size=16, **KV) == FullAttention(block_size=16, head_size_v=128, **KV)
    assert MLA(block_size=16, **KV) != HiddenState(block_size=16, **KV)
    assert len({Other(block_size=1, class_name="A"), Other(block_size=1, class_name="A")}) == 1


@pytest.mark.parametrize("bad", [0, -16])
def test_block_sizes_are_positive(bad: int) -> None:
    with pytest.raises(LayoutError, match=f"positive block size, not {bad}"):
        FullAttention(block_size=bad, **KV)


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(LayoutError, match="'float7' is unknown here; known are float64, "):
        specs.dtype_bytes("float7")


def test_an_empty_composite_is_refused() -> None:
    with pytest.raises(LayoutError, match="at least one layer"):
        Composite(block_size=16, layers=())


def test_all_names_exist() -> None:
    assert [name for name in specs.__all__ if not hasattr(specs, name)] == []
