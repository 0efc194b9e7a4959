"""Exported files against a Hugging Face forward pass of the same tokens: every slot of every row.

A file passes where its tokens are those of the sample it claims to be, each of its states is within the tolerance of
the layer it claims to hold, and its last layer stands on the claimed side of the final norm. What is compared is read
from the file as the trainer reads it, not from the capture it was made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsconnector.errors import SettingsError, ShardError, StoreError
from hsconnector.formats.manifest import Description, Entry
from hsconnector.formats.sample import Exported, Format
from hsconnector.prompts.labels import token_hash
from hsconnector.reference.comparison import DEFAULT_TOLERANCES, compare, explain
from hsconnector.reference.model import ReferenceModel

__all__ = ["EXPORT_TOLERANCES", "Finding", "check_export", "check_file", "relative_errors"]

EXPORT_TOLERANCES: Mapping[str, float] = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2}
"""By stored dtype: `|file - reference| / |reference|`, Euclidean, of one row and slot."""


@dataclass(frozen=True)
class Finding:
    """What came of one file; `problem` is empty where it passed."""

    file: str
    problem: str = ""
    largest_relative: float = 0.0
    """The largest relative error of any row and slot."""

    def __str__(self) -> str:
        return f"{self.file}: {self.problem or 'equal'}"


def check_export(
    format: Format,
    folder: Path,
    description: Description,
    entries: Mapping[str, Entry],
    reference: ReferenceModel,
    *,
    tolerance: float = 0.0,
) -> Iterator[Finding]:
    """Every file of an export, in its order; `tolerance` 0 takes that of the dtype. Raises SettingsError."""
    if reference.num_layers != description.num_layers:
        raise SettingsError(
            f"the export is of a model with {description.num_layers} layers, {reference.name} has "
            f"{reference.num_layers}: give its own checkpoint with --model"
        )
    if description.lora:
        raise SettingsError(f"the export ran with the adapter {description.lora}, which {reference.name} alone has not")
    tolerance = tolerance or EXPORT_TOLERANCES[description.dtype]
    for entry in entries.values():
        yield check_file(format, folder / entry.file, description, entry, reference, tolerance)


def check_file(
    format: Format, path: Path, description: Description, entry: Entry, reference: ReferenceModel, tolerance: float
) -> Finding:
    """One file."""
    try:
        exported = format.read(path)
        problem = _tokens(exported, entry) or _shapes(exported, description)
        if problem:
            return Finding(path.name, problem)
        found = _states(exported, path.name, description, reference, tolerance)
        # No file is accused by one pass alone; see hsconnector.cli.verify.
        return _states(exported, path.name, description, reference, tolerance) if found.problem else found
    except (ShardError, StoreError) as error:
        return Finding(path.name, str(error))


def _tokens(exported: Exported, entry: Entry) -> str:
    count = len(exported.token_ids)
    if count != entry.num_tokens:
        return f"holds {count} tokens of the {entry.num_tokens} of its sample"
    if token_hash(exported.token_ids.numpy().astype("<i8").tobytes()) != entry.token_hash:
        return "holds other tokens than its sample"
    if exported.loss_mask is not None and list(exported.loss_mask.shape) != [count]:
        return f"holds a loss mask of {list(exported.loss_mask.shape)} for {count} tokens"
    return ""


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


def _states(
    exported: Exported, name: str, description: Description, reference: ReferenceModel, tolerance: float
) -> Finding:
    token_ids = exported.token_ids.tolist()
    slots = _slots(exported, description)
    expected = reference.states(token_ids, description.layer_ids).float()
    if description.last_layer_norm == "post":
        expected[:, -1] = reference.normed(expected[:, -1])
    errors = relative_errors(slots, expected)
    largest = float(errors.max())
    wrong = ~(errors <= tolerance)
    if bool(wrong.any()):
        where = _first(wrong, description.layer_ids)
        return Finding(name, f"{where}: the slot {_holds(slots, wrong, token_ids, description, reference)}", largest)
    if description.last_layer_norm == "pre":
        normed = relative_errors(reference.normed(slots[:, -1].float()), reference.normed(expected[:, -1]).float())
        if not bool((normed <= tolerance).all()):
            return Finding(name, f"differs by {float(normed.max()):.2g} after the final norm", largest)
        largest = max(largest, float(normed.max()))
    return Finding(name, largest_relative=largest)


def relative_errors(states: Any, expected: Any) -> Any:
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


def _holds(slots: Any, wrong: Any, token_ids: list[int], description: Description, reference: ReferenceModel) -> str:
    """What the first wrong slot holds instead."""
    tolerance = DEFAULT_TOLERANCES[description.dtype]
    row = int(wrong.any(dim=1).nonzero()[0])
    slot = int(wrong[row].nonzero()[0])
    layer, last = description.layer_ids[slot], reference.num_layers
    layers = reference.states(token_ids, range(last + 1)).float()
    normed = reference.normed(layers[:, last]).float()
    if description.last_layer_norm == "post" and layer == last:
        if compare(slots[:, [slot]], layers[:, [last]], tolerance).ok:
            return f"holds the last layer {last} before the final norm, where this format has it after"
        layers[:, last] = normed
    return explain(slots[:, slot], layers, normed, layer_id=layer, tolerance=tolerance)
