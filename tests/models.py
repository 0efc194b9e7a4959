"""Tiny checkpoints with random weights, for a real engine and for Hugging Face alike.

Everything is built from code and a seed, so two runs hold the same bytes. Norm weights are random: with all ones,
states before and after the final norm are hard to tell apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LAYER_IDS = (0, 1, 3, 6)
"""Embeddings, two in the middle, and the last before the final norm: valid for both models as they are by default."""

NUM_LAYERS = 6
VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
END_TOKEN_ID = VOCAB_SIZE - len(SPECIAL_TOKENS)

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_qwen3(path: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A Qwen3 of 6 layers and hidden size 256: full attention only, so the engine makes one composite group."""
    config: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.03,
        "bos_token_id": None,
        "eos_token_id": END_TOKEN_ID,
    }
    torch.manual_seed(seed)
    return _save(Qwen3ForCausalLM(Qwen3Config(**{**config, **overrides})), path, dtype)


def tiny_gpt_oss(path: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A gpt-oss of 6 layers and hidden size 192, sliding and full attention in turn: a hybrid.

    With 128-token attention blocks on the CPU a page holds 128 * 2 * 2 * 64 * 4 = 131,072 bytes; a row of 4 slots
    takes 3,072, so the hidden-state group gets block size 32 and leaves a quarter of each page unused.
    """
    config: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 192,
        "intermediate_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.04,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": END_TOKEN_ID,
    }
    torch.manual_seed(seed)
    return _save(GptOssForCausalLM(GptOssConfig(**{**config, **overrides})), path, dtype)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens: 256 bytes, 252 pairs of lower-case letters, 4 special ones."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in letters for b in letters][: VOCAB_SIZE - 256 - len(SPECIAL_TOKENS)]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in pairs]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def random_token_ids(count: int, *, seed: int = 0) -> list[int]:
    """Ordinary token ids of the tiny models, never a special one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, END_TOKEN_ID, (count,), generator=generator).tolist()


def _save(model: PreTrainedModel, path: str | Path, dtype: torch.dtype) -> Path:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                weight.normal_(0.0, 0.1)
    model.to(dtype).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return Path(path)
