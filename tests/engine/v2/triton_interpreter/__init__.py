"""vLLM's V2 model runner on a CPU: its Triton kernels in Triton's interpreter, for tests.

vLLM takes the V2 runner only where Triton has a backend for the device. Triton's wheel has none for a CPU, but it has
an interpreter, which runs kernels as Python on CPU tensors. With the parent of this folder on PYTHONPATH,
`entry_points.txt` beside it makes a backend of that name known (`triton.backends`), and has vLLM call `hasten` in each
process of an engine (`vllm.general_plugins`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"


def hasten() -> None:
    """Spares each launch what a CPU does not need, and one kernel that the interpreter cannot run."""
    from triton.runtime import interpreter
    from vllm.v1.sample.ops import topk_topp_sampler

    _use_tensors_in_place(interpreter.GridExecutor)
    interpreter._patch_lang = _once(interpreter._patch_lang, interpreter._LangPatchScope())
    # Kernels count on integers that wrap, as they do on a GPU; the interpreter would raise.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # Top-k and top-p: the interpreter lacks a conversion that the kernel makes, and vLLM has a function without Triton.
    topk_topp_sampler.HAS_TRITON = False


def _use_tensors_in_place(executor: Any) -> None:
    """The interpreter copies tensors from the device and back; they are where it wants them already."""
    executor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    executor._restore_args_dev = lambda self, args, host_args, kwargs, host_kwargs: None


def _once(patch: Callable[[Any], Any], scope: Any) -> Callable[[Any], Any]:
    """`triton.language` is replaced by its interpreted twin at the first launch, and stays so: `scope` undoes nothing.

    A kernel sees the language under several names, each of which is patched once.
    """
    from triton import language

    patched: set[frozenset[int]] = set()

    def patch_unseen(kernel: Any) -> Any:
        seen = frozenset(id(each) for each in kernel.__globals__.values() if each is language or each is language.core)
        if seen not in patched:
            patch(kernel)
            patched.add(seen)
        return scope

    return patch_unseen
