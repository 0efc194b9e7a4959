"""The `hsconnector` command: one module per subcommand, imported only when it is asked for.

Exit codes: 0 done, 1 failed, 2 usage, 3 could not start.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer
from rich.markup import escape

from hsconnector import __version__
from hsconnector.errors import HSConnectorError, SettingsError

__all__ = ["COMMANDS", "CouldNotStart", "main"]

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


_CommandLineError: Any = typer.BadParameter.__mro__[2]
"""The base of what typer raises for a command line it cannot take: click's class, or that of the copy inside typer."""


class CouldNotStart(HSConnectorError):
    """What the command needs is not there: a library, a port, a folder, an engine. Exit code 3."""

    @classmethod
    def without(cls, error: ModuleNotFoundError, extra: str) -> CouldNotStart:
        """For a library that one of this package's extras brings."""
        return cls(f"{error.name} is missing: pip install 'hsconnector[{extra}]'")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and leaves the process with its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    asked = next((word for word in argv if not word.startswith("-")), "")
    try:
        code = build_command(asked)(argv, prog_name="hsconnector", standalone_mode=False)
    except _CommandLineError as error:
        _stop(_in_a_line(error, asked), error.exit_code)
    except SettingsError as error:
        _stop(error, 2)
    except CouldNotStart as error:
        _stop(error, 3)
    except HSConnectorError as error:
        _stop(error, 1)
    except (KeyboardInterrupt, typer.Abort):
        _stop("interrupted", 130)
    raise SystemExit(code)


def build_command(asked: str) -> Any:
    """The command line with `asked` imported and every other command known by name and help only."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_root)
    for name, summary in COMMANDS.items():
        function = _load(name) if name == asked else _unloaded
        settings: dict[str, Any] = getattr(function, "context_settings", {})
        app.command(name, short_help=summary, context_settings=settings)(function)
    group: Any = typer.main.get_command(app)
    if asked in COMMANDS:
        _keep_as_written(group.commands[asked])
    return group


def _keep_as_written(command: Any) -> None:
    """Rich would take brackets in a help text for markup, and every line of a paragraph for one of its own."""
    command.help = escape(re.sub(r"(?<=\S)\n(?=\S)", " ", command.help or ""))
    for option in command.params:
        option.help = escape(option.help or "")


def _in_a_line(error: Any, asked: str) -> str:
    about = f"hsconnector {asked} --help" if asked in COMMANDS else "hsconnector --help"
    return " ".join(error.format_message().split()).removesuffix(".") + f"; see `{about}`"


def _load(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f"hsconnector.cli.{name}"), name)
    return function


def _unloaded() -> None:
    """Stands for a command that this run does not call."""


def _root(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    """Hidden states out of a running vLLM engine, as drafter-training data."""
    if version:
        typer.echo(f"hsconnector {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def _stop(message: object, code: int) -> NoReturn:
    typer.echo(f"hsconnector: {message}", err=True)
    raise SystemExit(code)
