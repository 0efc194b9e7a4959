"""`hsconnector ls`: the captures of a sidecar, by filter."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hsconnector.capture.content import choose_weights
from hsconnector.capture.protocol import CaptureState, is_weights_id
from hsconnector.capture.record import CaptureRecord, public_fields
from hsconnector.cli.options import SidecarOption, with_older_names
from hsconnector.cli.quantities import parse_duration
from hsconnector.cli.show import HEADINGS, cells, plain, readable_bytes
from hsconnector.client import DEFAULT_SIDECAR, Client
from hsconnector.errors import SettingsError

__all__ = ["ls"]


@with_older_names
def ls(
    sidecar: SidecarOption = DEFAULT_SIDECAR,
    dataset: Annotated[str | None, typer.Option(help="Only captures of this data set.")] = None,
    sample_id: Annotated[str | None, typer.Option(help="Only captures of this sample.")] = None,
    state: Annotated[CaptureState | None, typer.Option(help="Only captures in this state.")] = None,
    model: Annotated[str | None, typer.Option(help="Only captures of this model, as the engine names it.")] = None,
    weights_id: Annotated[
        str | None, typer.Option(help="Only captures of these weights; the first digits are enough.")
    ] = None,
    request_id: Annotated[str | None, typer.Option(help="Only captures of this request, by the engine's id.")] = None,
    client_id: Annotated[str | None, typer.Option(help="Only captures of this request, by the client's id.")] = None,
    content_hash: Annotated[str | None, typer.Option(help="Only captures with this content hash.")] = None,
    since: Annotated[str | None, typer.Option(help="Only captures not older than this: 90s, 30m, 12h, 7d.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most so many, the newest; 0: all.")] = 50,
    totals: Annotated[bool, typer.Option("--totals", help="Count and add up everything that matches.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Lists captures, the newest first: state, rows, slots, size, whose weights, data set and sample.

    With --totals: how many there are in each state and how much room they take, whatever --limit says.
    """
    if since is not None and parse_duration("--since", since) > time.time():
        raise SettingsError(f"--since {since} reaches before 1970")
    oldest = None if since is None else time.time() - parse_duration("--since", since)
    with Client(sidecar) as client:
        found = client.captures(
            page_size=1000 if totals or not limit else min(limit, 1000),
            dataset=dataset,
            sample_id=sample_id,
            state=state,
            model=model,
            weights_id=None if weights_id is None else _whole_id(client, weights_id),
            request_id=request_id,
            client_id=client_id,
            content_hash=content_hash,
            since=oldest,
        )
        if totals:
            _print_totals(found, as_json)
            return
        chosen = list(islice(found, limit)) if limit else list(found)
        more = limit > 0 and len(chosen) == limit and next(found, None) is not None
    if as_json:
        for record in chosen:
            typer.echo(msgspec.json.encode(public_fields(record)).decode())
        return
    _print_table(chosen)
    if more:
        typer.echo(f"the newest {limit}; there are more: --limit 0 lists all, --totals counts them", err=True)


def _whole_id(client: Client, begun: str) -> str:
    return begun if is_weights_id(begun) else choose_weights(client.weights(), begun)


def _print_table(records: Sequence[CaptureRecord]) -> None:
    console = Console()
    if not records:
        console.print("no captures match")
        return
    table = Table(*HEADINGS[:-1], box=None)
    for record in records:
        table.add_row(*(Text(plain(cell)) for cell in cells(record)[:-1]))
    console.print(table)


def _print_totals(records: Iterator[CaptureRecord], as_json: bool) -> None:
    captures: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for record in records:
        captures[record.state] += 1
        sizes[record.state] += record.size
        rows[record.state] += record.num_rows
    if as_json:
        by_state = {
            state: {"captures": captures[state], "rows": rows[state], "bytes": sizes[state]} for state in captures
        }
        typer.echo(msgspec.json.encode({"states": by_state, "bytes": sizes.total()}).decode())
        return
    table = Table("state", "captures", "rows", "size", box=None)
    for state in CaptureState:
        table.add_row(state, str(captures[state]), str(rows[state]), readable_bytes(sizes[state]))
    table.add_row("all", str(captures.total()), str(rows.total()), readable_bytes(sizes.total()))
    Console().print(table)
