"""SpecForge 0.2.0: `.ckpt` files, torch dictionaries, read by `specforge.runtime.data_plane.offline_reader`.

All hold `input_ids` and `loss_mask`, `[T]` int64.

| format | states |
| --- | --- |
| `specforge-eagle3` | `aux_hidden_state` `[1, T, 3 * H]`, `hidden_state` `[1, T, H]` |
| `specforge-dflash` | `hidden_states` `[1, T, K * H]` |
| `specforge-dspark` | `hidden_states` `[1, T, K * H]`, `target_last_hidden_states` `[1, T, H]` |

The last layer is stored after the final norm, as SGLang hands it to the LM head. Rows are not shifted: SpecForge's
trainer moves targets itself. Its reader orders files by name, so row indices are padded with zeros. SpecForge counts
decoder layers from 0, one lower than vLLM.

EAGLE-3 drafts may have a draft vocabulary: `vocab_mapping-N.pt`, a torch dictionary of `d2t` and `t2d`, which its
trainer loads (SpecForge#18). It is what `process_token_dict_to_mappings` makes of these files where `data.max_length`
cuts none of them off. SpecForge keeps frequencies in no file, so there is none of them.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

from hsconnector.capture.layers import trainer_counting
from hsconnector.errors import SettingsError, ShardError, StoreError
from hsconnector.formats.draft_vocab import TokenCounts, mappings
from hsconnector.formats.sample import Exported, Layers, Sample, split_layers

__all__ = ["DFlash", "DSpark", "Eagle3"]


class _SpecForge:
    name = ""
    suffix = ".ckpt"
    post_norm = True
    has_mask = True
    is_shard = False
    needs_row = False
    vocab_size_names: tuple[str, ...] = ()
    aux_name = "hidden_states"
    last_name = ""

    def choose(self, layer_ids: tuple[int, ...], num_layers: int) -> Layers:
        layers = split_layers(self.name, layer_ids, num_layers, last=bool(self.last_name))
        if 0 in layers.aux:
            raise SettingsError(
                f"{self.name} counts decoder layers from 0 and cannot name the embeddings (vLLM's layer 0): "
                f"choose among {[layer for layer in layer_ids if layer]} with --layers"
            )
        if not layers.aux:
            raise SettingsError(f"{self.name} needs layers besides the last, the captures hold {list(layer_ids)}")
        return layers

    def counting(self, layers: Layers) -> str:
        return f'"dflash_config": {{"target_layer_ids": {list(trainer_counting(layers.aux))}}} in the draft\'s config'

    def file_name(self, row: int | None, capture_id: str) -> str:
        return f"capture_{capture_id}{self.suffix}" if row is None else f"row_{row:08d}{self.suffix}"

    def refusal(self, loss_mask: Any) -> str:
        if bool((loss_mask[:-1] & loss_mask[1:]).any()):
            return ""
        return "its loss mask has no two tokens in a row, without which SpecForge refuses a sample of this format"

    def vocabulary(self, counts: TokenCounts, size: int) -> dict[str, bytes]:
        """Of equally frequent tokens those that occur first are taken, by file and then by id.

        Where fewer than N tokens occur, those that do not are taken in the order in which CPython walks the set of
        ids below N that are missing, which is not always ascending: the trainer does so, and equal tables need it.
        """
        import torch

        missing = list(set(range(size)) - set(counts.tokens.tolist()))
        chosen = [*counts.by_frequency()[:size], *missing[: max(size - len(counts.tokens), 0)]]
        d2t, t2d = (torch.from_numpy(array) for array in mappings(chosen, counts.vocab_size))
        file = io.BytesIO()
        torch.save({"d2t": d2t, "t2d": t2d}, file)
        return {f"vocab_mapping-{size}.pt": file.getvalue()}

    def vocabulary_use(self, folder: Path, size: int) -> str:
        path = folder / f"vocab_mapping-{size}.pt"
        return f'model.vocab_mapping_path: {path} ("draft_vocab_size": {size} in the draft\'s config)'

    def write(self, sample: Sample, path: Path) -> None:
        import torch

        try:
            with path.open("wb") as file:
                torch.save(self._tensors(sample), file)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error

    def read(self, path: str | os.PathLike[str]) -> Exported:
        tensors = _load(path, ("input_ids", "loss_mask", self.aux_name, *filter(None, [self.last_name])))
        aux, last = tensors[self.aux_name], tensors.get(self.last_name)
        for name, tensor in ((self.aux_name, aux), (self.last_name, last)):
            if tensor is not None and (tensor.dim() != 3 or tensor.shape[0] != 1):
                raise ShardError(f"{name} of {path} is {list(tensor.shape)}, not [1, T, width]")
        return Exported(
            token_ids=tensors["input_ids"],
            aux=aux[0],
            last=None if last is None else last[0],
            loss_mask=tensors["loss_mask"],
        )

    def _tensors(self, sample: Sample) -> dict[str, Any]:
        """Each owns its memory: torch saves the whole storage behind a view."""
        states = sample.capture.hidden_states
        tensors = {
            "input_ids": sample.capture.token_ids.clone(),
            "loss_mask": sample.loss_mask.clone(),
            self.aux_name: states[:, : len(sample.layers.aux)].flatten(1).unsqueeze(0).clone(),
        }
        if self.last_name:
            if sample.norm is None:
                raise SettingsError(f"{self.name} stores the last layer after the final norm, which was not given")
            tensors[self.last_name] = sample.norm(states[:, -1]).unsqueeze(0)
        return tensors


class Eagle3(_SpecForge):
    """`training.strategy: eagle3`."""

    name = "specforge-eagle3"
    vocab_size_names: tuple[str, ...] = ("padded_vocab_size", "vocab_size")
    aux_name = "aux_hidden_state"
    last_name = "hidden_state"

    def choose(self, layer_ids: tuple[int, ...], num_layers: int) -> Layers:
        layers = super().choose(layer_ids, num_layers)
        if len(layers.aux) != 3:
            raise SettingsError(
                f"{self.name} needs three layers besides the last, {num_layers}, and there are {len(layers.aux)}: "
                f"{list(layers.aux)}; choose with --layers, or capture others"
            )
        return layers

    def counting(self, layers: Layers) -> str:
        ids = list(trainer_counting(layers.aux))
        return f'model.aux_hidden_state_layer_ids: {ids} ("eagle_aux_hidden_state_layer_ids" in the draft\'s config)'

    def refusal(self, loss_mask: Any) -> str:
        return "" if bool(loss_mask.any()) else "its loss mask is all zero: there is nothing to learn from it"


class DFlash(_SpecForge):
    """`training.strategy: dflash`; the last layer has no place in it."""

    name = "specforge-dflash"
    post_norm = False


class DSpark(_SpecForge):
    """`training.strategy: dspark`."""

    name = "specforge-dspark"
    last_name = "target_last_hidden_states"


def _load(path: str | os.PathLike[str], names: tuple[str, ...]) -> dict[str, Any]:
    import torch

    try:
        data = io.BytesIO(Path(path).read_bytes())
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        raw = torch.load(data, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError) as error:
        raise ShardError(f"{path} is no whole torch file: {str(error).strip().splitlines()[0]}") from error
    missing = [name for name in names if not isinstance(raw, dict) or not isinstance(raw.get(name), torch.Tensor)]
    if missing:
        raise ShardError(f"{path} lacks the tensors {', '.join(missing)}")
    return dict(raw)
