"""What a capture is of: the content hash, by which equal captures find each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = ["content_hash"]


def content_hash(
    *,
    model: str,
    model_revision: str,
    layer_ids: Sequence[int],
    lora: str,
    mm_hashes: Sequence[str],
    token_ids: bytes,
) -> str:
    """SHA-256 (hex) of everything that decides the values of a capture.

    Hashed are, in this order: the UTF-8 JSON array
    `["hsconnector/1", model, model_revision, layer_ids, lora, mm_hashes]` without spaces (non-ASCII characters
    unescaped), one newline, and the token ids as int64 little-endian.
    Equal tokens under another model, revision, layer set, adapter or image are other states.
    """
    head: list[Any] = ["hsconnector/1", model, model_revision, list(layer_ids), lora, list(mm_hashes)]
    digest = hashlib.sha256(msgspec.json.encode(head))
    digest.update(b"\n")
    digest.update(token_ids)
    return digest.hexdigest()
