"""Ten training steps of SpecForge's EAGLE-3 on a machine without an accelerator, as a program:

    python tests/specforge_cpu.py EXPORT MAPPING MODEL

EXPORT is the folder of `.ckpt` files, MAPPING the file of its draft vocabulary, MODEL the target's checkpoint. Reader,
normaliser, collator, draft, target head, strategy and loss are SpecForge's own; the loop around them is not. The
loss is a Triton kernel, which Triton's interpreter runs, and nothing is compiled. Prints the losses as JSON.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.training.strategies.base import Eagle3TrainStrategy
from transformers import LlamaConfig

from tests.formats.specforge_reading import read_by_specforge

STEPS = 10


def main(export: str, mapping: str, model: str) -> None:
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    head = TargetHead(model)
    head.load_weights(model)
    head.freeze_weights()
    draft = draft_of(head, mapping)
    strategy = Eagle3TrainStrategy(OnlineEagle3Model(draft, length=2), target_head=head)
    optimizer = torch.optim.AdamW([weight for weight in draft.parameters() if weight.requires_grad], lr=1e-3)
    (batch,) = read_by_specforge("eagle3", export, batch_size=1000)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = strategy.forward_loss(batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    print(json.dumps(losses))


def draft_of(head: TargetHead, mapping: str) -> LlamaForCausalLMEagle3:
    """A small one whose vocabulary is that of the mapping."""
    config = LlamaConfig(
        vocab_size=head.vocab_size,
        hidden_size=head.hidden_size,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        draft_vocab_size=len(torch.load(mapping)["d2t"]),
    )
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    draft.load_vocab_mapping(mapping)
    draft.freeze_embedding()
    return draft


if __name__ == "__main__":
    main(*sys.argv[1:])
