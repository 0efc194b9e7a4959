"""Which captures make up a data set, in which order, and a capture as a sample."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from hsconnector.capture.kinds import OfRows, of_one_weights
from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.shard import Capture
from hsconnector.client.sources import View
from hsconnector.dataset.failover import Replica
from hsconnector.errors import CaptureNotFound, SettingsError
from hsconnector.prompts.labels import DataRow, read_rows

__all__ = ["Entry", "Sample", "choose_entries", "common_layers", "make_sample", "rows_by_tokens"]

log = logging.getLogger("hsconnector.dataset")

Sample = dict[str, Any]

_NAMED = 5
"""Missing samples named in an error."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One sample and all that hold it: the newest copy of each source, then those before it."""

    name: str
    replicas: tuple[Replica, ...]
    row: DataRow | None = None


def choose_entries(
    found: Sequence[Replica],
    dataset: str | None,
    sample_ids: Sequence[str] | None,
    data: str | os.PathLike[str] | None,
    missing: Literal["error", "skip"],
    weights_id: str | None = None,
) -> list[Entry]:
    """The entries in their order; raises SettingsError, CaptureNotFound."""
    named = [replica for replica in found if dataset in (None, replica.record.dataset)]
    by_content = data is not None and sample_ids is None
    meant = _of_one_weights(found if by_content else named, data, weights_id)
    about = _common([replica for replica in meant if dataset in (None, replica.record.dataset)] or meant)
    rows = [] if data is None else _rows_of(Path(data), about)
    if by_content:
        wanted = _by_row(meant, rows, dataset)
    else:
        entries = _by_name(meant, {row.content_hash: row for row in rows})
        names = sorted(entries, key=_natural) if sample_ids is None else sample_ids
        wanted = [(name, entries.get(name)) for name in names]
    if missing == "error":
        _require_all(wanted, found, dataset)
    return [entry for _, entry in wanted if entry is not None]


def _require_all(wanted: Sequence[tuple[str, Entry | None]], found: Sequence[Replica], dataset: str | None) -> None:
    """Raises CaptureNotFound where a sample has no capture, or a name has none at all."""
    absent = [name for name, entry in wanted if entry is None]
    if not absent and (wanted or dataset is None):
        return
    others = Counter(replica.record.dataset for replica in found if replica.record.dataset != dataset)
    elsewhere = f"; captures under other names: {dict(others)}" if dataset is not None and others else ""
    if not absent:
        raise CaptureNotFound(f"no ready capture has the data-set name {dataset!r}{elsewhere}")
    listed = ", ".join(map(repr, absent[:_NAMED])) + (", …" if len(absent) > _NAMED else "")
    raise CaptureNotFound(
        f"{len(absent)} of {len(wanted)} samples have no ready capture: {listed}{elsewhere}; extract them, or leave "
        'them out with missing="skip"'
    )


def _of_one_weights(
    found: Sequence[Replica], data: str | os.PathLike[str] | None, weights_id: str | None
) -> Sequence[Replica]:
    """The captures of one model's weights; with `data`, of its rows, where there are captures of several contents."""
    of_rows = OfRows(replica.record for replica in found)
    if data is not None and len(of_rows.kinds) > 1:
        read_rows(Path(data), of_rows.meet)
        found = [replica for replica in found if replica.record.capture_id in of_rows.found]
    try:
        kept, others = of_one_weights(found, weights_id)
    except SettingsError as error:
        raise SettingsError(f"{error}, with weights_id=") from error
    if others:
        log.warning("captures of other weights are left out: %s", ", ".join(map(str, others)))
    return kept


