"""Addresses, and a uvicorn server that wakes long polls before it stops."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import uvicorn

from server.app import build_app
from server.service import Service
from server.settings import Settings

__all__ = ["SidecarServer", "listen", "public_url_of", "url_of"]

BACKLOG = 2048


def listen(settings: Settings) -> list[socket.socket]:
    """The bound sockets of `host:port` and `uds`; raises OSError where an address is taken or impossible."""
    sockets = []
    try:
        if settings.tcp:
            sockets.append(_tcp(settings.host, settings.port))
        if settings.uds is not None:
            sockets.append(_unix(settings.uds))
    except OSError:
        for bound in sockets:
            bound.close()
        raise
    return sockets


def url_of(sockets: list[socket.socket]) -> str:
    """The URL of the first TCP socket, or `unix://` with the path."""
    first = sockets[0]
    if first.family == socket.AF_UNIX:
        return f"unix://{first.getsockname()}"
    host, port = first.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def public_url_of(sockets: list[socket.socket]) -> str:
    """Where handles point to when no `public_url` is set."""
    url = url_of(sockets)
    return url if url.startswith("http") else "http://localhost"


def _tcp(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _unix(path: Path) -> socket.socket:
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        os.chmod(path, 0o660)
    except OSError:
        bound.close()
        raise
    return bound


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


class SidecarServer(uvicorn.Server):
    """Runs one sidecar on bound sockets; `ready` is called once it answers."""

    def __init__(self, sidecar: Service, ready: Callable[[], None]) -> None:
        settings = sidecar.settings
        super().__init__(
            uvicorn.Config(
                build_app(sidecar),
                log_config=None,
                access_log=settings.access_log,
                timeout_keep_alive=settings.keep_alive_s,
                timeout_graceful_shutdown=settings.shutdown_s,
                server_header=False,
                backlog=BACKLOG,
                lifespan="on",
            )
        )
        self._sidecar = sidecar
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._sidecar.waiters.close()
        await super().shutdown(sockets)
