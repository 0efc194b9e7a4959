"""`hsconnector extract`: a data set through a running engine into the sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date as Date
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hsconnector.capture.content import Content
from hsconnector.capture.protocol import MAX_TEXT_BYTES
from hsconnector.cli import CouldNotStart
from hsconnector.cli.options import SidecarOption, with_older_names
from hsconnector.cli.pace import show_progress
from hsconnector.cli.show import plain
from hsconnector.client import DEFAULT_SIDECAR
from hsconnector.client.async_client import AsyncClient
from hsconnector.client.connection import connect_async
from hsconnector.errors import HSConnectorError, SettingsError, SidecarUnreachable, UnsupportedError
from hsconnector.extraction.adapter import adapter_weights
from hsconnector.extraction.content import choose_content
from hsconnector.extraction.engine import Engine, EngineUnusable, engine_url, served_model
from hsconnector.extraction.extraction import Extraction, Order
from hsconnector.extraction.ledger import Ledger
from hsconnector.extraction.lock import only_run
from hsconnector.extraction.preparing import Recipe, default_workers, prepare
from hsconnector.prompts.files import Rows, open_rows
from hsconnector.prompts.preparation import Preparation
from hsconnector.prompts.prompt import Missing, Prompt
from hsconnector.prompts.saved import SavedDataset

__all__ = ["extract"]

_ENGINE = "http://127.0.0.1:8000"
_COULD_NOT_START = (EngineUnusable, SidecarUnreachable, UnsupportedError)
_LISTED = 50
"""Missing rows named at the end; --failures writes them all."""
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
    shard: tuple[int, int]
    """Which of how many, from 0."""
    workers: int
    preparation: Preparation
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
    shard: Annotated[
        str, typer.Option(help="I/N, the I-th of N parts, for N machines: each N-th row; default: all rows.")
    ] = "1/1",
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that encode conversations; default: a core is left.")
    ] = None,
    train_on: Annotated[
        Literal["all", "last"] | None, typer.Option(help="The assistant's turns that count; default: all.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest row wanted; default: as long as the engine takes.")
    ] = None,
    too_long: Annotated[
        Literal["refuse", "drop", "truncate"] | None,
        typer.Option(help="What becomes of a longer row; truncate cuts its end; default: refuse."),
    ] = None,
    min_trained_tokens: Annotated[
        int | None, typer.Option(min=0, help="A row in which fewer tokens count is dropped; default: 1.")
    ] = None,
    open_end: Annotated[
        Literal["refuse", "train"] | None,
        typer.Option(help="What becomes of a last turn that the template ends without a stop token; default: refuse."),
    ] = None,
    template_kwargs: Annotated[
        str, typer.Option(help='For the chat template, such as {"enable_thinking": false}; default: none.')
    ] = "",
    date: Annotated[str, typer.Option(help="Today, for the chat template, as YYYY-MM-DD; default: today.")] = "",
    role: Annotated[
        list[str] | None, typer.Option("--role", help="NAME=ROLE, a name the data has for a role; repeatable.")
    ] = None,
    save_dataset: Annotated[
        Path | None, typer.Option(help="A folder for the token ids and masks of what is stored; default: none.")
    ] = None,
    save_format: Annotated[Literal["jsonl", "arrow"], typer.Option(help="What --save-dataset writes.")] = "jsonl",
    failures: Annotated[
        Path | None, typer.Option(help="A file for the rows without a capture, one JSON object a line; default: none.")
    ] = None,
    engine_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="The engine's key; default: none.")] = "",
    api_key: Annotated[str, typer.Option(envvar="HSC_API_KEY", help="The sidecar's key; default: none.")] = "",
    accept_unknown_weights: Annotated[
        bool,
        typer.Option(
            "--accept-unknown-weights",
            help="Also take captures that do not say whose weights they are of, by the model's name.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Asks a running engine for every row of DATA until the sidecar has a sound capture of each.

    Rows hold `input_ids` (and `loss_mask`), or a conversation under `messages` or `conversations`, which is encoded
    with the model's chat template and masked to the assistant's turns. Token ids are sent, never text.

    What is stored already, by content, is not asked for again: after Ctrl-C or a crash start the same command again.
    How rows are prepared, the date included, is kept with --save-dataset, and the next run for that folder does the
    same. Exit code 1 if any row that is wanted has no capture at the end.
    """
    given: dict[str, Any] = {
        "train_on": train_on,
        "max_tokens": max_tokens,
        "too_long": too_long,
        "min_trained_tokens": min_trained_tokens,
        "open_end": open_end,
        "template_kwargs": _object(template_kwargs),
        "date": _date(date),
        "roles": _pairs("--role", role or []) or None,
    }
    decided = {name: value for name, value in given.items() if value is not None}
    saved = SavedDataset(save_dataset, save_format) if save_dataset else None
    order = Order(
        model=model,
        dataset=_checked(dataset or data.name.removesuffix(data.suffix)),
        tags=_tags(tag or []),
        concurrency=concurrency,
        attempts=attempts,
        capture_timeout_s=capture_timeout,
        accept_unknown_weights=accept_unknown_weights,
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
        shard=_shard(shard),
        workers=default_workers() if workers is None else workers,
        preparation=saved.decide(decided) if saved else Preparation(**decided),
        saved=saved,
        failures=failures,
        as_json=as_json,
    )
    _carry_out(options)


