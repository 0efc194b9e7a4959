"""Which known defects of vLLM a plan runs into, and what an engine's refusal to start comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hsconnector.layout.specs import Group, Mamba
from hsconnector.vllm_facts import DEFECTS, Defect

__all__ = ["Circumstances", "biting", "explain_kv_refusal"]

INFLATED = 3.0
"""A hidden-state cache that takes this many times its rows' bytes is worth naming."""


@dataclass(frozen=True)
class Circumstances:
    """What a defect depends on. `inflation` is bytes the pool spends on hidden rows over the rows' own bytes."""

    groups: tuple[Group, ...]
    version: tuple[int, ...]
    device: str
    prefix_caching: bool
    pp: int
    inflation: float
    scaled: bool

    @property
    def hybrid(self) -> bool:
        return len(self.groups) > 1

    @property
    def has_mamba(self) -> bool:
        return any(isinstance(group.spec, Mamba) for group in self.groups)


def biting(case: Circumstances) -> list[Defect]:
    """The defects of the table that these groups run into under this version."""
    found = {
        "global block size": case.hybrid,
        "first group": case.hybrid,
        "hash block size": case.hybrid and case.prefix_caching,
        "row over page": case.scaled,
        "write side": case.hybrid and case.device == "cuda",
        "inflated budget": case.inflation > INFLATED,
        "mamba page": case.scaled and case.has_mamba,
        "pipeline": case.pp > 1,
    }
    return [
        defect
        for name, defect in DEFECTS.items()
        if found[name] and (defect.fixed_in is None or case.version < defect.fixed_in)
    ]


def explain_kv_refusal(log: str, expected_bytes: int) -> str | None:
    """What to say when an engine's log asks for far more KV cache than planned, None for any other.

    `expected_bytes` is a rank's KV cache for one request of the full length, rows included.
    """
    found = re.search(r"([0-9]+(?:\.[0-9]+)?)\s*GiB KV\s+cache\s+(?:is\s+)?needed", log)
    if found is None or float(found[1]) * 2**30 <= INFLATED * expected_bytes:
        return None
    defect = DEFECTS["inflated budget"]
    return (
        f"the engine asks for {found[1]} GiB of KV cache where {expected_bytes / 2**30:.2f} GiB were expected: "
        f"{defect.reports}, {defect.what}. What helps: {defect.helps}, or another vLLM version"
    )
