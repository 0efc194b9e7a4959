"""Calls to a sidecar that `hsconnector.client` does not make: leases, and what leaves the store."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from hsconnector.errors import SettingsError, SidecarRefused, SidecarUnreachable

__all__ = ["Calls", "Refused"]

_T = TypeVar("_T")


class Refused(SidecarRefused):
    """An answer that says no; `kind` is the stable name of the reason, such as `lease_expired`."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Calls:
    """One sidecar at `http://…` or `unix:///path`. A call is made once; may be used from several threads."""

    def __init__(self, url: str, *, api_key: str = "", timeout: float = 60.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "unix"):
            raise SettingsError(f"a sidecar's address is http://…, https://… or unix:///path, not {url!r}")
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._http = httpx.Client(
            base_url="http://localhost" if parts.scheme == "unix" else self.url,
            transport=httpx.HTTPTransport(uds=parts.path) if parts.scheme == "unix" else None,
            timeout=timeout,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=parts.hostname not in (None, "localhost", "127.0.0.1", "::1"),
        )

    def __enter__(self) -> Calls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; harmless when repeated."""
        self._http.close()

    def get(self, path: str, kind: type[_T]) -> _T:
        """The answer as `kind`; raises SidecarUnreachable (no answer, or one of the 500s) or Refused."""
        return self._call("GET", path, kind)

    def post(self, path: str, body: Any, kind: type[_T], *, wait: float = 0) -> _T:
        """The same with a body; the sidecar may take `wait` seconds longer."""
        query = {"wait": f"{wait:.3f}"} if wait else {}
        return self._call("POST", path, kind, json=body, params=query, timeout=self._timeout + wait)

    def _call(self, method: str, path: str, kind: type[_T], **what: Any) -> _T:
        try:
            answer = self._http.request(method, path, **what)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise SidecarUnreachable(f"no sidecar answers at {self.url}: {reason}") from error
        said = _Error() if answer.is_success else _said(answer)
        message = f"{self.url}{path} answered {answer.status_code}: {said.message}"
        if answer.status_code >= 500:
            raise SidecarUnreachable(message)
        if not answer.is_success:
            raise Refused(message, said.type)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise Refused(f"{self.url} does not answer like a sidecar: {error}", "no_sidecar") from error


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    type: str = ""


class _Envelope(msgspec.Struct, frozen=True):
    error: _Error


def _said(answer: httpx.Response) -> _Error:
    try:
        return msgspec.json.decode(answer.content, type=_Envelope).error
    except msgspec.MsgspecError:
        return _Error(answer.text[:200] or answer.reason_phrase)
