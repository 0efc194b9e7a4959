"""From what was asked for to a list of files: the captures, their layers, their rows, the norm. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hsconnector.capture.layers import parse_layer_ids, slot_name
from hsconnector.capture.record import CaptureRecord
from hsconnector.client.sources import Listing, Source
from hsconnector.errors import CaptureNotFound, SettingsError
from hsconnector.formats import FORMATS
from hsconnector.formats.assignment import Assignments, Problem, assign, common_identity
from hsconnector.formats.checkpoint import Checkpoint
from hsconnector.formats.manifest import Description
from hsconnector.formats.norm import FinalNorm, NormKind, load_norm
from hsconnector.formats.sample import Format, Layers
from hsconnector.prompts.labels import DataRow, read_rows

__all__ = ["ExportRequest", "Prepared", "prepare"]


@dataclass(frozen=True)
class ExportRequest:
    """What a person asks for; an empty field does not restrict."""

    format: Format
    data: Path | None = None
    """The data set, whose row indices name the files and whose masks go into them."""
    dataset: str | None = None
    ids: tuple[str, ...] = ()
    """Capture or sample ids."""
    layers: str = ""
    """Layer ids in vLLM's counting, such as "2,18,33,36"."""
    model: str = ""
    """The checkpoint; else the one that the captures name."""
    norm: NormKind | None = None
    draft_vocab: int = 0
    """How many tokens the draft's vocabulary is to have; 0: all."""


@dataclass(frozen=True)
class Prepared:
    """What will be written."""

    description: Description
    layers: Layers
    norm: FinalNorm | None
    assignments: Assignments
    rows: tuple[DataRow, ...] | None
    """Of the whole data set; None where there is none, or only a part of it was asked for."""
    masked: bool
    """Whether the loss masks are a data set's; else every token counts."""
    vocab_size: int = 0
    """The model's; 0 where no draft vocabulary is asked for."""


def prepare(request: ExportRequest, source: Source) -> Prepared:
    """Raises SettingsError, UnsupportedError, CaptureNotFound and what the source raises."""
    listing = source.list(dataset=request.dataset, ids=request.ids)
    if not listing.ready:
        raise CaptureNotFound(_nothing(listing, source.name))
    first = common_identity(listing.ready)
    layers = request.format.choose(_layer_ids(request, listing.ready), first.num_layers)
    norm = _norm(request, first) if request.format.post_norm else None
    rows, masked = _rows(request, first, listing)
    vocab_size = _vocab_size(request, first, masked) if request.draft_vocab else 0
    found = assign(request.format, listing, rows)
    unknown = tuple(Problem(name, f"is not known in {source.name}") for name in _unknown(request.ids, listing))
    assignments = replace(found, problems=(*found.problems, *unknown))
    return Prepared(
        description=_description(request.format, first, layers, norm),
        layers=layers,
        norm=norm,
        assignments=assignments,
        rows=None if rows is None or request.ids else tuple(rows),
        masked=masked,
        vocab_size=vocab_size,
    )


def _nothing(listing: Listing, name: str) -> str:
    reasons = "; ".join(other.reason for other in listing.others[:3])
    return f"nothing to export in {name}" + (f": {reasons}" if reasons else "")


def _layer_ids(request: ExportRequest, records: Sequence[CaptureRecord]) -> tuple[int, ...]:
    first = records[0]
    if request.layers:
        return parse_layer_ids(request.layers, first.num_layers)
    for record in records:
        if record.layer_ids != first.layer_ids:
            raise SettingsError(
                f"the captures hold different layers: {first.capture_id} has {list(first.layer_ids)}, "
                f"{record.capture_id} has {list(record.layer_ids)}: choose with --layers"
            )
    return first.layer_ids


def _vocab_size(request: ExportRequest, first: CaptureRecord, masked: bool) -> int:
    """As the trainer finds it in the checkpoint's `config.json`; raises SettingsError."""
    size, format = request.draft_vocab, request.format
    if not format.vocab_size_names:
        able = ", ".join(name for name, each in FORMATS.items() if each.vocab_size_names)
        raise SettingsError(f"--draft-vocab: drafts of {format.name} have the whole vocabulary; it is for {able}")
    if not masked:
        lacks = f"{request.data} has none" if request.data else "give the data set that has them with --data"
        raise SettingsError(f"--draft-vocab chooses the tokens that are trained on, which loss masks say: {lacks}")
    checkpoint = _checkpoint(request, first)
    vocab_size = int(checkpoint.setting(format.vocab_size_names))
    if size > vocab_size:
        raise SettingsError(f"--draft-vocab {size} is more than the {vocab_size} tokens of {checkpoint.name}")
    return vocab_size


def _checkpoint(request: ExportRequest, first: CaptureRecord) -> Checkpoint:
    return Checkpoint(request.model or first.model, "" if request.model else first.model_revision)


def _norm(request: ExportRequest, first: CaptureRecord) -> FinalNorm:
    return load_norm(_checkpoint(request, first), kind=request.norm, hidden_size=first.hidden_size)


def _rows(request: ExportRequest, first: CaptureRecord, listing: Listing) -> tuple[list[DataRow] | None, bool]:
    if request.data is None:
        return None, False
    rows, masked = read_rows(request.data, first.content.hash_of)
    if request.ids:
        samples = {record.sample_id for record in listing.ready} | {other.sample_id for other in listing.others}
        hashes = {record.content_hash for record in listing.ready}
        rows = [row for row in rows if row.sample_id in samples or row.content_hash in hashes]
    return rows, masked


def _unknown(ids: Sequence[str], listing: Listing) -> list[str]:
    known = {name for record in listing.ready for name in (record.capture_id, record.sample_id)}
    known |= {name for other in listing.others for name in (other.capture_id, other.sample_id)}
    return [name for name in ids if name not in known]


def _description(format: Format, first: CaptureRecord, layers: Layers, norm: FinalNorm | None) -> Description:
    side = "none" if layers.last is None else "post" if format.post_norm else "pre"
    return Description(
        format=format.name,
        model=first.model,
        model_revision=first.model_revision,
        lora=first.lora,
        num_layers=first.num_layers,
        hidden_size=first.hidden_size,
        dtype=first.dtype,
        layer_ids=layers.ids,
        slots=tuple(slot_name(layer) for layer in layers.ids),
        last_layer_norm=side,
        norm=norm.description if norm else {},
        trainer=format.counting(layers),
    )
