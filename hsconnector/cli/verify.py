"""`hsconnector verify`: captures against a Hugging Face forward pass of the same tokens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.shard import Capture, open_shard
from hsconnector.cli.options import SidecarOption, with_older_names
from hsconnector.cli.show import columns, plain
from hsconnector.client import DEFAULT_SIDECAR, Client
from hsconnector.client.sources import FolderSource
from hsconnector.errors import CaptureNotFound, SettingsError
from hsconnector.reference.comparison import DEFAULT_TOLERANCES, Difference, compare, explain, ranges
from hsconnector.reference.model import ReferenceModel
from hsconnector.reference.passes import compare_twice

__all__ = ["Report", "check", "sentence", "verify"]


@dataclass(frozen=True)
class Report:
    """What came of one capture; `first_*` is set where it differs, `diagnosis` where there is anything to say."""

    capture_id: str
    request_id: str
    model: str
    ok: bool
    rows: int
    layer_ids: tuple[int, ...]
    dtype: str
    tolerance: float
    largest: float
    """Largest absolute difference."""
    largest_relative: float
    """Largest difference of a row and slot, relative to that row's largest value."""
    wrong_rows: int = 0
    first_row: int | None = None
    first_slot: int | None = None
    first_layer: int | None = None
    diagnosis: str = ""


@with_older_names
def verify(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Store folders, shard files, capture ids or handles; none: the sidecar's latest captures."),
    ] = None,
    sidecar: SidecarOption = DEFAULT_SIDECAR,
    model: Annotated[str, typer.Option(help="The checkpoint to compare with; else what each capture names.")] = "",
    n: Annotated[int, typer.Option("--n", min=1, help="At most so many captures, the newest.")] = 4,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Relative to a row's largest value; 0: 1e-4 (f32), 1e-2 (f16), 5e-2 (bf16).")
    ] = 0.0,
    dtype: Annotated[str, typer.Option(help="What Hugging Face computes in.")] = "float32",
    device: Annotated[str, typer.Option(help="Where Hugging Face computes; empty: a GPU if there is one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Proves layer ids, norm and offsets of captures by computing them again with Hugging Face.

    Names the first row and slot that differ and says what they hold instead: another layer, a neighbouring row, the
    states after the final norm. Exit code 1 if anything differs or nothing was found.
    """
    console = Console(stderr=True)
    with Client(sidecar) as client:
        captures = list(islice(_captures(sources or [], client), n))
    if not captures:
        raise CaptureNotFound(f"nothing to verify in {', '.join(sources or [sidecar])}")
    reports = []
    models: dict[str, ReferenceModel] = {}
    for capture in track(captures, "comparing", console=console, transient=True, disable=not console.is_terminal):
        name = model or capture.metadata.get("model", "")
        if name not in models:
            models[name] = _load(name, dtype, device)
        reports.append(check(capture, models[name], tolerance))
        if as_json:
            typer.echo(json.dumps(asdict(reports[-1])))
    if not as_json:
        _print(reports)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _load(name: str, dtype: str, device: str) -> ReferenceModel:
    if not name:
        raise SettingsError("the capture does not name its model: give the checkpoint with --model")
    with contextlib.suppress(ImportError):
        from transformers.utils import logging

        logging.disable_progress_bar()
    return ReferenceModel(name, dtype=dtype, device=device)


def check(capture: Capture, reference: ReferenceModel, tolerance: float = 0.0) -> Report:
    """One capture against its reference; `tolerance` 0 takes that of the capture's dtype. Raises SettingsError."""
    _refuse_incomparable(capture, reference)
    token_ids = capture.token_ids.tolist()
    dtype = str(capture.hidden_states.dtype).removeprefix("torch.")
    tolerance = tolerance or DEFAULT_TOLERANCES[dtype]
    passes = compare_twice(
        reference, token_ids, capture.layer_ids, lambda states: compare(capture.hidden_states, states, tolerance)
    )
    report = _report(capture, reference, tolerance, passes.decisive)
    if report.first_row is not None and report.first_slot is not None:
        return _explained(report, capture, reference, passes.layers)
    return report if passes.first.ok else replace(report, diagnosis=_unrepeated(passes.first))


def _explained(report: Report, capture: Capture, reference: ReferenceModel, layers: Any) -> Report:
    """The report with what the first wrong slot holds instead; `layers` `[T, N + 1, H]` is the whole reference."""
    slot = report.first_slot or 0
    diagnosis = explain(
        capture.hidden_states[:, slot],
        layers,
        reference.normed(layers[:, -1]),
        layer_id=capture.layer_ids[slot],
        tolerance=report.tolerance,
    )
    return replace(report, first_layer=capture.layer_ids[slot], diagnosis=diagnosis)


def _unrepeated(first: Difference) -> str:
    where = f"by {first.largest_relative:.1g} in {ranges(first.wrong_rows)}"
    return f"Hugging Face's first pass was off {where}, its second was not: arithmetic on this machine does not repeat"


def _report(capture: Capture, reference: ReferenceModel, tolerance: float, difference: Difference) -> Report:
    return Report(
        capture_id=capture.capture_id,
        request_id=capture.metadata.get("request_id", ""),
        model=reference.name,
        ok=difference.ok,
        rows=len(capture.token_ids),
        layer_ids=capture.layer_ids,
        dtype=str(capture.hidden_states.dtype).removeprefix("torch."),
        tolerance=tolerance,
        largest=difference.largest,
        largest_relative=difference.largest_relative,
        wrong_rows=len(difference.wrong_rows),
        first_row=difference.first_row,
        first_slot=difference.first_slot,
    )


def _refuse_incomparable(capture: Capture, reference: ReferenceModel) -> None:
    if capture.first_row:
        raise SettingsError(f"a view from row {capture.first_row} cannot be computed again: verify the whole capture")
    layers, adapter = capture.metadata.get("num_layers", ""), plain(capture.metadata.get("lora", ""))
    reference.refuse_foreign(f"capture {capture.capture_id}", num_layers=layers, lora=adapter)


def _captures(sources: Sequence[str], client: Client) -> Iterator[Capture]:
    if not sources:
        yield from (client.fetch(record) for record in client.captures(state=CaptureState.READY))
    for source in sources:
        if Path(source).is_dir():
            yield from (open_shard(path, verify=True) for path in FolderSource(Path(source)).shards())
        elif Path(source).exists() or source.endswith(".safetensors"):
            yield open_shard(source, verify=True)
        else:
            yield client.fetch(source)


def _print(reports: list[Report]) -> None:
    rows = [["capture", "request", "rows", "layers", "dtype", "largest difference", "relative", ""]]
    for report in reports:
        layers = ",".join(map(str, report.layer_ids))
        differences = [f"{report.largest:.2g}", f"{report.largest_relative:.2g}", "equal" if report.ok else "DIFFERS"]
        rows.append([report.capture_id, report.request_id, str(report.rows), layers, report.dtype, *differences])
    typer.echo(columns(rows))
    for report in reports:
        if report.diagnosis:
            typer.echo(plain(sentence(report)))


def sentence(report: Report) -> str:
    """Where a capture differs and what it holds there instead, or what was strange about one that matches."""
    if report.ok:
        return f"{report.capture_id} matches: {report.diagnosis}"
    return (
        f"{report.capture_id} differs first in row {report.first_row}, slot {report.first_slot} "
        f"(layer {report.first_layer}), in {report.wrong_rows} of {report.rows} rows: the slot {report.diagnosis}"
    )
