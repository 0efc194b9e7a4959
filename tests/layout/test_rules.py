"""The numbers of public reports, and the rules beyond what vLLM's own tests cover."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsconnector.errors import LayoutError
from hsconnector.layout import rules
from hsconnector.layout.granularity import BlockSizes, check_granularity, resolve_block_sizes
from hsconnector.layout.rules import (
    Grouping,
    form_groups,
    group_size,
    hidden_block_size,
    page_scale,
    scale_groups,
)
from hsconnector.layout.specs import (
    MLA,
    ChunkedLocal,
    Composite,
    FullAttention,
    Group,
    HiddenState,
    Mamba,
    SlidingWindow,
    Spec,
)


def full(block: int = 16, heads: int = 1, head: int = 64, **changes: Any) -> FullAttention:
    return replace(FullAttention(block_size=block, num_kv_heads=heads, head_size=head, dtype="bfloat16"), **changes)


def sliding(block: int = 16, heads: int = 1, head: int = 64) -> SlidingWindow:
    return SlidingWindow(block_size=block, num_kv_heads=heads, head_size=head, dtype="bfloat16", sliding_window=128)


def hidden(slots: int = 3, size: int = 1024, block: int = 16) -> HiddenState:
    return HiddenState(block_size=block, num_kv_heads=slots, head_size=size, dtype="bfloat16")


def mamba(block: int = 16, elements: int = 2_048, **changes: Any) -> Mamba:
    return replace(Mamba(block_size=block, shapes=((elements,),), dtypes=("bfloat16",), cache_mode="align"), **changes)


def named(*kinds: tuple[int, Spec]) -> dict[str, Spec]:
    layers = [spec for count, spec in kinds for _ in range(count)]
    return {f"layer.{index}": spec for index, spec in enumerate(layers)}


def test_544_tokens_give_136_and_a_quarter_of_the_page_is_waste() -> None:
    """vllm#51108: not 181, which is what fits a page."""
    assert hidden_block_size(1_114_112, 6_144, [544, 544, 544, 544]) == 136
    groups = form_groups(named((2, full(544, 2, 256)), (6, mamba(544, page_size_padded=1_114_112)), (1, hidden())))
    assert [group.spec.block_size for group in groups] == [544, 544, 544, 544, 136]
    extracted = groups[-1].spec
    assert isinstance(extracted, HiddenState)
    assert (extracted.row_bytes, extracted.page_size_bytes, extracted.waste_bytes) == (6_144, 1_114_112, 278_528)
    assert extracted.waste_bytes / extracted.page_size_bytes == 0.25
    assert resolve_block_sizes(groups, prefix_caching=True) == BlockSizes(scheduler=544, hash=136, hit=136)


def test_a_mamba_group_breaks_granularity_only_outside_align_mode() -> None:
    aligned = [Group(("a",), full(544)), Group(("m",), mamba(544)), Group(("h",), hidden(block=136))]
    assert resolve_block_sizes(aligned, prefix_caching=True).hash == 136
    other = [*aligned[:1], Group(("m",), mamba(544, cache_mode="all")), aligned[2]]
    sizes = resolve_block_sizes(other, prefix_caching=True)
    assert (sizes.scheduler, sizes.hash) == (544, 544)
    with pytest.raises(LayoutError, match=r"hashes cover 544, which does not divide 136.*--mamba-cache-mode align"):
        check_granularity(other, sizes, prefix_caching=True)
    check_granularity(other, sizes, prefix_caching=False)
    check_granularity(aligned, resolve_block_sizes(aligned, prefix_caching=True), prefix_caching=True)


def test_block_sizes_of_544_and_181_are_refused_and_explained() -> None:
    """vllm#51108."""
    groups = [*(Group((name,), full(544)) for name in "abcd"), Group(("h",), hidden(block=181))]
    sizes = resolve_block_sizes(groups, prefix_caching=True)
    assert sizes.scheduler == 98_464
    with pytest.raises(LayoutError, match=r"blocks of 544, 544, 544, 544, 181 tokens.*181.*98,464.*vllm#51108"):
        check_granularity(groups, sizes, prefix_caching=True)


