"""The parts of HTTP that a shard's reader may use: ranges, tags, and a response that streams a shard."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

__all__ = ["MEDIA_TYPE", "ByteRange", "StreamedFile", "Unsatisfiable", "matches", "parse_range"]

MEDIA_TYPE = "application/octet-stream"

ByteRange = tuple[int, int]
"""First byte and the one after the last."""

_RANGE = re.compile(r"bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*\Z", re.ASCII)


class Unsatisfiable(Exception):
    """A range that begins beyond the file."""


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """The one range asked for; None for none, for several and for what is no range (the whole is sent then)."""
    found = _RANGE.match(header.strip()) if header else None
    if found is None or found.groups() == ("", "") or max(map(len, found.groups())) > 18:
        return None
    first, last = found.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    elif last and int(last) < int(first):
        return None
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    if start >= stop:
        raise Unsatisfiable
    return start, stop


def matches(header: str | None, tag: str, *, weak: bool) -> bool:
    """Whether a list of tags names this one; weak comparison for `If-None-Match`, strong for `If-Range`."""
    if header is None:
        return False
    tags = [part.strip() for part in header.split(",")]
    if weak:
        return tags == ["*"] or tag in [part.removeprefix("W/") for part in tags]
    return tags == [tag]


class StreamedFile(StreamingResponse):
    """Streams bytes of a known length, and closes their source whatever happens."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes | memoryview],
        *,
        status: int,
        length: int,
        headers: Mapping[str, str],
        close: Callable[[], None],
    ) -> None:
        super().__init__(chunks, status, {**headers, "content-length": str(length)}, MEDIA_TYPE)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
