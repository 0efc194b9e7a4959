"""What a capture is of: the content hash, by which equal captures find each other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from hsconnector.capture.protocol import CaptureInfo, Producer

__all__ = ["Content", "content_of"]


@dataclass(frozen=True)
class Content:
    """What decides, together with the tokens, the values of a capture: equal tokens under another one are other states.

    `mm_hashes` are the engine's hashes of images and the like, in the order of the prompt.
    """

    model: str
    model_revision: str
    layer_ids: tuple[int, ...]
    lora: str = ""
    mm_hashes: tuple[str, ...] = ()

    def hash_of(self, token_ids: bytes) -> str:
        """The content hash of these tokens (int64 little-endian): SHA-256, in hex.

        Hashed are, in this order: the UTF-8 JSON array
        `["hsconnector/1", model, model_revision, layer_ids, lora, mm_hashes]` without spaces (non-ASCII characters
        unescaped), one newline, and the token ids.
        """
        head: list[Any] = ["hsconnector/1", self.model, self.model_revision, self.layer_ids, self.lora, self.mm_hashes]
        digest = hashlib.sha256(msgspec.json.encode(head))
        digest.update(b"\n")
        digest.update(token_ids)
        return digest.hexdigest()


def content_of(producer: Producer, info: CaptureInfo) -> Content:
    """The content of a capture that a producer sends."""
    return Content(producer.model, producer.model_revision, producer.layer_ids, info.lora, info.mm_hashes)
