"""`hsconnector verify`: captures against a Hugging Face forward pass of the same tokens."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from hsconnector.capture.header import open_header
from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.shard import Capture, open_shard
from hsconnector.cli.options import SidecarOption, with_older_names
from hsconnector.cli.show import columns, plain
from hsconnector.client import DEFAULT_SIDECAR, Client
from hsconnector.client.sources import FolderSource
from hsconnector.errors import CaptureError, CaptureNotFound, SettingsError, ShardError, StoreError
from hsconnector.reference.model import ReferenceModel
from hsconnector.reference.passes import Claim

__all__ = ["Report", "check", "sentence", "verify"]


@dataclass(frozen=True)
class Report:
    """What came of one capture; `first_*` is set where it differs, `diagnosis` where there is anything to say."""

    capture_id: str
    ok: bool
    request_id: str = ""
    model: str = ""
    rows: int = 0
    layer_ids: tuple[int, ...] = ()
    dtype: str = ""
    largest: float = 0.0
    """Largest absolute difference."""
    largest_relative: float = 0.0
    """Largest distance of a row in a slot, relative to the length that the row should have."""
    median_scales: float = 0.0
    """Distance of the median row of the worst slot, in what rounding moves such a row by."""
    row_scales: float = 0.0
    """Distance of the worst row, in what rounding moves it by."""
    wrong_rows: int = 0
    first_row: int | None = None
    first_slot: int | None = None
    first_layer: int | None = None
    diagnosis: str = ""
    source: str = ""
    """The shard file's name without its ending, or what the sidecar was asked for."""


@dataclass(frozen=True)
class _Found:
    """A capture that is opened when its turn comes."""

    name: str
    open: Callable[[], Capture]
    weights_id: str | None = None
    """None where it was asked for by its own name, or cannot be read."""


