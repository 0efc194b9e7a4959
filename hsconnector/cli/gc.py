"""`hsconnector gc`: what leaves a store, now."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from hsconnector.capture.protocol import CaptureState
from hsconnector.cli import CouldNotStart
from hsconnector.cli.options import with_older_names
from hsconnector.cli.quantities import parse_bytes, parse_duration
from hsconnector.cli.show import plain, readable_bytes
from hsconnector.client import DEFAULT_SIDECAR, Client, Collection, Limits
from hsconnector.client.address import default_sidecar
from hsconnector.errors import SettingsError

__all__ = ["gc"]

_LISTED = 20
_STOP_S = 30.0
_ANSWER_S = 600.0
"""For an answer: removing many shards takes a while."""


@with_older_names
def gc(
    sidecar: Annotated[
        str | None, typer.Option(help=f"Where `hsconnector serve` listens; else HSC_SIDECAR, else {DEFAULT_SIDECAR}.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="A store whose sidecar is not running, instead of --sidecar.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(help="What is older goes: 90s, 30m, 12h, 7d; default: the sidecar's.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(help="Remove down to this: 500GB, 1.5TiB; default: the sidecar's quota.")
    ] = None,
    evict: Annotated[
        Literal["acked", "oldest", "none"] | None,
        typer.Option(help="What may go to get down to --max-bytes; default: the sidecar's, acked."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Instead of retention: every capture of this data set.")] = None,
    sample_id: Annotated[str | None, typer.Option(help="Every capture of this sample.")] = None,
    model: Annotated[str | None, typer.Option(help="Every capture of this model.")] = None,
    state: Annotated[
        CaptureState | None, typer.Option(help="Every capture in this state: ready or quarantined.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Every capture made longer ago than this: 90s, 30m, 12h, 7d.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run/--delete", help="Only say what would go, or remove it.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Says what would leave a store, and with --delete removes it.

    Without filters retention is applied: what was deleted with its acknowledgement, what is older than --ttl, then
    down to --max-bytes what is acknowledged and, with --evict oldest, the oldest. With filters every capture that
    matches all of them goes. What is leased, being read or not final stays.
    """
    if sidecar is not None and store is not None:
        raise SettingsError(
            "--sidecar and --store are both given: name the sidecar, or the store of one that is stopped"
        )
    filters = _filters({"dataset": dataset, "sample_id": sample_id, "model": model, "state": state}, older_than)
    limits = _limits(ttl, max_bytes, evict)
    if filters and limits:
        raise SettingsError("--ttl, --max-bytes and --evict apply retention; they do not go together with filters")
    at = contextlib.nullcontext(sidecar or default_sidecar()) if store is None else _own_sidecar(store)
    with at as address, Client(address, timeout=_ANSWER_S) as client:
        found = client.collect(filters or None, dry_run=dry_run, **limits)
    if as_json:
        typer.echo(msgspec.json.encode({"dry_run": dry_run, **msgspec.to_builtins(found)}).decode())
    else:
        _print(found, dry_run)


def _filters(named: Mapping[str, str | None], older_than: str | None) -> dict[str, Any]:
    chosen: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if older_than is not None:
        chosen["created_before"] = time.time() - parse_duration("--older-than", older_than)
    return chosen


def _limits(ttl: str | None, max_bytes: str | None, evict: str | None) -> Limits:
    limits: Limits = {}
    if ttl is not None:
        limits["ttl_s"] = parse_duration("--ttl", ttl)
    if max_bytes is not None:
        limits["max_bytes"] = parse_bytes("--max-bytes", max_bytes)
    if evict is not None:
        limits["evict"] = evict
    return limits


@contextlib.contextmanager
def _own_sidecar(store: Path) -> Iterator[str]:
    """The address of a sidecar that runs on `store` within this context; exit code 3 where it cannot start."""
    if not (store / "captures").is_dir():
        raise SettingsError(f"{store} is not a store: it has no folder captures")
    with tempfile.TemporaryDirectory(prefix="hsconnector-") as folder:
        socket = Path(folder) / "sidecar"
        command = [sys.executable, "-c", "from hsconnector.cli import main; main()", "serve"]
        command += [f"--store={store.absolute()}", "--no-tcp", f"--uds={socket}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HSC_")}
        log = Path(folder) / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
        ):
            try:
                if process.stdout is None or not process.stdout.readline():
                    process.wait(_STOP_S)
                    raise CouldNotStart(f"no sidecar can be run on the store: {_last_line(log)}")
                yield f"unix://{socket}"
            finally:
                process.terminate()
                process.wait(_STOP_S)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1].removeprefix("hsconnector: ") if lines else "it said nothing"


def _print(found: Collection, dry_run: bool) -> None:
    for each in found.data[:_LISTED]:
        name = plain(" ".join(part for part in (each.dataset, each.sample_id) if part))
        typer.echo(
            f"{each.capture_id}  {each.why:<8}  {each.state:<11}  {readable_bytes(each.size):>8}  {name}".rstrip()
        )
    if found.count > _LISTED:
        typer.echo(f"… and {found.count - _LISTED} more")
    reasons = Counter(each.why for each in found.data)
    listed = ", ".join(f"{count} {why}" for why, count in reasons.items())
    verb = "would go" if dry_run else "are gone"
    typer.echo(f"{found.count} captures {verb}, {readable_bytes(found.bytes)}{f' ({listed})' if listed else ''}")
    if found.held:
        typer.echo(f"{found.held} that match stay: they are leased or being read")
    if dry_run and found.count:
        typer.echo("nothing was removed; say --delete to remove them")
