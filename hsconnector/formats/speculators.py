"""speculators: `hs_{row}.safetensors`, the shard itself.

Read by `hs_connectors.transfer.FileTransfer` and `speculators.train.data`: `hidden_states` `[T, L, H]`, of which the
last slot is taken as the verifier's last layer before the final norm and the others, flattened, as what the drafter
reads; `token_ids` `[T]` int64, equal to the data set's row. The loss mask stays in the data set.

A draft vocabulary is `token_freq.pt` (a dictionary of counts by token id) with `d2t-N.npy` and `t2d-N.npy`, as
`speculators.train.vocab_mapping` makes them of the data set. Of equally frequent tokens the lowest ids are taken, and
where fewer than N occur the lowest ids that do not.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from hsconnector.capture.header import build_header, data_hasher
from hsconnector.capture.shard import open_shard
from hsconnector.errors import ShardError, StoreError
from hsconnector.formats.draft_vocab import TokenCounts, mappings
from hsconnector.formats.sample import Exported, Layers, Sample, split_layers

__all__ = ["Speculators"]


class Speculators:
    """The offline files of `speculators train`."""

    name = "speculators"
    suffix = ".safetensors"
    post_norm = False
    has_mask = False
    is_shard = True
    needs_row = True
    vocab_size_names: tuple[str, ...] = ("vocab_size",)

    def choose(self, layer_ids: tuple[int, ...], num_layers: int) -> Layers:
        return split_layers(self.name, layer_ids, num_layers, last=True)

    def counting(self, layers: Layers) -> str:
        shown = " ".join(map(str, layers.aux))
        return f"--target-layer-ids {shown} (speculators counts as vLLM does; layer {layers.last} is added by itself)"

    def file_name(self, row: int | None, capture_id: str) -> str:
        return f"hs_{row}{self.suffix}"

    def refusal(self, loss_mask: Any) -> str:
        return ""

    def vocabulary(self, counts: TokenCounts, size: int) -> dict[str, bytes]:
        chosen = counts.sorted_by_id().by_frequency()[:size]
        unseen = np.setdiff1d(np.arange(size), counts.tokens)
        d2t, t2d = mappings([*chosen, *unseen[: size - len(chosen)]], counts.vocab_size)
        frequencies = dict(zip(counts.tokens.tolist(), counts.counts.tolist(), strict=True))
        return {
            "token_freq.pt": _saved(frequencies),
            f"d2t-{size}.npy": _saved_array(d2t),
            f"t2d-{size}.npy": _saved_array(t2d),
        }

    def vocabulary_use(self, folder: Path, size: int) -> str:
        return (
            f"--draft-vocab-size {size} --d2t-path {folder / f'd2t-{size}.npy'} --t2d-path {folder / f't2d-{size}.npy'}"
        )

    def write(self, sample: Sample, path: Path) -> None:
        capture = sample.capture
        header, data = shard_parts(capture.hidden_states, capture.token_ids, capture.metadata, capture.layer_ids)
        try:
            with path.open("wb") as file:
                file.write(header)
                for piece in data:
                    file.write(piece)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error

    def read(self, path: str | os.PathLike[str]) -> Exported:
        capture = open_shard(path, verify=True)
        if not capture.layer_ids:
            raise ShardError(f"{path} holds no layers")
        states = capture.hidden_states
        return Exported(token_ids=capture.token_ids, aux=states[:, :-1].flatten(1), last=states[:, -1])


def shard_parts(
    hidden_states: Any, token_ids: Any, metadata: Any, layer_ids: tuple[int, ...]
) -> tuple[bytes, list[memoryview]]:
    """A shard as header and pieces of data, laid out as the sidecar does; the metadata is the capture's.

    `hidden_states` `[T, L, H]`, `token_ids` `[T]`. `data_hash` is that of this data section.
    """
    pieces = [_bytes(hidden_states), _bytes(token_ids)]
    hasher = data_hasher()
    for piece in pieces:
        hasher.update(piece)
    about = dict(metadata) | {"layer_ids": json.dumps(list(layer_ids), separators=(",", ":"))}
    about["data_hash"] = hasher.hexdigest()
    dtype = str(hidden_states.dtype).removeprefix("torch.")
    return build_header(about, dtype, tuple(hidden_states.shape)), pieces


def _saved(value: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _saved_array(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _bytes(tensor: Any) -> memoryview:
    import torch

    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
