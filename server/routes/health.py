"""Is it alive, is it ready, what is it?"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from hsconnector.capture.protocol import PROTOCOL_VERSION
from server.routes.deps import Served

__all__ = ["router"]

router = APIRouter(tags=["health"])


@router.get("/health")
@router.get("/livez", include_in_schema=False)
async def health() -> Response:
    """200 while the process answers."""
    return Response(status_code=200)


@router.get("/readyz")
async def ready(sidecar: Served) -> JSONResponse:
    """200 while captures can be taken, else 503 with the reasons."""
    reasons = sidecar.troubles()
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@router.get("/version")
async def get_version() -> JSONResponse:
    """Versions of the package and of the protocol."""
    return JSONResponse({"version": version("hsconnector"), "protocol": PROTOCOL_VERSION})


@router.get("/metrics")
async def metrics(sidecar: Served) -> PlainTextResponse:
    """Prometheus metrics."""
    return PlainTextResponse(sidecar.metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/", include_in_schema=False)
async def index() -> JSONResponse:
    """Where to go from here."""
    return JSONResponse({"service": "hsconnector", "docs": "/docs", "captures": "/v1/captures", "metrics": "/metrics"})
