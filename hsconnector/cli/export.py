"""`hsconnector export`: captures into the files that a trainer reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

from hsconnector.cli.show import plain, readable_bytes
from hsconnector.client.address import DEFAULT_SIDECAR, SIDECAR_VARIABLES
from hsconnector.client.sources import Source, open_source
from hsconnector.errors import SettingsError
from hsconnector.formats import FORMATS, find_format
from hsconnector.formats.check import Finding, check_export
from hsconnector.formats.exporter import Exporter, Link, Outcome
from hsconnector.formats.manifest import Entry, Manifest, read_manifest
from hsconnector.formats.norm import NormKind
from hsconnector.formats.prepare import Prepared, Request, prepare
from hsconnector.formats.sample import Format
from hsconnector.reference.model import ReferenceModel

__all__ = ["export"]

_SHOWN = 20


def export(
    source: Annotated[
        str,
        typer.Argument(
            envvar=list(SIDECAR_VARIABLES),
            show_envvar=False,
            help="A store's folder, or a sidecar's address; else HSC_SIDECAR.",
        ),
    ] = DEFAULT_SIDECAR,
    format: Annotated[str, typer.Option("--format", "-f", help=f"One of {', '.join(FORMATS)}.")] = "",
    out: Annotated[str, typer.Option("--out", "-o", help="The folder to fill.")] = "",
    data: Annotated[
        str, typer.Option(help="JSON lines, Parquet or Arrow with input_ids and loss_mask: row indices and masks.")
    ] = "",
    dataset: Annotated[str, typer.Option(help="Only captures under this data-set name.")] = "",
    ids: Annotated[list[str] | None, typer.Option("--id", help="Only this capture or sample id; repeatable.")] = None,
    layers: Annotated[str, typer.Option(help="Layer ids in vLLM's counting; else all that were captured.")] = "",
    model: Annotated[str, typer.Option(help="The checkpoint; else the one that the captures name.")] = "",
    norm: Annotated[NormKind | None, typer.Option(help="How an unknown model applies its final norm.")] = None,
    link: Annotated[Link, typer.Option(help="How an unchanged local shard gets into the export.")] = Link.AUTO,
    local: Annotated[bool, typer.Option(help="Open a sidecar's files on this host directly.")] = True,
    workers: Annotated[int, typer.Option(min=0, help="Samples at a time; 0: one a processor, 8 at most.")] = 0,
    verify: Annotated[bool, typer.Option(help="Compare the checksum of each shard.")] = True,
    check: Annotated[bool, typer.Option("--check", help="Then compare the files with Hugging Face.")] = False,
    check_samples: Annotated[int, typer.Option(min=0, help="Check so many files, evenly spread; 0: all.")] = 0,
    tolerance: Annotated[float, typer.Option(min=0, help="Of --check; 0: 1e-5 (f32), 1e-2 (f16), 2e-2 (bf16).")] = 0.0,
) -> None:
    """Writes captures as the files that a trainer reads, and a manifest that says what they hold.

    Rows are never shifted and never padded. A second run writes what is missing and nothing else. Samples that cannot
    be exported are named, the rest goes on, and the exit code is 1.
    """
    if not out:
        raise SettingsError("--out names the folder to fill")
    request = Request(
        format=find_format(format),
        data=Path(data) if data else None,
        dataset=dataset or None,
        ids=tuple(ids or ()),
        layers=layers,
        model=model,
        norm=norm,
    )
    console = Console(stderr=True)
    with closing(open_source(source, local=local)) as captures:
        prepared = prepare(request, captures)
        _print_prepared(console, prepared)
        failed = _export(console, prepared, request.format, captures, Path(out), link, workers, verify)
    if check:
        failed += _check(console, request.format, Path(out), model, check_samples, tolerance)
    if failed:
        raise typer.Exit(1)


def _print_prepared(console: Console, prepared: Prepared) -> None:
    about, jobs = prepared.description, prepared.jobs
    slots = ", ".join(f"{layer} ({name})" for layer, name in zip(about.layer_ids, about.slots, strict=True))
    side = {"pre": "before the final norm", "post": "after the final norm", "none": "not among them"}
    _say(
        console,
        f"{about.format} of {plain(about.model)}: layers {slots}; the last layer is "
        f"{side[about.last_layer_norm]}; {about.dtype}",
    )
    _say(console, f"the trainer's own counting: {about.trainer}")
    if not prepared.masked:
        _say(
            console,
            "no loss masks were given: every token counts"
            + ("" if about.format != "speculators" else " (speculators takes masks from its data set)"),
        )
    if jobs.repeated:
        _say(console, f"{jobs.repeated} captures are left out: a later one holds the same sample")
    if jobs.unused:
        _say(console, f"{jobs.unused} captures belong to no row of the data set")


def _export(
    console: Console,
    prepared: Prepared,
    format: Format,
    source: Source,
    out: Path,
    link: Link,
    workers: int,
    verify: bool,
) -> int:
    """The number of samples that could not be exported, which are named."""
    jobs = prepared.jobs
    with Manifest(out, prepared.description, format.suffix) as manifest:
        exporter = Exporter(format, prepared.layers, source, manifest, prepared.norm, link, verify)
        outcomes = _tracked(console, exporter.run(jobs.jobs, workers=workers or _processors()), len(jobs.jobs))
    order = {job.file: index for index, job in enumerate(jobs.jobs)}
    outcomes.sort(key=lambda outcome: order[outcome.job.file])
    problems = [*jobs.problems, *(outcome for outcome in outcomes if outcome.problem)]
    written = [outcome.written for outcome in outcomes if outcome.written]
    kept = sum(outcome.kept and not outcome.problem for outcome in outcomes)
    _say(
        console,
        f"{len(written)} files written ({readable_bytes(sum(written))}), {kept} were there, "
        f"{len(problems)} samples could not be exported; {out / 'manifest.json'} lists them",
    )
    _name(console, problems)
    return len(problems)


def _tracked(console: Console, outcomes: Iterable[Outcome], total: int) -> list[Outcome]:
    """All outcomes, with a bar, the rate and the time left."""
    columns = (
        TextColumn("exporting"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    done: list[Outcome] = []
    size = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total, rate="")
        for outcome in outcomes:
            done.append(outcome)
            size += outcome.written
            seconds = progress.tasks[0].elapsed or 0
            rate = f"{len(done) / seconds:.3g} samples/s, {readable_bytes(int(size / seconds))}/s" if seconds else ""
            progress.update(task, advance=1, rate=rate)
    return done


def _check(console: Console, format: Format, out: Path, model: str, samples: int, tolerance: float) -> int:
    """The number of files that differ from Hugging Face, which are named."""
    description, entries = read_manifest(out)
    chosen = _spread(entries, samples)
    reference = ReferenceModel(model or description.model)
    checked = check_export(format, out, description, chosen, reference, tolerance=tolerance)
    findings: list[Finding] = list(
        track(checked, "comparing", len(chosen), console=console, transient=True, disable=not console.is_terminal)
    )
    wrong = [finding for finding in findings if finding.problem]
    largest = max((finding.largest_relative for finding in findings), default=0.0)
    _say(
        console,
        f"{len(findings) - len(wrong)} of {len(findings)} files equal Hugging Face's pass of "
        f"{plain(reference.name)}; largest relative error {largest:.2g}",
    )
    _name(console, wrong)
    return len(wrong)


def _spread(entries: dict[str, Entry], samples: int) -> dict[str, Entry]:
    names = list(entries)
    if samples and samples < len(names):
        names = [names[index * len(names) // samples] for index in range(samples)]
    return {name: entries[name] for name in names}


def _name(console: Console, problems: Sequence[object]) -> None:
    for problem in problems[:_SHOWN]:
        _say(console, plain(str(problem)))
    if len(problems) > _SHOWN:
        _say(console, f"and {len(problems) - _SHOWN} more")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _processors() -> int:
    return min(8, len(os.sched_getaffinity(0)))
