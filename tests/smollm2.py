"""A real checkpoint without a hub: SmolLM2-135M-Instruct, built as the demo builds it, in any dtype."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__all__ = ["chats", "smollm2"]

_ASKS = (
    "What is the capital of France?",
    "Tell me a joke about cats.",
    "Name three prime numbers.",
    "Why is the sky blue?",
    "def fib(n):",
    "What is 17 * 23?",
    "Translate 'good morning' to Spanish.",
    "Explain gravity to a child.",
)


def smollm2(folder: Path, dtype: torch.dtype) -> Path:
    """The checkpoint in that dtype, under `folder`."""
    path = folder / str(dtype).removeprefix("torch.")
    if not path.exists():
        source = _demo().build_model(folder / "float32")
        if source != path:
            AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(path)
            AutoTokenizer.from_pretrained(source).save_pretrained(path)
    return path


def chats(model: Path, count: int) -> list[list[int]]:
    """So many chats of 20 to 60 tokens, with and without a system prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for number in range(count):
        ask = _ASKS[number % len(_ASKS)] + " Say so in one more sentence." * (number // len(_ASKS))
        system = [] if number % 3 else [{"role": "system", "content": "Be brief."}]
        messages = [*system, {"role": "user", "content": ask}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        found.append(tokenizer.encode(text, add_special_tokens=False)[:60])
    return found


def _demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", Path(__file__).parents[1] / "deploy" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault("demo", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module
