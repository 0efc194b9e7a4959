"""Which layers a speculators training run reads, in vLLM's counting."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsconnector.capture.shard import Capture
from hsconnector.errors import SettingsError

__all__ = ["TargetLayers", "target_layers_of"]

_STORED = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
"""How the speculators' checkpoints name their target layers."""


@dataclass(frozen=True)
class TargetLayers:
    """The trainer's slots: `targets` ascending, as the engine's drafter gets them, then `last`.

    `last` is N, the residual stream after the last layer and before the final norm, which the trainer applies itself.
    """

    targets: tuple[int, ...]
    last: int

    @property
    def slots(self) -> tuple[int, ...]:
        """The layer id of each slot the trainer expects; a target that is the last layer stands here twice."""
        return (*self.targets, self.last)

    @property
    def captured(self) -> tuple[int, ...]:
        """The layer ids of an engine that captures these and no others."""
        return tuple(sorted(set(self.slots)))

    def check(self, name: str, layer_ids: Sequence[int], num_layers: int) -> None:
        """Raises SettingsError where captures with these layers do not hold what the trainer reads."""
        if num_layers != self.last:
            raise SettingsError(
                f"{name} is of a model with {num_layers} decoder layers, the verifier has {self.last}: "
                "another model was captured"
            )
        missing = [layer for layer in self.captured if layer not in layer_ids]
        if missing:
            raise SettingsError(
                f"{name} holds layers {list(layer_ids)}, this run reads {list(self.captured)}: {missing} are missing; "
                f"start the engine with --layers {','.join(map(str, self.captured))}, or train with other "
                "--target-layer-ids"
            )

    def of(self, capture: Capture) -> torch.Tensor:
        """`[T, len(slots), H]` of a capture that holds these layers; shares its memory where nothing must move."""
        states: torch.Tensor = capture.hidden_states
        if capture.layer_ids == self.slots:
            return states
        return states.index_select(1, torch.tensor([capture.slot(layer) for layer in self.slots]))


def target_layers_of(args: argparse.Namespace) -> TargetLayers:
    """What a run with these resolved arguments reads; the defaults are the trainer's own."""
    from speculators.models.utils import get_verifier_config, resolve_target_layer_ids

    verifier, trust = args.verifier_name_or_path, bool(getattr(args, "trust_remote_code", False))
    last = int(get_verifier_config(verifier, trust_remote_code=trust).num_hidden_layers)
    if args.speculator_type == "mtp":
        return TargetLayers((), last)
    named = args.target_layer_ids
    if args.from_pretrained:
        named = _stored_layer_ids(args.from_pretrained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = resolve_target_layer_ids(named, verifier, trust_remote_code=trust)
    return TargetLayers(tuple(sorted(targets)), last)


def _stored_layer_ids(checkpoint: str) -> list[int] | None:
    """The target layers of a checkpoint that training goes on from, which overrule the command line's."""
    from transformers import PretrainedConfig

    stored: dict[str, Any] = PretrainedConfig.get_config_dict(checkpoint)[0]
    found: list[list[int]] = [stored[name] for name in _STORED if stored.get(name) is not None]
    return found[0] if found else None
