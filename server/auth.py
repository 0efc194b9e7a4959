"""Who may ask: bearer keys, and, without one, loopback only."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Gate", "is_loopback"]

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/version"})
INGEST_PATHS = frozenset({"/v1/producers", "/v1/ingest"})

Refuse = Callable[[Scope, Receive, Send, int, str, str], Awaitable[None]]
"""Answers with a status, an error type and a sentence."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host


class Gate:
    """ASGI middleware in front of everything: checks the key, or the Host where there is no key."""

    def __init__(
        self, app: ASGIApp, *, key: str | None, ingest_key: str | None, any_host: bool, refuse: Refuse
    ) -> None:
        self.app = app
        self.key = key
        self.ingest_key = ingest_key
        self.any_host = any_host
        self.refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        ingests = scope["path"] in INGEST_PATHS and scope["method"] == "POST"
        key = self.ingest_key if ingests else self.key
        headers = Headers(scope=scope)
        if key is not None and not _bears(headers.get("authorization", ""), key):
            await self.refuse(
                scope, receive, send, 401, "invalid_api_key", "send `Authorization: Bearer KEY` with this sidecar's key"
            )
        elif key is None and not self._trusted(scope, headers):
            message = f"without a key the Host must be a loopback name, not {headers.get('host', '')!r}"
            await self.refuse(scope, receive, send, 403, "host_refused", message)
        else:
            await self.app(scope, receive, send)

    def _trusted(self, scope: Scope, headers: Headers) -> bool:
        return self.any_host or _over_unix_socket(scope) or is_loopback(host_name(headers.get("host", "")))


def _over_unix_socket(scope: Scope) -> bool:
    server = scope.get("server")
    return server is not None and server[1] is None


def _bears(header: str, key: str) -> bool:
    scheme, _, given = header.partition(" ")
    return hmac.compare_digest(given.strip().encode(), key.encode()) and scheme.lower() == "bearer"
