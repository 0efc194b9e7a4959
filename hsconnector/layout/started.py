"""What a started engine did, checked against the rules: the connector calls this once a side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsconnector.errors import LayoutError
from hsconnector.layout.granularity import BlockSizes, check_granularity, resolve_block_sizes
from hsconnector.layout.locate import HiddenGroup, locate_hidden_group, name_groups
from hsconnector.layout.rules import hidden_block_size
from hsconnector.layout.specs import Group, HiddenState

__all__ = ["ROW_DTYPES", "StartReport", "check_started"]

ROW_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class StartReport:
    """What the connector reads from; `block_sizes` is None without a KV-cache config."""

    hidden: HiddenGroup
    num_groups: int
    block_sizes: BlockSizes | None
    prefix_caching: bool
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """One line for the log."""
        parts = [f"hidden states in KV-cache group {self.hidden.index} of {self.num_groups}"]
        if self.hidden.layer_name:
            parts[0] += f" ({self.hidden.layer_name})"
        parts.append(f"{self.hidden.block_size} tokens a block")
        if self.hidden.spec is not None:
            waste, page = self.hidden.spec.waste_bytes, self.hidden.spec.page_size_bytes
            parts.append(f"{waste:,} of {page:,} bytes of each page unused ({waste / page:.0%})")
        if self.block_sizes is not None:
            hits = (
                f"prefix-cache hits every {self.block_sizes.hit} tokens" if self.prefix_caching else "no prefix cache"
            )
            parts.append(f"scheduler block {self.block_sizes.scheduler}, hash block {self.block_sizes.hash}, {hits}")
        return "; ".join([*parts, *self.notes])


def check_started(
    groups: Sequence[Group] | None,
    *,
    cache_block_size: int,
    prefix_caching: bool,
    hash_block_size: int | None = None,
    num_slots: int | None = None,
    hidden_size: int | None = None,
) -> StartReport:
    """Check the engine's groups against the rules, and say where the hidden states are.

    `groups` is None without a KV-cache config. `cache_block_size` and `hash_block_size` are the engine's own numbers
    (`cache_config.block_size`, `kv_cache_config.hash_block_size`; None where a version has none). `num_slots` and
    `hidden_size` are what the rows should hold. Raises LayoutError on what is known to give wrong rows or no start.
    """
    hidden = locate_hidden_group(groups, cache_block_size)
    if hidden.spec is not None:
        _check_rows(hidden.spec, num_slots, hidden_size)
    if not groups:
        return StartReport(hidden, 1, None, prefix_caching)
    sizes = resolve_block_sizes(groups, prefix_caching=prefix_caching)
    notes = _hidden_size_notes(groups, hidden)
    if hash_block_size and hash_block_size != sizes.hash:
        notes.append(f"the engine hashes {hash_block_size} tokens where {sizes.hash} were expected")
        sizes = BlockSizes(sizes.scheduler, hash_block_size, sizes.hit)
    check_granularity(groups, sizes, prefix_caching=prefix_caching)
    return StartReport(hidden, len(groups), sizes, prefix_caching, tuple(notes))


def _check_rows(spec: HiddenState, num_slots: int | None, hidden_size: int | None) -> None:
    if spec.quant_mode != "none" or spec.dtype not in ROW_DTYPES:
        raise LayoutError(
            f"the hidden-state cache is kept as {spec.dtype} (quantisation {spec.quant_mode}); rows can be read from "
            f"{', '.join(ROW_DTYPES)} only. Start the engine with --kv-cache-dtype auto"
        )
    if spec.tokens_per_state != 1 or spec.num_head_slots is not None or spec.state_content_bytes is not None:
        raise LayoutError(
            "the hidden-state cache is packed by its attention backend, so its rows cannot be read exactly"
        )
    if num_slots is not None and spec.num_kv_heads != num_slots:
        raise LayoutError(
            f"the hidden-state cache has {spec.num_kv_heads} slots where {num_slots} layers were asked for"
        )
    if hidden_size is not None and spec.head_size != hidden_size:
        raise LayoutError(
            f"the hidden-state cache has rows of {spec.head_size} where the model's size is {hidden_size}"
        )
    if spec.page_size_bytes < spec.block_size * spec.row_bytes:
        raise LayoutError(
            f"a hidden-state page of {spec.page_size_bytes:,} bytes cannot hold {spec.block_size} rows of "
            f"{spec.row_bytes:,} bytes"
        )


def _hidden_size_notes(groups: Sequence[Group], hidden: HiddenGroup) -> list[str]:
    """Where the engine's choice of block size is sound but not what vllm#51108 gives."""
    others = [group.spec.block_size for index, group in enumerate(groups) if index != hidden.index]
    if hidden.spec is None or hidden.spec.page_size_padded is None or not others:
        return []
    expected = hidden_block_size(hidden.spec.page_size_bytes, hidden.spec.row_bytes, others)
    if expected == hidden.block_size:
        return []
    return [f"{expected} tokens a block were expected beside {name_groups(groups)}"]
