"""The bytes of one capture as an answer: whole, a range, or a view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.selection import resolve_rows, resolve_slots
from hsconnector.errors import SettingsError
from server.metrics import Metrics
from server.ranges import Unsatisfiable, matches, parse_range
from server.refusals import bad_parameter
from server.routes.deps import parse_layers, parse_rows
from server.service import Service
from server.shard_files import ShardFile
from server.views import ShardView

__all__ = ["send_tensors"]

MEDIA_TYPE = "application/octet-stream"


async def send_tensors(
    request: Request,
    sidecar: Service,
    record: CaptureRecord,
    *,
    quarantined: bool,
    layers: str | None,
    rows: str | None,
) -> Response:
    """A response with the tensors of a final capture; raises the `CaptureError` of any other."""
    path = sidecar.shard_path(record, quarantined=quarantined)
    try:
        file = await asyncio.to_thread(sidecar.readers.open, record.capture_id, path)
    except FileNotFoundError as error:
        raise await sidecar.note_gone(record) from error
    sending = Sending(request, file, sidecar.metrics, _headers(sidecar, record))
    try:
        if layers is None and rows is None:
            return sending.whole(record.data_hash)
        return await sending.view(layers, rows)
    except BaseException:
        file.close()
        raise


def _headers(sidecar: Service, record: CaptureRecord) -> dict[str, str]:
    return {
        "cache-control": "private, no-cache",
        "content-location": f"{sidecar.handle(record)}/tensors",
        "content-disposition": f'attachment; filename="{record.capture_id}.safetensors"',
    }


class Sending:
    """One answer in the making."""

    def __init__(self, request: Request, file: ShardFile, metrics: Metrics, headers: dict[str, str]) -> None:
        self.request = request
        self.file = file
        self.metrics = metrics
        self.headers = headers

    def whole(self, data_hash: str) -> Response:
        """The file, a range of it, or 304."""
        asked, size = self.request.headers, self.file.size
        tag = f'"{data_hash}"'
        self.headers |= {"etag": tag, "accept-ranges": "bytes"}
        if matches(asked.get("if-none-match"), tag, weak=True):
            return self._empty(304)
        fresh = "if-range" not in asked or matches(asked["if-range"], tag, weak=False)
        try:
            found = parse_range(asked.get("range"), size) if fresh else None
        except Unsatisfiable:
            return self._empty(416, {"content-range": f"bytes */{size}"})
        start, stop = found or (0, size)
        if found:
            self.headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
        return self._stream(self.file.chunks(start, stop), 206 if found else 200, stop - start)

    async def view(self, layers: str | None, rows: str | None) -> Response:
        """Some layers and rows as a file of their own, or 304."""
        wanted_layers, wanted_rows = parse_layers(layers), parse_rows(rows)
        header = await asyncio.to_thread(self.file.header)
        try:
            slots = resolve_slots(wanted_layers, header.layer_ids)
        except SettingsError as error:
            raise bad_parameter("layers", str(error)) from error
        try:
            chosen = resolve_rows(wanted_rows, header.shape[0])
        except SettingsError as error:
            raise bad_parameter("rows", str(error)) from error
        view = await asyncio.to_thread(ShardView, self.file, header, chosen, slots)
        tag = f'"{view.data_hash}-view"'
        self.headers |= {"etag": tag, "accept-ranges": "none"}
        if matches(self.request.headers.get("if-none-match"), tag, weak=True):
            return self._empty(304)
        return self._stream(view.chunks(), 200, view.size)

    def _stream(self, chunks: AsyncIterator[bytes] | AsyncIterator[memoryview], status: int, length: int) -> Response:
        if self.request.method == "HEAD":
            return self._empty(status, {"content-length": str(length)})
        return StreamedFile(
            _counted(chunks, self.metrics), status=status, length=length, headers=self.headers, close=self.file.close
        )

    def _empty(self, status: int, more: dict[str, str] | None = None) -> Response:
        self.file.close()
        response = Response(status_code=status, headers={**self.headers, **(more or {})}, media_type=MEDIA_TYPE)
        if status == 304:
            del response.headers["content-type"]
        return response


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


async def _counted(
    chunks: AsyncIterator[bytes] | AsyncIterator[memoryview], metrics: Metrics
) -> AsyncIterator[bytes | memoryview]:
    async for chunk in chunks:
        yield chunk
        metrics.sent_bytes.inc(len(chunk))
