"""`hsconnector export`: captures into the files that a trainer reads."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
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
from hsconnector.formats.check import ExportCheck
from hsconnector.formats.draft_vocab import DraftVocabulary
from hsconnector.formats.exporter import Exporter, FileOutcome, Link
from hsconnector.formats.manifest import MANIFEST, Manifest, foreign_files, read_manifest
from hsconnector.formats.norm import NormKind
from hsconnector.formats.prepare import ExportRequest, Prepared, named, prepare
from hsconnector.prompts.labels import DataRow, read_tokens
from hsconnector.reference.model import ReferenceModel

__all__ = ["export"]

_SHOWN = 20
_COLUMNS = (
    TextColumn("exporting"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[rate]}"),
    TimeRemainingColumn(),
)


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
        str,
        typer.Option(help="The data set (JSON lines, Parquet, Arrow), for row indices and loss masks; default: none."),
    ] = "",
    dataset: Annotated[
        str,
        typer.Option(help="Only captures under this data-set name; default: all. Rows of --data are found by content."),
    ] = "",
    weights_id: Annotated[
        str | None, typer.Option(help="Only captures of these weights; the first digits are enough.")
    ] = None,
    ids: Annotated[
        list[str] | None, typer.Option("--id", help="Only this capture or sample id; repeatable; default: all.")
    ] = None,
    layers: Annotated[str, typer.Option(help="Layer ids in vLLM's counting; default: all that were captured.")] = "",
    model: Annotated[
        str,
        typer.Option(help="The checkpoint, for its final norm and vocabulary size; default: as the captures name it."),
    ] = "",
    norm: Annotated[
        NormKind | None, typer.Option(help="How the final norm is applied; default: as the model type is known to.")
    ] = None,
    draft_vocab: Annotated[
        int,
        typer.Option(min=0, help="Also the frequencies and tables of a draft vocabulary of N tokens; 0: none."),
    ] = 0,
    link: Annotated[Link, typer.Option(help="How an unchanged local shard gets into the export.")] = Link.AUTO,
    local: Annotated[bool, typer.Option(help="Open a sidecar's files directly where they lie on this host.")] = True,
    workers: Annotated[int, typer.Option(min=0, help="Samples written at a time; 0: one a processor, 8 at most.")] = 0,
    verify: Annotated[bool, typer.Option(help="Compare the checksum of each shard that is read.")] = True,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove earlier files of rows that the data set no longer has.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Then compare the files with their hashes and a Hugging Face forward pass."),
    ] = False,
    check_samples: Annotated[
        int, typer.Option(min=0, help="How many files --check compares with Hugging Face, evenly spread; 0: all.")
    ] = 0,
) -> None:
    """Writes captures as the files that a trainer reads, and a manifest that says what they hold.

    Rows are never shifted and never padded. A second run writes what is missing or was changed, and nothing else.
    Samples that cannot be exported, and files that belong to no row of the data set, are named, the rest goes on, and
    the exit code is 1.
    """
    if not out:
        raise SettingsError("--out names the folder to fill")
    request = ExportRequest(
        format=find_format(format),
        data=Path(data) if data else None,
        dataset=dataset or None,
        weights_id=weights_id,
        ids=tuple(ids or ()),
        layers=layers,
        model=model,
        norm=norm,
        draft_vocab=draft_vocab,
    )
    run = _Run(request=request, out=Path(out), link=link, workers=workers or _processors(), verify=verify, prune=prune)
    with closing(open_source(source, local=local)) as captures:
        failed = run.export(captures)
    if check:
        failed += run.check(check_samples)
    if failed:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The command's options, checked, and where it speaks."""

    request: ExportRequest
    out: Path
    link: Link
    workers: int
    verify: bool
    prune: bool
    console: Console = field(default_factory=lambda: Console(stderr=True))

    def export(self, captures: Source) -> int:
        """Writes what is missing; the number of samples that could not be exported, which are named."""
        prepared = prepare(self.request, captures)
        self._describe(prepared)
        assigned = prepared.assignments
        with Manifest(self.out, prepared.description, self.request.format.suffix) as manifest:
            exporter = Exporter(
                self.request.format, prepared.layers, captures, manifest, prepared.norm, self.link, self.verify
            )
            outcomes = self._tracked(exporter.run(assigned.made, workers=self.workers), len(assigned.made))
            order = {each.file: index for index, each in enumerate(assigned.made)}
            outcomes.sort(key=lambda outcome: order[outcome.assignment.file])
            problems = [*assigned.problems, *(outcome for outcome in outcomes if outcome.problem)]
            self._summarise(outcomes, len(problems))
            self._name(problems)
            stale = self._stale(exporter, prepared.rows)
            self._choose_tokens(exporter, prepared.vocab_size, outcomes)
        return len(problems) + stale

    def _stale(self, exporter: Exporter, rows: Sequence[DataRow] | None) -> int:
        """Files of rows that the data set no longer has: removed where that was asked for, else named and counted."""
        stale = [] if rows is None else exporter.stale(rows)
        if stale and self.prune:
            for file in stale:
                exporter.manifest.remove(file)
            self._say(f"{len(stale)} files were removed that belong to no row of the data set")
            return 0
        if stale:
            self._say(
                f"{len(stale)} earlier files belong to no row of the data set, and a trainer may read them: give "
                "another folder, or --prune to remove them"
            )
            self._name(stale)
        return len(stale)

    def _choose_tokens(self, exporter: Exporter, vocab_size: int, outcomes: Sequence[FileOutcome]) -> None:
        """The draft vocabulary that was asked for, or a word where one that is there is of fewer or more files."""
        if vocab_size and self.request.data:
            good = [outcome.assignment for outcome in outcomes if not outcome.problem]
            rows = read_tokens(self.request.data, exporter.rows_of_all_files(good))
            for vocabulary, same in exporter.draft_vocabularies(rows, self.request.draft_vocab, vocab_size):
                self._describe_tokens(vocabulary, same)
            return
        for size, vocabulary in exporter.manifest.vocabularies.items():
            if vocabulary.rows != (now := len(exporter.manifest.entries)):
                self._say(
                    f"the draft vocabulary of {size} tokens was counted over {vocabulary.rows} files, and there are "
                    f"{now}: repeat with --draft-vocab {size}"
                )

    def _describe_tokens(self, vocabulary: DraftVocabulary, same: bool) -> None:
        covered, trained, size = vocabulary.covered_tokens, vocabulary.trained_tokens, vocabulary.size
        filled = f"; {vocabulary.filled} of them never occur and fill it up" if vocabulary.filled else ""
        self._say(
            f"draft vocabulary: {size} of {vocabulary.vocab_size} tokens, which are {covered / trained:.2%} of the "
            f"{trained} trained on in {vocabulary.rows} files{filled}"
        )
        self._say(f"the trainer takes it by {self.request.format.vocabulary_use(self.out, size)}")
        if not same:
            self._say("it is another than the one that was there: a drafter that began with that cannot go on with it")

    def check(self, samples: int) -> int:
        """Compares files with their hashes and with Hugging Face; the number of those that differ, which are named."""
        description, entries = read_manifest(self.out)
        chosen = _spread(entries, samples)
        reference = ReferenceModel(self.request.model or description.model)
        compared = ExportCheck(self.request.format, description, reference).files(self.out, entries, chosen)
        hidden = not self.console.is_terminal
        files = list(track(compared, "comparing", len(entries), console=self.console, transient=True, disable=hidden))
        wrong = [file for file in files if file.problem]
        right = [file for file in files if not file.problem and file.file in chosen]
        largest = max((file.largest_relative for file in files), default=0.0)
        scales = max((file.scales for file in files), default=0.0)
        self._say(
            f"{len(right)} of {len(chosen)} files equal Hugging Face's pass of "
            f"{plain(reference.name)}; largest relative error {largest:.2g}, {scales:.2g} times what rounding explains"
        )
        unhashed = sum(not entry.file_hash for entry in entries.values())
        if unhashed:
            self._say(f"{unhashed} files were exported before a hash of each was kept: a changed byte may go unseen")
        foreign = foreign_files(self.out, self.request.format.suffix, entries)
        self._name([*wrong, *(f"{name}: is no file of this export, and a trainer may read it" for name in foreign)])
        return len(wrong) + len(foreign)

    def _describe(self, prepared: Prepared) -> None:
        about, assigned = prepared.description, prepared.assignments
        slots = ", ".join(f"{layer} ({name})" for layer, name in zip(about.layer_ids, about.slots, strict=True))
        side = {"pre": "before the final norm", "post": "after the final norm", "none": "not among them"}
        self._say(
            f"{about.format} of {plain(about.model)}: layers {slots}; the last layer is "
            f"{side[about.last_layer_norm]}; {about.dtype}"
        )
        self._say(f"the trainer's own counting: {about.trainer}")
        if not prepared.masked:
            elsewhere = "" if self.request.format.has_mask else f" ({about.format} takes masks from its data set)"
            self._say(f"no loss masks were given: every token counts{elsewhere}")
        if prepared.left_out:
            self._say(f"captures of other weights are left out: {', '.join(map(str, prepared.left_out))}")
        if prepared.other_names:
            which = "are taken too" if self.request.data else "are left out"
            self._say(f"captures under other data-set names {which}: {plain(named(prepared.other_names))}")
        if assigned.repeated:
            self._say(f"{assigned.repeated} captures are left out: a later one holds the same sample")
        if assigned.unused:
            self._say(f"{assigned.unused} captures belong to no row of the data set")

    def _tracked(self, outcomes: Iterable[FileOutcome], total: int) -> list[FileOutcome]:
        """All outcomes, with a bar, the rate and the time left."""
        done: list[FileOutcome] = []
        size = 0
        with Progress(*_COLUMNS, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task("", total=total, rate="")
            for outcome in outcomes:
                done.append(outcome)
                size += outcome.written
                seconds = bar.tasks[0].elapsed or 0
                rate = (
                    f"{len(done) / seconds:.3g} samples/s, {readable_bytes(int(size / seconds))}/s" if seconds else ""
                )
                bar.update(task, advance=1, rate=rate)
        return done

    def _summarise(self, outcomes: Sequence[FileOutcome], problems: int) -> None:
        written = [outcome.written for outcome in outcomes if outcome.written]
        kept = sum(outcome.kept and not outcome.problem for outcome in outcomes)
        self._say(
            f"{len(written)} files written ({readable_bytes(sum(written))}), {kept} were there, {problems} samples "
            f"could not be exported; {self.out / MANIFEST} lists the files"
        )
        ways = Counter(outcome.way for outcome in outcomes if outcome.way)
        if ways.keys() - {"made"}:
            ways_said = ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))
            self._say(f"of the files written are {ways_said}; the store's shards are read-only, also through a link")
        replaced = [outcome.assignment.file for outcome in outcomes if outcome.replaced]
        if replaced:
            self._say(f"{len(replaced)} of them had been changed since they were written before:")
            self._name(replaced)
        if remasked := sum(outcome.remasked for outcome in outcomes):
            self._say(f"{remasked} rows of the data set, in which the trainer looks for masks, have others than before")

    def _name(self, problems: Sequence[object]) -> None:
        for problem in problems[:_SHOWN]:
            self._say(plain(str(problem)))
        if len(problems) > _SHOWN:
            self._say(f"and {len(problems) - _SHOWN} more")

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _spread(entries: Iterable[str], samples: int) -> set[str]:
    names = list(entries)
    if samples and samples < len(names):
        names = [names[index * len(names) // samples] for index in range(samples)]
    return set(names)


def _processors() -> int:
    return min(8, len(os.sched_getaffinity(0)))
