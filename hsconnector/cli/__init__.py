"""The `hsconnector` command: one module per subcommand, imported only when it is asked for.

Exit codes: 0 done, 1 failed, 2 usage, 3 could not start.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from hsconnector import __version__
from hsconnector.errors import HSConnectorError, SettingsError

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "serve": "Run the sidecar: take captures, store and serve them.",
    "launch": "Run `vllm serve` with everything set for extraction.",
    "plan": "Say what the engine's KV cache will do, before taking GPUs.",
    "extract": "Push a data set through a running engine into the sidecar.",
    "train": "Run `speculators train` with its samples from a sidecar.",
    "export": "Write captures as the files that a trainer reads.",
    "ls": "List captures, by filter.",
    "show": "Show one capture, a shard file or the latest captures.",
    "gc": "Say what would leave a store, or remove it.",
    "reindex": "Rebuild a store's index from its shards.",
    "verify": "Compare captures with a Hugging Face forward pass.",
}
"""Each name is a module of this package that holds a function of the same name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and leaves the process with its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    app = build_app(next((word for word in argv if not word.startswith("-")), ""))
    try:
        app(argv, prog_name="hsconnector")
    except SettingsError as error:
        _stop(error, 2)
    except HSConnectorError as error:
        _stop(error, 1)
    except KeyboardInterrupt:
        _stop("interrupted", 130)


def build_app(asked: str) -> typer.Typer:
    """The command line with `asked` imported and every other command known by name and help only."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_root)
    for name, summary in COMMANDS.items():
        function = _load(name) if name == asked else _unloaded
        settings: dict[str, Any] = getattr(function, "context_settings", {})
        app.command(name, short_help=summary, context_settings=settings)(function)
    return app


def _load(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f"hsconnector.cli.{name}"), name)
    return function


def _unloaded() -> None:
    """Stands for a command that this run does not call."""


def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Hidden states out of a running vLLM engine, as drafter-training data."""
    if version:
        typer.echo(f"hsconnector {__version__}")
        raise typer.Exit


def _stop(message: object, code: int) -> None:
    typer.echo(f"hsconnector: {message}", err=True)
    raise SystemExit(code)
