"""`hsconnector show`: one capture, a shard file, or the latest captures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.cells import cell_len, set_cell_size

from hsconnector.capture.header import ShardHeader, open_header
from hsconnector.capture.layers import slot_name
from hsconnector.capture.protocol import is_capture_id
from hsconnector.capture.record import CaptureRecord, Verdict, public_fields
from hsconnector.cli.options import SidecarOption, with_older_names
from hsconnector.client import DEFAULT_SIDECAR, Client
from hsconnector.errors import CaptureNotFound

__all__ = ["HEADINGS", "cells", "columns", "plain", "readable_bytes", "show"]

HEADINGS = ("capture", "created", "state", "rows", "slots", "size", "weights", "dataset", "sample", "request")
"""Of the `cells` of a record in a list."""
_LATEST = 20


@with_older_names
def show(
    what: Annotated[
        str, typer.Argument(help="A capture id, a handle, a request id or a shard file; nothing: the latest captures.")
    ] = "",
    sidecar: SidecarOption = DEFAULT_SIDECAR,
    limit: Annotated[int, typer.Option(min=1, help="Captures of a list.")] = _LATEST,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Shows what is known of captures: state, verdict, layers, size and where they are.

    A request id is the engine's or the one the client knows; several captures of one request are shown as a list.
    """
    if Path(what).is_file() or what.endswith(".safetensors"):
        _show_shard(Path(what), as_json)
        return
    with Client(sidecar) as client:
        records = _records(client, what, limit)
    if as_json:
        for record in records:
            typer.echo(msgspec.json.encode(public_fields(record)).decode())
    elif len(records) == 1 and what:
        _print_fields(_fields(records[0]))
    else:
        _print_list(records)


def plain(text: str) -> str:
    """A text from elsewhere, safe for a terminal: what is not printable is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of a table as lines, nothing cut off."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def cells(record: CaptureRecord) -> list[str]:
    """A record as one line of a list, under `HEADINGS`; its texts are as clients gave them."""
    return [
        record.capture_id,
        _moment(record.created)[:19],
        record.state + (f": {record.reason}" if record.reason else ""),
        str(record.num_rows),
        str(len(record.layer_ids)),
        readable_bytes(record.size),
        record.weights_id[:12],
        record.dataset,
        record.sample_id,
        record.request_id,
    ]


def readable_bytes(count: int) -> str:
    """ "1.2 MB", in powers of 1000."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _records(client: Client, what: str, limit: int) -> Sequence[CaptureRecord]:
    if not what:
        return [record for record, _ in zip(client.captures(page_size=min(limit, 100)), range(limit), strict=False)]
    if is_capture_id(what) or "://" in what:
        return [client.record(what)]
    found = client.find(request_id=what) or client.find(client_id=what)
    if not found:
        raise CaptureNotFound(f"no capture of the request {plain(what)!r} is known at {client.url}")
    return found[:limit]


def _fields(record: CaptureRecord) -> dict[str, str]:
    shape = f"[{record.num_rows}, {len(record.layer_ids)}, {record.hidden_size}] {record.dtype}"
    state = record.state + (f": {record.reason} {record.detail}" if record.reason else "")
    fields = {
        "capture": record.capture_id,
        "state": state,
        "verdict": _verdict(record),
        "request": record.request_id,
        "rows": f"{record.num_rows} ({record.rows}), {record.num_prompt_tokens} prompt tokens",
        "hidden_states": shape,
        **_slots(record.layer_ids, record.num_layers, record.verdict),
        "model": " ".join([record.model, record.model_revision]).strip(),
        "engine": f"{record.engine_id}, vLLM {record.vllm_version}",
        "dataset": record.dataset,
        "sample": record.sample_id,
        "tags": json.dumps(record.tags, ensure_ascii=False) if record.tags else "",
        "adapter": record.lora,
        "finished": record.finish_reason,
        "created": _moment(record.created),
        "content hash": record.content_hash,
        "data hash": record.data_hash,
        "size": readable_bytes(record.size),
        "file": record.path or "",
        "handle": record.handle,
    }
    return {name: value for name, value in fields.items() if value}


def _verdict(record: CaptureRecord) -> str:
    if record.verdict is None:
        return ""
    return "sound" if not record.unsound else f"unsound: {record.findings}"


def _slots(layer_ids: Sequence[int], num_layers: int, verdict: Verdict | None) -> dict[str, str]:
    stats = {each.slot: each for each in verdict.slots} if verdict else {}
    lines = {}
    for slot, layer in enumerate(layer_ids):
        text = f"layer {layer} ({slot_name(layer)}{', before the final norm' if layer == num_layers else ''})"
        if slot in stats:
            seen = stats[slot]
            text += f", mean norm {_number(seen.mean_norm)}"
            text += f", {_number(seen.minimum)} to {_number(seen.maximum)}"
        lines[f"slot {slot}"] = text
    return lines


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).astimezone().isoformat(sep=" ", timespec="seconds")


def _show_shard(path: Path, as_json: bool) -> None:
    header = open_header(path)
    if as_json:
        tensors = {"shape": header.shape, "dtype": header.dtype, "bytes": header.file_bytes}
        typer.echo(json.dumps({**header.metadata, **tensors}, ensure_ascii=False))
    else:
        _print_fields({"file": str(path), **_shard_fields(header)})


def _shard_fields(header: ShardHeader) -> dict[str, str]:
    num_layers = header.metadata.get("num_layers", "")
    return {
        "hidden_states": f"{list(header.shape)} {header.dtype}",
        **_slots(header.layer_ids, int(num_layers) if re.fullmatch("[0-9]+", num_layers) else -1, None),
        "size": readable_bytes(header.file_bytes),
        **{name: value for name, value in header.metadata.items() if value and name != "layer_ids"},
    }


def _print_fields(fields: Mapping[str, str]) -> None:
    width = max(map(len, fields))
    for name, value in fields.items():
        typer.echo(f"{plain(name):<{width}}  {plain(value)}")


def _print_list(records: Sequence[CaptureRecord]) -> None:
    if not records:
        typer.echo("no captures yet")
        return
    typer.echo(columns([HEADINGS, *map(cells, records)]))
