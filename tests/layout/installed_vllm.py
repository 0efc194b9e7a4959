"""The installed vLLM's modules, imported past the deprecation warnings that torch gives at import."""

from __future__ import annotations

import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.core import kv_cache_utils as engine
    from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = [
    "KVCacheLayout",
    "MambaStateShapeCalculator",
    "MultipleOf",
    "engine",
    "get_pp_indices",
    "interface",
    "models_folder",
]

models_folder = Path(engine.__file__).parents[2] / "model_executor" / "models"
