"""`specforge train` itself, on exported files and with the exported table of a draft vocabulary, on a CPU.

Its loss is a Triton kernel, which Triton's interpreter runs. Its target head is in bfloat16 whatever it is told, so the
states have to be of an engine in bfloat16.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.formats.running import export
from tests.formats.samples import feed, make_rows
from tests.models import VOCAB_SIZE
from tests.sidecar import SidecarThread

pytestmark = pytest.mark.trainer

STEPS = 10
VOCABULARY = 300
COMMAND = [sys.executable, "-c", "import sys; from specforge.cli import main; sys.exit(main())", "train", "-c"]
ENVIRONMENT = {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1"}


def target_of(model: Path, folder: Path) -> Path:
    """The model with an index of its weights, by which SpecForge finds the head's."""
    shutil.copytree(model, folder)
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def draft(path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "pad_token_id": 0,
        "draft_vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    path.write_text(json.dumps(config))
    return path


def test_ten_steps_of_its_own_command(model: Path, sidecar: SidecarThread, tmp_path: Path) -> None:
    rows, out = make_rows(6), tmp_path / "out"
    feed(sidecar.url, model, enumerate(rows.token_ids), dtype=torch.bfloat16)
    data = rows.write_lines(tmp_path / "data.jsonl")
    words = ("-f", "specforge-eagle3", "-o", out, "--data", data, "--draft-vocab", str(VOCABULARY))
    code, said = export(sidecar.url, *words)
    assert code == 0, said
    settings = {
        "output_dir": str(tmp_path / "trained"),
        "model": {
            "target_model_path": str(target_of(model, tmp_path / "model")),
            "draft_model_config": str(draft(tmp_path / "draft.json")),
            "vocab_mapping_path": str(out / f"vocab_mapping-{VOCABULARY}.pt"),
        },
        "data": {"hidden_states_path": str(out), "max_length": 512, "dataloader_num_workers": 0},
        "training": {
            "num_epochs": 2,
            "max_steps": STEPS,
            "ttt_length": 2,
            "attention_backend": "sdpa",
            "fsdp_sharding": "NO_SHARD",
            "log_interval": 1,
        },
    }
    (tmp_path / "run.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [*COMMAND, str(tmp_path / "run.json")], capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("step ")]
    losses = [ast.literal_eval(line.partition(": ")[2])["loss"] for line in lines]
    assert len(losses) == STEPS
    assert all(0 <= loss < 100 for loss in losses) and max(losses) > 0
