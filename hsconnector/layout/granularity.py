"""Where prefix-cache hits can land: scheduler block size and hash block size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from hsconnector.errors import LayoutError
from hsconnector.layout.specs import ChunkedLocal, Composite, Group, HiddenState, Mamba, SlidingWindow, layer_specs

__all__ = ["BlockSizes", "check_granularity", "resolve_block_sizes"]


@dataclass(frozen=True)
class BlockSizes:
    """Tokens. `scheduler`: what the scheduler rounds to. `hash`: what block hashes cover. `hit`: where hits land."""

    scheduler: int
    hash: int
    hit: int


def resolve_block_sizes(groups: Sequence[Group], *, prefix_caching: bool) -> BlockSizes:
    """Scheduler, hash and hit block sizes of an engine with a connector (vllm#51108, `resolve_kv_cache_block_sizes`).

    One group: its own block size. Several: the scheduler takes the lcm, hashes the gcd. Hashing falls back to the lcm
    where a Mamba group's cache mode is not "align". Raises LayoutError where the engine does.
    """
    sizes = [group.spec.block_size for group in groups]
    scheduler = lcm(*sizes)
    if len(groups) <= 1 or _has_unaligned_mamba(groups):
        return BlockSizes(scheduler, scheduler, scheduler)
    unit = gcd(*([group.spec.block_size for group in groups if group.spec.prefix_cacheable] or sizes))
    fine = _mamba_allows_fine_hits(groups, unit)
    _check_compression(groups, unit if fine else scheduler, unit)
    fine = fine and prefix_caching and not _blocks_fine_hits(groups, unit)
    return BlockSizes(scheduler, unit, unit if fine else scheduler)


def check_granularity(groups: Sequence[Group], sizes: BlockSizes, *, prefix_caching: bool) -> None:
    """Refuse block sizes with which prefix caching cannot start or can never hit.

    [544, 544, 544, 544, 181] has the lcm 98,464: the engines before vllm#51108 hashed blocks of that many tokens and
    stopped with "block_size must be divisible by hash_block_size".
    """
    if not prefix_caching or len(groups) <= 1:
        return
    everyone = [group.spec.block_size for group in groups]
    others = [group.spec.block_size for group in groups if not isinstance(group.spec, HiddenState)]
    for group in groups:
        own = group.spec.block_size
        if isinstance(group.spec, HiddenState) and others and not _fits(own, lcm(*others)):
            raise LayoutError(
                f"KV-cache groups have blocks of {_listed(everyone)} tokens; the hidden group's {own} does not divide "
                f"the others, so their least common multiple is {lcm(*everyone):,} and prefix caching "
                "cannot work (vllm#51108). Take vLLM 0.32 or newer, or --no-enable-prefix-caching"
            )
    torn = [
        group.spec.block_size for group in groups if group.spec.prefix_cacheable and group.spec.block_size % sizes.hash
    ]
    if torn:
        raise LayoutError(
            f"KV-cache groups have blocks of {_listed(everyone)} tokens and hashes cover {sizes.hash:,}, which does "
            f"not divide {torn[0]}, so the engine stops at start. Take --mamba-cache-mode align, or "
            "--no-enable-prefix-caching"
        )


def _has_unaligned_mamba(groups: Sequence[Group]) -> bool:
    return any(
        isinstance(spec, Mamba) and spec.cache_mode != "align" for group in groups for spec in layer_specs(group.spec)
    )


def _mamba_allows_fine_hits(groups: Sequence[Group], unit: int) -> bool:
    return any(
        isinstance(spec, Mamba) and spec.cache_mode == "align" and spec.block_size > unit
        for group in groups
        for spec in layer_specs(group.spec)
    )


def _blocks_fine_hits(groups: Sequence[Group], unit: int) -> bool:
    """Sliding-window and chunked-local managers look up whole blocks only."""
    return any(
        isinstance(_managed(group), SlidingWindow | ChunkedLocal)
        and group.spec.prefix_cacheable
        and group.spec.block_size != unit
        for group in groups
    )


def _managed(group: Group) -> object:
    return group.spec.first if isinstance(group.spec, Composite) else group.spec


def _check_compression(groups: Sequence[Group], alignment: int, unit: int) -> None:
    compressed = {
        spec.tokens_per_row
        for group in groups
        for spec in layer_specs(group.spec)
        if spec.prefix_cacheable and isinstance(spec.tokens_per_row, int) and spec.tokens_per_row > 1
    }
    if any(alignment % tokens for tokens in compressed):
        raise LayoutError(
            f"hashes of {unit} tokens do not align with caches that keep one row for "
            f"{_listed(sorted(compressed))} tokens"
        )


def _fits(own: int, others: int) -> bool:
    return others % own == 0 or own % others == 0


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)
