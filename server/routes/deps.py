"""What several routes read from a request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, cast

from fastapi import Depends, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message, Receive

from server.refusals import bad_parameter, too_large
from server.service import Service

__all__ = ["JsonRoute", "Quarantined", "Served", "Wait", "read_body"]

MAX_JSON_BYTES = 1 << 20
"""The most bytes of a JSON body; a thousand content hashes, the longest list that is taken, are 67 KB."""


def _sidecar(request: Request) -> Service:
    return cast(Service, request.app.state.sidecar)


Served = Annotated[Service, Depends(_sidecar)]
Wait = Annotated[float, Query(ge=0, allow_inf_nan=False, description="Seconds to wait for the end of the capture.")]
Quarantined = Annotated[bool, Query(description="Also give a capture that is whole but unsound.")]


class JsonRoute(APIRoute):
    """A route whose JSON body is refused with 413 where it has more than `MAX_JSON_BYTES`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            body = bytes(await read_body(request, MAX_JSON_BYTES))
            return await handle(Request(request.scope, _replayed(body)))

        return bounded


def _replayed(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def read_body(request: Request, limit: int, grown: Callable[[bytearray], None] = lambda body: None) -> bytearray:
    """The whole body; refused with 413 as soon as it is known to be over `limit`. `grown` is told of each piece."""
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and int(announced[:19]) > limit:
        raise too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large(limit)
        grown(body)
    return body


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """`0,3,6` as layer ids."""
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) > 4096 or not all(
        part.strip().isascii() and part.strip().isdigit() and len(part) < 10 for part in parts
    ):
        raise bad_parameter("layers", f"layers={text[:64]!r} is not a list of layer ids such as 0,3,6")
    ids = tuple(int(part) for part in parts)
    if len(set(ids)) != len(ids):
        raise bad_parameter("layers", f"layers={text[:64]!r} names a layer twice")
    return ids


def parse_rows(text: str | None) -> tuple[int | None, int | None] | None:
    """`a:b`, either side optional."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon or not all(
        part == "" or (part.isascii() and part.isdigit() and len(part) < 16) for part in (first, last)
    ):
        raise bad_parameter("rows", f"rows={text[:64]!r} is not a range of rows such as 0:128")
    return int(first) if first else None, int(last) if last else None
