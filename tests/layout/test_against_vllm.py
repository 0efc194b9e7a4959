"""The rules against the functions of the installed vLLM, on random sets of specs.

Intended differences, each with its own test below:

| where                                | the engine                   | here            | why                    |
| ------------------------------------ | ---------------------------- | --------------- | ---------------------- |
| Mamba page, groups scaled for a row  | keeps its size unless padded | grows with them | pages must be one size |
| layers in a composite that is scaled | keep block size and page     | grow with it    | one block table        |
| only hidden-state layers, two sizes  | min() of nothing             | one sentence    | says what is missing   |
| sliding-window MLA promoted to MLA   | TypeError                    | one sentence    | says what to leave out |
| block sizes with a useless lcm       | starts, hashes single tokens | refused         | vllm#51108             |
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from hsconnector.connector.vllm_specs import groups_from_vllm, spec_from_vllm
from hsconnector.errors import LayoutError
from hsconnector.layout.capacity import capacity, pool_bytes_per_block
from hsconnector.layout.granularity import (
    check_granularity,
    resolve_block_sizes,
)
from hsconnector.layout.rules import Grouping, form_groups, largest_divisor_at_most, scale_groups
from hsconnector.layout.specs import Group, HiddenState, Mamba, Spec, layer_specs
from tests.examples import examples
from tests.layout.installed_vllm import KVCacheLayout, engine, interface
from tests.layout.strategies import scaled_sets, spec_sets

EXAMPLES = examples(2000)
REFUSALS = (ValueError, NotImplementedError, AssertionError, TypeError, StopIteration)
fast = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def config(*, hybrid: bool = True, caching: bool = True) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
            enable_prefix_caching=caching,
            prefix_match_unit=None,
            block_size=16,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=None,
        kv_transfer_config=SimpleNamespace(),
    )


def engine_groups(specs: dict[str, Any], **options: bool) -> tuple[Group, ...] | None:
    """The engine's groups as ours, None where it refuses: here, or later because a layer is in no group."""
    try:
        groups = engine.get_kv_cache_groups(config(**options), dict(specs))
    except REFUSALS:
        return None
    names = [name for group in groups for name in group.layer_names]
    return groups_from_vllm(groups) if sorted(names) == sorted(specs) else None


def our_groups(specs: dict[str, Any], *, hybrid: bool, as_engine: bool) -> tuple[Group, ...] | None:
    ours = {name: spec_from_vllm(spec) for name, spec in specs.items()}
    try:
        return form_groups(ours, Grouping(hybrid_manager=hybrid, as_engine=as_engine))
    except LayoutError as refused:
        assert str(refused) and "\n" not in str(refused)
        return None


def has_one_page(groups: tuple[Group, ...]) -> bool:
    return len({group.spec.page_size_bytes for group in groups}) == 1


@fast
@given(spec_sets() | scaled_sets(), st.booleans())
def test_groups_sizes_pages_waste_and_refusals_are_the_engines(specs: dict[str, Any], hybrid: bool) -> None:
    theirs = engine_groups(specs, hybrid=hybrid)
    event("refused" if theirs is None else f"{min(len(theirs), 5)} groups")
    assert our_groups(specs, hybrid=hybrid, as_engine=True) == theirs
    closed = our_groups(specs, hybrid=hybrid, as_engine=False)
    if closed != theirs:
        event("differs on purpose")
        assert closed is not None and theirs is not None
        assert any(isinstance(spec, Mamba) for group in closed for spec in layer_specs(group.spec))
        assert has_one_page(closed) and not has_one_page(theirs)
        assert [group.spec.block_size for group in closed] == [group.spec.block_size for group in theirs]


