"""The final norm of a model, from its own checkpoint: what turns layer N's states into what the LM head reads.

Captures hold the last layer before this norm. SpecForge's files hold it after, so exporting to them needs the weight
(read from the safetensors file that holds it, nothing else of the checkpoint), the epsilon (from `config.json`) and
the family: how the two are applied. The families are those of the model classes in transformers, which the tests
compare with one by one; a model type that is not listed is refused, never guessed.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hsconnector.errors import SettingsError, UnsupportedError
from hsconnector.formats.checkpoint import Checkpoint
from hsconnector.reference.model import NORM_NAMES

__all__ = ["MODEL_TYPES", "FinalNorm", "NormKind", "load_norm"]


class NormKind(enum.StrEnum):
    """How a final norm is applied to a row `x` of H values."""

    RMS = "rms"
    """`x / sqrt(mean(x^2) + eps) * w`: Llama and most others."""
    RMS_PLUS_ONE = "rms+1"
    """`x / sqrt(mean(x^2) + eps) * (1 + w)`: Gemma 1 to 3, Qwen3-Next and Qwen3.5."""
    LAYER = "layer"
    """`(x - mean(x)) / sqrt(var(x) + eps) * w + b`, with `b` where the checkpoint has one."""
    LAYER_PLUS_ONE = "layer+1"
    """The same with `1 + w`: Nemotron."""


_RMS = """afmoe apertus arcee bitnet cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 flex_olmo
gemma3n_text gemma4_text glm glm4 glm4_moe gpt_oss granite granitemoe granitemoeshared helium hunyuan_v1_dense
hunyuan_v1_moe llama llama4_text minicpm3 minimax minimax_m2 ministral ministral3 mistral mixtral olmo2 olmo3 olmoe
phi3 qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3
solar_open youtu"""
_RMS_PLUS_ONE = """gemma gemma2 gemma3_text qwen3_5_moe_text qwen3_5_text qwen3_next vaultgemma"""
_LAYER = """cohere cohere2 falcon gpt2 gpt_neox phi phimoe stablelm starcoder2"""
_LAYER_PLUS_ONE = """nemotron"""

MODEL_TYPES: Mapping[str, NormKind] = {
    name: kind
    for kind, names in (
        (NormKind.RMS, _RMS),
        (NormKind.RMS_PLUS_ONE, _RMS_PLUS_ONE),
        (NormKind.LAYER, _LAYER),
        (NormKind.LAYER_PLUS_ONE, _LAYER_PLUS_ONE),
    )
    for name in names.split()
}
"""The `model_type` of a checkpoint's `config.json` (of its `text_config`, where it has one)."""

_EPS_NAMES = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_PREFIXES = (
    "",
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "transformer.",
    "gpt_neox.",
    "model.decoder.",
)


@dataclass(frozen=True)
class FinalNorm:
    """A final norm: call it with states `[..., H]`; the result has their dtype and is computed in float32."""

    kind: NormKind
    eps: float
    weight: Any = field(repr=False)
    """`[H]`, as stored."""
    bias: Any = field(default=None, repr=False)
    tensor: str = ""
    """The weight's name in the checkpoint."""

    def __call__(self, states: Any) -> Any:
        values = states.float()
        if self.kind in (NormKind.LAYER, NormKind.LAYER_PLUS_ONE):
            values = values - values.mean(dim=-1, keepdim=True)
        values = values * (values.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        weight = self.weight.float()
        if self.kind in (NormKind.RMS_PLUS_ONE, NormKind.LAYER_PLUS_ONE):
            weight = weight + 1
        values = values * weight
        if self.bias is not None:
            values = values + self.bias.float()
        return values.to(states.dtype)

    @property
    def description(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {"kind": str(self.kind), "eps": self.eps, "tensor": self.tensor}


def load_norm(
    model: str | os.PathLike[str] | Checkpoint, *, kind: NormKind | None = None, hidden_size: int = 0
) -> FinalNorm:
    """The final norm of a checkpoint, of its folder, or of a name that the hub's local cache or the hub itself knows.

    `kind` overrides what is known of the model type. Raises UnsupportedError for a model type that is not listed,
    SettingsError for a checkpoint that cannot be read or whose norm is not `hidden_size` wide.
    """
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint(model)
    kind = kind or _kind(str(checkpoint.text_config.get("model_type", "")), checkpoint.name)
    name = _weight_name(checkpoint)
    weight = checkpoint.tensor(name)
    if hidden_size and list(weight.shape) != [hidden_size]:
        raise SettingsError(
            f"{name} of {checkpoint.name} is {list(weight.shape)}, the captures are {hidden_size} wide: "
            "give the checkpoint that was captured with --model"
        )
    bias = name.removesuffix("weight") + "bias"
    return FinalNorm(
        kind=kind,
        eps=float(checkpoint.setting(_EPS_NAMES)),
        weight=weight,
        bias=checkpoint.tensor(bias) if bias in checkpoint.tensors else None,
        tensor=name,
    )


def _kind(model_type: str, name: str) -> NormKind:
    if model_type not in MODEL_TYPES:
        raise UnsupportedError(
            f"how {name} (model type {model_type!r}) applies its final norm is not known: look at its code and say "
            f"--norm {', '.join(kind.value for kind in NormKind)}, then prove it with --check"
        )
    return MODEL_TYPES[model_type]


def _weight_name(checkpoint: Checkpoint) -> str:
    names = [f"{prefix}{name}.weight" for prefix in _PREFIXES for name in NORM_NAMES]
    found = [name for name in names if name in checkpoint.tensors]
    if len(found) != 1:
        what = f"several tensors that may be its final norm: {', '.join(found)}" if found else "no final norm"
        raise UnsupportedError(
            f"{checkpoint.name} has {what}; known are {', '.join(NORM_NAMES)}, "
            f"alone or under {', '.join(_PREFIXES[1:])}"
        )
    return found[0]
