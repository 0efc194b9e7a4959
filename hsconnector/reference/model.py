"""What the states of a model should be: the same tokens through Hugging Face's forward pass.

Layer ids count as vLLM does: 0 is what enters the first decoder layer, `i` what leaves decoder layer `i - 1`, and N
what enters the final norm. Each is taken from the module that receives it, not from Hugging Face's
`output_hidden_states`, whose last entry is after the norm.

torch and transformers are imported when a model is loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from hsconnector.errors import SettingsError, UnsupportedError

__all__ = ["NORM_NAMES", "ReferenceModel"]

NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
"""What models call their final norm."""
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of experts that a router chooses from."""
_LAYER_NAMES = ("layers", "h", "blocks")


class ReferenceModel:
    """One checkpoint in Hugging Face's implementation."""

    def __init__(self, model: str | os.PathLike[str], *, dtype: str = "float32", device: str = "") -> None:
        """Loads a path or a hub name; `device` is a GPU where there is one. Raises SettingsError, UnsupportedError."""
        self._torch, model_class = _libraries()
        self.name, self.dtype = str(model), dtype
        self._others: dict[str, ReferenceModel] = {}
        self.device = device or ("cuda" if self._torch.cuda.is_available() else "cpu")
        try:
            loaded = model_class.from_pretrained(self.name, dtype=getattr(self._torch, dtype))
        except (OSError, ValueError) as error:
            raise SettingsError(f"cannot load {self.name} with transformers: {_first_line(error)}") from error
        self._model = loaded.to(self.device).eval()
        self._decoder = _decoder(self._model)
        self._layers = _child(self._decoder, _LAYER_NAMES, self.name)
        self._norm = _child(self._decoder, NORM_NAMES, self.name)

    @property
    def num_layers(self) -> int:
        """Decoder layers, N: the layer id before the final norm."""
        return len(self._layers)

    @property
    def is_routed(self) -> bool:
        """Whether a router chooses experts for each token."""
        config = self._model.config.get_text_config()
        return any((getattr(config, name, 0) or 0) > 1 for name in _EXPERT_COUNTS)

    def in_dtype(self, dtype: str) -> ReferenceModel:
        """The same checkpoint computed in another dtype, which is loaded when it is first asked for."""
        if dtype == self.dtype:
            return self
        if dtype not in self._others:
            self._others[dtype] = ReferenceModel(self.name, dtype=dtype, device=self.device)
        return self._others[dtype]

    def refuse_foreign(self, what: str, *, num_layers: int | str, lora: str) -> None:
        """Raises SettingsError where another model made `what`; an empty `num_layers` is not known."""
        if num_layers and str(num_layers) != str(self.num_layers):
            raise SettingsError(
                f"{what} is of a model with {num_layers} layers, {self.name} has {self.num_layers}: "
                "give its own checkpoint with --model"
            )
        if lora:
            raise SettingsError(f"{what} ran with the adapter {lora}, which {self.name} alone has not")

    def states(self, token_ids: Sequence[int], layer_ids: Sequence[int]) -> Any:
        """States `[T, L, H]` of one sequence, in this model's dtype, on the CPU; raises SettingsError."""
        unknown = [layer for layer in layer_ids if not 0 <= layer <= self.num_layers]
        if unknown:
            raise SettingsError(f"layer {unknown[0]} is outside the 0 to {self.num_layers} of {self.name}")
        with self._torch.inference_mode(), self._taps(sorted(set(layer_ids))) as caught:
            self._decoder(input_ids=self._torch.tensor([list(token_ids)], device=self.device), use_cache=False)
        return self._torch.stack([caught[layer] for layer in layer_ids], dim=1)

    def normed(self, states: Any) -> Any:
        """The final norm over the last dimension of `states`, on the CPU."""
        weight = next(self._norm.parameters())
        with self._torch.inference_mode():
            return self._norm(states.to(self.device, weight.dtype)).cpu()

    @contextlib.contextmanager
    def _taps(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Any]]:
        caught: dict[int, Any] = {}

        def tap(layer: int) -> Any:
            def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                entering = args[0] if args else kwargs["hidden_states"]
                caught[layer] = entering[0].detach().cpu()

            return hook

        modules = [*self._layers, self._norm]
        hooks = [modules[layer].register_forward_pre_hook(tap(layer), with_kwargs=True) for layer in layer_ids]
        try:
            yield caught
        finally:
            for hook in hooks:
                hook.remove()


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UnsupportedError(
            f"a reference pass needs torch and transformers: pip install 'hsconnector[verify]' ({error})"
        ) from error
    return torch, AutoModelForCausalLM


def _decoder(model: Any) -> Any:
    """The module that holds decoder layers and final norm, also inside a vision-language model."""
    decoder = model.get_decoder()
    return getattr(decoder, "language_model", decoder)


def _child(decoder: Any, names: Sequence[str], model: str) -> Any:
    for name in names:
        if getattr(decoder, name, None) is not None:
            return getattr(decoder, name)
    raise UnsupportedError(f"{model} is a {type(decoder).__name__}, which has none of {', '.join(names)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
