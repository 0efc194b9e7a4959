"""One tokenizer with the markers of every shape, so that one engine can be asked to render them all."""

from __future__ import annotations

import copy
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hsconnector.prompts.chat import ChatTokenizer
from hsconnector.prompts.preparation import Preparation
from tests.prompts.shapes import SHAPES


@cache
def shared_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE under 512 tokens that normalises, with Qwen3's shape of template as its own."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "th", "er"]
    pairs = [("Ċ", "Ċ"), ("t", "h"), ("e", "r")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys(marker for shape in SHAPES.values() for marker in shape.special)
    added = dict.fromkeys(marker for shape in SHAPES.values() for marker in shape.added if marker not in special)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        chat_template=SHAPES["qwen3"].template,
        clean_up_tokenization_spaces=False,
    )


def shared_chat(shape: str, **options: object) -> ChatTokenizer:
    """That tokenizer with the template and the stop tokens of a shape."""
    tokenizer = copy.deepcopy(shared_tokenizer())
    tokenizer.chat_template = SHAPES[shape].template
    stops = tokenizer.convert_tokens_to_ids(list(SHAPES[shape].stops))
    return ChatTokenizer(tokenizer, shape, Preparation(**options), stops)  # type: ignore[arg-type]
