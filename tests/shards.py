"""Shards written by hand with the safetensors library, independently of the sidecar's writer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save

from hsconnector.capture.protocol import new_capture_id


def shard_bytes(
    hidden_states: torch.Tensor, token_ids: Sequence[int], layer_ids: Sequence[int], **metadata: str
) -> bytes:
    """A shard of `hidden_states` `[T, L, H]` with a true `data_hash`; `metadata` adds to or replaces the rest."""
    tensors = {"hidden_states": hidden_states.contiguous(), "token_ids": torch.tensor(list(token_ids))}
    dtype = str(hidden_states.dtype).removeprefix("torch.")
    about = {
        "format": "hsconnector/1",
        "capture_id": new_capture_id(),
        "layer_ids": json.dumps(list(layer_ids)),
        "dims": "token,layer,hidden",
        "dtype": dtype,
        "data_hash": "0" * 32,
        **metadata,
    }
    body = save(tensors, metadata=about)
    data = body[8 + int.from_bytes(body[:8], "little") :]
    return body.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(data).encode(), 1)


def write_shard(
    folder: Path, hidden_states: torch.Tensor, token_ids: Sequence[int], layer_ids: Sequence[int], **metadata: str
) -> Path:
    """The same as a file named after its capture id."""
    metadata.setdefault("capture_id", new_capture_id())
    path = folder / f"{metadata['capture_id']}.safetensors"
    path.write_bytes(shard_bytes(hidden_states, token_ids, layer_ids, **metadata))
    return path


def overwrite(path: Path, data: bytes | bytearray) -> None:
    """Puts other bytes in the place of a store's shard, which is read-only."""
    path.chmod(0o644)
    path.write_bytes(data)
