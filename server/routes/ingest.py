"""The connector's side: streams and their batches, as msgpack; see `hsconnector.capture.protocol`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from hsconnector.capture.protocol import encode
from server.routes.deps import Served, read_body

__all__ = ["router"]

MSGPACK = "application/msgpack"
MAX_PRODUCER_BYTES = 1 << 20

router = APIRouter(tags=["ingest"])
_BODY = {"requestBody": {"required": True, "content": {MSGPACK: {"schema": {"type": "string", "format": "binary"}}}}}


@router.post("/v1/producers", openapi_extra=_BODY)
async def register(request: Request, sidecar: Served) -> Response:
    """Opens a stream: a `Producer`, answered by a `ProducerAccepted`."""
    body = await read_body(request, MAX_PRODUCER_BYTES)
    return Response(encode(await sidecar.register(bytes(body))), media_type=MSGPACK)


@router.post("/v1/ingest", openapi_extra=_BODY)
async def ingest(request: Request, sidecar: Served) -> Response:
    """Takes a framed `Batch`, answered by a `BatchAnswer`."""
    body = await read_body(request, sidecar.body_limit, sidecar.hear)
    return Response(encode(await sidecar.ingest(body)), media_type=MSGPACK)
