"""Which contents are here, and which engines send."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from server.routes.deps import JsonRoute, Served

__all__ = ["router"]

MAX_HASHES = 1000
SHOWN = (
    "capture_id",
    "state",
    "reason",
    "detail",
    "content_hash",
    "weights_id",
    "dataset",
    "sample_id",
    "num_rows",
    "created",
    "size",
    "handle",
    "path",
)

router = APIRouter(tags=["captures"], route_class=JsonRoute)


class Lookup(BaseModel):
    """What is looked up."""

    model_config = ConfigDict(extra="forbid")

    content_hashes: Annotated[
        list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]],
        Field(
            max_length=MAX_HASHES,
            description="SHA-256 digests as `hsconnector.capture.content` makes them.",
        ),
    ]


@router.post("/v1/captures:lookup")
async def look_up(wanted: Lookup, sidecar: Served) -> JSONResponse:
    """The captures of these contents, oldest first, whatever their state; a content that is not here has none."""
    records = await sidecar.with_content(wanted.content_hashes)
    described = [sidecar.describe(record) for record in records]
    return JSONResponse({"object": "list", "data": [{name: each[name] for name in SHOWN} for each in described]})


@router.get("/v1/weights")
async def list_weights(sidecar: Served, dataset: str | None = None, model: str | None = None) -> JSONResponse:
    """Whose weights the ready captures are of: how many of each, and the newest; the newest weights last."""
    held = await sidecar.weights(dataset=dataset, model=model)
    return JSONResponse({"object": "list", "data": msgspec.to_builtins(held)})


@router.get("/v1/producers")
async def list_producers(sidecar: Served) -> JSONResponse:
    """The engines whose streams are open: model, layers and geometry."""
    data: list[dict[str, Any]] = [msgspec.to_builtins(producer) for producer in sidecar.producers()]
    for producer in data:
        del producer["ring"]
    return JSONResponse({"object": "list", "data": data})
