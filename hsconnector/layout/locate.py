"""Find the hidden-state group among the engine's KV-cache groups, and its block size.

Both rules come from vllm#46301: the group is known by the type of its spec, never by its position or the name of its
layer, and its block size is its own, never `cache_config.block_size` (which is a common multiple for hybrid models).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsconnector.errors import LayoutError
from hsconnector.layout.specs import Composite, Group, HiddenState

__all__ = ["HiddenGroup", "check_view_block_size", "locate_hidden_group", "name_groups"]


@dataclass(frozen=True)
class HiddenGroup:
    """Where the hidden rows are: group `index`, `block_size` tokens a block.

    `spec` is the hidden layer's own spec, None where only a flattened group or no KV-cache config was given; then
    `layer_name` is None as well.
    """

    index: int
    layer_name: str | None
    block_size: int
    spec: HiddenState | None


def locate_hidden_group(groups: Sequence[Group] | None, global_block_size: int | None = None) -> HiddenGroup:
    """The group whose spec is a hidden-state spec, whatever its position; also inside a composite.

    `groups` is None where there is no KV-cache config: then group 0 and `global_block_size`. A single group without a
    hidden-state spec is group 0: the scheduler is given composites flattened to their first inner spec. Raises
    LayoutError, naming every group's spec, when several groups or none among several can hold hidden states
    (vllm#46301, vllm-ascend#9763).
    """
    if groups is None:
        if not global_block_size:
            raise LayoutError("without a KV-cache config the global block size is needed to read hidden states")
        return HiddenGroup(0, None, global_block_size, None)
    found = [
        HiddenGroup(index, name, spec.block_size, spec)
        for index, group in enumerate(groups)
        for name, spec in _hidden_members(group)
    ]
    if len(found) == 1:
        return found[0]
    if not found and len(groups) == 1:
        return HiddenGroup(0, None, groups[0].spec.block_size, None)
    if not groups:
        raise LayoutError(
            "the engine has no KV-cache group, so there is no place for hidden states; start it with "
            '--speculative-config \'{"method": "extract_hidden_states", ...}\''
        )
    if not found:
        raise LayoutError(
            f"none of {len(groups)} KV-cache groups has a hidden-state spec ({name_groups(groups)}); start the engine "
            'with --speculative-config \'{"method": "extract_hidden_states", ...}\', and on an out-of-tree platform '
            "check that it keeps the type HiddenStateCacheSpec"
        )
    raise LayoutError(
        f"{len(found)} hidden-state layers found where one is expected ({name_groups(groups)}); one connector reads "
        "one hidden-state cache"
    )


def check_view_block_size(spec_block_size: int, tensor_block_size: int) -> int:
    """How many kernel blocks of the registered tensor make one block of the spec.

    A tensor may be viewed in smaller kernel blocks than the spec's. Raises LayoutError with both numbers unless the
    spec's block size is a multiple of the tensor's (vllm#46301: 528 against 22 gave zeros).
    """
    if tensor_block_size <= 0 or spec_block_size <= 0 or spec_block_size % tensor_block_size:
        raise LayoutError(
            f"the hidden-state spec has blocks of {spec_block_size} tokens and the registered tensor has blocks of "
            f"{tensor_block_size}, which does not divide it: rows would be read from wrong slots. This engine lays "
            "its cache out in a way that this version of hsconnector does not know"
        )
    return spec_block_size // tensor_block_size


def name_groups(groups: Sequence[Group]) -> str:
    """Every group as "index: kind (block size)", for messages."""
    return "; ".join(
        f"group {index}: {group.spec.described}, {group.spec.block_size} tokens a block"
        for index, group in enumerate(groups)
    )


def _hidden_members(group: Group) -> list[tuple[str | None, HiddenState]]:
    if isinstance(group.spec, Composite):
        return [(name, spec) for name, spec in group.spec.layers if isinstance(spec, HiddenState)]
    if isinstance(group.spec, HiddenState):
        return [(name, group.spec) for name in group.layer_names] or [(None, group.spec)]
    return []
