"""HTTP connections to one server, plain and for asyncio, made of the same parts."""

from __future__ import annotations

import functools
import os
import ssl
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import msgspec

from hsconnector.client.address import Address, parse_address
from hsconnector.client.envelope import error_of
from hsconnector.errors import HSConnectorError, SidecarRefused, SidecarUnreachable

__all__ = ["Connection", "connect_async", "decode", "require", "why"]

_KEEPALIVE_S = 2.0
"""Shorter than the 5 s after which uvicorn, under its own defaults, drops an idle connection."""
_PAUSES_S = (0.2, 0.4, 0.8)
"""Between the attempts of one call."""
_NOT_AGAIN = (httpx.ReadTimeout, httpx.UnsupportedProtocol)
_T = TypeVar("_T")


class Connection:
    """Calls to one sidecar over HTTP or a Unix socket. May be used from several threads, forked or pickled.

    `timeout_s` is of one answer. `key`, else `HSC_API_KEY`, goes with every call, so ask for trusted origins only.
    Sockets are closed with the last reference, where nobody did before. Raises SettingsError.
    """

    def __init__(self, address: str, *, key: str | None = None, timeout_s: float = 60.0) -> None:
        self.address = parse_address(address)
        self._key = os.environ.get("HSC_API_KEY", "") if key is None else key
        self._timeout_s = timeout_s
        self._process = -1
        self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes that are spawned: the same, the key included, with sockets of its own."""
        return functools.partial(Connection, key=self._key, timeout_s=self._timeout_s), (self.address.text,)

    def close(self) -> None:
        """Closes the sockets of this process; harmless when repeated."""
        _close(self._process, self._http)

    def ask(self, method: str, url: str, *, wait_s: float = 0.0, repeat: bool = True, **what: Any) -> httpx.Response:
        """The answer of a path or URL, whatever its status; raises SidecarUnreachable.

        The sidecar may take `wait_s` longer. With `repeat`, for calls that may be made twice, a lost connection is
        tried again, four times within two seconds or so.
        """
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + wait_s, pool=None)
        return self._repeated(lambda: self._open().request(method, url, timeout=timeout, **what), repeat)

    def answer(self, kind: type[_T], method: str, url: str, **what: Any) -> _T:
        """The same, decoded; raises what the answer stands for where it is no success (see `error_of`)."""
        return decode(self.address, self.ask(method, url, **what), kind)

    def download(self, url: str, query: dict[str, str], capture: str) -> bytearray:
        """The whole body of a 200; raises what any other answer stands for."""

        def attempt() -> bytearray:
            with self._open().stream("GET", url, params=query) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise _error(self.address, answer, capture)
                body = bytearray()
                for piece in answer.iter_bytes():
                    body += piece
                return body

        return self._repeated(attempt, True)

    def _repeated(self, attempt: Callable[[], _T], repeat: bool) -> _T:
        pauses = iter(_PAUSES_S if repeat else ())
        while True:
            try:
                return attempt()
            except httpx.TransportError as error:
                pause = None if isinstance(error, _NOT_AGAIN) else next(pauses, None)
                if pause is None:
                    raise SidecarUnreachable(f"no sidecar answers at {self.address.text}: {why(error)}") from error
            time.sleep(pause)

    def _open(self) -> httpx.Client:
        """The sockets, new ones after a fork: two processes must not talk over one."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._http = _connect(self.address, self._key, self._timeout_s)
            weakref.finalize(self, _close, self._process, self._http)
        return self._http


def connect_async(url: str, *, key: str, timeout_s: float, connections: int) -> httpx.AsyncClient:
    """A client for one server, an engine or a sidecar; raises SettingsError."""
    address = parse_address(url)
    limits = httpx.Limits(max_connections=connections, keepalive_expiry=_KEEPALIVE_S)
    transport = httpx.AsyncHTTPTransport(uds=address.socket, limits=limits) if address.socket else None
    return httpx.AsyncClient(transport=transport, limits=limits, **_options(address, key, timeout_s))


def decode(address: Address, answer: httpx.Response, kind: type[_T], capture: str = "") -> _T:
    """What a sidecar answered; raises as `require` does, and SidecarRefused where it is not of this kind."""
    require(address, answer, capture)
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SidecarRefused(f"{address.text} does not answer like a sidecar: {error}") from error


def require(address: Address, answer: httpx.Response, capture: str = "") -> None:
    """Raises what an answer stands for that is no success; `capture` is the one that was asked for, if any."""
    if not answer.is_success:
        raise _error(address, answer, capture)


def why(error: httpx.TransportError) -> str:
    """What happened to a call that got no answer."""
    return str(error) or type(error).__name__


def _connect(address: Address, key: str, timeout_s: float) -> httpx.Client:
    limits = httpx.Limits(keepalive_expiry=_KEEPALIVE_S)
    transport = httpx.HTTPTransport(uds=address.socket, limits=limits) if address.socket else None
    return httpx.Client(transport=transport, limits=limits, **_options(address, key, timeout_s))


def _options(address: Address, key: str, timeout_s: float) -> dict[str, Any]:
    return {
        "base_url": address.base,
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": httpx.Timeout(timeout_s, pool=None),
        "trust_env": not address.on_this_host,
        "verify": _certificates(),
    }


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once in a process: it takes 40 ms, which every connection would pay, also those that are not encrypted."""
    return httpx.create_ssl_context()


def _close(process: int, http: httpx.Client) -> None:
    if process == os.getpid():
        http.close()


def _error(address: Address, answer: httpx.Response, capture: str) -> HSConnectorError:
    url = str(answer.url.copy_with(query=None))
    shown = url.replace(address.base, address.text, 1) if address.socket else url
    return error_of(answer.status_code, answer.content, url=shown, capture=capture)
