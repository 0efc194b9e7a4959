"""What several routes read from a request."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Query, Request

from server.refusals import bad_parameter, too_large
from server.service import Sidecar

__all__ = ["Quarantined", "Served", "Wait", "read_body"]


def _sidecar(request: Request) -> Sidecar:
    return cast(Sidecar, request.app.state.sidecar)


Served = Annotated[Sidecar, Depends(_sidecar)]
Wait = Annotated[float, Query(ge=0, allow_inf_nan=False, description="Seconds to wait for the end of the capture.")]
Quarantined = Annotated[bool, Query(description="Also give a capture that is whole but unsound.")]


async def read_body(request: Request, limit: int) -> bytearray:
    """The whole body; refused with 413 as soon as it is known to be over `limit`."""
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and int(announced[:19]) > limit:
        raise too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large(limit)
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
    return tuple(int(part) for part in parts)


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
