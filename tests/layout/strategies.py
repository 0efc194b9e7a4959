"""Random sets of vLLM's own specs, drawn so that they often merge, divide, need padding or must be refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from hypothesis import strategies as st

from tests.layout.installed_vllm import MultipleOf, interface

HAS_TOPK_WIDTH = "topk_buffer_width" in {field.name for field in fields(interface.MLAAttentionSpec)}
FLOATS = (torch.bfloat16, torch.float32, torch.uint8)
BLOCKS = (16, 32, 48, 544)


@st.composite
def attention_fields(draw: Any, block: int) -> dict[str, Any]:
    about: dict[str, Any] = {
        "block_size": block,
        "num_kv_heads": draw(st.sampled_from([1, 1, 2, 4, 8])),
        "head_size": draw(st.sampled_from([32, 64, 96, 128])),
        "dtype": draw(st.sampled_from(FLOATS)),
    }
    rare = draw(st.integers(0, 19))
    if rare == 0:
        about["block_stride_alignment"] = draw(st.sampled_from([256, MultipleOf(16)]))
    if rare == 1:
        about["state_content_bytes"] = draw(st.sampled_from([80, 656]))
        about["num_head_slots"] = 1
    if rare == 2:
        about["max_tp_shards"] = 2
    if rare == 3:
        about["dcp_sharded"] = False
    if rare == 4:
        about["kv_quant_mode"] = interface.KVQuantMode.FP8_PER_TENSOR
    if rare == 5:
        about["tokens_per_state"] = draw(st.sampled_from([2, 4, 16]))
    return about


@st.composite
def full_attention(draw: Any, block: int) -> interface.FullAttentionSpec:
    fields = draw(attention_fields(block))
    if draw(st.integers(0, 9)) == 0:
        fields["sliding_window"] = draw(st.sampled_from([128, 512]))
    if draw(st.integers(0, 9)) == 0:
        fields["attention_chunk_size"] = 256
    if draw(st.integers(0, 9)) == 0:
        fields["head_size_v"] = 32
    spec = interface.FullAttentionSpec(**fields)
    if draw(st.integers(0, 9)) == 0:
        extra = draw(st.sampled_from([0, 64, spec.page_size_bytes]))
        spec = interface.FullAttentionSpec(**{**fields, "page_size_padded": spec.page_size_bytes + extra})
    return spec


@st.composite
def mla(draw: Any, block: int) -> interface.MLAAttentionSpec:
    return interface.MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=draw(st.sampled_from([64, 128, 576])),
        dtype=draw(st.sampled_from(FLOATS)),
        cache_dtype_str=draw(st.sampled_from([None, None, "fp8_ds_mla"])),
        alignment=draw(st.sampled_from([None, None, 576])),
        tokens_per_state=draw(st.sampled_from([1, 1, 4])),
        is_index_group_leader=draw(st.sampled_from([False, False, False, True])),
        head_size_v=draw(st.sampled_from([0, 0, 0, 0, 32])),
        **({"topk_buffer_width": draw(st.sampled_from([None, None, 2048, 4096]))} if HAS_TOPK_WIDTH else {}),
    )


@st.composite
def sliding(draw: Any, block: int) -> interface.SlidingWindowSpec:
    return interface.SlidingWindowSpec(
        **draw(attention_fields(block)), sliding_window=draw(st.sampled_from([128, 128, 512]))
    )


@st.composite
def sliding_mla(draw: Any, block: int) -> interface.SlidingWindowMLASpec:
    return interface.SlidingWindowMLASpec(
        block_size=block,
        num_kv_heads=draw(st.sampled_from([1, 2])),
        head_size=draw(st.sampled_from([64, 128])),
        dtype=torch.uint8,
        sliding_window=128,
        alignment=draw(st.sampled_from([None, 576])),
        model_version=draw(st.sampled_from([None, "deepseek_v4"])),
        bounded_replay=draw(st.booleans()),
    )


@st.composite
def chunked(draw: Any, block: int) -> interface.ChunkedLocalAttentionSpec:
    return interface.ChunkedLocalAttentionSpec(
        **draw(attention_fields(block)), attention_chunk_size=draw(st.sampled_from([256, 1024]))
    )


@st.composite
def mamba(draw: Any, block: int) -> interface.MambaSpec:
    shapes = draw(st.sampled_from([((3, 64), (8, 16, 16)), ((4, 128),), ((8, 544, 32),)]))
    spec = interface.MambaSpec(
        block_size=draw(st.sampled_from([block, block, 4096])),
        shapes=shapes,
        dtypes=tuple(draw(st.sampled_from(FLOATS)) for _ in shapes),
        mamba_cache_mode=draw(st.sampled_from(["none", "align", "align", "all"])),
        num_speculative_blocks=draw(st.sampled_from([0, 1])),
        tp_replicated=draw(st.sampled_from([False, False, True])),
    )
    if draw(st.integers(0, 2)) == 0:
        extra = draw(st.sampled_from([0, 64, spec.page_size_bytes]))
        spec = interface.MambaSpec(**{**spec.__dict__, "page_size_padded": spec.page_size_bytes + extra})
    return spec


@st.composite
def hidden(draw: Any, block: int) -> interface.HiddenStateCacheSpec:
    return interface.HiddenStateCacheSpec(
        block_size=block,
        num_kv_heads=draw(st.sampled_from([1, 3, 4, 6])),
        head_size=draw(st.sampled_from([64, 576, 2048, 5120])),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
    )


@st.composite
def spec_sets(draw: Any, hidden_layers: tuple[int, ...] = (0, 1, 1, 1, 1, 2)) -> dict[str, Any]:
    """Layer name -> spec, in registration order: one to four kinds of layers, repeated, with hidden-state layers."""
    block = draw(st.sampled_from(BLOCKS))
    own = st.sampled_from([block] * 9 + [16])
    makers = (full_attention, full_attention, sliding, sliding, mamba, mla, chunked, sliding_mla)
    kinds = [draw(draw(st.sampled_from(makers))(draw(own))) for _ in range(draw(st.integers(1, 4)))]
    layers = [spec for spec in kinds for _ in range(draw(st.integers(1, 12)))]
    if draw(st.booleans()):
        layers = draw(st.permutations(layers))
    specs = {f"model.layers.{index}": spec for index, spec in enumerate(layers)}
    for index in range(draw(st.sampled_from(hidden_layers))):
        specs[f"cache_only_layers.{len(layers) + index}"] = draw(hidden(block))
    names = list(specs)
    if draw(st.integers(0, 4)) == 0:
        names = draw(st.permutations(names))
    return {name: specs[name] for name in names}


@st.composite
def scaled_sets(draw: Any) -> dict[str, Any]:
    """Small pages beside hidden rows that exceed them, so that every group must grow, by three and more too."""
    small = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": draw(st.sampled_from(FLOATS))}
    state = interface.MambaSpec(
        block_size=draw(st.sampled_from([16, 4096])),
        shapes=((draw(st.sampled_from([64, 1024, 2048])),),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode=draw(st.sampled_from(["none", "align"])),
        page_size_padded=draw(st.sampled_from([None, None, 4096, 8192])),
    )
    window = interface.SlidingWindowSpec(**small, sliding_window=64)
    padded = interface.FullAttentionSpec(**small, page_size_padded=draw(st.sampled_from([None, 4096, 5000])))
    kinds = draw(st.lists(st.sampled_from([state, state, window, padded]), min_size=2, max_size=4, unique=True))
    layers = [spec for spec in kinds for _ in range(draw(st.integers(1, 4)))]
    specs: dict[str, Any] = {f"model.layers.{index}": spec for index, spec in enumerate(layers)}
    specs["cache_only_layers.9"] = interface.HiddenStateCacheSpec(
        block_size=16, num_kv_heads=draw(st.integers(1, 6)), head_size=2048, dtype=torch.bfloat16
    )
    return specs