def _carry_out(options: Options) -> None:
    """Runs the command and reports, also what was done before an error or Ctrl-C."""
    part, parts = options.shard
    ledger = Ledger(len(range(part, min(options.rows.count, options.limit or options.rows.count), parts)))
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
            stack.enter_context(only_run(options.sidecar_url, options.order.dataset, options.shard))
            order, content, max_tokens = await self._meet(engines, sidecar)
            saved = stack.enter_context(options.saved) if options.saved else None
            if saved is not None:
                saved.begin()
            changed = stack.enter_context(show_progress(self.ledger))
            extraction = Extraction(order, engines, sidecar, content, self.ledger, changed=changed)
            if saved is not None:
                stack.callback(self._publish, saved, content)
            await extraction.run(self._samples(content, max_tokens), saved.add if saved else lambda _: None)

    async def _meet(self, engines: list[Engine], sidecar: AsyncClient) -> tuple[Order, Content, int]:
        """What the engines serve, as they and the sidecar say."""
        contents: dict[str, Content] = {}
        lengths: list[int] = []
        name = self.options.order.model
        for engine in engines:
            chosen, base = served_model(await engine.models(), name, engine.url)
            name = chosen.id
            lora = chosen.id if chosen is not base else ""
            content = await self._content_of(sidecar, base.root or base.id, lora)
            if lora and content.weights_id:
                adapter = await adapter_weights(engine, sidecar, lora, wait_s=self.options.order.capture_timeout_s)
                content = replace(content, lora_weights_id=adapter)
            contents[engine.url] = content
            lengths.append(base.max_model_len or 0)
        if len(set(contents.values())) > 1:
            found = "; ".join(
                f"{url}: {content.model!r} {list(content.layer_ids)} {content.dtype}, weights "
                f"{content.weights_id[:12] or 'unknown'}"
                for url, content in contents.items()
            )
            raise SettingsError(
                f"the engines would give different states: {found}; extract from each in a run of its own"
            )
        known = [length for length in lengths if length]
        order = replace(self.options.order, model=name)
        content = next(iter(contents.values()))
        await self._note_others(sidecar, content)
        return order, content, min(known) - 1 if known else 0

    async def _note_others(self, sidecar: AsyncClient, content: Content) -> None:
        """Counts the captures under this data-set name that are of other weights, and says so before it asks."""
        taken = {content.weights_id, *([""] if self.options.order.accept_unknown_weights else [])}
        others = [each for each in await sidecar.weights(self.options.order.dataset) if each.weights_id not in taken]
        self.ledger.other_weights = sum(each.captures for each in others)
        if others:
            typer.echo(
                f"the engine's weights are {content.weights_id[:12] or 'unknown'}; captures of others are not taken: "
                f"{', '.join(map(str, others))}",
                err=True,
            )

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
        options = self.options
        tokenizer = options.tokenizer or content.model
        recipe = Recipe(tokenizer, options.preparation, options.id_field, max_tokens)
        rows = enumerate(itertools.islice(options.rows.read(), options.limit or None))
        part, parts = options.shard
        return prepare((row for row in rows if row[0] % parts == part), recipe, options.workers)

    def _publish(self, saved: SavedDataset, content: Content) -> None:
        """Saves what has a capture, also where the run broke off."""
        about = {"dataset": self.options.order.dataset, **asdict(content)}
        del about["mm_hashes"]  # of images, which no row of an extraction has
        whole = self.ledger.done == self.ledger.total
        about["counts"] = self.ledger.numbers()
        count = saved.publish(self.ledger.with_capture, about, complete=whole)
        if count is not None:
            typer.echo(f"{count} rows with token ids and masks in {saved.folder}", err=True)


def _report(ledger: Ledger, options: Options) -> None:
    missing = ledger.missing
    if options.failures is not None:
        with options.failures.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in missing)
    for each in itertools.islice(missing, _LISTED):
        typer.echo(plain(str(each)), err=True)
    if len(missing) > _LISTED:
        typer.echo(f"… and {len(missing) - _LISTED} more; --failures FILE writes them all", err=True)
    if options.as_json:
        typer.echo(json.dumps({**ledger.numbers(), "missing": [asdict(each) for each in missing]}))
    else:
        typer.echo(ledger.sentence())


def _tags(words: list[str]) -> dict[str, str]:
    tags = _pairs("--tag", words)
    if "row" in tags:
        raise SettingsError("--tag row=… is taken: it carries the row's number")
    return tags


def _pairs(option: str, words: list[str]) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise SettingsError(f"{option} {word!r} is not NAME={'ROLE' if option == '--role' else 'VALUE'}")
        pairs[name] = value
    return pairs


def _shard(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise SettingsError(f"--shard {text!r} is not I/N with I from 1 to N")
    return int(part) - 1, int(parts)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text) if text else None
    except ValueError as error:
        raise SettingsError(f"--template-kwargs {text!r} is no JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise SettingsError(f"--template-kwargs {text!r} is no JSON object, but a {type(value).__name__}")
    return value


def _date(text: str) -> Date | None:
    try:
        return Date.fromisoformat(text) if text else None
    except ValueError as error:
        raise SettingsError(f"--date {text!r} is no day as YYYY-MM-DD: {error}") from error


def _checked(dataset: str) -> str:
    size = len(dataset.encode("utf-8", "surrogatepass"))
    if not dataset or size > MAX_TEXT_BYTES:
        raise SettingsError(f"--dataset has {size} bytes, 1 to {MAX_TEXT_BYTES} are allowed")
    return dataset
