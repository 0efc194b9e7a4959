"""What `plan` predicts against what a really started engine reports to its connectors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hsconnector.capture.layers import choose_layers
from hsconnector.layout.models import read_config, read_model
from hsconnector.layout.plan import Plan, make_plan
from hsconnector.layout.serving import Serving
from tests.models import tiny_gpt_oss, tiny_qwen3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
LENGTH = 1_024


def start(model: Path, folder: Path, layer_ids: list[int], **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The scheduler's and a worker's report of one engine that started and generated."""
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    if options.get("tensor_parallel_size", 1) > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    asked = {"layer_ids": layer_ids, "dtype": "float32", "max_model_len": LENGTH, "max_num_batched_tokens": 512}
    script = Path(__file__).with_name("start_engine.py")
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(folder), json.dumps(asked | options)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0 and "GENERATED 4" in done.stdout, done.stdout[-4_000:] + done.stderr[-8_000:]
    return (
        json.loads((folder / "scheduler.json").read_text()),
        json.loads((folder / "worker.json").read_text()),
    )


def predict(model: Path, layers: str, memory: int, **serving: Any) -> Plan:
    name, config = read_config(model)
    read = read_model(name, config, dtype="float32")
    asked = Serving(device="cpu", max_model_len=LENGTH, max_batched_tokens=512, **serving)
    return make_plan(read, asked, choose_layers(layers, read.num_layers), kv_memory=memory)


def check(plan: Plan, scheduler: dict[str, Any], worker: dict[str, Any]) -> None:
    assert plan.refused is None and plan.block_sizes is not None and plan.with_extraction is not None
    theirs = [(g["kind"], g["layers"], g["block_size"], g["page_bytes"], g["waste_bytes"]) for g in worker["groups"]]
    ours = [
        (g.kind, g.layers, g.block_size, g.page_bytes, g.waste_bytes if g.holds_hidden_states else 0)
        for g in plan.groups
    ]
    assert ours == theirs
    assert [g["block_size"] for g in scheduler["groups"]] == [g.block_size for g in plan.groups]
    assert (scheduler["hash_block_size"], scheduler["hit_tokens"]) == (plan.block_sizes.hash, plan.block_sizes.hit)
    assert plan.serving.in_flight_tokens == scheduler["in_flight_tokens"]
    assert plan.with_extraction.num_blocks == worker["num_blocks"]
    assert plan.with_extraction.tokens == scheduler["tokens"]


def test_a_tiny_qwen3_is_one_composite(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model")
    scheduler, worker = start(model, tmp_path, [0, 1, 3, 6])
    plan = predict(model, "0,1,3,6", worker["bytes"])
    check(plan, scheduler, worker)
    assert [group.kind for group in plan.groups] == ["composite of 6 full attention + 1 hidden states"]
    assert [group["kind"] for group in scheduler["groups"]] == ["full attention"]
    granularity = "scheduler block 128, hash block 128, prefix-cache hits every 128 tokens"
    assert scheduler["line"] == f"hidden states in KV-cache group 0 of 1; 128 tokens a block; {granularity}"


def test_a_tiny_gpt_oss_is_a_hybrid(tmp_path: Path) -> None:
    model = tiny_gpt_oss(tmp_path / "model")
    scheduler, worker = start(model, tmp_path, [0, 1, 3, 6])
    plan = predict(model, "0,1,3,6", worker["bytes"])
    check(plan, scheduler, worker)
    assert [group.block_size for group in plan.groups] == [128, 128, 32]
    assert (scheduler["block_size"], worker["block_size"]) == (32, 128)
    assert scheduler["line"] == worker["line"]
    assert worker["line"] == (
        "hidden states in KV-cache group 2 of 3 (cache_only_layers.6); 32 tokens a block; 32,768 of 131,072 bytes of "
        "each page unused (25%); scheduler block 128, hash block 32, prefix-cache hits every 128 tokens"
    )


def test_two_ranks_with_rows_that_exceed_the_page(tmp_path: Path) -> None:
    """Pages of 8,192 bytes and rows of 28,672: every other group grows by four."""
    model = tiny_gpt_oss(tmp_path / "model", hidden_size=1_024, head_dim=32)
    layers = list(range(7))
    scheduler, worker = start(model, tmp_path, layers, tensor_parallel_size=2, block_size=32)
    plan = predict(model, ",".join(map(str, layers)), worker["bytes"], tp=2, block_size=32)
    check(plan, scheduler, worker)
    assert [group.block_size for group in plan.groups] == [128, 128, 1]
    assert "times 4, because one hidden row is larger than a page" in plan.block_size_note
