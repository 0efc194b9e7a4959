"""The bytes of one capture as an answer: whole, a range, or a view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request, Response

from hsconnector.capture.record import CaptureRecord
from hsconnector.errors import ShardError
from server.http import MEDIA_TYPE, StreamedFile, Unsatisfiable, matches, parse_range
from server.metrics import Metrics
from server.reading import Selection, ShardFile, View
from server.refusals import bad_parameter
from server.routes.deps import parse_layers, parse_rows
from server.service import Service

__all__ = ["send_tensors"]


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
            selection = Selection.of(header, wanted_layers, wanted_rows)
        except ShardError as error:
            raise bad_parameter("rows" if str(error).startswith("rows") else "layers", str(error)) from error
        view = await asyncio.to_thread(View, self.file, header, selection)
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


async def _counted(
    chunks: AsyncIterator[bytes] | AsyncIterator[memoryview], metrics: Metrics
) -> AsyncIterator[bytes | memoryview]:
    async for chunk in chunks:
        yield chunk
        metrics.sent_bytes.inc(len(chunk))
