"""Whose weights: an id of what an engine has loaded, and of its adapters, equal for equal weights and no others.

It is SHA-256 over the checkpoint's digest (see `checkpoint`, which also says what samples can miss) and over what else
decides the network: the model's configuration with the overrides of the command line, quantisation on load, sliding
window. The name of the model, its folder, the dtype (which the content hash carries) and what only the tokenizer or
the sampler reads do not enter it. What a model class of vLLM fetches beside the checkpoint (`secondary_weights`) and
custom code of the model are not seen, nor are files that were replaced between loading them and the engine's start.

Where no file can be read (weights from an object store, a cache that is gone) a commit of the hub stands in. Where
there is none either, nothing is known: the id is random, so that captures of this engine are never taken for others.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsconnector.connector.checkpoint import checkpoint_digest, weight_files
from hsconnector.errors import CheckpointError

__all__ = ["Weights", "hashed", "loaded_weights", "model_folder", "read_object", "source_of", "without"]

_NOT_THE_NETWORK = {
    *("_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict"),
    *("_attn_implementation", "attn_implementation", "output_attentions", "output_hidden_states"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "chat_template", "task_specific_params"),
}
_QUANTISED = "quantization_config"
"""Kept as it is: a dtype in there decides values."""
_QUANTISATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_OWN_FORMATS = {
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache"),
    *("sharded_state", "runai_streamer", "runai_streamer_sharded"),
}
"""Load formats whose extra settings say how to read, not what."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Weights:
    """An id (64 hex digits) and, for the log, where it comes from."""

    id: str
    source: str


def source_of(vllm_config: Any) -> tuple[str, str]:
    """Where the engine has its weights from, by name; `reload_weights` with a path changes it while the engine runs."""
    model = vllm_config.model_config
    return _where(model), str(model.revision or "")


def loaded_weights(vllm_config: Any, vllm_version: str = "") -> Weights:
    """The weights that an engine of this configuration has loaded; never raises for what it cannot read.

    The version counts for dummy weights only: they are drawn by vLLM's own code, rank by rank.
    """
    load_format = str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format))
    model = vllm_config.model_config
    folder = model_folder(_where(model), model.revision, vllm_config.load_config.download_dir)
    network = _network(vllm_config, folder)
    if load_format == "dummy":
        parallel = vllm_config.parallel_config
        ranks = [parallel.tensor_parallel_size, parallel.pipeline_parallel_size]
        return Weights(hashed("dummy", network, [model.seed, vllm_version, ranks]), "dummy weights")
    try:
        return _from_files(vllm_config, folder, load_format, network)
    except (CheckpointError, OSError) as error:
        return _from_revision(model, network, error)


def _where(model: Any) -> str:
    return str(getattr(model, "model_weights", "") or model.model)


def _from_files(vllm_config: Any, folder: Path | None, load_format: str, network: Any) -> Weights:
    if folder is None:
        raise CheckpointError(f"{_where(vllm_config.model_config)!r} is no folder here and not in the hub's cache")
    extra = vllm_config.load_config.model_loader_extra_config
    pattern = extra.get("pattern") if isinstance(extra, Mapping) else None
    files = weight_files(_picked(folder, vllm_config), load_format, pattern and re.sub(r"\{[^}]*\}", "*", pattern))
    kind = "files" if load_format in _OWN_FORMATS else [load_format, extra]
    return Weights(
        hashed(kind, network, checkpoint_digest(files)),
        f"{len(files)} file{'s' * (len(files) > 1)} in {files[0].parent}",
    )


def _picked(folder: Path, vllm_config: Any) -> Path:
    """The file of a quantisation named behind the repository (`repo:Q4_K_M`), or the folder."""
    name, colon, kind = str(vllm_config.model_config.model).rpartition(":")
    if not colon or Path(f"{name}:{kind}").exists():
        return folder
    return next(iter(sorted(folder.glob(f"*{kind}*.gguf"))), folder)


def _from_revision(model: Any, network: Any, error: Exception) -> Weights:
    revision = str(model.revision or "")
    if _COMMIT.fullmatch(revision):
        return Weights(hashed("revision", network, [_where(model), revision]), f"the hub's commit {revision} ({error})")
    return Weights(secrets.token_hex(32), f"nothing that can be read, so an id for this start only ({error})")


def model_folder(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Where the files of a model lie here: its own path, or its snapshot in the hub's cache; no network."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        repo = model.partition(":")[0]
        return Path(snapshot_download(repo, revision=revision, cache_dir=cache, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


# ---- what decides the network beside the weights


def _network(vllm_config: Any, folder: Path | None) -> dict[str, Any]:
    model = vllm_config.model_config
    config = _merged(_config(model, folder), getattr(model, "hf_overrides", None) or {})
    facts: dict[str, Any] = {"config": without(config, _NOT_THE_NETWORK)}
    if _QUANTISED not in config:
        facts["quantisation"] = _quantisation(model, folder)
    if getattr(model, "disable_sliding_window", False):
        facts["sliding_window"] = False
    return facts


def _quantisation(model: Any, folder: Path | None) -> list[Any]:
    """What quantises on load, or says so in a file of its own. A kernel's name (`awq_marlin`) is not of it."""
    name = str(getattr(model, "quantization", None) or "")
    files = [read_object(folder / name) for name in _QUANTISATION_FILES] if folder is not None else []
    return [name, getattr(model, _QUANTISED, None), [content for content in files if content is not None]]


def _config(model: Any, folder: Path | None) -> dict[str, Any]:
    """The configuration as its file has it: what a version of transformers adds to it does not enter the id."""
    other = getattr(model, "hf_config_path", None)
    source = model_folder(other) if other else folder
    names = ("config.json", "params.json") if source is not None else ()
    for name in names:
        content = read_object(Path(str(source)) / name)
        if content is not None:
            return content
    content = model.hf_config.to_dict()
    return content if isinstance(content, dict) else {}


def _merged(config: Mapping[str, Any], overrides: Any) -> dict[str, Any]:
    """The configuration with its overrides; a function that changes it counts by its name."""
    if not isinstance(overrides, Mapping):
        return {**config, "hf_overrides": f"{overrides.__module__}.{overrides.__qualname__}"}
    nested = {key: _merged(config.get(key) or {}, value) for key, value in overrides.items() if isinstance(value, dict)}
    return {**config, **overrides, **nested}


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON file that holds an object; None where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def without(value: Any, keys: set[str]) -> Any:
    """A copy of a JSON value without these keys, at any depth but inside a quantisation."""
    if isinstance(value, Mapping):
        kept = {str(key): inner for key, inner in value.items() if key not in keys}
        return {key: inner if key == _QUANTISED else without(inner, keys) for key, inner in kept.items()}
    if isinstance(value, list | tuple):
        return [without(inner, keys) for inner in value]
    return value


def hashed(*parts: Any) -> str:
    """SHA-256 (hex) of the parts as JSON."""
    return hashlib.sha256(
        json.dumps(["hsconnector/weights/1", *parts], sort_keys=True, default=str).encode()
    ).hexdigest()
