"""Batches of several samples: `pad` to the longest, or `Pack` into a budget of tokens.

Both take dictionaries. A tensor whose first dimension is the tokens of its sample (that of `token_ids`, or else of
`input_ids`) is put together along it; anything else (`sample_id`, `lease`, …) becomes a list, one of each sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsconnector.errors import SettingsError

__all__ = ["Pack", "pad"]

Batch = dict[str, Any]


def pad(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """`[B, T, …]` with zeros after each sample's end; with `lengths` `[B]` and `attention_mask` `[B, T]`, int64."""
    lengths = torch.tensor([_length(sample) for sample in samples])
    longest = int(lengths.max()) if samples else 0
    batch: Batch = {name: [sample[name] for sample in samples] for name in _names(samples)}
    for name in _per_token(samples):
        batch[name] = torch.stack([_filled([tensor], longest, tensor.dtype) for tensor in batch[name]])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {**batch, "lengths": lengths, "attention_mask": mask}


@dataclass(frozen=True)
class Pack:
    """Samples one after another in `[1, max_tokens, …]`, zeros after the last, as speculators 0.9 packs them.

    `position_ids` count from 0 in each sample, `document_ids` say which sample a token is of, -1 for padding, both
    `[1, max_tokens]` int64. Tokens beyond the budget are cut off, as speculators does (`CollateFn` in its
    `train/data.py`), and counted in `tokens_cut`: let `lengths` and a sampler, or `batch_tokens`, choose what fits.
    """

    max_tokens: int
    dtype: torch.dtype | None = None
    """Of floating-point tensors; None leaves them as they are."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        if not samples:
            raise SettingsError("a batch without samples cannot be packed: nothing tells its shapes")
        lengths = torch.tensor([_length(sample) for sample in samples])
        numbered = [{**sample, "position_ids": torch.arange(_length(sample))} for sample in samples]
        batch: Batch = {name: [sample[name] for sample in numbered] for name in _names(numbered)}
        for name in _per_token(numbered):
            first = batch[name][0].dtype
            dtype = self.dtype if self.dtype is not None and first.is_floating_point else first
            batch[name] = _filled(batch[name], self.max_tokens, dtype)[None]
        documents = torch.repeat_interleave(torch.arange(len(samples)), lengths)
        placed = torch.full((self.max_tokens,), -1)
        placed[: len(documents)] = documents[: self.max_tokens]
        cut = max(0, len(documents) - self.max_tokens)
        return {**batch, "document_ids": placed[None], "tokens_cut": cut}


def _filled(tensors: Sequence[torch.Tensor], length: int, dtype: torch.dtype) -> torch.Tensor:
    """Tensors one after another, cut or filled with zeros to `length` rows; each is copied once."""
    filled = torch.zeros((length, *tensors[0].shape[1:]), dtype=dtype)
    done = 0
    for tensor in tensors:
        count = min(len(tensor), length - done)
        filled[done : done + count] = tensor[:count]
        done += count
    return filled


def _length(sample: Mapping[str, Any]) -> int:
    tokens = sample.get("token_ids", sample.get("input_ids"))
    if tokens is None:
        raise SettingsError(f"a sample with the keys {list(sample)} has neither token_ids nor input_ids")
    return len(tokens)


def _names(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(samples[0]) if samples else []


def _per_token(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        name
        for name in _names(samples)
        if all(isinstance(sample[name], torch.Tensor) and len(sample[name]) == _length(sample) for sample in samples)
    ]
