"""vLLM's own spec objects as ours, told apart by class name through the MRO."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
        kind = _KINDS.get(cls.__name__)
        if kind is not None:
            return _composite(spec) if kind is Composite else _same_fields(kind, spec)
    return Other(
        class_name=type(spec).__name__,
        block_size=spec.block_size,
        reported_page_bytes=spec.page_size_bytes,
        cacheable=bool(getattr(spec, "prefix_cacheable", True)),
    )


def groups_from_vllm(groups: Any) -> tuple[Group, ...]:
    """`kv_cache_config.kv_cache_groups` as groups of ours, in the engine's order."""
    return tuple(Group(tuple(group.layer_names), spec_from_vllm(group.kv_cache_spec)) for group in groups)


def _same_fields(kind: type[Spec], spec: Any) -> Spec:
    """A spec of ours from one of the engine's, field by field."""
    given = {}
    for field in dataclasses.fields(kind):
        theirs = _NAMES.get(field.name, field.name)
        if field.name not in _NEWER or hasattr(spec, theirs):
            given[field.name] = _VALUES.get(field.name, _as_it_is)(getattr(spec, theirs))
    return kind(**given)


def _composite(spec: Any) -> Composite:
    return Composite(
        block_size=spec.block_size,
        layers=tuple((name, spec_from_vllm(inner)) for name, inner in spec.kv_cache_specs.items()),
    )


def _as_it_is(value: Any) -> Any:
    return value


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _enum(value: Any) -> str:
    return str(getattr(value, "name", value)).lower()


def _alignment(value: Any) -> Any:
    base = getattr(value, "base", None)
    return value if base is None else KernelBlocks(base)


_NAMES = {"quant_mode": "kv_quant_mode", "cache_dtype": "cache_dtype_str", "cache_mode": "mamba_cache_mode"}
"""The engine's name of a field, where ours is another."""
_VALUES: dict[str, Callable[[Any], Any]] = {
    "block_stride_alignment": _alignment,
    "dtype": _dtype,
    "dtypes": lambda dtypes: tuple(map(_dtype, dtypes)),
    "shapes": lambda shapes: tuple(map(tuple, shapes)),
    "quant_mode": _enum,
    "cache_role": _enum,
    "mamba_type": _enum,
}
_NEWER = {
    "alignment",
    "block_stride_alignment",
    "bounded_replay",
    "cache_role",
    "dcp_sharded",
    "extra_retained_tokens",
    "is_index_group_leader",
    "max_tp_shards",
    "model_version",
    "non_causal",
    "non_causal_multi_token_decode",
    "num_head_slots",
    "num_heads",
    "num_prefill_checkpoint_blocks",
    "prefill_checkpoint_alignment",
    "quant_mode",
    "state_content_bytes",
    "tokens_per_state",
    "topk_buffer_width",
    "tp_replicated",
}
"""Fields that not every version has; without one our default holds. All others must be there."""

_KINDS: dict[str, type[Spec]] = {
    "HiddenStateCacheSpec": HiddenState,
    "MLAAttentionSpec": MLA,
    "FullAttentionSpec": FullAttention,
    "SlidingWindowMLASpec": SlidingWindowMLA,
    "SlidingWindowSpec": SlidingWindow,
    "ChunkedLocalAttentionSpec": ChunkedLocal,
    "MambaSpec": Mamba,
    "UniformTypeKVCacheSpecs": Composite,
}
