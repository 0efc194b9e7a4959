"""`hsconnector plan MODEL`: what the engine's KV cache will do, before GPUs are taken."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from hsconnector.capture.layers import choose_layers
from hsconnector.cli.command_line import printable, serve_command
from hsconnector.cli.options import LayersOption
from hsconnector.cli.quantities import parse_count, parse_memory
from hsconnector.errors import LayoutError, SettingsError
from hsconnector.layout.capacity import Capacity
from hsconnector.layout.defects import explain_kv_refusal
from hsconnector.layout.models import read_config, read_model
from hsconnector.layout.plan import Plan, make_plan
from hsconnector.layout.serving import Serving
from hsconnector.vllm_facts import RULES_VERSION, installed

__all__ = ["plan", "plan_as_json", "plan_as_text"]

DTYPES = ("auto", "bfloat16", "float16", "float32")


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's directory, or its config.json.")],
    layers: LayersOption = "auto",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.")] = 1,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block, vLLM's --block-size; by default its own choice.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, fp8, fp8_e4m3 or fp8_e5m2.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    kv_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV-cache memory of one rank, such as 40GiB.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="vLLM's --max-model-len; by default the model's own.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="COUNT", help="Tokens of a data set, such as 100M: prints the disk space that it takes."),
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the cache of equal prefixes.")] = True,
    disable_hybrid_kv_cache_manager: Annotated[
        bool, typer.Option("--disable-hybrid-kv-cache-manager", help="vLLM's option of this name.")
    ] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    vllm_version: Annotated[
        str | None, typer.Option(help="The engine's version; by default the installed one.")
    ] = None,
    engine_log: Annotated[
        typer.FileText | None,
        typer.Option(metavar="FILE", errors="replace", help="What an engine printed that did not start; - is stdin."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what the engine's KV cache will do when a hidden-state layer joins MODEL, and what its rows take on disk.

    Exits 1, with the reason, where the engine would refuse to start, or did so in `--engine-log` for a known defect.
    """
    if dtype not in DTYPES:
        raise SettingsError(f"--dtype {dtype} is none of {', '.join(DTYPES)}")
    name, config = read_config(model)
    read = read_model(name, config, dtype=None if dtype == "auto" else dtype)
    serving = Serving(
        tp=tp,
        pp=pp,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        prefix_caching=prefix_caching,
        hybrid_manager=not disable_hybrid_kv_cache_manager,
        device=device,
    )
    made = make_plan(
        read,
        serving,
        choose_layers(layers, read.num_layers),
        kv_memory=None if kv_memory is None else parse_memory("--kv-memory", kv_memory),
        tokens=None if tokens is None else parse_count("--tokens", tokens),
        version=vllm_version or (installed() or ("vllm", RULES_VERSION))[1],
    )
    command = serve_command(name, made.layers.layer_ids, options=_options(made, dtype, as_given=block_size))
    typer.echo(json.dumps(plan_as_json(made, command), indent=2) if as_json else plan_as_text(made, command))
    if made.refused is not None:
        raise LayoutError(f"the engine would refuse to start: {made.refused}")
    if engine_log is not None and made.request_bytes is not None:
        explained = explain_kv_refusal(engine_log.read(), made.request_bytes)
        if explained is not None:
            raise LayoutError(explained)


def plan_as_json(made: Plan, command: list[str]) -> dict[str, Any]:
    """The report as one object of plain values; sizes in bytes, block sizes in tokens."""
    sizes = made.block_sizes
    return {
        "model": made.model.name,
        "architecture": made.model.architecture,
        "dtype": made.model.dtype,
        "layer_ids": list(made.layers.layer_ids),
        "trainer_layer_ids": list(made.trainer_ids),
        "slots": list(made.slots),
        "refused": made.refused,
        "helps": list(made.helps),
        "groups": [vars(group) for group in made.groups],
        "hidden_group": None if made.hidden is None else made.hidden.index,
        "block_size": made.block_size_note,
        "scheduler_block_size": sizes.scheduler if sizes else None,
        "hash_block_size": sizes.hash if sizes else None,
        "prefix_cache_hit_tokens": sizes.hit if sizes else None,
        "without_extraction": None if made.without is None else vars(made.without),
        "with_extraction": None if made.with_extraction is None else vars(made.with_extraction),
        "share_lost": made.share_lost,
        "hidden_cache_inflation": made.inflation,
        "storage": vars(made.storage),
        "defects": [vars(defect) for defect in made.defects],
        "assumptions": list(made.assumptions),
        "command": command,
    }


def plan_as_text(made: Plan, command: list[str]) -> str:
    """The report for a terminal or a file, in 100 columns."""
    parts = [_heading(made)]
    if made.groups:
        parts += [_groups(made), _capacity(made)]
    parts.append(_storage(made))
    if made.defects:
        parts.append(_defects(made))
    if made.refused is not None:
        parts.append(
            "\n".join(
                ["REFUSED", *_wrapped(made.refused), *(w for each in made.helps for w in _wrapped(f"try: {each}"))]
            )
        )
    if made.assumptions:
        parts.append("\n".join(["Assumed", *(line for each in made.assumptions for line in _wrapped(each))]))
    parts.append("Serve\n" + "\n".join("  " + line for line in printable(command).splitlines()))
    return "\n\n".join(parts)


