"""Small checkpoints written by hand, and what an engine's configuration says of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["CONFIG", "engine_config", "tensors", "write", "write_adapter", "write_sharded"]

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "rope_theta": 10000.0, "torch_dtype": "float32"}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """A few small tensors and one of 256 KB, of which only samples are read."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (1024, 64), "norm": (64,), "layer.weight": (64, 64), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, content: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors() if content is None else content, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def write_sharded(folder: Path, content: dict[str, torch.Tensor]) -> Path:
    """One file a tensor, and an index."""
    folder.mkdir(parents=True)
    names = {name: f"model-{number:05}-of-{len(content):05}.safetensors" for number, name in enumerate(content)}
    for name, file in names.items():
        save_file({name: content[name]}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_adapter(folder: Path, seed: int = 0, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(seed), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, **config}))
    return folder


class _Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def engine_config(model: object, load_format: str = "auto", load: Any = None, **fields: Any) -> Any:
    """The parts of a `VllmConfig` that say what was loaded."""
    defaults: dict[str, Any] = {
        "revision": None,
        "model_weights": "",
        "hf_overrides": {},
        "quantization": None,
        "seed": 0,
    }
    model_config = SimpleNamespace(**{"model": str(model), "hf_config": _Config(**CONFIG), **defaults, **fields})
    return SimpleNamespace(
        model_config=model_config,
        load_config=SimpleNamespace(load_format=load_format, download_dir=None, model_loader_extra_config=load or {}),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
