"""`hsconnector extract`: a data set through a running engine into the sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hsconnector.capture.content import Content
from hsconnector.capture.protocol import MAX_TEXT_BYTES
from hsconnector.cli import CouldNotStart
from hsconnector.cli.options import SidecarOption, with_older_names
from hsconnector.cli.show import plain
from hsconnector.client import DEFAULT_SIDECAR
from hsconnector.client.async_client import AsyncClient
from hsconnector.client.connection import connect_async
from hsconnector.errors import HSConnectorError, SettingsError, SidecarUnreachable, UnsupportedError
from hsconnector.extraction.content import choose_content
from hsconnector.extraction.engine import Engine, EngineUnusable, engine_url, served_model
from hsconnector.extraction.extraction import Extraction, Order
from hsconnector.extraction.ledger import Fate, Ledger
from hsconnector.prompts.chat import ChatTokenizer, load_tokenizer
from hsconnector.prompts.encoded import Encoded
from hsconnector.prompts.files import Rows, open_rows
from hsconnector.prompts.prompt import Missing, Prompt, PromptReader
from hsconnector.prompts.saved import SavedDataset

__all__ = ["extract"]

_ENGINE = "http://127.0.0.1:8000"
_COULD_NOT_START = (EngineUnusable, SidecarUnreachable, UnsupportedError)
_LISTED = 50
"""Missing rows named at the end; --failures writes them all."""
_LINE_EVERY_S = 10.0
"""Between lines of progress where no terminal shows the bar."""
_SEEN_WITHIN_S = 20.0
"""How long an engine may take to open its stream again after the sidecar was restarted."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options, checked."""

    rows: Rows
    order: Order
    engine_urls: tuple[str, ...]
    engine_key: str
    timeout_s: float
    sidecar_url: str
    api_key: str
    layers: str
    tokenizer: str
    id_field: str
    limit: int
    saved: SavedDataset | None
    failures: Path | None
    as_json: bool