def test_the_hidden_group_has_22_where_the_cache_says_528() -> None:
    """vllm#46301."""
    specs = named((2, full(528, 2, 256)), (6, mamba(528, page_size_padded=528 * 2 * 512 * 2)), (1, hidden(6, 4_096)))
    assert [group.spec.block_size for group in form_groups(specs)] == [528, 528, 528, 528, 22]


def test_a_row_that_exceeds_the_page_scales_everything_by_two() -> None:
    """vllm#50894: 6,144 over 4,096; 16 -> 32, block size 1, 2,048 bytes of waste."""
    assert page_scale(6_144, 4_096) == 2
    assert page_scale(4_096, 4_096) == page_scale(1, 4_096) == 1
    groups = form_groups(named((2, full()), (2, sliding()), (1, hidden())))
    assert [group.spec.block_size for group in groups] == [32, 32, 1]
    assert {group.spec.page_size_bytes for group in groups} == {8_192}
    extracted = groups[-1].spec
    assert isinstance(extracted, HiddenState) and extracted.waste_bytes == 2_048


@pytest.mark.parametrize(("slots", "scale"), [(3, 2), (5, 3), (6, 3), (7, 4), (36, 18)])
def test_scales_of_three_and_more(slots: int, scale: int) -> None:
    groups = form_groups(named((2, full()), (2, sliding()), (1, hidden(slots))))
    assert [group.spec.block_size for group in groups] == [16 * scale, 16 * scale, hidden_block(slots, scale)]
    assert {group.spec.page_size_bytes for group in groups} == {4_096 * scale}


def hidden_block(slots: int, scale: int) -> int:
    return hidden_block_size(4_096 * scale, slots * 2_048, [16 * scale])


def test_explicit_padding_and_mamba_pages_scale() -> None:
    padded = full(page_size_padded=5_000)
    groups = form_groups(named((1, padded), (1, mamba(page_size_padded=5_000)), (1, sliding()), (1, hidden(6))))
    assert [group.spec.block_size for group in groups] == [48, 48, 48, 1]
    assert {group.spec.page_size_bytes for group in groups} == {15_000}
    groups = form_groups(named((1, full()), (1, mamba(elements=2_048)), (1, hidden(6))))
    assert [(g.spec.block_size, g.spec.page_size_bytes) for g in groups] == [(48, 12_288), (48, 12_288), (1, 12_288)]


def test_the_engine_leaves_a_mamba_page_behind() -> None:
    groups = form_groups(named((1, full()), (1, mamba()), (1, hidden(6))), Grouping(as_engine=True))
    assert [group.spec.page_size_bytes for group in groups] == [12_288, 4_096, 12_288]


def test_layers_inside_a_composite_scale() -> None:
    composite = Composite(block_size=16, layers=(("a", full()), ("b", full(head=32))))
    scaled = scale_groups([Group(("a", "b"), composite)], 3)[0].spec
    assert isinstance(scaled, Composite)
    assert [spec.block_size for spec in (scaled, *scaled.specs)] == [48, 48, 48]
    assert scaled.page_size_bytes == 3 * composite.page_size_bytes


@pytest.mark.parametrize(
    ("counts", "threshold", "size"),
    [
        ([12, 13], 1.5, 13),
        ([12, 17], 1.5, 17),
        ([12, 18], 1.5, 12),
        ([12, 13], 1.25, 13),
        ([12, 14], 1.25, 14),
        ([12, 15], 1.25, 12),
        ([12, 17], 1.25, 12),
        ([10, 20, 20], 1.5, 10),
        ([7], 1.5, 7),
    ],
)
def test_both_thresholds_of_grouping(counts: list[int], threshold: float, size: int) -> None:
    """vllm#36684: 1.5, which was 1.25 and crashed."""
    assert group_size(counts, threshold) == size


