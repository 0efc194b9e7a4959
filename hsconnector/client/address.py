"""Where a server listens: `http://…`, `https://…` or `unix:///path`. Opens nothing."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from hsconnector.errors import SettingsError

__all__ = ["DEFAULT_SIDECAR", "SIDECAR_VARIABLES", "Address", "default_sidecar", "origin_of", "parse_address"]

DEFAULT_SIDECAR = "http://127.0.0.1:8190"
SIDECAR_VARIABLES = ("HSC_SIDECAR", "HSC_URL")
"""Environment variables that name the sidecar; the second one is the older name."""


@dataclass(frozen=True)
class Address:
    """One server."""

    text: str
    """As it was given, without a slash at the end."""
    base: str
    """What the URLs of its routes begin with; of a Unix socket `http://localhost`."""
    socket: str | None = None
    """The path of its Unix socket."""
    on_this_host: bool = True
    """Whether it can only be this machine, so that no proxy of the environment belongs in between."""


def parse_address(text: str) -> Address:
    """Raises SettingsError."""
    parts = urlsplit(text)
    if parts.scheme == "unix" and parts.path:
        return Address(text.rstrip("/"), "http://localhost", parts.path)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"an address is http://host:port, https://… or unix:///path, not {text!r}")
    return Address(text.rstrip("/"), text.rstrip("/"), on_this_host=_is_loopback(parts.hostname))


def default_sidecar() -> str:
    """The address in `HSC_SIDECAR`, else that of `hsconnector serve` without options."""
    return next((os.environ[name] for name in SIDECAR_VARIABLES if os.environ.get(name)), DEFAULT_SIDECAR)


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL; raises SettingsError."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        raise SettingsError(f"{url!r} is no http:// or https:// address") from None
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
