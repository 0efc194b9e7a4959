"""HTTP clients for the engine and the sidecar, and what can be asked again."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import httpx

from hsconnector.errors import SettingsError

__all__ = ["RETRIED_STATUS", "connect", "said"]

RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_KEEPALIVE_S = 2.0
"""Shorter than the 5 s after which uvicorn drops an idle connection."""
_SAID = 500


def connect(url: str, *, key: str, timeout_s: float, connections: int) -> httpx.AsyncClient:
    """A client for one server, `http(s)://…` or `unix:///path`; no proxy stands before this host."""
    parts = urlsplit(url)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=connections, keepalive_expiry=_KEEPALIVE_S)
    timeout = httpx.Timeout(timeout_s, pool=None)
    if parts.scheme == "unix" and parts.path:
        transport = httpx.AsyncHTTPTransport(uds=parts.path, limits=limits)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, timeout=timeout)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"an address is http://…, https://… or unix:///path, not {url!r}")
    return httpx.AsyncClient(
        base_url=url.rstrip("/"),
        headers=headers,
        timeout=timeout,
        limits=limits,
        trust_env=not _is_this_host(parts.hostname),
    )


def said(answer: httpx.Response) -> str:
    """The message of an error answer in OpenAI's envelope, else the start of its text."""
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text or answer.reason_phrase
    return " ".join(str(message).split())[:_SAID]


def _is_this_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
