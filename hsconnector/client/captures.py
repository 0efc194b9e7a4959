"""Captures of one sidecar: found, waited for, read, removed."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

import msgspec

from hsconnector.capture.content import WeightsHeld
from hsconnector.capture.protocol import CaptureState, Producer, is_capture_id
from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.selection import RowRange, resolve_rows, resolve_slots
from hsconnector.capture.shard import Capture, Framework, open_shard, parse_shard
from hsconnector.client.address import DEFAULT_SIDECAR, origin_of
from hsconnector.client.connection import Connection, decode, require
from hsconnector.errors import (
    CaptureExpired,
    CaptureFailed,
    CapturePending,
    CaptureQuarantined,
    SettingsError,
    ShardError,
    StoreError,
)

__all__ = ["Client", "Collection", "Filters", "Held", "Leaving", "Limits", "Page", "Producers"]

_POLL_S = 30.0
"""One long poll; a sidecar that stops answers earlier."""
_PAUSE_S = 0.05


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
    weights_id: str | None
    """Whose weights, all 64 digits; "" for captures that do not say."""
    since: float | None
    """Seconds since the epoch, compared with `created`."""


class Limits(TypedDict, total=False):
    """What `collect` applies; what is left out is the sidecar's own."""

    ttl_s: float | None
    """What is older goes."""
    max_bytes: int | None
    """Down to so many bytes of shards."""
    evict: str | None
    """What may go to get there: `acked`, `oldest` or `none`."""


class Leaving(msgspec.Struct, frozen=True):
    """A capture that goes, and why."""

    capture_id: str
    dataset: str
    sample_id: str
    state: str
    size: int
    why: str


class Collection(msgspec.Struct, frozen=True):
    """What leaves a store, or would; `data` names the first 1,000."""

    count: int
    bytes: int
    held: int
    """Captures that match and stay, because they are leased or being read."""
    data: list[Leaving]


class Producers(msgspec.Struct, frozen=True):
    """The engines that send to a sidecar."""

    data: list[Producer]


class Held(msgspec.Struct, frozen=True):
    """Whose weights captures are of."""

    data: list[WeightsHeld]


class Page(msgspec.Struct, frozen=True):
    """A part of a list; the next one begins at `next_cursor`."""

    data: list[CaptureRecord]
    next_cursor: str | None = None


class Client:
    """One sidecar, over HTTP or a Unix socket. May be used from several threads, forked or pickled."""

    def __init__(
        self,
        url: str = DEFAULT_SIDECAR,
        *,
        api_key: str | None = None,
        origins: Sequence[str] = (),
        timeout: float = 60.0,
        local: bool = True,
    ) -> None:
        """`url` is `http://…`, `https://…` or `unix:///path`.

        A sidecar that was started with `--api-key` wants that key: give it as `api_key`, or leave `api_key` out and set
        the environment variable `HSC_API_KEY`. It is sent as `Authorization: Bearer KEY`, as any other program must.

        Handles are followed to `url` and to `origins` only (a sidecar's public address, if it has another), so the key
        goes nowhere else. `timeout` is of one answer, in seconds. With `local` files on this host are opened directly.
        Raises SettingsError.
        """
        self.local = local
        self._connection = Connection(url, key=api_key, timeout_s=timeout)
        self.url = self._connection.address.text
        self._base = self._connection.address.base
        self._origins = tuple(dict.fromkeys(origin_of(address) for address in (self._base, *origins)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; harmless when repeated."""
        self._connection.close()

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
            body = self._connection.download(self._capture_url(handle) + "/tensors", query, record.capture_id)
            capture = replace(read(parse_shard, body, name=f"capture {record.capture_id}"), first_row=start)
            if capture.capture_id != record.capture_id:
                raise ShardError(f"asked for capture {record.capture_id}, the sidecar sent {capture.capture_id!r}")
        return replace(capture, verdict=record.verdict)

    def record(self, handle: str | CaptureRecord, *, wait: float = 0.0) -> CaptureRecord:
        """What is known of a capture now, or within `wait` seconds once it is final; raises CaptureNotFound."""
        url, deadline = self._capture_url(handle), time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            wait_s = min(max(left, 0.0), _POLL_S)
            query = {"wait": f"{wait_s:.3f}"} if wait_s else {}
            answer = self._connection.ask("GET", url, params=query, wait_s=wait_s)
            if left <= 0 or answer.status_code not in (202, 404):
                record = decode(self._connection.address, answer, CaptureRecord, _name(handle))
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
            page = self._connection.answer(Page, "GET", "/v1/captures", params=query)
            yield from page.data
            if not page.next_cursor:
                return
            query["cursor"] = page.next_cursor

    def producers(self) -> list[Producer]:
        """The engines that send to it now."""
        return self._connection.answer(Producers, "GET", "/v1/producers").data

    def weights(self, *, dataset: str | None = None, model: str | None = None) -> list[WeightsHeld]:
        """Whose weights the ready captures of a data set or model are of: how many of each; the newest last."""
        narrowed = {"dataset": dataset, "model": model}
        query = {name: value for name, value in narrowed.items() if value is not None}
        return self._connection.answer(Held, "GET", "/v1/weights", params=query).data

    def delete(self, handle: str | CaptureRecord) -> None:
        """Removes a capture; harmless when repeated."""
        answer = self._connection.ask("DELETE", self._capture_url(handle))
        require(self._connection.address, answer, _name(handle))

    def collect(
        self, filters: Mapping[str, Any] | None = None, *, dry_run: bool = True, **limits: Unpack[Limits]
    ) -> Collection:
        """Removes what has outlived its limits or, given `filters`, every capture that matches all of them.

        `filters` are `dataset`, `sample_id`, `model`, `state` and `created_before` (seconds since the epoch). With
        `dry_run` nothing is removed. What is leased, being read or not final stays.
        """
        body = {**limits, "filters": filters, "dry_run": dry_run}
        return self._connection.answer(Collection, "POST", "/v1/captures:collect", json=body, repeat=False)

    def _capture_url(self, handle: str | CaptureRecord) -> str:
        """The address of a capture, at an origin that was given; raises SettingsError."""
        text = handle.capture_id if isinstance(handle, CaptureRecord) else handle
        if "://" not in text:
            if not is_capture_id(text):
                raise SettingsError(f"{text!r} is neither a capture id (32 hex digits) nor a handle (an absolute URL)")
            return f"{self._base}/v1/captures/{text}"
        origin = origin_of(text)
        if origin not in self._origins:
            known = ", ".join(self._origins)
            raise SettingsError(
                f"the handle is at {origin}, this client was given {known}: if both are one sidecar, "
                f"make it Client({self.url!r}, origins=[{origin!r}])"
            )
        return text.rstrip("/")


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
