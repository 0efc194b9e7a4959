"""How many tokens and requests fit: the pool's blocks, and what one request takes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsconnector.layout.specs import (
    ChunkedLocal,
    Group,
    Mamba,
    SlidingWindow,
    Spec,
    ceil_div,
    layer_specs,
    round_up,
)

__all__ = ["Capacity", "blocks_per_request", "capacity", "pool_bytes_per_block"]


@dataclass(frozen=True)
class Capacity:
    """Bytes are of one rank. `tokens` and `requests` are what the engine reports as KV-cache size and concurrency."""

    bytes_per_block: int
    blocks_per_request: int
    bytes_per_token: float
    num_blocks: int | None = None
    tokens: int | None = None
    requests: float | None = None


def pool_bytes_per_block(groups: Sequence[Group]) -> int:
    """Bytes of one block over all layers of the widest group; all groups draw their blocks from one pool."""
    return max(
        sum(round_up(spec.page_size_bytes, spec.stride_alignment_bytes) for _, spec in group.members)
        for group in groups
    )


def blocks_per_request(groups: Sequence[Group], max_model_len: int, in_flight_tokens: int) -> int:
    """Blocks that a request of the full length holds, over all groups."""
    return sum(
        max(_blocks(spec, max_model_len, in_flight_tokens) for spec in layer_specs(group.spec)) for group in groups
    )


def capacity(
    groups: Sequence[Group],
    *,
    max_model_len: int,
    in_flight_tokens: int,
    memory: int | None = None,
) -> Capacity:
    """What one rank's cache holds, for requests of the full length. `memory` is in bytes a rank."""
    per_block = pool_bytes_per_block(groups)
    per_request = blocks_per_request(groups, max_model_len, in_flight_tokens)
    plain = Capacity(per_block, per_request, per_block * per_request / max_model_len)
    if memory is None:
        return plain
    blocks = memory // per_block
    requests = blocks / per_request
    return Capacity(per_block, per_request, plain.bytes_per_token, blocks, int(requests * max_model_len), requests)


def _blocks(spec: Spec, max_model_len: int, in_flight_tokens: int) -> int:
    match spec:
        case SlidingWindow():
            kept = spec.sliding_window - 1 + spec.extra_retained_tokens + in_flight_tokens
            return ceil_div(min(kept, max_model_len), spec.block_size) + 1
        case ChunkedLocal():
            return ceil_div(min(spec.attention_chunk_size + in_flight_tokens, max_model_len), spec.block_size)
        case Mamba():
            states = 2 + spec.num_prefill_checkpoint_blocks if spec.cache_mode == "align" else 1
            return states + spec.num_speculative_blocks
    return ceil_div(max_model_len, spec.block_size)
