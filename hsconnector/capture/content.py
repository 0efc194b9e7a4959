"""What a capture is of: the content hash, by which equal captures find each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hsconnector.capture.protocol import CaptureInfo, Producer
from hsconnector.errors import SettingsError

__all__ = ["Content", "WeightsHeld", "choose_weights", "content_of"]


@dataclass(frozen=True)
class Content:
    """What decides, together with the tokens, the values of a capture: equal tokens under another one are other states.

    A model's name and folder decide nothing, the weights in it do: what stands under the name may have been replaced,
    and a copy elsewhere is the same model (vllm#57810).
    """

    model: str
    model_revision: str
    layer_ids: tuple[int, ...]
    lora: str = ""
    """The adapter's name."""
    mm_hashes: tuple[str, ...] = ()
    """The engine's hashes of images and the like, in the order of the prompt."""
    weights_id: str = ""
    """Whose weights, 64 hex digits; empty where they are not known, as of engines before they were told apart."""
    dtype: str = ""
    kv_cache_dtype: str = ""
    """As the engine resolved it, such as "fp8_e4m3"; empty where it is the dtype of the states."""
    lora_weights_id: str = ""
    """The adapter's own, whatever it is called."""

    def hash_of(self, token_ids: bytes) -> str:
        """The content hash of these tokens (int64 little-endian): SHA-256, in hex.

        Version 2. Hashed are, in this order: the UTF-8 JSON array `["hsconnector/2", weights_id, dtype, kv_cache_dtype,
        layer_ids, lora_weights_id, mm_hashes]` without spaces (non-ASCII characters unescaped), one newline, and the
        token ids. Where the weights are not known, it is `version_1`.
        """
        return _hashed(self.head, token_ids)

    def version_1(self, token_ids: bytes) -> str:
        """The content hash of captures that do not say whose weights they are of, by names alone.

        As above, with `["hsconnector/1", model, model_revision, layer_ids, lora, mm_hashes]`.
        """
        return _hashed(self._names, token_ids)

    @property
    def head(self) -> tuple[object, ...]:
        """What is hashed before the tokens: two contents with the same one are the same."""
        if not self.weights_id:
            return self._names
        weights = (self.weights_id, self.dtype, self.kv_cache_dtype)
        return ("hsconnector/2", *weights, self.layer_ids, self.lora_weights_id, self.mm_hashes)

    @property
    def _names(self) -> tuple[object, ...]:
        return ("hsconnector/1", self.model, self.model_revision, self.layer_ids, self.lora, self.mm_hashes)


class WeightsHeld(msgspec.Struct, frozen=True):
    """How many captures are of one model's weights."""

    weights_id: str
    """Empty for captures that do not say."""
    captures: int
    newest: str
    """The capture id of the newest."""

    def __str__(self) -> str:
        return f"{self.captures} of weights {self.weights_id[:12] or 'unknown'}"


def choose_weights(held: Sequence[WeightsHeld], wanted: str | None) -> str:
    """The weights id that `wanted` begins, or without one the only id; raises SettingsError where that is not one."""
    fitting = [each for each in held if wanted is None or each.weights_id.startswith(wanted)]
    if wanted == "":
        fitting = [each for each in held if not each.weights_id]
    if len(fitting) == 1 or (not held and wanted is None):
        return fitting[0].weights_id if fitting else ""
    found = ", ".join(map(str, held)) or "no captures"
    if wanted is None:
        raise SettingsError(f"there are captures of {len(held)} weights ({found}, the newest last): say whose")
    raise SettingsError(f"weights id {wanted!r} begins {len(fitting)} of the ids that are here: {found}")


def content_of(producer: Producer, info: CaptureInfo) -> Content:
    """The content of a capture that a producer sends."""
    return Content(
        model=producer.model,
        model_revision=producer.model_revision,
        layer_ids=producer.layer_ids,
        lora=info.lora,
        mm_hashes=info.mm_hashes,
        weights_id=info.weights_id or producer.weights_id,
        dtype=producer.dtype,
        kv_cache_dtype=producer.kv_cache_dtype,
        lora_weights_id=info.lora_weights_id,
    )


def _hashed(head: Sequence[object], token_ids: bytes) -> str:
    digest = hashlib.sha256(msgspec.json.encode(head))
    digest.update(b"\n")
    digest.update(token_ids)
    return digest.hexdigest()
