"""Which layers a drafter is trained on, in vLLM's counting.

A layer id of vLLM's is 0 for the embeddings and `i` for the residual stream after decoder layer `i - 1`; `N` is the
last layer before the final norm. SGLang, SpecForge, TorchSpec and DFlash's own code count decoder layers from 0, so
their number is one lower.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hsconnector.errors import SettingsError

__all__ = [
    "PRESETS",
    "LayerChoice",
    "choose_layers",
    "dflash_layers",
    "eagle3_layers",
    "parse_layer_ids",
    "slot_name",
    "trainer_counting",
]

PRESETS = ("auto", "eagle3", "dflash")
_IDS = re.compile(r"\s*-?[0-9]+\s*(,\s*-?[0-9]+\s*)*")


@dataclass(frozen=True)
class LayerChoice:
    """`layer_ids` ascending, in vLLM's counting; `preset` is "eagle3", "dflash:K" or "given"."""

    preset: str
    layer_ids: tuple[int, ...]
    num_layers: int

    @property
    def has_last(self) -> bool:
        """Whether the slot that a trainer projects to logits (pre-norm) is among them."""
        return self.num_layers in self.layer_ids


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """`[2, N//2, N-3]`, the defaults of vLLM's `SupportsEagle3`, and `N`; fewer where a small model makes two equal."""
    return _within(num_layers, (2, num_layers // 2, num_layers - 3, num_layers))


def dflash_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """DFlash's even spread of `count` decoder layers from 1 to `N - 3`, one higher in vLLM's counting, and `N`."""
    if count < 1:
        raise SettingsError(f"dflash needs at least one layer, not {count}")
    if count == 1:
        spread = [num_layers // 2]
    else:
        span = num_layers - 4
        spread = [round(1 + index * span / (count - 1)) for index in range(count)]
    return _within(num_layers, [decoder_layer + 1 for decoder_layer in spread] + [num_layers])


def choose_layers(asked: str, num_layers: int) -> LayerChoice:
    """What `--layers` means: "auto" (EAGLE-3), "eagle3", "dflash" (K of 5), "dflash:K", or ids such as "2,18,33,36".

    Raises SettingsError for anything else, for an id outside [0, N] and for a repeated id.
    """
    word = asked.strip().lower()
    if word in ("auto", "eagle3"):
        return LayerChoice("eagle3", eagle3_layers(num_layers), num_layers)
    name, colon, count = word.partition(":")
    if name == "dflash" and (not colon or count.isdecimal()):
        spread = int(count) if colon else 5
        return LayerChoice(f"dflash:{spread}", dflash_layers(num_layers, spread), num_layers)
    if not _IDS.fullmatch(word):
        raise SettingsError(f"--layers {asked!r} is none of {', '.join(PRESETS)}, dflash:K, nor ids such as 2,18,33,36")
    return LayerChoice("given", parse_layer_ids(asked, num_layers), num_layers)


def parse_layer_ids(text: str, num_layers: int, *, option: str = "--layers") -> tuple[int, ...]:
    """Layer ids from "2,18,33,36", ascending; raises SettingsError for one outside [0, N] and for a repeated one.

    vLLM sorts the ids and drops repeats, so a repeat would leave slots empty.
    """
    if not _IDS.fullmatch(text):
        raise SettingsError(f"{option} takes layer ids such as 2,18,33,36, not {text!r}")
    ids = [int(word) for word in text.split(",")]
    outside = [layer for layer in ids if not 0 <= layer <= num_layers]
    if outside:
        raise SettingsError(
            f"layer {outside[0]} is outside this model's 0 to {num_layers} "
            f"(0 is the embeddings, {num_layers} the last layer before the final norm)"
        )
    repeated = [layer for index, layer in enumerate(ids) if layer in ids[:index]]
    if repeated:
        raise SettingsError(f"layer {repeated[0]} is given twice in {option} {text}; each layer fills one slot")
    return tuple(sorted(ids))


def trainer_counting(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The same layers as SGLang, SpecForge, TorchSpec and DFlash count them: one lower, -1 for the embeddings."""
    return tuple(layer - 1 for layer in layer_ids)


def slot_name(layer_id: int) -> str:
    """ "embed" or "after_layer_I", I being the decoder layer's index from 0 as Hugging Face names its modules."""
    return "embed" if layer_id == 0 else f"after_layer_{layer_id - 1}"


def _within(num_layers: int, ids: Sequence[int]) -> tuple[int, ...]:
    if num_layers < 1:
        raise SettingsError(f"a model needs at least one layer, not {num_layers}")
    return tuple(sorted({layer for layer in ids if 0 < layer <= num_layers}))
