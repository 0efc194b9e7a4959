"""Exported files against what was written, and against a Hugging Face forward pass of the same tokens.

A file passes where its bytes and its mask are those that the manifest has hashes of, its tokens are those of the sample
it claims to be, and its states are those of the layers it claims to hold, with the last one on the claimed side of the
final norm, by the rule of `hsconnector.reference.comparison`. What is compared is read from the file as the trainer
reads it, not from the capture it was made of.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hsconnector.errors import ShardError, StoreError
from hsconnector.formats.manifest import ONES, Description, ManifestEntry, file_hash
from hsconnector.formats.sample import Exported, Format
from hsconnector.prompts.labels import mask_hash, token_hash
from hsconnector.reference.model import ReferenceModel
from hsconnector.reference.passes import Claim

__all__ = ["CheckedFile", "ExportCheck"]


@dataclass(frozen=True)
class CheckedFile:
    """What came of one file; `problem` is empty where it passed."""

    file: str
    problem: str = ""
    largest_relative: float = 0.0
    """The largest distance of any row and slot from its reference, relative to the length that it should have."""
    scales: float = 0.0
    """The same in what rounding moves that row by."""

    def __str__(self) -> str:
        return f"{self.file}: {self.problem or 'equal'}"


@dataclass(frozen=True)
class ExportCheck:
    """An export, and the checkpoint that its files are compared with."""

    format: Format
    description: Description
    reference: ReferenceModel

    def files(
        self, folder: Path, entries: Mapping[str, ManifestEntry], compared: Container[str] | None = None
    ) -> Iterator[CheckedFile]:
        """Every file, in the order of its entry; `compared` are those whose states are compared, None for all.

        Raises SettingsError where it is another model's export.
        """
        about = self.description
        self.reference.refuse_foreign("the export", num_layers=about.num_layers, lora=about.lora)
        for entry in entries.values():
            yield self._file(folder / entry.file, entry, compared is None or entry.file in compared)

    def _file(self, path: Path, entry: ManifestEntry, compared: bool) -> CheckedFile:
        try:
            changed = "has other bytes than were written" if _changed(path, entry) else ""
            if not changed and not compared:
                return CheckedFile(path.name)
            found = self._contents(path, entry)
        except (ShardError, StoreError) as error:
            return CheckedFile(path.name, str(error))
        return replace(found, problem="; ".join(filter(None, [changed, found.problem])))

    def _contents(self, path: Path, entry: ManifestEntry) -> CheckedFile:
        exported = self.format.read(path)
        problem = _tokens(exported, entry) or _mask(exported, entry) or _shapes(exported, self.description)
        return CheckedFile(path.name, problem) if problem else self._states(exported, path.name)

    def _states(self, exported: Exported, name: str) -> CheckedFile:
        layer_ids = self.description.layer_ids
        claim = Claim(exported.token_ids.tolist(), layer_ids, self.description.last_layer_norm == "post")
        judged = claim.judge(_slots(exported, self.description), self.reference)
        found = judged.difference
        if found.ok:
            return CheckedFile(name, "", found.largest_relative, found.row)
        row, slot = found.first
        where = f"row {row}, layer {layer_ids[slot]}, in {len(found.wrong_rows)} of {len(found.wrong)} rows"
        problem = f"differs first in {where}: the slot {judged.diagnosis}"
        return CheckedFile(name, problem, found.largest_relative, found.row)


def _tokens(exported: Exported, entry: ManifestEntry) -> str:
    count = len(exported.token_ids)
    if count != entry.num_tokens:
        return f"holds {count} tokens of the {entry.num_tokens} of its sample"
    if token_hash(exported.token_ids.numpy().astype("<i8").tobytes()) != entry.token_hash:
        return "holds other tokens than its sample"
    return ""


def _mask(exported: Exported, entry: ManifestEntry) -> str:
    mask, count = exported.loss_mask, len(exported.token_ids)
    if mask is None:
        return ""
    if list(mask.shape) != [count]:
        return f"holds a loss mask of {list(mask.shape)} for {count} tokens"
    if entry.loss_mask == ONES and bool((mask == 1).all()):
        return ""
    if bool(((mask == 0) | (mask == 1)).all()) and entry.loss_mask == f"sha256:{mask_hash(mask.numpy())}":
        return ""
    return "holds another loss mask than its sample"


def _changed(path: Path, entry: ManifestEntry) -> bool:
    return bool(entry.file_hash) and file_hash(path) != entry.file_hash


def _shapes(exported: Exported, description: Description) -> str:
    count, hidden = len(exported.token_ids), description.hidden_size
    num_aux = len(description.layer_ids) - (description.last_layer_norm != "none")
    wanted = {"aux": [count, num_aux * hidden], "last": [count, hidden] if exported.last is not None else None}
    for name, shape in wanted.items():
        tensor = getattr(exported, name)
        if shape is not None and list(tensor.shape) != shape:
            return f"holds states of shape {list(tensor.shape)}, not {shape}"
        if tensor is not None and (dtype := str(tensor.dtype).removeprefix("torch.")) != description.dtype:
            return f"holds states in {dtype}, its manifest says {description.dtype}"
    return ""


def _slots(exported: Exported, description: Description) -> Any:
    """`[T, L, H]` in the order of the description's layer ids."""
    import torch

    aux = exported.aux.reshape(len(exported.token_ids), -1, description.hidden_size)
    return aux if exported.last is None else torch.cat([aux, exported.last.unsqueeze(1)], dim=1)
