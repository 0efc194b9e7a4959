"""Exported files against what was written, and against a Hugging Face forward pass of the same tokens.

A file passes where its bytes and its mask are those that the manifest has hashes of, its tokens are those of the sample
it claims to be, each of its states is within the tolerance of the layer it claims to hold, and its last layer stands on
the claimed side of the final norm. What is compared is read from the file as the trainer reads it, not from the capture
it was made of.
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
from hsconnector.reference.comparison import DEFAULT_TOLERANCES, compare, explain
from hsconnector.reference.model import ReferenceModel
from hsconnector.reference.passes import compare_twice

__all__ = ["EXPORT_TOLERANCES", "CheckedFile", "ExportCheck"]

EXPORT_TOLERANCES: Mapping[str, float] = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2}
"""By stored dtype: `|file - reference| / |reference|`, Euclidean, of one row and slot."""


@dataclass(frozen=True)
class CheckedFile:
    """What came of one file; `problem` is empty where it passed."""

    file: str
    problem: str = ""
    largest_relative: float = 0.0
    """The largest relative error of any row and slot."""

    def __str__(self) -> str:
        return f"{self.file}: {self.problem or 'equal'}"


@dataclass(frozen=True)
class _Errors:
    """How far the states of one file are from one pass of the reference."""

    wrong: Any
    """`[T, L]`, true where a row and slot is beyond the tolerance."""
    largest: float
    normed: float
    """The largest error of the last layer after the final norm, where the file holds it before."""
    tolerance: float

    @property
    def ok(self) -> bool:
        return not bool(self.wrong.any()) and self.normed <= self.tolerance


@dataclass(frozen=True)
class ExportCheck:
    """An export, and the checkpoint that its files are compared with."""

    format: Format
    description: Description
    reference: ReferenceModel
    tolerance: float = 0.0
    """Of one row and slot; 0: that of the export's dtype in `EXPORT_TOLERANCES`."""

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
        slots, token_ids = _slots(exported, self.description), exported.token_ids.tolist()
        layer_ids = self.description.layer_ids
        passes = compare_twice(self.reference, token_ids, layer_ids, lambda expected: self._errors(slots, expected))
        errors = passes.decisive
        if errors.ok:
            return CheckedFile(name, largest_relative=max(errors.largest, errors.normed))
        if not bool(errors.wrong.any()):
            return CheckedFile(name, f"differs by {errors.normed:.2g} after the final norm", errors.largest)
        where, holds = _first(errors.wrong, layer_ids), self._holds(slots, errors.wrong, passes.layers.float())
        return CheckedFile(name, f"{where}: the slot {holds}", errors.largest)

    def _errors(self, slots: Any, expected: Any) -> _Errors:
        expected, normed = expected.float(), 0.0
        side, norm = self.description.last_layer_norm, self.reference.normed
        if side == "post":
            expected[:, -1] = norm(expected[:, -1])
        if side == "pre":
            after = norm(expected[:, -1]).float()
            normed = float(_relative_errors(norm(slots[:, -1].float()), after).max())
        errors = _relative_errors(slots, expected)
        tolerance = self.tolerance or EXPORT_TOLERANCES[self.description.dtype]
        return _Errors(~(errors <= tolerance), float(errors.max()), normed, tolerance)

    def _holds(self, slots: Any, wrong: Any, layers: Any) -> str:
        """What the first wrong slot holds instead; `layers` `[T, N + 1, H]` is the whole reference."""
        tolerance = DEFAULT_TOLERANCES[self.description.dtype]
        row = int(wrong.any(dim=1).nonzero()[0])
        slot = int(wrong[row].nonzero()[0])
        layer, last = self.description.layer_ids[slot], self.reference.num_layers
        normed = self.reference.normed(layers[:, last]).float()
        if self.description.last_layer_norm == "post" and layer == last:
            if compare(slots[:, [slot]], layers[:, [last]], tolerance).ok:
                return f"holds the last layer {last} before the final norm, where this format has it after"
            layers[:, last] = normed
        return explain(slots[:, slot], layers, normed, layer_id=layer, tolerance=tolerance)


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


def _relative_errors(states: Any, expected: Any) -> Any:
    """The Euclidean distance over the last dimension, relative to the length of what is expected."""
    return (states.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)


def _slots(exported: Exported, description: Description) -> Any:
    """`[T, L, H]` in the order of the description's layer ids."""
    import torch

    aux = exported.aux.reshape(len(exported.token_ids), -1, description.hidden_size)
    return aux if exported.last is None else torch.cat([aux, exported.last.unsqueeze(1)], dim=1)


def _first(wrong: Any, layer_ids: tuple[int, ...]) -> str:
    rows = wrong.any(dim=1).nonzero().flatten().tolist()
    slot = int(wrong[rows[0]].nonzero()[0])
    return f"differs first in row {rows[0]}, layer {layer_ids[slot]}, in {len(rows)} of {len(wrong)} rows"
