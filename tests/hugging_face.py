"""What a capture must hold: the same tokens through Hugging Face's own forward pass, in float32.

Independent of `hsconnector.reference.model` on purpose, so that the product is not compared with itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def reference_states(path: str | Path, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
    """Hidden states `[T, L, H]`, float32, in vLLM's counting; layer id N is the one before the final norm."""
    last = _one_pass(path, token_ids, layer_ids)
    for _ in range(5):
        states = _one_pass(path, token_ids, layer_ids)
        if torch.equal(states, last):
            return states
        last = states
    raise AssertionError("no two passes of Hugging Face in a row were equal: this machine cannot be measured on")


def _one_pass(path: str | Path, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
    """On a shared machine one pass was seen to be off in a few rows: `reference_states` takes two that are equal."""
    model = reference_model(str(path))
    caught: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, inputs: caught.append(inputs[0]))
    try:
        with torch.no_grad():
            output = model.model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    (before_norm,) = caught
    states = [*output.hidden_states[:-1], before_norm]
    return torch.stack([states[layer][0] for layer in layer_ids], dim=1)


def final_norm(path: str | Path, states: torch.Tensor) -> torch.Tensor:
    """The model's final norm over the last dimension of `states`, float32."""
    with torch.no_grad():
        return reference_model(str(path)).model.norm(states.float())


def reference_tokens(path: str | Path, token_ids: Sequence[int], count: int) -> list[int]:
    """The next `count` greedy tokens, end tokens ignored."""
    model, tokens = reference_model(str(path)), list(token_ids)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(token_ids) :]


@functools.lru_cache(maxsize=4)
def reference_model(path: str) -> PreTrainedModel:
    """The checkpoint in float32, kept for the next call."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
