"""From what was asked for to a list of files: the captures, their layers, their rows, the norm. Writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hsconnector.capture.content import WeightsHeld
from hsconnector.capture.kinds import OfRows, of_one_weights
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

__all__ = ["ExportRequest", "Prepared", "named", "prepare"]


@dataclass(frozen=True)
class ExportRequest:
    """What a person asks for; an empty field does not restrict."""

    format: Format
    data: Path | None = None
    """The data set, whose row indices name the files and whose masks go into them."""
    dataset: str | None = None
    """Of captures; with `data`, rows are found by content, whatever name they were captured under."""
    weights_id: str | None = None
    """The first digits of whose weights."""
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
    left_out: tuple[WeightsHeld, ...]
    """Captures of other weights, which count as not there."""
    other_names: dict[str, int]
    """Captures under other data-set names than was asked for: with a data set those that are taken all the same,
    else those that are left out."""
    masked: bool
    """Whether the loss masks are a data set's; else every token counts."""
    vocab_size: int = 0
    """The model's; 0 where no draft vocabulary is asked for."""


def prepare(request: ExportRequest, source: Source) -> Prepared:
    """Raises SettingsError, UnsupportedError, CaptureNotFound and what the source raises."""
    every = source.list(ids=request.ids)
    listing, other_names = (every, {}) if request.data else _named(every, request.dataset)
    listing, left_out = _of_one_weights(request, listing)
    if not listing.ready:
        raise CaptureNotFound(_nothing(listing, other_names, source.name))
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
        left_out=tuple(left_out),
        other_names=other_names if rows is None else _under_other_names(assignments, request.dataset),
        masked=masked,
        vocab_size=vocab_size,
    )


def _named(listing: Listing, dataset: str | None) -> tuple[Listing, dict[str, int]]:
    """The captures under a data-set name, and how many there are under others."""
    if dataset is None:
        return listing, {}
    ready = tuple(record for record in listing.ready if record.dataset == dataset)
    others = tuple(other for other in listing.others if other.dataset in (None, dataset))
    return Listing(ready, others), Counter(each.dataset for each in listing.ready if each.dataset != dataset)


def _of_one_weights(request: ExportRequest, listing: Listing) -> tuple[Listing, list[WeightsHeld]]:
    """Without the captures of other weights; where a data set is given, of what is no row of it either."""
    records = listing.ready
    of_rows = OfRows(records)
    if request.data is not None and len(of_rows.kinds) > 1:
        read_rows(request.data, of_rows.meet)
        records = tuple(record for record in records if record.capture_id in of_rows.found)
    if not records:
        return Listing((), listing.others), []
    try:
        kept, left_out = of_one_weights(records, request.weights_id)
    except SettingsError as error:
        raise SettingsError(f"{error}, with --weights-id") from error
    return Listing(tuple(kept), listing.others), left_out


def _under_other_names(assignments: Assignments, dataset: str | None) -> dict[str, int]:
    names = Counter(each.record.dataset for each in assignments.made)
    return {name: count for name, count in names.items() if dataset not in (None, name)}


def _nothing(listing: Listing, other_names: Mapping[str, int], name: str) -> str:
    reasons = [other.reason for other in listing.others[:3]]
    reasons += [f"there are captures under other data-set names: {named(other_names)}"] if other_names else []
    return f"nothing to export in {name}" + (f": {'; '.join(reasons)}" if reasons else "")


def named(names: Mapping[str, int]) -> str:
    """ "20 under 'chats', 3 under ''"."""
    return ", ".join(f"{count} under {name!r}" for name, count in sorted(names.items()))


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
        weights_id=first.weights_id,
        num_layers=first.num_layers,
        hidden_size=first.hidden_size,
        dtype=first.dtype,
        layer_ids=layers.ids,
        slots=tuple(slot_name(layer) for layer in layers.ids),
        last_layer_norm=side,
        norm=norm.description if norm else {},
        trainer=format.counting(layers),
    )
