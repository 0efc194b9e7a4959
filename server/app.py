"""Builds the FastAPI app; the only place where errors become responses."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from hsconnector.errors import (
    CaptureError,
    CaptureExpired,
    CaptureFailed,
    CaptureNotFound,
    CapturePending,
    CaptureQuarantined,
    HSConnectorError,
    ProtocolError,
    StoreError,
)
from server.auth import Gate
from server.refusals import Refusal
from server.routes import ROUTERS
from server.service import Service

__all__ = ["build_app", "envelope"]

log = logging.getLogger("hsconnector.server.app")

STATUS: dict[type[HSConnectorError], tuple[int, str]] = {
    CaptureNotFound: (404, "capture_not_found"),
    CapturePending: (202, "capture_pending"),
    CaptureFailed: (424, "capture_failed"),
    CaptureQuarantined: (424, "capture_quarantined"),
    CaptureExpired: (410, "capture_expired"),
    ProtocolError: (400, "bad_message"),
    StoreError: (507, "store_error"),
}


def build_app(sidecar: Service) -> FastAPI:
    """The sidecar's HTTP side; starts and stops `sidecar` with its lifespan."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await sidecar.start()
        yield
        await sidecar.stop()

    app = FastAPI(title="hsconnector sidecar", version=version("hsconnector"), lifespan=lifespan)
    app.state.sidecar = sidecar
    # As they are: `include_router` would make each route anew, which takes three times as long as all else of a start.
    app.router.routes += [route for router in ROUTERS for route in router.routes]
    app.add_exception_handler(HSConnectorError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_bad_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    settings = sidecar.settings
    app.add_middleware(
        Gate, key=settings.key(), ingest_key=settings.ingest_key(), any_host=settings.insecure, refuse=_refuse
    )
    return app


def envelope(status: int, kind: str, message: str, param: str | None = None, **more: Any) -> JSONResponse:
    """vLLM's error envelope."""
    headers = {202: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}.get(status)
    error = {"message": message, "type": kind, "param": param, "code": status, **more}
    return JSONResponse({"error": error}, status, headers)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, Refusal):
        return envelope(error.status, error.kind, str(error), error.param)
    if isinstance(error, CaptureError):
        status, kind = STATUS[type(error)]
        return envelope(status, kind, str(error), capture_id=error.capture_id, reason=error.reason)
    status, kind = next((found for base, found in STATUS.items() if isinstance(error, base)), (500, "internal_error"))
    if status == 500:
        log.error("%s %s: %s", request.method, request.url.path, error)
    return envelope(status, kind, str(error))


async def _on_bad_request(request: Request, error: Exception) -> JSONResponse:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    sentences = [f"{problem['loc'][-1]}: {problem['msg']}" for problem in problems]
    return envelope(400, "bad_request", "; ".join(sentences), str(problems[0]["loc"][-1]) if problems else None)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else ""
    return envelope(
        status, "not_found" if status == 404 else "bad_request", f"{request.method} {request.url.path}: {detail}"
    )


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    return envelope(500, "internal_error", f"{type(error).__name__}: the sidecar's log has the traceback")


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, kind: str, message: str) -> None:
    await envelope(status, kind, message)(scope, receive, send)
