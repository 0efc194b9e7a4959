"""Texts that others chose, made fit for the wire. A request id comes from a client's header, unsanitised."""

from __future__ import annotations

import msgspec

from hsconnector.capture.protocol import CaptureInfo

__all__ = ["MAX_REQUEST_ID_BYTES", "bounded_info", "bounded_text"]

MAX_REQUEST_ID_BYTES = 60_000
"""A longer request id is cut; the sidecar takes 64 KiB."""
MAX_DETAIL_BYTES = 1000


def bounded_info(info: CaptureInfo) -> CaptureInfo:
    """The same capture, with texts that can be sent."""
    try:
        texts = [info.request_id, info.lora, info.dataset, info.sample_id, *info.mm_hashes]
        sizes = [len(text.encode()) for text in texts]
        if sizes[0] <= MAX_REQUEST_ID_BYTES:
            return info
    except UnicodeEncodeError:
        pass
    return msgspec.structs.replace(
        info,
        request_id=bounded_text(info.request_id, MAX_REQUEST_ID_BYTES),
        lora=bounded_text(info.lora, MAX_REQUEST_ID_BYTES),
        dataset=bounded_text(info.dataset),
        sample_id=bounded_text(info.sample_id),
        mm_hashes=tuple(bounded_text(text) for text in info.mm_hashes),
    )


def bounded_text(text: str, most: int = MAX_DETAIL_BYTES) -> str:
    """At most so many UTF-8 bytes; half a surrogate pair is written out as an escape."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= most:
        return data.decode()
    return data[: most - 3].decode("utf-8", "ignore") + "…"
