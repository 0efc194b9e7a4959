"""`hsconnector serve`: the sidecar. Its options are the sidecar's settings, which `server.settings` declares."""

from __future__ import annotations

import contextlib
import enum
import inspect
import logging
import resource
import signal
import socket
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

import typer

from hsconnector.cli import CouldNotStart
from hsconnector.errors import StoreError

try:
    from pydantic import ByteSize, SecretStr
    from pydantic.fields import FieldInfo

    from server.listen import SidecarServer, listen, public_url_of, url_of
    from server.service import Service
    from server.settings import Settings, load
except ModuleNotFoundError as error:
    raise CouldNotStart.without(error, "serve") from error

__all__ = ["serve"]

log = logging.getLogger("hsconnector.server")


def serve(context: typer.Context, config: Path | None, **settings: Any) -> None:
    """Runs the sidecar: takes captures, stores and serves them.

    Each setting is an option, a variable (HSC_PORT for --port) and a key of --config (port = 8190). Options win over
    variables, variables over the file.
    """
    _run(config, {name: value for name, value in settings.items() if _is_typed(context, name)})


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """The option of a setting. Its value stays as it was typed: `server.settings` reads and checks it."""
    default = field.get_default(call_default_factory=True)
    spelled = "--" + name.replace("_", "-")
    about: dict[str, Any] = {"help": " ".join((field.description or "").split())}
    if field.annotation is bool:
        declared = f"{spelled}/--no-{spelled[2:]}" if default else spelled
        return _parameter(name, Annotated[bool, typer.Option(declared, **about)], default)
    shown = default.human_readable() if isinstance(default, ByteSize) else default
    option = typer.Option(spelled, metavar=f"<{_kind(field.annotation)}>", **about)
    return _parameter(name, Annotated[str | None, option], None if default is None else str(shown))


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _kind(annotation: Any) -> str:
    """What a value looks like, in a word."""
    kind = next((each for each in get_args(annotation) if each is not NoneType), annotation)
    if issubclass(kind, enum.Enum):
        return "|".join(each.value for each in kind)
    return {Path: "path", ByteSize: "bytes", SecretStr: "key"}.get(kind, str(kind.__name__))


_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
_CONFIG = Annotated[Path | None, typer.Option(help="A TOML file with any of these settings.")]
serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        _CONTEXT,
        *(_option(name, field) for name, field in Settings.model_fields.items()),
        _parameter("config", _CONFIG, None),
    ]
)


def _run(config: Path | None, given: dict[str, Any]) -> None:
    settings = load(config, **given)
    settings.check_exposure()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _allow_many_files()
    try:
        sockets = listen(settings)
    except OSError as error:
        where = f"{settings.host}:{settings.port}" + (f" and {settings.uds}" if settings.uds else "")
        raise CouldNotStart(f"cannot listen on {where}: {error.strerror or error}") from error
    with contextlib.ExitStack() as open_sockets:
        for bound in sockets:
            open_sockets.enter_context(bound)
        _serve(settings, sockets)


def _serve(settings: Settings, sockets: list[socket.socket]) -> None:
    if settings.reaches_beyond_loopback() and not settings.public_url:
        log.warning("handles say %s, which only this host can reach: set --public-url", public_url_of(sockets))
    try:
        sidecar = Service(settings, public_url_of(sockets))
    except StoreError as error:
        raise CouldNotStart(str(error)) from error
    where = " and ".join(url_of([bound]) for bound in sockets)
    server = SidecarServer(sidecar, lambda: typer.echo(f"hsconnector sidecar on {where}, store {settings.store}"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again once it has stopped
    server.run(sockets)
    if settings.uds is not None:
        settings.uds.unlink(missing_ok=True)


def _allow_many_files() -> None:
    """One file is open for each capture that is being received."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
