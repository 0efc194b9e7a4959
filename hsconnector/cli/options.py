"""Options that several commands share, declared once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from hsconnector.client.address import DEFAULT_SIDECAR, SIDECAR_VARIABLES

__all__ = ["LayersOption", "SidecarOption", "with_older_names"]

LayersOption = Annotated[
    str, typer.Option(help="auto (EAGLE-3), eagle3, dflash, dflash:K, or vLLM layer ids such as 2,18,33,36.")
]
"""The layers of an engine that is still to be started."""
SidecarOption = Annotated[
    str,
    typer.Option(
        "--sidecar",
        envvar=list(SIDECAR_VARIABLES),
        show_envvar=False,
        help=f"Where `hsconnector serve` listens, http://… or unix:///…; else HSC_SIDECAR, else {DEFAULT_SIDECAR}.",
        show_default=False,
    ),
]
"""The sidecar of a command; its default is `DEFAULT_SIDECAR`."""

_OLDER = {"url": "sidecar"}
"""Option names of earlier versions, which still work and which no help shows."""
_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_older_names(command: _Command) -> _Command:
    """Lets a command also take the options of `_OLDER`."""
    settings = getattr(command, "context_settings", {})
    command.context_settings = {**settings, "token_normalize_func": _newer}  # type: ignore[attr-defined]
    return command


def _newer(name: str) -> str:
    return _OLDER.get(name, name)