def _heading(made: Plan) -> str:
    ids = ", ".join(map(str, made.layers.layer_ids))
    theirs = ", ".join(map(str, made.trainer_ids))
    return "\n".join(
        [
            f"{made.model.name}",
            f"  {made.model.architecture}, {made.model.num_layers} layers, hidden size {made.model.hidden_size}, "
            f"{made.model.dtype}, TP {made.serving.tp}, PP {made.serving.pp}",
            f"  layers {ids} in vLLM's counting ({made.layers.preset})",
            f"  layers {theirs} as SGLang, SpecForge, TorchSpec and DFlash count",
            f"  slots {', '.join(made.slots)}",
        ]
        + ([] if made.layers.has_last else ["  the last layer is not among them: no trainer's target can be built"])
    )


def _groups(made: Plan) -> str:
    rows = [("group", "kind", "layers", "block", "page", "unused")]
    for group in made.groups:
        share = f" ({group.waste_bytes / group.page_bytes:.0%})" if group.waste_bytes else ""
        mark = " *" if group.holds_hidden_states else ""
        rows.append(
            (
                f"{group.index}{mark}",
                group.kind,
                str(group.layers),
                str(group.block_size),
                f"{group.page_bytes:,}",
                f"{group.waste_bytes:,}{share}",
            )
        )
    sizes = made.block_sizes
    lines = [
        *_table(rows),
        "* holds the hidden states; blocks are in tokens, pages and what they leave unused in bytes",
        *_wrapped(f"block size: {made.block_size_note}", indent=0),
    ]
    if sizes is not None:
        note = f"scheduler block {sizes.scheduler:,}, hash block {sizes.hash:,}: {made.granularity_note}"
        lines += _wrapped(note, indent=0)
    return "\n".join(lines)


def _capacity(made: Plan) -> str:
    without, held = made.without, made.with_extraction
    if without is None or held is None or made.specs is None:
        return ""
    rows = [("KV cache of a rank", "without", "with extraction")]
    rows.append(("bytes a token", f"{without.bytes_per_token:,.0f}", f"{held.bytes_per_token:,.0f}"))
    if held.tokens is not None:
        rows.append(("tokens that fit", f"{without.tokens:,}", f"{held.tokens:,}"))
        length = f"{made.specs.max_model_len:,}"
        rows.append((f"requests of {length}", _requests(without), _requests(held)))
    lines = [*_table(rows), f"lost to extraction: {made.share_lost:.0%} of the tokens"]
    if made.inflation > 1.05:
        lines.append(f"the hidden-state cache takes {made.inflation:.1f} times the bytes of its rows")
    return "\n".join(lines)


def _requests(capacity: Capacity) -> str:
    return f"{capacity.requests:.2f}"


def _storage(made: Plan) -> str:
    kept = made.storage
    rows = [("rows", made.model.dtype, "fp8")]
    rows.append(("bytes a token, wire", f"{kept.wire:,}", f"{kept.wire_fp8:,}"))
    rows.append(("bytes a token, disk", f"{kept.disk:,}", f"{kept.disk_fp8:,}"))
    if kept.tokens is not None and kept.total is not None and kept.total_fp8 is not None:
        rows.append((f"disk, {kept.tokens:,} tokens", _bytes(kept.total), _bytes(kept.total_fp8)))
    return "\n".join(_table(rows))


def _defects(made: Plan) -> str:
    lines = ["Known defects"]
    for defect in made.defects:
        state = "open" if defect.fixed_in is None else f"before {'.'.join(map(str, defect.fixed_in))}"
        lines += _wrapped(f"{defect.reports} ({state}): {defect.what}")
        lines += _wrapped(f"helps: {defect.helps}", indent=4)
    return "\n".join(lines)


def _options(made: Plan, dtype: str, *, as_given: int | None) -> list[str]:
    """The options of the plan that are not vLLM's defaults."""
    serving = made.serving
    valued = (
        ("--tensor-parallel-size", serving.tp, 1),
        ("--pipeline-parallel-size", serving.pp, 1),
        ("--block-size", as_given, None),
        ("--kv-cache-dtype", serving.kv_cache_dtype, "auto"),
        ("--dtype", dtype, "auto"),
        ("--max-model-len", serving.max_model_len, None),
    )
    words = [word for option, value, default in valued if value != default for word in (option, str(value))]
    if not serving.prefix_caching:
        words.append("--no-enable-prefix-caching")
    if not serving.hybrid_manager:
        words.append("--disable-hybrid-kv-cache-manager")
    return words


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {0, 1} if len(rows[0]) > 3 else {0}
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _wrapped(text: str, indent: int = 2) -> list[str]:
    pad = " " * indent
    return textwrap.wrap(text, 98, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)


def _bytes(value: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value} B"