@pytest.mark.parametrize(("threshold", "sizes"), [(1.5, [12, 17]), (1.25, [12, 9, 8])])
def test_12_sliding_and_17_full_layers(threshold: float, sizes: list[int]) -> None:
    groups = form_groups(named((12, sliding()), (17, full())), Grouping(split_threshold=threshold))
    assert [len(group.layer_names) for group in groups] == sizes


def test_split_layers_are_dealt_in_turn() -> None:
    groups = form_groups(named((2, full()), (4, sliding())))
    assert [group.layer_names for group in groups] == [
        ("layer.0", "layer.1"),
        ("layer.2", "layer.4"),
        ("layer.3", "layer.5"),
    ]


def test_a_plain_model_folds_the_hidden_layer_into_a_composite() -> None:
    (group,) = form_groups(named((36, full(16, 8, 128)), (1, hidden(4, 4_096))))
    assert isinstance(group.spec, Composite)
    assert (group.spec.block_size, len(group.layer_names)) == (16, 37)


def test_without_the_hybrid_manager_local_layers_are_full_attention_in_one_composite() -> None:
    specs = named((2, full()), (2, sliding()), (1, hidden()))
    (group,) = form_groups(specs, Grouping(hybrid_manager=False))
    assert isinstance(group.spec, Composite)
    assert [spec.kind for spec in group.spec.specs] == [*["full attention"] * 4, "hidden states"]
    assert group.spec.block_size == 16


@pytest.mark.parametrize("specs", [named((1, full()), (1, mamba()), (1, hidden()))])
def test_without_the_hybrid_manager_mamba_layers_are_refused(specs: dict[str, Spec]) -> None:
    with pytest.raises(LayoutError, match=r"cannot bring these layers to one type .*Mamba"):
        form_groups(specs, Grouping(hybrid_manager=False))


def test_two_windows_without_the_hybrid_manager_are_refused() -> None:
    specs = named((1, full()), (1, sliding()), (1, replace(sliding(), sliding_window=512)))
    with pytest.raises(LayoutError, match="windows of 128, 512 tokens"):
        form_groups(specs, Grouping(hybrid_manager=False))


def test_mla_beside_a_plain_window_falls_back_only_without_hidden_states() -> None:
    latent = MLA(block_size=16, num_kv_heads=1, head_size=576, dtype="bfloat16")
    wide = SlidingWindow(block_size=16, num_kv_heads=8, head_size=100, dtype="bfloat16", sliding_window=128)
    (group,) = form_groups(named((2, latent), (2, wide)))
    assert isinstance(group.spec, Composite)
    with pytest.raises(LayoutError, match=r"layer layer.0: a MLA page of 18,432 bytes .* refuses to start"):
        form_groups(named((2, latent), (2, wide), (1, hidden())))


def test_a_page_padded_before_cannot_grow() -> None:
    with pytest.raises(LayoutError, match="padding included, does not grow to 20,480"):
        form_groups(named((1, full(page_size_padded=5_120)), (1, replace(sliding(), num_kv_heads=5))))


def test_chunked_layers_of_one_chunk_share_a_group() -> None:
    chunk = ChunkedLocal(block_size=16, num_kv_heads=1, head_size=64, dtype="bfloat16", attention_chunk_size=256)
    assert [len(group.layer_names) for group in form_groups(named((2, full()), (6, chunk)))] == [2, 2, 2, 2]


def test_no_layers_make_no_groups() -> None:
    assert form_groups({}) == ()


@given(st.integers(1, 4_096), st.integers(1, 1 << 20), st.lists(st.integers(1, 2_048), min_size=1, max_size=5))
def test_the_hidden_block_divides_all_others_and_fits(rows_per_page: int, row: int, sizes: list[int]) -> None:
    page = rows_per_page * row
    block = hidden_block_size(page, row, sizes)
    assert all(size % block == 0 for size in sizes)
    assert block * row <= page


def test_all_names_exist() -> None:
    assert [name for name in rules.__all__ if not hasattr(rules, name)] == []
