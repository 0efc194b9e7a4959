"""The work queue of one sidecar: captures lent with a deadline, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from hsconnector.capture.content import WeightsHeld
from hsconnector.capture.record import CaptureRecord
from hsconnector.client.captures import Page
from hsconnector.client.connection import Connection

__all__ = ["Holding", "Lease", "LeaseFilters", "LeaseRequest", "Leases"]

_T = TypeVar("_T")


class LeaseFilters(msgspec.Struct, frozen=True):
    """Which captures are lent; what is left out does not restrict."""

    dataset: str | None = None
    model: str | None = None
    layer_ids: tuple[int, ...] = ()
    """Captures that hold at least these layers."""
    weights_id: str | None = None
    """The first digits of whose weights; "" for captures that do not say."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer asks for."""

    consumer: str
    """Who asks; counts are kept by this name."""
    queue: str = ""
    """Each queue lends every capture until it is acknowledged there."""
    count: int = 1
    """At most so many captures."""
    max_bytes: int | None = None
    """Of all their shards; one capture is given in any case."""
    deadline_s: float = 300.0
    """After so many seconds what is not acknowledged is lent again."""
    filters: LeaseFilters = LeaseFilters()


class Lease(msgspec.Struct, frozen=True):
    """Captures lent together; none, and no id, where nothing was free."""

    captures: list[CaptureRecord]
    lease_id: str | None = None
    receiving: int = 0
    """Captures that the sidecar receives now, of whatever data set."""


class Holding(msgspec.Struct, frozen=True):
    """What one consumer of one queue holds now."""

    queue: str
    consumer: str
    held: int


class _Answers(msgspec.Struct, frozen=True):
    captures: dict[str, str]


class _Released(msgspec.Struct, frozen=True):
    released: list[str]


class _Renewed(msgspec.Struct, frozen=True):
    deadline: float


class Leases:
    """A sidecar's work queue at `http://…` or `unix:///path`; may be used from several threads, forked or pickled.

    A call is made once, as a lost answer does not say whether it was heard. Every method raises SidecarUnreachable, and
    SidecarRefused with the `kind` `lease_unknown` or `lease_expired` (the deadline has passed) among others.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 60.0) -> None:
        """`api_key` else `HSC_API_KEY`; `timeout` is of one answer, in seconds."""
        self._connection = Connection(url, key=api_key, timeout_s=timeout)

    def close(self) -> None:
        """Closes the connections; harmless when repeated."""
        self._connection.close()

    def take(self, wanted: LeaseRequest, *, wait: float = 0.0) -> Lease:
        """Free captures, the oldest first; none where none is free within `wait` seconds."""
        query = {"wait": f"{wait:.3f}"} if wait else {}
        return self._post("/v1/leases", wanted, Lease, params=query, wait_s=wait)

    def acknowledge(self, lease_id: str, capture_ids: Sequence[str], *, delete: bool = False) -> Mapping[str, str]:
        """These captures are done, and with `delete` their shards may go: what the sidecar says of each.

        `acked`, `already_acked`, or why not. Harmless when repeated.
        """
        body = {"capture_ids": capture_ids, "delete": delete}
        return self._post(f"/v1/leases/{lease_id}/ack", body, _Answers).captures

    def release(self, lease_id: str, capture_ids: Sequence[str]) -> list[str]:
        """These captures are free again, for any consumer; those that the lease still held."""
        return self._post(f"/v1/leases/{lease_id}/release", {"capture_ids": capture_ids}, _Released).released

    def release_all(self, queue: str, consumer: str) -> list[str]:
        """Whatever a consumer holds in a queue is free again; those captures."""
        return self._post("/v1/leases:release", {"queue": queue, "consumer": consumer}, _Released).released

    def renew(self, lease_id: str, deadline_s: float) -> float:
        """Moves the deadline to so many seconds from now; the deadline in seconds since the epoch."""
        return self._post(f"/v1/leases/{lease_id}/renew", {"deadline_s": deadline_s}, _Renewed).deadline

    def holdings(self) -> list[Holding]:
        """What each consumer of each queue holds now."""
        return self._connection.answer(Page[Holding], "GET", "/v1/leases", repeat=False).data

    def newest(self) -> CaptureRecord | None:
        """The capture that began last, whatever its state."""
        page = self._connection.answer(Page[CaptureRecord], "GET", "/v1/captures", params={"limit": "1"}, repeat=False)
        return next(iter(page.data), None)

    def weights(self, filters: LeaseFilters) -> list[WeightsHeld]:
        """Whose weights the ready captures of a data set and model are of; the newest last."""
        narrowed = {"dataset": filters.dataset, "model": filters.model}
        query = {name: value for name, value in narrowed.items() if value is not None}
        return self._connection.answer(Page[WeightsHeld], "GET", "/v1/weights", params=query).data

    def _post(self, path: str, body: object, kind: type[_T], **what: object) -> _T:
        content = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        return self._connection.answer(kind, "POST", path, content=content, headers=headers, repeat=False, **what)