def _by_row(found: Sequence[Replica], rows: Sequence[DataRow], dataset: str | None) -> list[tuple[str, Entry | None]]:
    """Every row with the copies of its content, whatever sample ids and data sets they were captured under."""
    replicas: dict[str, list[Replica]] = defaultdict(list)
    for replica in found:
        replicas[replica.record.content_hash].append(replica)
    held = [replicas.get(row.content_hash, []) for row in rows]
    elsewhere = [same for same in held if same and dataset not in (None, *(copy.record.dataset for copy in same))]
    if elsewhere:
        names = Counter(_by_age(same)[0].record.dataset for same in elsewhere)
        log.info(
            "%d of %d rows stand under another data-set name than %r: %s",
            len(elsewhere),
            len(rows),
            dataset,
            dict(names),
        )
    return [
        (row.sample_id, Entry(row.sample_id, _by_age(same), row) if same else None)
        for row, same in zip(rows, held, strict=True)
    ]


def _by_name(found: Sequence[Replica], rows: Mapping[str, DataRow]) -> dict[str, Entry]:
    """Every sample with the copies that hold the same as its newest capture."""
    replicas: dict[str, list[Replica]] = defaultdict(list)
    for replica in found:
        replicas[replica.record.sample_id or replica.record.capture_id].append(replica)
    entries = {}
    for name, copies in replicas.items():
        datasets = {replica.record.dataset for replica in copies}
        if len(datasets) > 1:
            raise SettingsError(f"sample {name!r} is in the data sets {sorted(datasets)}: say which with dataset=")
        content = max(copies, key=lambda replica: replica.record.capture_id).record.content_hash
        same = _by_age([replica for replica in copies if replica.record.content_hash == content])
        entries[name] = Entry(name, same, rows.get(content))
    return entries


def _by_age(copies: Sequence[Replica]) -> tuple[Replica, ...]:
    """The newest copy in each source, in the order of the sources, then the newest but one in each, and so on."""
    ages: Counter[int] = Counter()
    placed = []
    for replica in sorted(copies, key=lambda replica: replica.record.capture_id, reverse=True):
        placed.append((ages[replica.source], replica.source, replica))
        ages[replica.source] += 1
    return tuple(replica for *_, replica in sorted(placed, key=lambda place: place[:2]))


def _common(found: Sequence[Replica]) -> CaptureRecord | None:
    """A record that stands for all in what decides their values; raises SettingsError where they differ."""
    kinds = {(*each.content.head, each.dtype): each for each in (replica.record for replica in found)}
    if len(kinds) > 1:
        listed = "; ".join(
            f"model {each.model!r} {each.model_revision!r} {each.lora!r}, layers {list(each.layer_ids)}, {each.dtype}"
            for each in sorted(kinds.values(), key=lambda each: each.capture_id)
        )
        raise SettingsError(
            f"captures of {len(kinds)} kinds do not make one data set ({listed}): choose with dataset= or model="
        )
    return next(iter(kinds.values()), None)


def common_layers(entries: Sequence[Entry], view: View) -> tuple[int, ...]:
    """What the slots of every sample hold."""
    held = entries[0].replicas[0].record.layer_ids if entries else ()
    absent = sorted(set(view.layers or ()) - set(held))
    if absent and entries:
        raise SettingsError(f"layers {absent} are not among the captured {list(held)}")
    return tuple(layer for layer in held if view.layers is None or layer in view.layers)


def _rows_of(path: Path, about: CaptureRecord | None) -> list[DataRow]:
    return read_rows(path, about.content.hash_of if about else lambda _: "")[0]


def rows_by_tokens(data: str | os.PathLike[str] | None) -> dict[str, DataRow]:
    rows = [] if data is None else read_rows(Path(data), lambda _: "")[0]
    return {row.token_hash: row for row in rows if not row.problem}


def make_sample(capture: Capture, record: CaptureRecord, row: DataRow | None) -> Sample:
    sample = {"hidden_states": capture.hidden_states, "token_ids": capture.token_ids}
    if row is not None:
        stop = capture.first_row + len(capture.token_ids)
        sample["loss_mask"] = torch.from_numpy(row.loss_mask)[capture.first_row : stop]
    return {**sample, "sample_id": record.sample_id, "capture_id": capture.capture_id}


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts numbers by value and everything else as text."""
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]
