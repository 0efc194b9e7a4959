"""Captures from Python: what a trainer or a notebook imports.

    from hsconnector.client import Client

    with Client("http://127.0.0.1:8190") as client:
        capture = client.fetch(response.kv_transfer_params["handle"])
        capture.hidden_states     # [T, L, H]
        capture.layer_ids         # what each slot holds

A capture on this host is read from its file, any other over HTTP; either way its checksum is verified.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit

import httpx
import msgspec

from hsconnector.capture.protocol import CaptureState, is_capture_id
from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.selection import RowRange, resolve_rows, resolve_slots
from hsconnector.capture.shard import Capture, Framework, open_shard, parse_shard
from hsconnector.errors import (
    CaptureError,
    CaptureExpired,
    CaptureFailed,
    CaptureNotFound,
    CapturePending,
    CaptureQuarantined,
    SettingsError,
    ShardError,
    SidecarRefused,
    SidecarUnreachable,
    StoreError,
)

__all__ = ["Client", "Filters"]

DEFAULT_URL = "http://127.0.0.1:8190"
_POLL_S = 30.0
"""One long poll; a sidecar that stops answers earlier."""
_PAUSE_S = 0.05
_PAUSES_S = (0.2, 0.4, 0.8)
"""Between the attempts of one call."""
_NOT_AGAIN = (httpx.ReadTimeout, httpx.UnsupportedProtocol)
_T = TypeVar("_T")


class Filters(TypedDict, total=False):
    """Which captures; what is left out does not restrict."""

    request_id: str | None
    """The engine's, exactly."""
    client_id: str | None
    """The one that the client sent, or was answered."""
    dataset: str | None
    sample_id: str | None
    state: str | None
    content_hash: str | None
    model: str | None
    since: float | None
    """Seconds since the epoch, compared with `created`."""


class _Page(msgspec.Struct, frozen=True):
    data: list[CaptureRecord]
    next_cursor: str | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    type: str = ""
    reason: str = ""


class _Envelope(msgspec.Struct, frozen=True):
    error: _Error


