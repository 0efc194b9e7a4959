from __future__ import annotations

import pytest

from hsconnector.errors import LayoutError
from hsconnector.layout import locate
from hsconnector.layout.locate import check_view_block_size, locate_hidden_group
from hsconnector.layout.specs import MLA, Composite, FullAttention, Group, HiddenState, Mamba, SlidingWindow

FULL = FullAttention(block_size=528, num_kv_heads=2, head_size=256, dtype="bfloat16")
SLIDING = SlidingWindow(block_size=528, num_kv_heads=2, head_size=256, dtype="bfloat16", sliding_window=128)
MAMBA = Mamba(block_size=528, shapes=((4, 4),), dtypes=("float32",))
HIDDEN = HiddenState(block_size=22, num_kv_heads=4, head_size=2048, dtype="bfloat16")

ATTENTION_GROUP = Group(("model.layers.0",), FULL)
HIDDEN_GROUP = Group(("cache_only_layers.40",), HIDDEN)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_group_is_known_by_its_type_and_has_its_own_block_size(position: int) -> None:
    groups = [ATTENTION_GROUP, Group(("model.layers.1",), MAMBA)]
    groups.insert(position, HIDDEN_GROUP)
    found = locate_hidden_group(groups, global_block_size=528)
    assert (found.index, found.layer_name, found.block_size) == (position, "cache_only_layers.40", 22)
    assert found.spec is HIDDEN


def test_a_worker_sees_a_composite_and_takes_the_inner_spec() -> None:
    inner = HIDDEN.with_block_size(16)
    composite = Composite(block_size=16, layers=(("a", FULL.with_block_size(16)), ("h", inner)))
    found = locate_hidden_group([Group(("a", "h"), composite)])
    assert (found.index, found.layer_name, found.block_size, found.spec) == (0, "h", 16, inner)


def test_a_scheduler_sees_the_composite_flattened_to_its_first_spec() -> None:
    found = locate_hidden_group([Group(("a", "h"), FULL.with_block_size(16))])
    assert (found.index, found.layer_name, found.block_size, found.spec) == (0, None, 16, None)


def test_without_a_config_it_is_group_0_and_the_global_block_size() -> None:
    assert locate_hidden_group(None, global_block_size=16).block_size == 16
    with pytest.raises(LayoutError, match="global block size is needed"):
        locate_hidden_group(None)


def test_a_pipeline_rank_without_the_layer_still_finds_the_group() -> None:
    found = locate_hidden_group([ATTENTION_GROUP, Group((), HIDDEN)])
    assert (found.index, found.layer_name, found.block_size) == (1, None, 22)


def test_a_lost_marker_is_refused_and_every_group_named() -> None:
    lost = Group(("cache_only_layers.40",), MLA(block_size=22, num_kv_heads=4, head_size=2048, dtype="bfloat16"))
    with pytest.raises(LayoutError) as refused:
        locate_hidden_group([ATTENTION_GROUP, Group(("b",), SLIDING), lost])
    for named in (
        "group 0: full attention, 528",
        "group 1: sliding window",
        "group 2: MLA, 22",
        "HiddenStateCacheSpec",
    ):
        assert named in str(refused.value)


@pytest.mark.parametrize(
    "groups",
    [
        [HIDDEN_GROUP, ATTENTION_GROUP, HIDDEN_GROUP],
        [Group(("h", "i"), HIDDEN)],
        [Group(("h", "i"), Composite(block_size=22, layers=(("h", HIDDEN), ("i", HIDDEN))))],
    ],
)
def test_several_hidden_layers_are_refused(groups: list[Group]) -> None:
    with pytest.raises(LayoutError, match="2 hidden-state layers found where one is expected"):
        locate_hidden_group(groups)


def test_no_group_at_all_is_refused() -> None:
    with pytest.raises(LayoutError, match="no KV-cache group"):
        locate_hidden_group([])


def test_a_tensor_in_smaller_kernel_blocks_divides_the_block() -> None:
    assert check_view_block_size(528, 528) == 1
    assert check_view_block_size(528, 16) == 33


@pytest.mark.parametrize(("spec", "tensor"), [(22, 528), (528, 31), (16, 0), (0, 16)])
def test_a_size_that_does_not_divide_is_refused_with_both_numbers(spec: int, tensor: int) -> None:
    with pytest.raises(LayoutError, match=rf"blocks of {spec} tokens .* blocks of {tensor}, which does not divide"):
        check_view_block_size(spec, tensor)


def test_all_names_exist() -> None:
    assert [name for name in locate.__all__ if not hasattr(locate, name)] == []