@with_older_names
def verify(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Store folders, shard files, capture ids or handles; none: the sidecar's latest captures."),
    ] = None,
    sidecar: SidecarOption = DEFAULT_SIDECAR,
    model: Annotated[str, typer.Option(help="The checkpoint to compare with; else what each capture names.")] = "",
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="At most so many, the newest; default: 4, with --every all.")
    ] = None,
    every: Annotated[int, typer.Option(min=0, help="Of everything that is there each N-th; 1: all of it.")] = 0,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Also write each result to this file, a JSON object a line. Captures that are in it already are not "
            "computed again, and what was found wrong still counts: repeat a command that was stopped, and it goes on."
        ),
    ] = None,
    weights_id: Annotated[
        str | None,
        typer.Option(help="Whose weights, by their first digits; default: those of the newest capture that is there."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where Hugging Face computes; empty: a GPU if there is one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Proves layer ids, norm and offsets of captures by computing them again with Hugging Face.

    Distances are counted in what rounding alone explains, which a pass in the captures' dtype shows. Names the first
    row and slot that differ and says what they hold instead: another layer, a neighbouring row, the states after the
    final norm. Exit code 1 if anything differs or nothing was found.
    """
    console = Console(stderr=True)
    with Client(sidecar) as client:
        chosen = _OfOneWeights(weights_id)
        spread = islice(chosen.among(_captures(sources or [], client)), 0, None, every or 1)
        found = list(islice(spread, None if n is None and every else n or 4))
        if chosen.others:
            counts = ", ".join(f"{count} of {name[:12] or 'unknown ones'}" for name, count in chosen.others.items())
            typer.echo(f"captures of other weights are left out: {counts}; --weights-id chooses them", err=True)
        if not found:
            raise CaptureNotFound(f"nothing to verify in {', '.join(sources or [sidecar])}")
        reporting = _Reporting(report)
        checking = _Checking(model, device, whole_store=bool(every))
        left = [capture for capture in found if capture.name not in reporting.done]
        for capture in track(left, "comparing", console=console, transient=True, disable=not console.is_terminal):
            reporting.add(checking.check(capture))
            if as_json:
                typer.echo(json.dumps(asdict(reporting.new[-1])))
    if not as_json:
        _print(reporting.new)
    if report:
        typer.echo(f"{len(found) - len(left)} of {len(found)} captures were in {report} already", err=True)
    if not all(reporting.done[capture.name] for capture in found):
        raise typer.Exit(1)


class _OfOneWeights:
    """The captures of one model's weights: a checkpoint says nothing of captures that other weights made."""

    def __init__(self, wanted: str | None) -> None:
        self.wanted = wanted
        self.others: Counter[str] = Counter()

    def among(self, found: Iterator[_Found]) -> Iterator[_Found]:
        """Those that are chosen; without a choice, what is of the same weights as the first, which is the newest."""
        for each in found:
            weights = each.weights_id
            if weights is not None and self.wanted is None:
                self.wanted = weights
            if weights is None or weights == self.wanted or (self.wanted and weights.startswith(self.wanted)):
                yield each
            else:
                self.others[weights] += 1


class _Reporting:
    """What was found, in this run and, where there is a file, in those before it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.new: list[Report] = []
        self.done: dict[str, bool] = {}
        if path and path.exists():
            whole = path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]  # a run that was killed may have left half a line
            path.write_bytes(whole)
            self.done = {line["source"]: line["ok"] for line in map(json.loads, whole.splitlines())}

    def add(self, report: Report) -> None:
        self.new.append(report)
        self.done[report.source] = report.ok
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(report)) + "\n")


@dataclass(frozen=True)
class _Checking:
    """Captures, each against its checkpoint, which is loaded once."""

    model: str
    device: str
    whole_store: bool
    """What cannot be read or compared is a report, not the end."""
    loaded: dict[str, ReferenceModel] = field(default_factory=dict)

    def check(self, found: _Found) -> Report:
        """The report of one capture; raises ShardError, CaptureError and SettingsError where it is not one of many."""
        try:
            capture = found.open()
            return replace(check(capture, self._reference(capture)), source=found.name)
        except (ShardError, CaptureError, SettingsError) as error:
            if not self.whole_store:
                raise
            return Report(found.name, ok=False, diagnosis=str(error), source=found.name)

    def _reference(self, capture: Capture) -> ReferenceModel:
        name = self.model or capture.metadata.get("model", "")
        if name not in self.loaded:
            self.loaded[name] = _load(name, self.device)
        return self.loaded[name]


def _load(name: str, device: str) -> ReferenceModel:
    if not name:
        raise SettingsError("the capture does not name its model: give the checkpoint with --model")
    with contextlib.suppress(ImportError):
        from transformers.utils import logging

        logging.disable_progress_bar()
    return ReferenceModel(name, device=device)


def check(capture: Capture, reference: ReferenceModel) -> Report:
    """One capture against its reference. Raises SettingsError."""
    _refuse_incomparable(capture, reference)
    judged = Claim(capture.token_ids.tolist(), capture.layer_ids).judge(capture.hidden_states, reference)
    found = judged.difference
    row, slot = (None, None) if found.ok else found.first
    return Report(
        capture_id=capture.capture_id,
        ok=found.ok,
        request_id=capture.metadata.get("request_id", ""),
        model=reference.name,
        rows=len(capture.token_ids),
        layer_ids=capture.layer_ids,
        dtype=str(capture.hidden_states.dtype).removeprefix("torch."),
        largest=found.largest,
        largest_relative=found.largest_relative,
        median_scales=found.median,
        row_scales=found.row,
        wrong_rows=len(found.wrong_rows),
        first_row=row,
        first_slot=slot,
        first_layer=None if slot is None else capture.layer_ids[slot],
        diagnosis=judged.diagnosis + ("" if found.ok else _kv_cache(capture)),
    )


def _kv_cache(capture: Capture) -> str:
    kept = capture.metadata.get("kv_cache_dtype", "")
    own = ("", "auto", str(capture.hidden_states.dtype).removeprefix("torch."))
    return "" if kept in own else f"; the engine kept its KV cache in {kept}, which the reference does not"


def _refuse_incomparable(capture: Capture, reference: ReferenceModel) -> None:
    if capture.first_row:
        raise SettingsError(f"a view from row {capture.first_row} cannot be computed again: verify the whole capture")
    layers, adapter = capture.metadata.get("num_layers", ""), plain(capture.metadata.get("lora", ""))
    reference.refuse_foreign(f"capture {capture.capture_id}", num_layers=layers, lora=adapter)


def _captures(sources: Sequence[str], client: Client) -> Iterator[_Found]:
    if not sources:
        for record in client.captures(state=CaptureState.READY):
            yield _Found(record.capture_id, partial(client.fetch, record), record.weights_id)
    for source in sources:
        if Path(source).is_dir():
            for path in FolderSource(Path(source)).shards():
                yield _Found(path.stem, partial(open_shard, path, verify=True), _weights_in(path))
        elif Path(source).exists() or source.endswith(".safetensors"):
            yield _Found(Path(source).stem, partial(open_shard, source, verify=True))
        else:
            yield _Found(source.rstrip("/").rpartition("/")[2], partial(client.fetch, source))


def _weights_in(path: Path) -> str | None:
    try:
        return open_header(path).metadata.get("weights_id", "")
    except (ShardError, StoreError):
        return None  # what is wrong with it is said when it is compared


def _print(reports: list[Report]) -> None:
    rows = [["capture", "request", "rows", "layers", "dtype", "relative", "median", "worst row", ""]]
    for report in reports:
        layers = ",".join(map(str, report.layer_ids))
        away = [f"{report.largest_relative:.2g}", f"{report.median_scales:.2g}", f"{report.row_scales:.2g}"]
        verdict = "equal" if report.ok else "DIFFERS"
        rows.append([report.capture_id, report.request_id, str(report.rows), layers, report.dtype, *away, verdict])
    typer.echo(columns(rows))
    for report in reports:
        if report.diagnosis:
            typer.echo(plain(sentence(report)))


def sentence(report: Report) -> str:
    """Where a capture differs and what it holds there instead, or what was strange about one that matches."""
    if report.ok:
        return f"{report.capture_id} matches: {report.diagnosis}"
    if report.first_row is None:
        return f"{report.capture_id} cannot be compared: {report.diagnosis}"
    return (
        f"{report.capture_id} differs first in row {report.first_row}, slot {report.first_slot} "
        f"(layer {report.first_layer}), in {report.wrong_rows} of {report.rows} rows: the slot {report.diagnosis}"
    )
