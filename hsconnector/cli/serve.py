"""`hsconnector serve`: the sidecar."""

from __future__ import annotations

import logging
import resource
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from hsconnector.errors import SettingsError, StoreError

__all__ = ["serve"]

log = logging.getLogger("hsconnector.server")


def serve(
    store: Annotated[Path | None, typer.Option(help="Folder of the shards; made if missing.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port [default: 8190]; 0 takes a free one.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    uds: Annotated[Path | None, typer.Option(help="Also listen on this Unix socket.")] = None,
    tcp: Annotated[bool | None, typer.Option("--tcp/--no-tcp", help="Listen on host and port.")] = None,
    public_url: Annotated[
        str | None, typer.Option(help="How clients reach this sidecar; the start of handles.")
    ] = None,
    shm_dir: Annotated[Path | None, typer.Option(help="Where engines share memory [default: /dev/shm].")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of readers (better: HSC_API_KEY or a file).")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key.")] = None,
    ingest_api_key: Annotated[str | None, typer.Option(help="Key of engines, where it is another.")] = None,
    ingest_api_key_file: Annotated[Path | None, typer.Option(help="File that holds it.")] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Listen beyond loopback without a key.")] = None,
    quota: Annotated[str | None, typer.Option(help="Most bytes of shards, such as 500GB.")] = None,
    evict: Annotated[
        str | None, typer.Option(help="What goes when the quota is reached: acked (default), oldest or none.")
    ] = None,
    ttl_s: Annotated[float | None, typer.Option(help="Seconds after which a final capture is removed.")] = None,
    forget_s: Annotated[
        float | None, typer.Option(help="Seconds until failed and removed captures are forgotten [default: 30 days].")
    ] = None,
    full_wait_s: Annotated[
        float | None, typer.Option(help="Seconds a full store slows engines before captures fail [default: 10].")
    ] = None,
    on_unsound: Annotated[str | None, typer.Option(help="quarantine (default), reject or warn.")] = None,
    durable: Annotated[bool | None, typer.Option("--durable", help="fsync every shard.")] = None,
    heartbeat_s: Annotated[float | None, typer.Option(help="Seconds until a silent engine is lost.")] = None,
    max_payload_bytes: Annotated[str | None, typer.Option(help="Most bytes of rows in one call.")] = None,
    access_log: Annotated[bool | None, typer.Option("--access-log", help="Log every request.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of these settings.")] = None,
) -> None:
    """Run the sidecar: take captures, store and serve them. Options win over HSC_* variables, those over --config."""
    given = {name: value for name, value in locals().items() if name != "config" and value is not None}
    _run(config, given)


def _run(config: Path | None, given: dict[str, Any]) -> None:
    try:
        from server.listen import SidecarServer, listen, public_url_of, url_of
        from server.service import Service
        from server.settings import load
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is missing: pip install 'hsconnector[serve]'") from error
    settings = load(config, **given)
    settings.check_exposure()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _allow_many_files()
    try:
        sockets = listen(settings)
    except OSError as error:
        where = f"{settings.host}:{settings.port}" + (f" and {settings.uds}" if settings.uds else "")
        raise _could_not_start(f"cannot listen on {where}: {error.strerror or error}") from error
    if settings.reaches_beyond_loopback() and not settings.public_url:
        log.warning("handles say %s, which only this host can reach: set --public-url", public_url_of(sockets))
    try:
        sidecar = Service(settings, public_url_of(sockets))
    except StoreError as error:
        raise _could_not_start(str(error)) from error
    where = " and ".join(url_of([bound]) for bound in sockets)
    server = SidecarServer(sidecar, lambda: typer.echo(f"hsconnector sidecar on {where}, store {settings.store}"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again once it has stopped
    server.run(sockets)
    if settings.uds is not None:
        settings.uds.unlink(missing_ok=True)


def _could_not_start(message: str) -> SystemExit:
    typer.echo(f"hsconnector: {message}", err=True)
    return SystemExit(3)


def _allow_many_files() -> None:
    """One file is open for each capture that is being received."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
