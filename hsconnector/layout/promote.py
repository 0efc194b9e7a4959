"""Local-attention layers managed as full attention: `--disable-hybrid-kv-cache-manager` and the engine's fallback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hsconnector.errors import LayoutError
from hsconnector.layout.merging import composite_of, is_uniform_spec, is_uniform_type
from hsconnector.layout.specs import (
    MLA,
    Attention,
    ChunkedLocal,
    FullAttention,
    Group,
    HiddenState,
    SlidingWindow,
    SlidingWindowMLA,
    Spec,
)

__all__ = ["full_allocation_groups", "promote_local_layers", "unify_hybrid"]


def unify_hybrid(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """What `--disable-hybrid-kv-cache-manager` does: local layers become full attention for allocation.

    Replicated layers (`dcp_sharded` False) are looked at apart from the others. Raises LayoutError where no one type
    comes out, for instance with Mamba layers.
    """
    unified = dict(specs)
    for replicated in (False, True):
        side = {name: spec for name, spec in specs.items() if _replicated(spec) is replicated}
        if side:
            unified.update(promote_local_layers(side))
    return unified


def promote_local_layers(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Sliding-window and chunked-local specs as full attention, where full attention is among the layers."""
    promoted = dict(specs)
    layers = list(specs.values())
    if _is_one_type(promoted):
        return promoted
    if any(isinstance(spec, FullAttention) for spec in layers):
        block_sizes = {spec.block_size for spec in layers if isinstance(spec, FullAttention)}
        shared = next(iter(block_sizes)) if len(block_sizes) == 1 else None
        for name, spec in specs.items():
            if isinstance(spec, SlidingWindow | ChunkedLocal):
                promoted[name] = _as_full(spec, shared or spec.block_size)
    if not _is_one_type(promoted):
        kinds = ", ".join(sorted({spec.described for spec in layers}))
        raise LayoutError(
            f"--disable-hybrid-kv-cache-manager cannot bring these layers to one type ({kinds}); leave the option out"
        )
    return promoted


def full_allocation_groups(specs: Mapping[str, Spec]) -> tuple[Group, ...] | None:
    """The engine's way out where pages cannot be unified: MLA beside a plain sliding window, in one composite.

    Never taken when a hidden-state layer is there: then the engine refuses to start.
    """
    layers = list(specs.values())
    if any(isinstance(spec, HiddenState | SlidingWindowMLA | ChunkedLocal) for spec in layers):
        return None
    has_mla = any(isinstance(spec, MLA) for spec in layers)
    if not (has_mla and any(isinstance(spec, SlidingWindow) for spec in layers)):
        return None
    try:
        composite = composite_of(promote_local_layers(specs))
    except LayoutError:
        return None
    return None if composite is None else (Group(tuple(specs), composite),)


def _is_one_type(specs: Mapping[str, Spec]) -> bool:
    layers = list(specs.values())
    return is_uniform_spec(layers) or is_uniform_type(layers)


def _as_full(spec: SlidingWindow | ChunkedLocal, block_size: int) -> FullAttention:
    if isinstance(spec, SlidingWindowMLA):
        raise LayoutError(
            "--disable-hybrid-kv-cache-manager cannot turn sliding-window MLA layers into full attention in vLLM "
            "0.32.0 (its replacement fails on the field bounded_replay); leave the option out"
        )
    shared: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(Attention)}
    shared |= {"block_size": block_size, "page_size_padded": _promoted_padding(spec, block_size)}
    if isinstance(spec, SlidingWindow):
        return FullAttention(**shared, sliding_window=spec.sliding_window)
    return FullAttention(**shared, attention_chunk_size=spec.attention_chunk_size)


def _promoted_padding(spec: Attention, block_size: int) -> int | None:
    if spec.page_size_padded is None:
        return None
    return max(spec.page_size_padded, spec.dense_page_bytes * block_size // spec.block_size)


def _replicated(spec: Spec) -> bool:
    return isinstance(spec, Attention) and not spec.dcp_sharded