@with_older_names
def extract(
    data: Annotated[Path, typer.Argument(help=".jsonl, .json, .parquet, .arrow, or a folder of these.")],
    engine_urls: Annotated[
        list[str] | None,
        typer.Option("--engine-url", envvar="HSC_ENGINE_URL", help=f"The engine, default {_ENGINE}; repeatable."),
    ] = None,
    sidecar: SidecarOption = DEFAULT_SIDECAR,
    dataset: Annotated[
        str, typer.Option(help="The data-set name that each capture carries; default: DATA's own.")
    ] = "",
    model: Annotated[str, typer.Option(help="The model, as the engine names it; default: the first it serves.")] = "",
    layers: Annotated[
        str, typer.Option(help="Refuse to start unless the engine captures these, written as for launch; default: any.")
    ] = "",
    tokenizer: Annotated[
        str, typer.Option(help="What encodes conversations, a folder or a hub name; default: the engine's model.")
    ] = "",
    id_field: Annotated[str, typer.Option(help="The field with a sample's id; default: the row's number.")] = "",
    tag: Annotated[list[str] | None, typer.Option("--tag", help="NAME=VALUE for each capture; repeatable.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at the engines at one time.")] = 32,
    attempts: Annotated[int, typer.Option(min=1, help="How often a row is asked for before it counts as failed.")] = 3,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one request may take.")] = 600.0,
    capture_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until a capture must be final, once its request is answered.")
    ] = 120.0,
    limit: Annotated[int, typer.Option(min=0, help="Only so many rows from the start; 0: all.")] = 0,
    save_dataset: Annotated[
        Path | None, typer.Option(help="A folder for the token ids and masks of what is stored; default: none.")
    ] = None,
    save_format: Annotated[Literal["jsonl", "arrow"], typer.Option(help="What --save-dataset writes.")] = "jsonl",
    failures: Annotated[
        Path | None, typer.Option(help="A file for the rows without a capture, one JSON object a line; default: none.")
    ] = None,
    engine_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="The engine's key; default: none.")] = "",
    api_key: Annotated[str, typer.Option(envvar="HSC_API_KEY", help="The sidecar's key; default: none.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Asks a running engine for every row of DATA until the sidecar has a sound capture of each.

    Rows hold `input_ids` (and `loss_mask`), or a conversation under `messages` or `conversations`, which is encoded
    with the model's chat template and masked to the assistant's turns. Token ids are sent, never text.

    What is stored already, by content, is not asked for again: after Ctrl-C or a crash start the same command again.
    Exit code 1 if any row has no capture at the end.
    """
    order = Order(
        model=model,
        dataset=_checked(dataset or data.name.removesuffix(data.suffix)),
        tags=_tags(tag or []),
        concurrency=concurrency,
        attempts=attempts,
        capture_timeout_s=capture_timeout,
    )
    options = Options(
        rows=open_rows(data),
        order=order,
        engine_urls=tuple(engine_urls or [_ENGINE]),
        engine_key=engine_key,
        timeout_s=timeout,
        sidecar_url=sidecar,
        api_key=api_key,
        layers=layers,
        tokenizer=tokenizer,
        id_field=id_field,
        limit=limit,
        saved=SavedDataset(save_dataset, save_format) if save_dataset else None,
        failures=failures,
        as_json=as_json,
    )
    _carry_out(options)


def _carry_out(options: Options) -> None:
    """Runs the command and reports, also what was done before an error or Ctrl-C."""
    ledger = Ledger(min(options.rows.count, options.limit or options.rows.count))
    try:
        asyncio.run(_Run(options, ledger).run())
    except (HSConnectorError, KeyboardInterrupt) as error:
        if isinstance(error, _COULD_NOT_START) and not ledger.done:
            raise CouldNotStart(str(error)) from error
        if ledger.done or isinstance(error, KeyboardInterrupt):
            _report(ledger, options)
        if isinstance(error, KeyboardInterrupt):
            typer.echo("interrupted: start the same command again to go on", err=True)
        raise
    _report(ledger, options)
    if not ledger.complete:
        raise typer.Exit(1)


class _Run:
    """One run of the command."""

    def __init__(self, options: Options, ledger: Ledger) -> None:
        self.options = options
        self.ledger = ledger

    async def run(self) -> None:
        options = self.options
        async with contextlib.AsyncExitStack() as stack:
            connections = options.order.concurrency + 4
            engines = []
            for url in options.engine_urls:
                http = connect_async(
                    engine_url(url), key=options.engine_key, timeout_s=options.timeout_s, connections=connections
                )
                engines.append(Engine(url, await stack.enter_async_context(http)))
            http = connect_async(options.sidecar_url, key=options.api_key, timeout_s=60.0, connections=connections)
            sidecar = AsyncClient(options.sidecar_url, await stack.enter_async_context(http))
            order, content, max_tokens = await self._meet(engines, sidecar)
            saved = stack.enter_context(options.saved) if options.saved else None
            changed = stack.enter_context(_progress(self.ledger))
            extraction = Extraction(order, engines, sidecar, content, self.ledger, changed=changed)
            await extraction.run(self._samples(content, max_tokens), saved.add if saved else lambda _: None)
            if saved is not None:
                self._publish(saved, content)

    async def _meet(self, engines: list[Engine], sidecar: AsyncClient) -> tuple[Order, Content, int]:
        """What the engines serve, as they and the sidecar say."""
        contents: dict[str, Content] = {}
        lengths: list[int] = []
        name = self.options.order.model
        for engine in engines:
            chosen, base = served_model(await engine.models(), name, engine.url)
            name = chosen.id
            lora = chosen.id if chosen is not base else ""
            contents[engine.url] = await self._content_of(sidecar, base.root or base.id, lora)
            lengths.append(base.max_model_len or 0)
        if len(set(contents.values())) > 1:
            found = "; ".join(
                f"{url}: {content.model!r} {list(content.layer_ids)}" for url, content in contents.items()
            )
            raise SettingsError(
                f"the engines would give different states: {found}; extract from each in a run of its own"
            )
        known = [length for length in lengths if length]
        order = replace(self.options.order, model=name)
        return order, next(iter(contents.values())), min(known) - 1 if known else 0

    async def _content_of(self, sidecar: AsyncClient, model: str, lora: str) -> Content:
        end = time.monotonic() + _SEEN_WITHIN_S
        while True:
            producers = await sidecar.producers()
            try:
                return choose_content(
                    producers, model=model, lora=lora, layers=self.options.layers, sidecar=self.options.sidecar_url
                )
            except UnsupportedError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(0.5)

    def _samples(self, content: Content, max_tokens: int) -> Iterator[Prompt | Missing]:
        tokenizer: list[ChatTokenizer] = []

        def encode(conversation: object, tools: object) -> Encoded:
            if not tokenizer:
                tokenizer.append(load_tokenizer(self.options.tokenizer or content.model))
            return tokenizer[0].encode(conversation, tools)

        reader = PromptReader(encode, self.options.id_field, max_tokens)
        for index, row in enumerate(self.options.rows.read()):
            if self.options.limit and index >= self.options.limit:
                return
            yield reader.read(row, index)

    def _publish(self, saved: SavedDataset, content: Content) -> None:
        about = {"dataset": self.options.order.dataset, **asdict(content)}
        del about["mm_hashes"]  # of images, which no row of an extraction has
        count = saved.publish({missing.row for missing in self.ledger.missing}, about)
        typer.echo(f"{count} rows with token ids and masks in {saved.folder}", err=True)


@contextlib.contextmanager
def _progress(ledger: Ledger) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    pace = _Pace(ledger)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task: TaskID = bar.add_task("extract", total=ledger.total, rate="")
        said = time.monotonic()

        def changed() -> None:
            nonlocal said
            bar.update(task, completed=ledger.done, rate=pace.text())
            if bar.disable and time.monotonic() - said > _LINE_EVERY_S:
                said = time.monotonic()
                console.print(f"{ledger.done}/{ledger.total} rows, {pace.text()}, {pace.left()}", highlight=False)

        yield changed


class _Pace:
    """How fast captures come."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._start = time.monotonic()

    def text(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-3)
        failed = self._ledger.counts[Fate.FAILED] + self._ledger.counts[Fate.REFUSED]
        captures, tokens = self._ledger.counts[Fate.CAPTURED] / seconds, self._ledger.tokens / seconds
        rate = f"{captures:.1f} captures/s, {tokens:.0f} tokens/s"
        return f"{rate}, {failed} failed" if failed else rate

    def left(self) -> str:
        done = self._ledger.done
        if not done:
            return "time left unknown"
        seconds = (time.monotonic() - self._start) * (self._ledger.total - done) / done
        return f"{seconds / 60:.0f} min left" if seconds > 90 else f"{seconds:.0f} s left"


def _report(ledger: Ledger, options: Options) -> None:
    missing = sorted(ledger.missing, key=lambda each: each.row)
    if options.failures is not None:
        lines = [json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in missing]
        options.failures.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    for each in missing[:_LISTED]:
        typer.echo(plain(str(each)), err=True)
    if len(missing) > _LISTED:
        typer.echo(f"… and {len(missing) - _LISTED} more; --failures FILE writes them all", err=True)
    if options.as_json:
        counts = {str(fate): ledger.counts[fate] for fate in Fate}
        more = {"total": ledger.total, "complete": ledger.complete, "tokens": ledger.tokens, "retries": ledger.retries}
        typer.echo(json.dumps({**counts, **more, "missing": [asdict(each) for each in missing]}))
    else:
        typer.echo(ledger.sentence())


def _tags(words: list[str]) -> dict[str, str]:
    tags = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise SettingsError(f"--tag {word!r} is not NAME=VALUE")
        if name == "row":
            raise SettingsError("--tag row=… is taken: it carries the row's number")
        tags[name] = value
    return tags


def _checked(dataset: str) -> str:
    size = len(dataset.encode("utf-8", "surrogatepass"))
    if not dataset or size > MAX_TEXT_BYTES:
        raise SettingsError(f"--dataset has {size} bytes, 1 to {MAX_TEXT_BYTES} are allowed")
    return dataset
