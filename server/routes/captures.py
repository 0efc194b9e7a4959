"""Captures: list, look, wait, read, delete."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from hsconnector.capture.protocol import CaptureState
from hsconnector.storage.queries import Filter
from server.routes.deps import Quarantined, Served, Wait
from server.routes.tensors import send_tensors

__all__ = ["router"]

router = APIRouter(tags=["captures"])


@router.get("/v1/captures")
async def list_captures(
    sidecar: Served,
    request_id: str | None = None,
    client_id: str | None = None,
    dataset: str | None = None,
    sample_id: str | None = None,
    state: CaptureState | None = None,
    content_hash: str | None = None,
    model: str | None = None,
    weights_id: Annotated[str | None, Query(description="Whose weights; empty for captures that do not say.")] = None,
    since: Annotated[
        float | None, Query(allow_inf_nan=False, description="Created at or after, seconds since the epoch.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str, Query(max_length=32, description="`next_cursor` of the page before.")] = "",
    order: Literal["newest", "oldest"] = "newest",
) -> JSONResponse:
    """Captures in the order of time, a page at a time."""
    wanted = Filter(
        request_id=request_id,
        client_id=client_id,
        dataset=dataset,
        sample_id=sample_id,
        state=state,
        content_hash=content_hash,
        model=model,
        weights_id=weights_id,
        since=since,
    )
    page = await sidecar.page(wanted, limit=limit, cursor=cursor, oldest_first=order == "oldest")
    data: list[dict[str, Any]] = [sidecar.describe(record) for record in page.records]
    return JSONResponse({"object": "list", "data": data, "next_cursor": page.next_cursor})


@router.get("/v1/captures/{capture_id}")
async def get_capture(capture_id: str, sidecar: Served, wait: Wait = 0) -> JSONResponse:
    """Metadata, state and verdict of a capture, whatever its state."""
    record = await sidecar.find(capture_id, wait)
    receiving = record.state is CaptureState.RECEIVING
    return JSONResponse(sidecar.describe(record), headers={"retry-after": "1"} if receiving else None)


@router.head("/v1/captures/{capture_id}/tensors", include_in_schema=False)
@router.get("/v1/captures/{capture_id}/tensors")
async def get_tensors(
    request: Request,
    capture_id: str,
    sidecar: Served,
    wait: Wait = 0,
    quarantined: Quarantined = False,
    layers: str | None = None,
    rows: str | None = None,
) -> Response:
    """The safetensors bytes, or a view of them."""
    record = await sidecar.find(capture_id, wait)
    return await send_tensors(request, sidecar, record, quarantined=quarantined, layers=layers, rows=rows)


@router.delete("/v1/captures/{capture_id}", status_code=204)
async def delete_capture(capture_id: str, sidecar: Served) -> Response:
    """Removes a capture's bytes; asked again, changes nothing."""
    await sidecar.delete(capture_id)
    return Response(status_code=204)


@router.head("/v1/requests/{request_id:path}/hidden-states", include_in_schema=False)
@router.get("/v1/requests/{request_id:path}/hidden-states")
async def get_by_request(
    request: Request,
    request_id: str,
    sidecar: Served,
    wait: Wait = 0,
    quarantined: Quarantined = False,
    layers: str | None = None,
    rows: str | None = None,
) -> Response:
    """The tensors of a request, by the engine's or the client's id; 300 with the list where it has several captures."""
    records = await sidecar.of_request(request_id, wait)
    if len(records) > 1:
        return JSONResponse({"object": "list", "data": [sidecar.describe(record) for record in records]}, 300)
    return await send_tensors(request, sidecar, records[0], quarantined=quarantined, layers=layers, rows=rows)