class Client:
    """One sidecar, over HTTP or a Unix socket. May be used from several threads, forked or pickled."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        origins: Sequence[str] = (),
        timeout: float = 60.0,
        local: bool = True,
    ) -> None:
        """`url` is `http://…` or `unix:///path`; `api_key` else `HSC_API_KEY`.

        Handles are followed to `url` and to `origins` only (a sidecar's public address, if it has another), so the key
        goes nowhere else. `timeout` is of one answer, in seconds. With `local` files on this host are opened directly.
        """
        self.url = url.rstrip("/")
        self.local = local
        self._key = api_key if api_key is not None else os.environ.get("HSC_API_KEY", "")
        self._timeout = timeout
        self._given = tuple(origins)
        self._base, self._connections = _connection(self.url, timeout)
        self._pid = os.getpid()
        self._origins = {_origin(address): address for address in (self._base, *origins)}

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; harmless when repeated."""
        if self._pid == os.getpid():
            self._connections.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """For workers that are spawned: the same client with connections of its own, the key included."""
        options: dict[str, Any] = {
            "api_key": self._key,
            "origins": self._given,
            "timeout": self._timeout,
            "local": self.local,
        }
        return functools.partial(Client, **options), (self.url,)

    @property
    def _http(self) -> httpx.Client:
        """The connections, new ones after a fork: two processes must not talk over one."""
        if self._pid != os.getpid():
            self._base, self._connections = _connection(self.url, self._timeout)
            self._pid = os.getpid()
        return self._connections

    def fetch(
        self,
        handle: str | CaptureRecord,
        *,
        wait: float = 30.0,
        layers: Sequence[int] | None = None,
        rows: RowRange | None = None,
        quarantined: bool = False,
        verify: bool = True,
        framework: Framework = "torch",
        dtype: Literal["float32"] | None = None,
    ) -> Capture:
        """The tensors of a capture, by handle, capture id or record.

        Waits up to `wait` seconds for it to be final, also where the sidecar has not heard of it yet. `layers` are
        layer ids, `rows` a range: a view. `quarantined` takes an unsound capture as well. `verify` compares the
        checksum. `framework="numpy"` gives arrays; bfloat16 then needs `dtype="float32"`.

        Raises CapturePending, CaptureFailed, CaptureQuarantined, CaptureExpired, CaptureNotFound, ShardError,
        SettingsError, SidecarUnreachable or SidecarRefused.
        """
        record = handle if isinstance(handle, CaptureRecord) and handle.final else self.wait(handle, wait)
        _require(record, quarantined)
        start, stop = resolve_rows(rows, record.num_rows)
        resolve_slots(layers, record.layer_ids)

        def read(opener: Callable[..., Capture], source: Any, **more: Any) -> Capture:
            return opener(source, framework=framework, dtype=dtype, verify=verify, **more)

        capture = None
        if self.local and record.path:
            capture = _open_local(record, lambda path: read(open_shard, path, layers=layers, rows=(start, stop)))
        if capture is None:
            query = _view(record, layers, None if rows is None else (start, stop), quarantined)
            body = self._download(self._capture_url(handle) + "/tensors", query, record.capture_id)
            capture = replace(read(parse_shard, body, name=f"capture {record.capture_id}"), first_row=start)
            if capture.capture_id != record.capture_id:
                raise ShardError(f"asked for capture {record.capture_id}, the sidecar sent {capture.capture_id!r}")
        return replace(capture, verdict=record.verdict)

    def record(self, handle: str | CaptureRecord, *, wait: float = 0.0) -> CaptureRecord:
        """What is known of a capture now, or within `wait` seconds once it is final; raises CaptureNotFound."""
        url, deadline = self._capture_url(handle), time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            answer = self._get(url, {"wait": f"{min(left, _POLL_S):.3f}"} if left > 0 else {})
            if left <= 0 or answer.status_code not in (202, 404):
                record = _decoded(answer, CaptureRecord, _name(handle))
                if record.final or left <= 0:
                    return record
            time.sleep(min(max(deadline - time.monotonic(), 0), _PAUSE_S))

    def wait(self, handle: str | CaptureRecord, seconds: float = 30.0) -> CaptureRecord:
        """The record once it is final, whatever the state; raises CapturePending after `seconds`, CaptureNotFound."""
        record = self.record(handle, wait=seconds)
        if not record.final:
            raise CapturePending(
                f"capture {record.capture_id} was still receiving after {seconds:g} s: "
                f"{record.num_rows} rows have arrived; wait longer",
                capture_id=record.capture_id,
                reason=record.state,
            )
        return record

    def find(self, **filters: Unpack[Filters]) -> list[CaptureRecord]:
        """Every capture that matches, newest first; the filters are those of `captures`."""
        return list(self.captures(**filters))

    def captures(self, *, page_size: int = 100, **filters: Unpack[Filters]) -> Iterator[CaptureRecord]:
        """Captures that match, newest first, asked for page by page."""
        query = {name: str(value) for name, value in filters.items() if value is not None}
        query["limit"] = str(page_size)
        while True:
            page = _decoded(self._get(f"{self._base}/v1/captures", query), _Page, "captures")
            yield from page.data
            if not page.next_cursor:
                return
            query["cursor"] = page.next_cursor

    def delete(self, handle: str | CaptureRecord) -> None:
        """Removes a capture; harmless when repeated."""
        url = self._capture_url(handle)
        _raise_for_status(
            self._repeated(lambda: self._http.request("DELETE", url, headers=self._headers())), _name(handle)
        )

    def _capture_url(self, handle: str | CaptureRecord) -> str:
        """The address of a capture, at an origin that was given; raises SettingsError."""
        text = handle.capture_id if isinstance(handle, CaptureRecord) else handle
        if "://" not in text:
            if not is_capture_id(text):
                raise SettingsError(f"{text!r} is neither a capture id (32 hex digits) nor a handle (an absolute URL)")
            return f"{self._base}/v1/captures/{text}"
        if _origin(text) not in self._origins:
            known = ", ".join(self._origins)
            raise SettingsError(
                f"the handle is at {_origin(text)}, this client was given {known}: if both are one sidecar, "
                f"make it Client({self.url!r}, origins=[{_origin(text)!r}])"
            )
        return text.rstrip("/")

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _get(self, url: str, query: dict[str, str]) -> httpx.Response:
        timeout = httpx.Timeout(self._timeout, read=self._timeout + float(query.get("wait", 0)))
        return self._repeated(lambda: self._http.get(url, params=query, headers=self._headers(), timeout=timeout))

    def _download(self, url: str, query: dict[str, str], name: str) -> bytearray:
        def attempt() -> bytearray:
            with self._http.stream("GET", url, params=query, headers=self._headers()) as answer:
                if answer.status_code != 200:
                    answer.read()
                    _raise_for_status(answer, name)
                    raise CapturePending(f"capture {name} is not ready yet", capture_id=name)
                body = bytearray()
                for piece in answer.iter_bytes():
                    body += piece
                return body

        return self._repeated(attempt)

    def _repeated(self, attempt: Callable[[], _T]) -> _T:
        """An idempotent call, again after a lost connection, four times within two seconds or so."""
        pauses = iter(_PAUSES_S)
        while True:
            try:
                return attempt()
            except httpx.TransportError as error:
                pause = None if isinstance(error, _NOT_AGAIN) else next(pauses, None)
                if pause is None:
                    reason = str(error) or type(error).__name__
                    raise SidecarUnreachable(f"no sidecar answers at {self.url}: {reason}") from error
            time.sleep(pause)


def _connection(url: str, timeout: float) -> tuple[str, httpx.Client]:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return "http://localhost", httpx.Client(transport=httpx.HTTPTransport(uds=parts.path), timeout=timeout)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"a sidecar's address is http://…, https://… or unix:///path, not {url!r}")
    return url, httpx.Client(timeout=timeout, trust_env=not _is_loopback(parts.hostname))


