"""The installed vLLM's modules, imported past the deprecation warnings that torch gives at import."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.core import kv_cache_utils as utils
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

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    planning = utils  # before 0.33

engine = SimpleNamespace(**vars(utils) | vars(planning))
"""The functions that form groups, wherever a version keeps them."""

models_folder = Path(utils.__file__).parents[2] / "model_executor" / "models"
