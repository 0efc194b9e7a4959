"""What vLLM does to KV-cache groups, block sizes and pages when a hidden-state layer joins a model.

Each rule names the vLLM pull request that it comes from. The functions take and give specs of ours, so a geometry can
be asked about before a GPU is taken. `tests/layout/test_against_vllm.py` compares them with the installed engine.

The rules are those of KV-cache layouts that keep layers apart. The ones that pack pages of several sizes into a block
(`VLLM_KV_CACHE_LAYOUT=BLHNC`, or an attention backend that takes no other, such as DeepSeek-V4's indexer) cannot be
planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from hsconnector.errors import LayoutError
from hsconnector.layout.merging import composite_of, is_uniform_spec, merge
from hsconnector.layout.promote import full_allocation_groups, unify_hybrid
from hsconnector.layout.specs import MLA, Attention, Composite, Group, HiddenState, Mamba, Spec, ceil_div

__all__ = [
    "Grouping",
    "PageMismatch",
    "common_page",
    "form_groups",
    "group_size",
    "hidden_block_size",
    "largest_divisor_at_most",
    "page_scale",
    "scale_groups",
    "unify_pages",
]


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """What besides the specs decides about groups.

    `hybrid_manager`: False with `--disable-hybrid-kv-cache-manager`.
    `split_threshold`: where the largest kind has fewer layers than this many times the smallest, the larger count is
    the group size (vllm#36684; it was 1.25). `as_engine`: scale only the pages that vLLM 0.32.0 scales.
    """

    hybrid_manager: bool = True
    split_threshold: float = 1.5
    as_engine: bool = False


class PageMismatch(LayoutError):
    """Pages that no block size brings to one size."""


def form_groups(specs: Mapping[str, Spec], grouping: Grouping | None = None) -> tuple[Group, ...]:
    """The engine's KV-cache groups for these layers, in its order (`get_kv_cache_groups`).

    Raises LayoutError where the engine refuses to start.
    """
    grouping = grouping or Grouping()
    if not grouping.hybrid_manager:
        specs = unify_hybrid(specs)
    if not specs:
        return ()
    layers = list(specs.values())
    if is_uniform_spec(layers):
        return (Group(tuple(specs), merge(layers)),)
    composite = composite_of(specs)
    if composite is not None:
        return (Group(tuple(specs), composite),)

    hidden = {name: spec for name, spec in specs.items() if isinstance(spec, HiddenState)}
    target = {name: spec for name, spec in specs.items() if name not in hidden}
    try:
        target = unify_pages(target)
    except PageMismatch:
        fallback = full_allocation_groups(specs)
        if fallback is None:
            raise
        return fallback
    groups = _equal_groups(target, grouping.split_threshold)
    return _with_hidden(groups, hidden, grouping) if hidden else groups


def unify_pages(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Every layer with the widest layer's page: by a larger block, or by padding (Mamba, attention other than MLA)."""
    widest = max((spec.page_size_bytes for spec in specs.values()), default=0)
    return {name: _with_page(name, spec, widest) for name, spec in specs.items()}


def group_size(counts: Sequence[int], threshold: float = 1.5) -> int:
    """Layers of each group, given how many layers each kind has (vllm#36684).

    The smallest count, unless the largest is less than `threshold` times as many: then padding the smaller kinds costs
    less than splitting the larger one.
    """
    return max(counts) if max(counts) < min(counts) * threshold else min(counts)


def page_scale(row_bytes: int, page_bytes: int) -> int:
    """By how much all other groups grow so that one hidden row fits a page (vllm#50894): 6,144 over 4,096 gives 2."""
    return ceil_div(row_bytes, page_bytes) if row_bytes > page_bytes else 1


def scale_groups(groups: Sequence[Group], scale: int, *, as_engine: bool = False) -> tuple[Group, ...]:
    """Groups with block sizes and pages `scale` times as large (vllm#50894).

    The engine scales the block size and an explicit padded page. A Mamba page follows its states, not its block size,
    and stays small there; the layers inside a composite stay behind it. Here both follow.
    """
    if scale == 1:
        return tuple(groups)
    return tuple(Group(group.layer_names, _scaled(group.spec, scale, as_engine)) for group in groups)


def hidden_block_size(page_bytes: int, row_bytes: int, other_block_sizes: Sequence[int]) -> int:
    """The hidden group's block size: the largest divisor of the others' gcd that fits a page (vllm#51108).

    544-token blocks, a page of 1,114,112 bytes and rows of 6,144 bytes give 136, not 181.
    """
    return largest_divisor_at_most(gcd(*other_block_sizes), max(page_bytes // row_bytes, 1))


def largest_divisor_at_most(value: int, limit: int) -> int:
    return next(candidate for candidate in range(min(value, limit), 0, -1) if value % candidate == 0)


def common_page(groups: Sequence[Group]) -> int:
    """Bytes of one layer's page, the same for every group; LayoutError where they differ."""
    pages = {group.spec.page_size_bytes for group in groups}
    if len(pages) != 1:
        raise LayoutError(
            f"groups have pages of {', '.join(f'{page:,}' for page in sorted(pages))} bytes and need one size"
        )
    return pages.pop()


def _with_page(name: str, spec: Spec, page: int) -> Spec:
    own = spec.page_size_bytes
    if own == page:
        return spec
    if isinstance(spec, Mamba):
        return replace(spec, page_size_padded=page)
    if page % own == 0:
        grown = spec.with_block_size(spec.block_size * (page // own))
    elif isinstance(spec, Attention) and not isinstance(spec, MLA):
        grown = replace(spec, page_size_padded=page)
    else:
        raise PageMismatch(
            f"layer {name}: a {spec.described} page of {own:,} bytes divides the widest page of {page:,} bytes neither "
            "evenly nor may it be padded, so the engine refuses to start"
        )
    if not _has_page(grown, page):
        raise LayoutError(
            f"layer {name}: a {spec.described} page of {own:,} bytes, padding included, does not grow to {page:,} "
            "with its block size, so the engine refuses to start"
        )
    return grown


def _has_page(spec: Spec, page: int) -> bool:
    try:
        return spec.page_size_bytes == page
    except LayoutError:
        return False


def _equal_groups(specs: Mapping[str, Spec], threshold: float) -> tuple[Group, ...]:
    kinds = _kinds(specs)
    if not kinds:
        raise LayoutError(
            "only hidden-state layers of different block sizes are left: there is no model to extract from"
        )
    size = group_size([len(names) for names in kinds], threshold)
    groups: list[Group] = []
    for names in kinds:
        split = ceil_div(len(names), size)
        for index in range(split):
            members = names[index::split]
            groups.append(Group(tuple(members), merge([specs[name] for name in members])))
    return tuple(groups)


def _kinds(specs: Mapping[str, Spec]) -> list[list[str]]:
    """Layer names by spec, specs that merge together, in order of first appearance."""
    by_spec: dict[Spec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    kinds: list[tuple[list[str], list[Spec]]] = []
    for spec, names in by_spec.items():
        for known_names, known_specs in kinds:
            if _merges([*known_specs, spec]):
                known_names.extend(names)
                known_specs.append(spec)
                break
        else:
            kinds.append((list(names), [spec]))
    return [names for names, _ in kinds]


def _merges(specs: Sequence[Spec]) -> bool:
    try:
        merge(specs)
    except LayoutError:
        return False
    return True


def _with_hidden(groups: tuple[Group, ...], hidden: Mapping[str, HiddenState], grouping: Grouping) -> tuple[Group, ...]:
    page = common_page(groups)
    scale = page_scale(max(spec.row_bytes for spec in hidden.values()), page)
    groups = scale_groups(groups, scale, as_engine=grouping.as_engine)
    page *= scale
    sizes = [group.spec.block_size for group in groups]
    aligned = tuple(
        Group(
            (name,),
            replace(spec, block_size=hidden_block_size(page, spec.row_bytes, sizes), page_size_padded=page),
        )
        for name, spec in hidden.items()
    )
    return groups + aligned


def _scaled(spec: Spec, scale: int, as_engine: bool) -> Spec:
    block_size = spec.block_size * scale
    if isinstance(spec, Composite):
        layers = spec.layers if as_engine else tuple((n, _scaled(s, scale, as_engine)) for n, s in spec.layers)
        return replace(spec, block_size=block_size, layers=layers)
    if isinstance(spec, Mamba) and not as_engine:
        return replace(spec, block_size=block_size, page_size_padded=spec.page_size_bytes * scale)
    if isinstance(spec, Attention | Mamba) and spec.page_size_padded is not None:
        return replace(spec, block_size=block_size, page_size_padded=spec.page_size_padded * scale)
    return spec.with_block_size(block_size)
