"""Leases: captures lent to consumers with a deadline; and what leaves the store."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hsconnector.capture.protocol import MAX_TEXT_BYTES, CaptureState
from hsconnector.storage.queries import Filter
from server.lease import Ack, LeaseFilter, Wanted
from server.leaving import Chosen
from server.routes.deps import JsonRoute, Served, Wait
from server.settings import Evict

__all__ = ["router"]

MAX_CAPTURES = 1000
LISTED = 1000

router = APIRouter(tags=["leases"], route_class=JsonRoute)


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no character") from None
    return text


def _short(text: str) -> str:
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise ValueError(f"at most {MAX_TEXT_BYTES} bytes")
    return text


Name = Annotated[str, AfterValidator(_whole)]
Text = Annotated[Name, AfterValidator(_short)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86_400, allow_inf_nan=False)]
CaptureIds = Annotated[list[Annotated[Name, Field(max_length=64)]] | None, Field(max_length=MAX_CAPTURES)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LeaseFilters(_Body):
    """Which captures are taken; what is left out does not restrict."""

    dataset: Text | None = None
    sample_id: Text | None = None
    model: Name | None = None
    model_revision: Name | None = None
    weights_id: Annotated[str | None, Field(max_length=64, description="Its first digits; empty: unknown.")] = None
    lora: Name | None = None
    layer_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=4096)] = []
    since: Annotated[float | None, Field(allow_inf_nan=False)] = None


class NewLease(_Body):
    """What a consumer asks for."""

    consumer: Annotated[Text, Field(min_length=1, description="Who asks; counts are kept by this name.")]
    queue: Annotated[Text, Field(description="Each queue lends every capture until it is acknowledged there.")] = ""
    count: Annotated[int, Field(ge=1, le=MAX_CAPTURES)] = 1
    max_bytes: Annotated[int | None, Field(ge=0, description="Of all shards; one capture is given in any case.")] = None
    deadline_s: Seconds = 300.0
    filters: LeaseFilters = LeaseFilters()


class AckBody(_Body):
    """Which captures are done."""

    capture_ids: CaptureIds = None
    delete: Annotated[bool, Field(description="Their shards may go, as soon as no other lease holds them.")] = False


class ReleaseBody(_Body):
    """Which captures are given back."""

    capture_ids: CaptureIds = None


class Consumer(_Body):
    """Who holds captures, and of which queue."""

    consumer: Annotated[Text, Field(min_length=1)]
    queue: Text = ""


class RenewBody(_Body):
    """A new deadline, from now."""

    deadline_s: Seconds = 300.0


class CollectFilters(_Body):
    """Which captures go; at least one must be given."""

    dataset: Text | None = None
    sample_id: Text | None = None
    model: Name | None = None
    state: CaptureState | None = None
    created_before: Annotated[float | None, Field(allow_inf_nan=False)] = None

    @model_validator(mode="after")
    def _restricts(self) -> CollectFilters:
        if all(value is None for value in dict(self).values()):
            raise ValueError("filters without a filter would remove everything: name at least one")
        return self


class CollectBody(_Body):
    """Limits to apply (the sidecar's own, where left out), or captures to remove by filter."""

    dry_run: bool = True
    ttl_s: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    max_bytes: Annotated[int | None, Field(ge=0)] = None
    evict: Evict | None = None
    filters: CollectFilters | None = None


@router.post("/v1/leases")
async def take(wanted: NewLease, sidecar: Served, wait: Wait = 0) -> JSONResponse:
    """Lends free captures, oldest first; an empty list where none is free within `?wait=` seconds."""
    filters = LeaseFilter(**{**dict(wanted.filters), "layer_ids": tuple(wanted.filters.layer_ids)})
    asked = Wanted(**{**dict(wanted), "filters": filters})
    lease, lent, receiving = await sidecar.lending.take(asked, min(wait, sidecar.settings.max_wait_s))
    captures = [{**sidecar.describe(each.record), "deliveries": each.deliveries} for each in lease.captures]
    return JSONResponse(
        {
            "object": "lease",
            "lease_id": lease.lease_id or None,
            "queue": lease.queue,
            "consumer": lease.consumer,
            "deadline": lease.deadline if captures else None,
            "captures": captures,
            "lent": lent,
            "receiving": receiving,
        }
    )


@router.get("/v1/leases")
async def list_counts(sidecar: Served) -> JSONResponse:
    """What each consumer was lent, what became of it and what it holds, the latest first."""
    return JSONResponse({"object": "list", "data": await sidecar.lending.counts()})


@router.post("/v1/leases/{lease_id}/ack")
async def ack(lease_id: str, sidecar: Served, body: AckBody | None = None) -> JSONResponse:
    """Captures of a lease (all by default) are done. Harmless when repeated; after the deadline 409, unchanged."""
    given = body or AckBody()
    answers = await sidecar.lending.ack(lease_id, given.capture_ids, remove=given.delete)
    done = [name for name, answer in answers.items() if answer in (Ack.ACKED, Ack.ALREADY_ACKED)]
    return JSONResponse({"object": "lease.ack", "lease_id": lease_id, "acked": done, "captures": answers})


@router.post("/v1/leases/{lease_id}/release")
async def release(lease_id: str, sidecar: Served, body: ReleaseBody | None = None) -> JSONResponse:
    """Captures of a lease (all by default) are free again; those it does not hold any more are left as they are."""
    released = await sidecar.lending.release(lease_id, body.capture_ids if body else None)
    return JSONResponse({"object": "lease.release", "lease_id": lease_id, "released": released})


@router.post("/v1/leases:release")
async def release_all(body: Consumer, sidecar: Served) -> JSONResponse:
    """Whatever a consumer holds in a queue is free again: for one that was restarted, or broke off."""
    released = await sidecar.lending.release_all(body.queue, body.consumer)
    return JSONResponse({"object": "lease.release", "lease_id": None, "released": released})


@router.post("/v1/leases/{lease_id}/renew")
async def renew(lease_id: str, sidecar: Served, body: RenewBody | None = None) -> JSONResponse:
    """Moves the deadline; 409 where it has passed."""
    deadline = await sidecar.lending.renew(lease_id, (body or RenewBody()).deadline_s)
    return JSONResponse({"object": "lease", "lease_id": lease_id, "deadline": deadline})


@router.post("/v1/captures:collect")
async def collect(body: CollectBody, sidecar: Served) -> JSONResponse:
    """Applies limits now, or removes captures by filter; with `dry_run` (the default) only says what would go."""
    if body.filters is not None:
        chosen = body.filters
        wanted = Filter(dataset=chosen.dataset, sample_id=chosen.sample_id, model=chosen.model, state=chosen.state)
        chosen_ones = Chosen(wanted=wanted, created_before=chosen.created_before)
        found = await sidecar.collect_chosen(chosen_ones, dry_run=body.dry_run)
    else:
        given = body.model_dump(include={"ttl_s", "max_bytes", "evict"}, exclude_none=True)
        found = await sidecar.collect(msgspec.structs.replace(sidecar.limits, **given), dry_run=body.dry_run)
    shown: list[dict[str, Any]] = [
        {
            name: getattr(each.record, name)
            for name in ("capture_id", "dataset", "sample_id", "state", "created", "size")
        }
        | {"why": each.why}
        for each in found.leaving[:LISTED]
    ]
    return JSONResponse(
        {
            "object": "collection",
            "dry_run": body.dry_run,
            "count": len(found.leaving),
            "bytes": found.size,
            "held": found.held,
            "data": shown,
        }
    )
