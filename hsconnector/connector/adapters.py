"""Whose adapter: an id of a LoRA adapter's files, like the weights' own, whatever the adapter is called.

An adapter is read from its folder when a request first needs it, again after the engine has let it go, and by every
request that says `load_inplace`. Files that change under a loaded adapter are noticed by their size and time: where
requests load in place the id is derived anew; elsewhere nobody can tell which content the engine holds, and the id is
random. Files replaced between the engine's first load and the first captured request are not noticed.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

from hsconnector.connector.checkpoint import checkpoint_digest
from hsconnector.connector.weights import hashed, model_folder, read_object, without
from hsconnector.errors import CheckpointError

__all__ = ["Adapters", "adapter_id"]

log = logging.getLogger("vllm.hsconnector.adapters")

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_CONFIG = "adapter_config.json"
_NOT_THE_ADAPTER = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
}

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, size, time of change and inode of each file of an adapter."""


def adapter_id(folder: Path) -> str:
    """64 hex digits; raises `CheckpointError` or `OSError` where the adapter cannot be read."""
    files = [folder / name for name in _WEIGHTS if (folder / name).is_file()][:1]
    if not files:
        raise CheckpointError(f"no adapter in {folder}: none of {', '.join(_WEIGHTS)}")
    config = without(read_object(folder / _CONFIG) or {}, _NOT_THE_ADAPTER)
    return hashed("adapter", config, checkpoint_digest(files))


def _stamp(folder: Path | None) -> Stamp:
    paths = [folder / name for name in (*_WEIGHTS, _CONFIG)] if folder is not None else []
    stats = [(path.name, path.stat()) for path in paths if path.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


class Adapters:
    """The ids of the adapters that one engine has been asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[Stamp, str]] = {}

    def id_of(self, request: Any) -> str:
        """The id of a `LoRARequest`'s adapter as it is loaded now; random where that cannot be told."""
        key = (request.lora_int_id, request.lora_path)
        folder = model_folder(request.lora_path)
        stamp = _stamp(folder)
        known, adapter = self._known.get(key, (None, ""))
        if known != stamp:
            sure = known is None or request.load_inplace
            adapter = _derived(folder, request.lora_name) if sure else _unsure(request.lora_name)
            self._known[key] = (stamp, adapter)
        return adapter


def _derived(folder: Path | None, name: str) -> str:
    try:
        return adapter_id(folder if folder is not None else Path(name))
    except (CheckpointError, OSError) as error:
        log.warning("adapter %r cannot be read here, so its captures are never taken for others: %s", name, error)
        return secrets.token_hex(32)


def _unsure(name: str) -> str:
    log.warning(
        "the files of adapter %r changed while it may be loaded: its captures are never taken for others; "
        "load changed adapters from another folder",
        name,
    )
    return secrets.token_hex(32)