def _is_loopback(host: str) -> bool:
    """This host, where no proxy of the environment belongs in between."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _origin(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        raise SettingsError(f"{url!r} is no http:// or https:// address") from None
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


def _name(handle: str | CaptureRecord) -> str:
    return handle.capture_id if isinstance(handle, CaptureRecord) else handle.rstrip("/").rpartition("/")[2]


def _view(
    record: CaptureRecord, layers: Sequence[int] | None, rows: tuple[int, int] | None, quarantined: bool
) -> dict[str, str]:
    query = {}
    if layers is not None:
        query["layers"] = ",".join(str(layer) for layer in record.layer_ids if layer in layers)
    if rows is not None:
        query["rows"] = f"{rows[0]}:{rows[1]}"
    if quarantined:
        query["quarantined"] = "1"
    return query


def _require(record: CaptureRecord, quarantined: bool) -> None:
    """Raises what stands in the way of reading a final capture."""
    name, about = record.capture_id, {"capture_id": record.capture_id, "reason": record.reason or ""}
    if record.state is CaptureState.FAILED:
        detail = f" ({record.detail})" if record.detail else ""
        raise CaptureFailed(f"capture {name} failed: {record.reason}{detail}", **about)
    if record.state is CaptureState.EXPIRED:
        raise CaptureExpired(f"capture {name} was deleted or ran out of time", **about)
    if record.state is CaptureState.QUARANTINED and not quarantined:
        raise CaptureQuarantined(
            f"capture {name} is unsound: {record.findings}; read it with quarantined=True",
            capture_id=name,
            reason=", ".join(record.unsound),
        )


def _open_local(record: CaptureRecord, opener: Callable[[Path], Capture]) -> Capture | None:
    """The capture from its file on this host; None where there is no such file or it is another's."""
    path = Path(record.path or "")
    try:
        if path.name != f"{record.capture_id}.safetensors" or not stat.S_ISREG(path.lstat().st_mode):
            return None
        capture = opener(path)
    except (OSError, StoreError):
        return None
    return capture if capture.capture_id == record.capture_id else None


def _decoded(answer: httpx.Response, kind: type[_T], name: str) -> _T:
    _raise_for_status(answer, name)
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except msgspec.MsgspecError as error:
        raise SidecarRefused(f"{answer.url.host} does not answer like a sidecar: {error}") from error


_CAPTURE_ERRORS: dict[int, type[CaptureError]] = {404: CaptureNotFound, 410: CaptureExpired}


def _raise_for_status(answer: httpx.Response, name: str) -> None:
    """The error that an answer stands for; nothing for 2xx, nor for the JSON of a capture that cannot be read."""
    if answer.is_success:
        return
    try:
        error = msgspec.json.decode(answer.content, type=_Envelope).error
    except msgspec.MsgspecError:
        error = _Error(message=answer.text[:200] or answer.reason_phrase)
    if answer.status_code in _CAPTURE_ERRORS:
        raise _CAPTURE_ERRORS[answer.status_code](error.message, capture_id=name, reason=error.reason)
    if answer.status_code == 424:
        kind = CaptureQuarantined if "quarantine" in error.type else CaptureFailed
        raise kind(error.message, capture_id=name, reason=error.reason)
    raise SidecarRefused(f"{answer.request.url.copy_with(query=None)} answered {answer.status_code}: {error.message}")
