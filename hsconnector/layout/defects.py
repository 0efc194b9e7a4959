"""Known defects of engines and trainers that a plan can run into: public reports, versions, and what helps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hsconnector.layout.specs import Composite, Group, HiddenState, Mamba

__all__ = ["DEFECTS", "Circumstances", "Defect", "biting", "explain_kv_refusal", "parse_version"]

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

    @property
    def has_composite(self) -> bool:
        return any(isinstance(group.spec, Composite) for group in self.groups)

    @property
    def hidden_block_size(self) -> int:
        return next((group.spec.block_size for group in self.groups if isinstance(group.spec, HiddenState)), 0)


@dataclass(frozen=True)
class Defect:
    """`fixed_in` is the first version without it, None while it is open in 0.32. `at_start`: it can end the start."""

    reports: str
    fixed_in: tuple[int, ...] | None
    what: str
    helps: str
    at_start: bool = False


DEFECTS = {
    "global block size": Defect(
        "vllm#46301, vllm#44328",
        (0, 32),
        "the example connector read rows with the global block size: zeros, or an index out of bounds",
        "vLLM 0.32 or newer; this connector reads the hidden group's own block size",
    ),
    "first group": Defect(
        "vllm#45849",
        (0, 32),
        "the hidden-state group was taken to be group 0 and its new blocks were not zeroed: NaN rows",
        "vLLM 0.32 or newer",
    ),
    "hash block size": Defect(
        "vllm#51108",
        (0, 32),
        "the hidden group's block size did not divide the others: prefix caching ends the start",
        "vLLM 0.32 or newer, or --no-enable-prefix-caching",
        at_start=True,
    ),
    "row over page": Defect(
        "vllm#50894",
        (0, 32),
        "one hidden row is larger than a KV page and the engine did not scale its blocks",
        "vLLM 0.32 or newer, fewer layers, or a smaller --tp",
        at_start=True,
    ),
    "write side": Defect(
        "vllm#51328",
        None,
        "the writer took the main group's slots for the hidden group on some runners: zeros and NaN in hybrids",
        "look at the verdicts of the first captures (zero_rows, non_finite); run hsconnector verify",
    ),
    "inflated budget": Defect(
        "vllm#53243, vllm#56774",
        None,
        "each hidden-state block takes a whole block of the widest group, many times its rows' bytes",
        "fewer layers, a smaller --max-model-len, or --disable-hybrid-kv-cache-manager where that starts",
        at_start=True,
    ),
    "mamba page": Defect(
        "vllm 0.32.0",
        None,
        "one hidden row is larger than a KV page, and the engine scales attention pages but not Mamba pages",
        "fewer layers, a smaller --tp, or a larger --block-size",
        at_start=True,
    ),
    "pipeline": Defect(
        "vllm#49811, vllm#53015",
        None,
        "only the V2 model runner hands hidden states across pipeline stages, and only for some models",
        "--tp in place of --pp",
        at_start=True,
    ),
}


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


def parse_version(text: str) -> tuple[int, ...]:
    """(0, 32, 0) from "0.32.0+cpu"; what is not a number ends it."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
