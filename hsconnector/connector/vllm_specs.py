"""vLLM's own spec objects as ours, told apart by class name through the MRO."""

from __future__ import annotations

from typing import Any

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
    Spec,
)

# Classes with a parent of ours but rules of their own: a reference window, sinks, ring buffers.
_APART = {
    "RSWASpec",
    "SinkFullAttentionSpec",
    "CircularBufferSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
}


def spec_from_vllm(spec: Any) -> Spec:
    """One `KVCacheSpec` of the engine as a spec of ours; a class that the rules do not know becomes `Other`."""
    for cls in type(spec).__mro__:
        if cls.__name__ in _APART:
            break
        translate = _TRANSLATIONS.get(cls.__name__)
        if translate is not None:
            return translate(spec)
    return Other(
        class_name=type(spec).__name__,
        block_size=spec.block_size,
        reported_page_bytes=spec.page_size_bytes,
        cacheable=bool(getattr(spec, "prefix_cacheable", True)),
    )


def groups_from_vllm(groups: Any) -> tuple[Group, ...]:
    """`kv_cache_config.kv_cache_groups` as groups of ours, in the engine's order."""
    return tuple(Group(tuple(group.layer_names), spec_from_vllm(group.kv_cache_spec)) for group in groups)


def _common(spec: Any) -> dict[str, Any]:
    alignment = getattr(spec, "block_stride_alignment", None)
    base = getattr(alignment, "base", None)
    return {
        "block_size": spec.block_size,
        "block_stride_alignment": alignment if base is None else KernelBlocks(base),
    }


def _attention(spec: Any) -> dict[str, Any]:
    return _common(spec) | {
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "dtype": _dtype(spec.dtype),
        "quant_mode": _enum(getattr(spec, "kv_quant_mode", "none")),
        "page_size_padded": spec.page_size_padded,
        "num_head_slots": getattr(spec, "num_head_slots", None),
        "state_content_bytes": getattr(spec, "state_content_bytes", None),
        "tokens_per_state": getattr(spec, "tokens_per_state", 1),
        "dcp_sharded": getattr(spec, "dcp_sharded", True),
        "max_tp_shards": getattr(spec, "max_tp_shards", None),
    }


def _full(spec: Any) -> FullAttention:
    return FullAttention(**_full_fields(spec))


def _full_fields(spec: Any) -> dict[str, Any]:
    return _attention(spec) | {
        "sliding_window": spec.sliding_window,
        "attention_chunk_size": spec.attention_chunk_size,
        "non_causal": getattr(spec, "non_causal", False),
    }


def _mla_fields(spec: Any) -> dict[str, Any]:
    return _full_fields(spec) | {
        "cache_dtype": spec.cache_dtype_str,
        "alignment": getattr(spec, "alignment", None),
        "model_version": getattr(spec, "model_version", None),
        "cache_role": _enum(getattr(spec, "cache_role", "sparse")),
        "is_index_group_leader": getattr(spec, "is_index_group_leader", False),
        "non_causal_multi_token_decode": getattr(spec, "non_causal_multi_token_decode", False),
    }


def _mla(spec: Any) -> MLA:
    return MLA(**_mla_fields(spec))


def _hidden(spec: Any) -> HiddenState:
    return HiddenState(**_mla_fields(spec))


def _sliding_fields(spec: Any) -> dict[str, Any]:
    return _attention(spec) | {
        "sliding_window": spec.sliding_window,
        "extra_retained_tokens": getattr(spec, "extra_retained_tokens", 0),
    }


def _sliding(spec: Any) -> SlidingWindow:
    return SlidingWindow(**_sliding_fields(spec))


def _sliding_mla(spec: Any) -> SlidingWindowMLA:
    return SlidingWindowMLA(
        **_sliding_fields(spec),
        cache_dtype=spec.cache_dtype_str,
        alignment=spec.alignment,
        model_version=spec.model_version,
        bounded_replay=getattr(spec, "bounded_replay", False),
    )


def _chunked(spec: Any) -> ChunkedLocal:
    return ChunkedLocal(**_attention(spec), attention_chunk_size=spec.attention_chunk_size)


def _mamba(spec: Any) -> Mamba:
    return Mamba(
        **_common(spec),
        shapes=tuple(tuple(shape) for shape in spec.shapes),
        dtypes=tuple(_dtype(dtype) for dtype in spec.dtypes),
        page_size_padded=spec.page_size_padded,
        mamba_type=_enum(spec.mamba_type),
        cache_mode=spec.mamba_cache_mode,
        num_speculative_blocks=spec.num_speculative_blocks,
        num_prefill_checkpoint_blocks=getattr(spec, "num_prefill_checkpoint_blocks", 0),
        prefill_checkpoint_alignment=getattr(spec, "prefill_checkpoint_alignment", None),
        num_heads=getattr(spec, "num_heads", 1),
        tp_replicated=getattr(spec, "tp_replicated", False),
    )


def _composite(spec: Any) -> Composite:
    return Composite(
        block_size=spec.block_size,
        layers=tuple((name, spec_from_vllm(inner)) for name, inner in spec.kv_cache_specs.items()),
    )


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _enum(value: Any) -> str:
    return str(getattr(value, "name", value)).lower()


_TRANSLATIONS = {
    "HiddenStateCacheSpec": _hidden,
    "MLAAttentionSpec": _mla,
    "FullAttentionSpec": _full,
    "SlidingWindowMLASpec": _sliding_mla,
    "SlidingWindowSpec": _sliding,
    "ChunkedLocalAttentionSpec": _chunked,
    "MambaSpec": _mamba,
    "UniformTypeKVCacheSpecs": _composite,
}
