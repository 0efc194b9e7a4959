"""The sidecar as an extraction needs it: who sends to it, what is there, what has become final."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from hsconnector.capture.protocol import CaptureState, Producer
from hsconnector.capture.record import CaptureRecord
from hsconnector.errors import SidecarRefused, SidecarUnreachable
from hsconnector.extraction.connection import RETRIED_STATUS, said

__all__ = ["Sidecar"]

_LOOKUP = 500
"""Content hashes in one question."""
_POLL_S = 20.0
_PAUSE_S = 0.05
_T = TypeVar("_T")


class _Captures(msgspec.Struct, frozen=True):
    data: list[CaptureRecord]
    next_cursor: str | None = None


class _Producers(msgspec.Struct, frozen=True):
    data: list[Producer]


class Sidecar:
    """A sidecar at `url`; a call is repeated for `patience_s` while nobody answers, then raises SidecarUnreachable."""

    def __init__(self, url: str, http: httpx.AsyncClient, *, patience_s: float = 30.0) -> None:
        self.url = url
        self._http = http
        self._patience_s = patience_s

    async def producers(self) -> list[Producer]:
        """The engines that send to it now."""
        return _decoded(await self._ask("GET", "/v1/producers"), _Producers).data

    async def lookup(self, hashes: Sequence[str]) -> dict[str, list[CaptureRecord]]:
        """The captures of each content hash, oldest first; a record holds what names it and its state, no layers."""
        found: dict[str, list[CaptureRecord]] = {digest: [] for digest in hashes}
        for first in range(0, len(hashes), _LOOKUP):
            body = {"content_hashes": list(hashes[first : first + _LOOKUP])}
            for record in _decoded(await self._ask("POST", "/v1/captures:lookup", json=body), _Captures).data:
                found[record.content_hash].append(record)
        return found

    async def receiving(self, dataset: str, sample_id: str | None = None) -> list[CaptureRecord]:
        """The captures of a data set, or of one sample, that are not final."""
        query = {"dataset": dataset, "state": CaptureState.RECEIVING, "limit": "1000"}
        if sample_id is not None:
            query["sample_id"] = sample_id
        records: list[CaptureRecord] = []
        while True:
            page = _decoded(await self._ask("GET", "/v1/captures", params=query), _Captures)
            records += page.data
            if not page.next_cursor:
                return records
            query["cursor"] = page.next_cursor

    async def wait(self, capture_id: str, seconds: float) -> CaptureRecord | None:
        """The record once it is final, as it is after `seconds` otherwise; None where it was never heard of."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(deadline - time.monotonic(), 0)
            query = {"wait": f"{min(left, _POLL_S):.3f}"}
            answer = await self._ask("GET", f"/v1/captures/{capture_id}", params=query, missing=True)
            record = None if answer.status_code == 404 else _decoded(answer, CaptureRecord)
            if left == 0 or (record is not None and record.final):
                return record
            await asyncio.sleep(_PAUSE_S)

    async def delete(self, capture_id: str) -> None:
        """Removes a capture."""
        await self._ask("DELETE", f"/v1/captures/{capture_id}")

    async def _ask(self, method: str, path: str, *, missing: bool = False, **what: Any) -> httpx.Response:
        deadline, pause = time.monotonic() + self._patience_s, 0.1
        while True:
            try:
                answer = await self._http.request(method, path, **what)
                trouble = f"it answered {answer.status_code}: {said(answer)}" if _again(answer) else ""
            except httpx.TransportError as error:
                trouble = str(error) or type(error).__name__
            if not trouble:
                break
            if time.monotonic() > deadline:
                raise SidecarUnreachable(f"no sidecar answers at {self.url}: {trouble}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 2.0)
        if answer.is_success or (missing and answer.status_code == 404):
            return answer
        raise SidecarRefused(f"the sidecar at {self.url} answered {answer.status_code} to {path}: {said(answer)}")


def _again(answer: httpx.Response) -> bool:
    return answer.status_code in RETRIED_STATUS


def _decoded(answer: httpx.Response, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except msgspec.MsgspecError as error:
        raise SidecarRefused(f"{answer.url.host} does not answer like a sidecar: {error}") from error
