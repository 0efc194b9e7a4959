"""Which specs may share one block table: vLLM's `merge` and `UniformTypeKVCacheSpecs.is_uniform_type`, on our specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from hsconnector.errors import LayoutError
from hsconnector.layout.specs import (
    MLA,
    Attention,
    ChunkedLocal,
    Composite,
    FullAttention,
    Mamba,
    Other,
    SlidingWindow,
    SlidingWindowMLA,
    Spec,
)

__all__ = ["Unmergeable", "composite_of", "is_uniform_spec", "is_uniform_type", "merge"]


class Unmergeable(LayoutError):
    """These specs cannot be one spec; the engine tries something else."""


def merge(specs: Sequence[Spec]) -> Spec:
    """One spec for layers of one group, of the first one's type.

    Raises Unmergeable where vLLM's assertion fails, and LayoutError for two windows, which vLLM lets end the start.
    """
    cls = type(specs[0])
    if issubclass(cls, MLA):
        return _merge_mla(cls, specs)
    if issubclass(cls, FullAttention):
        return _merge_full(cls, specs)
    if issubclass(cls, SlidingWindowMLA):
        return _merge_sliding_mla(cls, specs)
    if any(spec != specs[0] for spec in specs):
        raise Unmergeable("layers of one group must have equal specs")
    return specs[0]


def is_uniform_spec(specs: Sequence[Spec]) -> bool:
    """Whether all layers merge into one spec, so that the model has one plain group."""
    if not specs:
        return True
    try:
        merge(specs)
    except Unmergeable:
        return False
    return True


def is_uniform_type(specs: Sequence[Spec]) -> bool:
    """Whether layers need the same token slots though their pages differ, so that they fit one composite.

    MLA and hidden-state layers count as full attention here: this is how a hidden layer comes into a composite.
    """
    first = specs[0]
    if any(spec.block_size != first.block_size or _dcp_sharded(spec) != _dcp_sharded(first) for spec in specs):
        return False
    return all(_same_type(first, spec) for spec in specs)


def composite_of(specs: Mapping[str, Spec]) -> Composite | None:
    """One composite over these layers, None where they are not of one type."""
    members = tuple(specs.items())
    if not members or not is_uniform_type([spec for _, spec in members]):
        return None
    return Composite(block_size=members[0][1].block_size, layers=members)


def _same_type(first: Spec, spec: Spec) -> bool:
    match first:
        case SlidingWindowMLA():
            return (
                isinstance(spec, SlidingWindowMLA)
                and spec.sliding_window == first.sliding_window
                and spec.bounded_replay == first.bounded_replay
            )
        case SlidingWindow():
            return isinstance(spec, SlidingWindow) and spec.sliding_window == first.sliding_window
        case ChunkedLocal():
            return isinstance(spec, ChunkedLocal) and spec.attention_chunk_size == first.attention_chunk_size
        case Mamba():
            return isinstance(spec, Mamba) and _mamba_shape(spec) == _mamba_shape(first)
        case FullAttention():
            return isinstance(spec, FullAttention)
        case Other():
            return isinstance(spec, Other) and spec.class_name == first.class_name
    return False


def _mamba_shape(spec: Mamba) -> tuple[object, ...]:
    return (
        spec.num_speculative_blocks,
        spec.num_prefill_checkpoint_blocks,
        spec.prefill_checkpoint_alignment,
        spec.page_size_bytes,
        spec.tp_replicated,
    )


def _dcp_sharded(spec: Spec) -> bool:
    return isinstance(spec, Attention) and spec.dcp_sharded


_SHARED = tuple(field.name for field in fields(Attention))
_LATENT = ("cache_dtype", "tokens_per_state", "model_version", "block_stride_alignment")
_MLA_ALIKE = (*_LATENT, "cache_role", "is_index_group_leader", "topk_buffer_width")
_SLIDING_MLA_ALIKE = (
    *_LATENT,
    "sliding_window",
    "extra_retained_tokens",
    "bounded_replay",
    "dcp_sharded",
    "max_tp_shards",
)


def _differ(specs: Sequence[Spec], names: Sequence[str]) -> bool:
    return len({tuple(getattr(spec, name) for name in names) for spec in specs}) > 1


def _merge_full(cls: type[FullAttention], specs: Sequence[Spec]) -> FullAttention:
    layers = [spec for spec in specs if isinstance(spec, FullAttention)]
    if len(layers) < len(specs):
        raise Unmergeable("all layers of a full-attention group must be full attention")
    if any(isinstance(spec, MLA) for spec in layers):
        raise Unmergeable("MLA layers do not merge into a full-attention group")
    window = _one_window({spec.sliding_window for spec in layers} - {None})
    chunk = _one_window({spec.attention_chunk_size for spec in layers} - {None})
    merged = cls(
        **{name: getattr(layers[0], name) for name in _SHARED},
        sliding_window=window,
        attention_chunk_size=chunk,
        non_causal=any(spec.non_causal for spec in layers),
    )
    _same_attention(layers, merged)
    if window is not None and chunk is not None:
        raise Unmergeable("a group cannot have sliding-window and chunked-local layers")
    return merged


def _merge_mla(cls: type[MLA], specs: Sequence[Spec]) -> MLA:
    layers = [spec for spec in specs if isinstance(spec, MLA)]
    if len(layers) < len(specs):
        raise Unmergeable("all layers of an MLA group must be MLA")
    if _differ(layers, _MLA_ALIKE):
        raise Unmergeable("MLA layers of one group must have one dtype, compression, version, role and index width")
    first = layers[0]
    # As in the engine: the alignment and the value width are not carried over, the padded page is.
    merged = cls(
        **{name: getattr(first, name) for name in _SHARED if name != "head_size_v"},
        cache_dtype=first.cache_dtype,
        model_version=first.model_version,
        cache_role=first.cache_role,
        is_index_group_leader=first.is_index_group_leader,
        topk_buffer_width=first.topk_buffer_width,
        non_causal_multi_token_decode=any(spec.non_causal_multi_token_decode for spec in layers),
    )
    _same_attention(layers, merged)
    return merged


def _merge_sliding_mla(cls: type[SlidingWindowMLA], specs: Sequence[Spec]) -> SlidingWindowMLA:
    layers = [spec for spec in specs if isinstance(spec, SlidingWindowMLA)]
    if len(layers) < len(specs):
        raise Unmergeable("all layers of a sliding-window MLA group must be sliding-window MLA")
    if _differ(layers, _SLIDING_MLA_ALIKE):
        raise Unmergeable("sliding-window MLA layers of one group must have one dtype, window and policy")
    return replace(layers[0], alignment=None, head_size_v=0, quant_mode="none")


def _same_attention(specs: Sequence[Attention], merged: Attention) -> None:
    if any(getattr(spec, name) != getattr(merged, name) for spec in specs for name in _SHARED):
        raise Unmergeable("all attention layers of one group must have the same heads, sizes and dtype")


def _one_window(windows: set[int | None]) -> int | None:
    if len(windows) > 1:
        raise LayoutError(
            f"attention layers of one group have windows of {', '.join(map(str, sorted(w for w in windows if w)))} "
            "tokens, and the engine takes one: it refuses to start. Do not set --disable-hybrid-kv-cache-manager"
        )
    return next(iter(windows), None)