@settings(fast, max_examples=max(EXAMPLES // 8, 50))
@given(spec_sets() | scaled_sets(), st.booleans())
def test_scheduler_hash_and_hit_sizes_are_the_engines(specs: dict[str, Any], caching: bool) -> None:
    setup = config(caching=caching)
    assume(engine_groups(specs) is not None)
    groups = engine.get_kv_cache_groups(setup, dict(specs))
    kv_config = interface.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    flat = engine.generate_scheduler_kv_cache_config([kv_config])
    ours = groups_from_vllm(flat.kv_cache_groups)
    cacheable = [group.spec.block_size for group in ours if group.spec.prefix_cacheable]
    setup.cache_config.block_size = min(cacheable or [group.spec.block_size for group in ours])
    try:
        scheduler, hashed = engine.resolve_kv_cache_block_sizes(flat, setup)
        theirs = (scheduler, hashed, engine.resolve_cache_hit_alignment_tokens(flat, setup, scheduler, hashed))
    except REFUSALS:
        with pytest.raises(LayoutError):
            resolve_block_sizes(ours, prefix_caching=caching)
        return
    sizes = resolve_block_sizes(ours, prefix_caching=caching)
    assert (sizes.scheduler, sizes.hash, sizes.hit) == theirs


@settings(fast, max_examples=max(EXAMPLES // 8, 50))
@given(spec_sets())
def test_pages_alignment_and_bytes_per_block_are_the_engines(specs: dict[str, Any]) -> None:
    for spec in specs.values():
        ours = spec_from_vllm(spec)
        assert ours.page_size_bytes == spec.page_size_bytes
        assert ours.stride_alignment_bytes == spec.get_block_stride_alignment()
    groups = engine_groups(specs)
    assume(groups is not None)
    theirs = engine.get_kv_cache_groups(config(), dict(specs))
    for group, own in zip(theirs, groups or (), strict=True):
        assert own.spec.page_size_bytes == group.kv_cache_spec.page_size_bytes
        assert own.spec.prefix_cacheable == group.kv_cache_spec.prefix_cacheable
    assert pool_bytes_per_block(groups or ()) == engine._get_kv_cache_bytes_per_block(theirs, KVCacheLayout.LBHNC)


@settings(fast, max_examples=max(EXAMPLES // 8, 50))
@given(spec_sets() | scaled_sets(), st.integers(1, 10_000), st.integers(1, 4_096), st.sampled_from(["none", "align"]))
def test_what_one_request_takes_is_the_engines(
    specs: dict[str, Any], length: int, in_flight: int, mamba_mode: str
) -> None:
    specs = {
        name: replace(spec, mamba_cache_mode=mamba_mode) if isinstance(spec, interface.MambaSpec) else spec
        for name, spec in specs.items()
    }
    groups = engine_groups(specs)
    assume(groups is not None)
    setup = config()
    setup.model_config = SimpleNamespace(max_model_len=length)
    setup.max_in_flight_tokens = in_flight
    setup.cache_config.mamba_cache_mode = mamba_mode
    theirs = engine._max_memory_usage_bytes_from_groups(setup, engine.get_kv_cache_groups(config(), dict(specs)))
    ours = capacity(groups or (), max_model_len=length, in_flight_tokens=in_flight)
    assert ours.bytes_per_block * ours.blocks_per_request == theirs


@given(st.integers(1, 5_000), st.integers(1, 5_000))
def test_the_largest_divisor_is_the_engines(value: int, limit: int) -> None:
    assert largest_divisor_at_most(value, limit) == engine._largest_divisor_at_most(value, limit)


def attention(block: int = 16, **changes: Any) -> interface.FullAttentionSpec:
    return interface.FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, **changes)


def row(size: int, block: int = 16) -> interface.HiddenStateCacheSpec:
    return interface.HiddenStateCacheSpec(block_size=block, num_kv_heads=1, head_size=size, dtype=torch.bfloat16)


def test_difference_a_mamba_page_grows_with_the_others() -> None:
    mamba = interface.MambaSpec(block_size=16, shapes=((4, 512),), dtypes=(torch.bfloat16,))
    specs = {"a": attention(), "m": mamba, "h": row(6_144)}
    theirs = engine_groups(specs)
    assert theirs is not None and [group.spec.page_size_bytes for group in theirs] == [12_288, 4_096, 12_288]
    with pytest.raises(ValueError, match="mixed page sizes"):
        engine.validate_kv_cache_layout(KVCacheLayout.LBHNC, engine.get_kv_cache_groups(config(), dict(specs)))
    ours = form_groups({name: spec_from_vllm(spec) for name, spec in specs.items()})
    assert [group.spec.page_size_bytes for group in ours] == [12_288] * 3
    assert [group.spec.block_size for group in ours] == [48, 48, 1] == [group.spec.block_size for group in theirs]


def test_difference_the_layers_inside_a_composite_grow_with_it() -> None:
    inner = {"a": attention(), "b": attention(head_size_v=32)}
    composite = interface.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=inner)
    scaled, _ = engine._ensure_min_page_size(
        [interface.KVCacheGroupSpec(["a", "b"], composite)], 4_096, {"h": row(6_144)}
    )
    theirs = scaled[0].kv_cache_spec
    assert isinstance(theirs, interface.UniformTypeKVCacheSpecs)
    assert (theirs.block_size, theirs.first_spec.block_size) == (48, 16)
    ours = scale_groups([Group(("a", "b"), spec_from_vllm(composite))], 3)[0].spec
    assert [spec.block_size for spec in (ours, *layer_specs(ours))] == [48, 48, 48]
    assert ours.page_size_bytes == 3 * composite.page_size_bytes
    as_engine = scale_groups([Group(("a", "b"), spec_from_vllm(composite))], 3, as_engine=True)[0].spec
    assert as_engine == spec_from_vllm(theirs)


def test_difference_hidden_layers_alone_are_refused_in_a_sentence() -> None:
    specs = {"h": row(64), "i": row(64, block=32)}
    with pytest.raises(ValueError, match=r"min\(\)"):
        engine.get_kv_cache_groups(config(), dict(specs))
    with pytest.raises(LayoutError, match="no model to extract from"):
        form_groups({name: spec_from_vllm(spec) for name, spec in specs.items()})


def test_difference_sliding_window_mla_is_not_promoted() -> None:
    sliding = interface.SlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=128
    )
    specs = {"a": attention(), "s": sliding}
    with pytest.raises(TypeError, match="bounded_replay"):
        engine.get_kv_cache_groups(config(hybrid=False), dict(specs))
    with pytest.raises(LayoutError, match="bounded_replay"):
        form_groups({n: spec_from_vllm(s) for n, s in specs.items()}, Grouping(hybrid_manager=False))


def test_difference_181_beside_544_is_refused() -> None:
    specs = [attention(544)] * 4 + [row(64, block=181)]
    theirs = [interface.KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate(specs)]
    kv_config = interface.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=theirs)
    assert engine.resolve_kv_cache_block_sizes(kv_config, config()) == (98_464, 1)
    ours = groups_from_vllm(theirs)
    with pytest.raises(LayoutError, match=r"544, 544, 544, 544, 181 tokens.*98,464"):
        check_granularity(ours, resolve_block_sizes(ours, prefix_caching=True), prefix_caching=True)


def test_an_unknown_class_becomes_other_and_a_subclass_its_parent() -> None:
    class Ascend(interface.FullAttentionSpec):
        pass

    class Strange:
        block_size = 16
        page_size_bytes = 64

    ours: Spec = spec_from_vllm(Ascend(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16))
    assert ours == spec_from_vllm(attention())
    assert spec_from_vllm(Strange()).described == "Strange"
    assert isinstance(spec_from_vllm(row(64)), HiddenState)
