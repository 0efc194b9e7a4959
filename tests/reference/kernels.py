"""Captures as other kernels give them: Hugging Face in the capture's dtype, with what a device does differently."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

__all__ = ["KERNELS", "quantised_cache"]


def eager(path: Path, token_ids: Sequence[int], layer_ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return _states(_model(path, dtype, "eager"), [token_ids], layer_ids)


def batched(path: Path, token_ids: Sequence[int], layer_ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Three other sequences in the same pass: matrix products of another shape."""
    others = [list(reversed(token_ids)), [*token_ids[7:], *token_ids[:7]], [*token_ids[3:], *token_ids[:3]]]
    return _states(_model(path, dtype, "eager"), [token_ids, *others], layer_ids)


def in_chunks(path: Path, token_ids: Sequence[int], layer_ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Thirteen tokens a pass, over a KV cache in the model's dtype."""
    model, parts, cache = _model(path, dtype, "eager"), [], None
    for start in range(0, len(token_ids), 13):
        chunk = torch.tensor([list(token_ids[start : start + 13])])
        caught, cache = _run(model, layer_ids, input_ids=chunk, past_key_values=cache, use_cache=True)
        parts.append(caught)
    return torch.cat(parts)


def quantised_cache(path: Path, token_ids: Sequence[int], layer_ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Keys and values of eight bits (e4m3), as an engine keeps them under `--kv-cache-dtype fp8`."""
    tokens = torch.tensor([list(token_ids)])
    return _run(_model(path, dtype, "eager"), layer_ids, input_ids=tokens, past_key_values=_Eight(), use_cache=True)[0]


class _Eight(DynamicCache):
    def update(self, keys: torch.Tensor, values: torch.Tensor, *more: Any, **options: Any) -> Any:
        kept = [part.to(torch.float8_e4m3fn).to(part.dtype) for part in (keys, values)]
        return super().update(*kept, *more, **options)


KERNELS: dict[str, Callable[..., torch.Tensor]] = {"eager": eager, "batched": batched, "in chunks": in_chunks}


@functools.lru_cache(maxsize=8)
def _model(path: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()


def _states(model: PreTrainedModel, batch: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> torch.Tensor:
    return _run(model, layer_ids, input_ids=torch.tensor([list(row) for row in batch]), use_cache=False)[0]


def _run(model: PreTrainedModel, layer_ids: Sequence[int], **inputs: Any) -> tuple[torch.Tensor, Any]:
    caught: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, inputs: caught.append(inputs[0]))
    try:
        with torch.no_grad():
            output = model.model(output_hidden_states=True, **inputs)
    finally:
        hook.remove()
    states = [*output.hidden_states[:-1], caught[0]]
    return torch.stack([states[layer][0] for layer in layer_ids], dim=1), output.past_key_values
