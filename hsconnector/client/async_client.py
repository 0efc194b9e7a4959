"""The calls of an extraction, which has many under way at one time: who sends, what is there, what has become final."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import httpx

from hsconnector.capture.content import WeightsHeld
from hsconnector.capture.protocol import CaptureState, Producer
from hsconnector.capture.record import CaptureRecord
from hsconnector.client.address import parse_address
from hsconnector.client.captures import Held, Page, Producers
from hsconnector.client.connection import decode, require, why
from hsconnector.client.envelope import PASSING, read_denial
from hsconnector.errors import SidecarUnreachable

__all__ = ["AsyncClient"]

_LOOKUP = 500
"""Content hashes in one question."""
_POLL_S = 20.0
_PAUSE_S = 0.05
_T = TypeVar("_T")


class AsyncClient:
    """One sidecar, for asyncio; `http` comes from `connect_async`.

    A call is repeated for `patience_s` while nobody answers, or that it cannot now, then raises SidecarUnreachable.
    """

    def __init__(self, url: str, http: httpx.AsyncClient, *, patience_s: float = 30.0) -> None:
        self._address = parse_address(url)
        self._http = http
        self._patience_s = patience_s

    async def producers(self) -> list[Producer]:
        """The engines that send to it now."""
        return (await self._answer(Producers, "GET", "/v1/producers")).data

    async def weights(self, dataset: str) -> list[WeightsHeld]:
        """Whose weights the ready captures of a data set are of: how many of each; the newest last."""
        return (await self._answer(Held, "GET", "/v1/weights", params={"dataset": dataset})).data

    async def lookup(self, hashes: Sequence[str]) -> dict[str, list[CaptureRecord]]:
        """The captures of each content hash, oldest first; a record holds what names it and its state, no layers."""
        found: dict[str, list[CaptureRecord]] = {digest: [] for digest in hashes}
        for first in range(0, len(hashes), _LOOKUP):
            body = {"content_hashes": list(hashes[first : first + _LOOKUP])}
            for record in (await self._answer(Page, "POST", "/v1/captures:lookup", json=body)).data:
                found[record.content_hash].append(record)
        return found

    async def receiving(self, dataset: str, sample_id: str | None = None) -> list[CaptureRecord]:
        """The captures of a data set, or of one sample, that are not final."""
        query = {"dataset": dataset, "state": CaptureState.RECEIVING, "limit": "1000"}
        if sample_id is not None:
            query["sample_id"] = sample_id
        records: list[CaptureRecord] = []
        while True:
            page = await self._answer(Page, "GET", "/v1/captures", params=query)
            records += page.data
            if not page.next_cursor:
                return records
            query["cursor"] = page.next_cursor

    async def wait(self, capture_id: str, seconds: float) -> CaptureRecord | None:
        """The record once it is final, as it is after `seconds` otherwise; None where it was never heard of."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(deadline - time.monotonic(), 0)
            answer = await self._ask("GET", f"/v1/captures/{capture_id}", params={"wait": f"{min(left, _POLL_S):.3f}"})
            record = None if answer.status_code == 404 else decode(self._address, answer, CaptureRecord)
            if left == 0 or (record is not None and record.final):
                return record
            await asyncio.sleep(_PAUSE_S)

    async def delete(self, capture_id: str) -> None:
        """Removes a capture."""
        require(self._address, await self._ask("DELETE", f"/v1/captures/{capture_id}"))

    async def _answer(self, kind: type[_T], method: str, path: str, **what: Any) -> _T:
        return decode(self._address, await self._ask(method, path, **what), kind)

    async def _ask(self, method: str, path: str, **what: Any) -> httpx.Response:
        """The answer, unless it is one that may be another in a moment."""
        deadline, pause = time.monotonic() + self._patience_s, 0.1
        while True:
            try:
                answer = await self._http.request(method, path, **what)
                if answer.status_code not in PASSING:
                    return answer
                trouble = f"it answered {answer.status_code}: {read_denial(answer.content).message}"
            except httpx.TransportError as error:
                trouble = why(error)
            if time.monotonic() > deadline:
                raise SidecarUnreachable(f"no sidecar answers at {self._address.text}: {trouble}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 2.0)
