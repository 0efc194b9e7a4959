"""Grouping for the packed (block-outermost) layout: pages of several sizes lie side by side in one block.

vLLM takes it where the attention backend asks for it (DeepSeek-V4's indexer) or `VLLM_KV_CACHE_LAYOUT=BLHNC` says so
(`_get_packed_kv_cache_groups`). Blocks are strided by the widest group, so a hidden-state group is not aligned to a
page and keeps the global block size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hsconnector.errors import LayoutError
from hsconnector.layout.merging import composite_of, is_uniform_type
from hsconnector.layout.specs import Composite, Group, Mamba, SlidingWindow, Spec, ceil_div

__all__ = ["closest_divisor", "packed_groups"]


@dataclass(frozen=True)
class Bucket:
    """Layers of one type; `layers_by_page` names them by page size, in order of appearance."""

    composite: Composite
    layers_by_page: dict[int, list[str]]

    @property
    def repeats(self) -> int:
        """Layers that share the commonest page size: how often a balanced bucket repeats its pattern."""
        return max(len(names) for names in self.layers_by_page.values())

    @property
    def balanced(self) -> bool:
        """One layer of each page size a repeat."""
        return len({len(names) for names in self.layers_by_page.values()}) == 1

    def widest_bytes(self, split: int) -> int:
        """Page bytes of the largest of the `split` groups this bucket is split into."""
        return sum(ceil_div(len(names), split) * page for page, names in self.layers_by_page.items())


def packed_groups(specs: Mapping[str, Spec]) -> tuple[Group, ...] | None:
    """Groups of composites for a block-outermost layout; None where one page size makes packing pointless."""
    if len({spec.page_size_bytes for spec in specs.values()}) <= 1:
        return None
    buckets = _buckets(specs)
    mixed = [bucket.repeats for bucket in buckets if bucket.balanced and len(bucket.layers_by_page) > 1]
    repeats = (
        closest_divisor([bucket.repeats for bucket in buckets if bucket.balanced], at_least=max(mixed))
        if mixed
        else None
    )

    def splits(bucket: Bucket) -> int:
        return ceil_div(bucket.repeats, repeats) if bucket.balanced and repeats is not None else 1

    def holds_states(bucket: Bucket) -> bool:
        first = bucket.composite.first
        return isinstance(first, Mamba) or (repeats is None and isinstance(first, SlidingWindow))

    anchor = max(
        bucket.widest_bytes(len(bucket.composite.layers) if holds_states(bucket) else splits(bucket))
        for bucket in buckets
    )
    groups: list[Group] = []
    for bucket in buckets:
        split = splits(bucket)
        if holds_states(bucket):
            states_per_block = max(anchor // bucket.composite.first.page_size_bytes, 1)
            split = max(split, ceil_div(len(bucket.composite.layers), states_per_block))
        groups.extend(_split(bucket, split))
    return tuple(groups)


def closest_divisor(values: Sequence[int], *, at_least: int) -> int:
    """The chunk size from `at_least` up that needs the least padding over all values; the larger one of equals."""
    lowest = max(1, at_least)
    highest = max(values)
    if lowest > highest:
        return lowest
    return min(range(lowest, highest + 1), key=lambda size: (sum(-value % size for value in values), -size))


def _buckets(specs: Mapping[str, Spec]) -> list[Bucket]:
    members: list[dict[str, Spec]] = []
    for name, spec in specs.items():
        for bucket in members:
            if is_uniform_type([*bucket.values(), spec]):
                bucket[name] = spec
                break
        else:
            members.append({name: spec})
    return [_bucket(bucket) for bucket in members]


def _bucket(specs: Mapping[str, Spec]) -> Bucket:
    layers_by_page: dict[int, list[str]] = {}
    for name, spec in specs.items():
        layers_by_page.setdefault(spec.page_size_bytes, []).append(name)
    return Bucket(_composite(specs), layers_by_page)


def _split(bucket: Bucket, split: int) -> list[Group]:
    specs = dict(bucket.composite.layers)
    if split == 1:
        return [Group(tuple(specs), bucket.composite)]
    if not bucket.balanced:
        raise LayoutError(
            f"the packed KV-cache layout splits {len(specs)} {bucket.composite.first.described} layers of "
            f"{len(bucket.layers_by_page)} page sizes and loses some of them, so the engine does not start; set "
            "VLLM_KV_CACHE_LAYOUT=LBNHC"
        )
    repeats = list(zip(*bucket.layers_by_page.values(), strict=True))
    groups = []
    for index in range(split):
        names = [name for repeat in repeats[index::split] for name in repeat]
        groups.append(Group(tuple(names), _composite({name: specs[name] for name in names})))
    return groups


def _composite(specs: Mapping[str, Spec]) -> Composite:
    composite = composite_of(specs)
    if composite is None:
        raise LayoutError(f"layers {', '.join(specs)} cannot share one block table")
    return composite
