"""Captures of a tiny model from Hugging Face's forward pass, in a real sidecar, and the data set they are of."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.feeding import Feeder
from tests.models import NUM_LAYERS, random_token_ids

LAYERS = (1, 3, 5, NUM_LAYERS)
"""Three in the middle and the last before the final norm: enough for every format."""


@dataclass(frozen=True)
class DataSet:
    """Rows of token ids with their masks."""

    token_ids: list[list[int]]
    masks: list[list[int]]

    def write_lines(self, path: Path) -> Path:
        rows = zip(self.token_ids, self.masks, strict=True)
        path.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n" for ids, mask in rows))
        return path


def make_rows(count: int, *, seed: int = 0) -> DataSet:
    """Rows of 5 to 40 tokens whose masks leave out the first third."""
    lengths = [5 + (7 * row + seed) % 36 for row in range(count)]
    token_ids = [random_token_ids(length, seed=seed * 1000 + row) for row, length in enumerate(lengths)]
    return DataSet(token_ids, [[int(token >= length // 3) for token in range(length)] for length in lengths])


@functools.lru_cache(maxsize=4)
def model_in(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def captured_states(path: Path, token_ids: Sequence[int], layer_ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What an engine in `dtype` would capture: `[T, L, H]`, the last before the final norm."""
    model = model_in(path, dtype)
    caught: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, inputs: caught.append(inputs[0]))
    try:
        with torch.no_grad():
            output = model.model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    states = [*output.hidden_states[:-1], caught[0]]
    return torch.stack([states[layer][0] for layer in layer_ids], dim=1)


def feed(
    url: str,
    model: Path,
    rows: Iterable[tuple[int, list[int]]],
    *,
    layer_ids: Sequence[int] = LAYERS,
    dtype: torch.dtype = torch.float32,
    dataset: str = "chats",
    weights_id: str = "",
    called: str = "",
) -> list[str]:
    """Sends a capture of each (row index, token ids), as an engine would; their ids."""
    hidden = model_in(model, dtype).config.hidden_size
    about = {"layer_ids": layer_ids, "hidden_size": hidden, "num_layers": NUM_LAYERS}
    with Feeder(url, model=called or str(model), dtype=dtype, weights_id=weights_id, **about) as feeder:
        return [
            feeder.capture(
                captured_states(model, ids, layer_ids, dtype),
                ids,
                dataset=dataset,
                sample_id=str(row),
                request_id=f"cmpl-{row}-0badcafe",
            )
            for row, ids in rows
        ]
