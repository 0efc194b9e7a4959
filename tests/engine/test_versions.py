"""The oldest engine and one in between, as a smoke test each: another view of the cache, another scheduler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsconnector.client import Client
from tests.engine.inprocess import tokens
from tests.hugging_face import reference_states
from tests.models import LAYER_IDS
from tests.sidecar import SidecarThread

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["0.28.0", "0.30.0"])
def test_extraction(models: dict[str, Path], sidecar: SidecarThread, client: Client, version: str) -> None:
    """`deploy/test.sh` puts the engines beside the environment's own; the folder comes first on PYTHONPATH."""
    folder = Path(sys.prefix) / f"vllm-{version}"
    assert (folder / "vllm").is_dir(), f"{folder} is missing; deploy/test.sh installs it"
    prompts = [tokens(n, seed=600 + n) for n in (1, 130, 400)]
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{ROOT}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    script = Path(__file__).parent / "smoke.py"
    run = subprocess.run(
        [sys.executable, str(script), str(models["qwen3"]), sidecar.url, json.dumps(LAYER_IDS)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("handles "))
    handles = json.loads(line.removeprefix("handles "))
    assert len(handles) == 2 * len(prompts)
    for handle, prompt in zip(handles, [*prompts, *prompts], strict=True):
        capture = client.fetch(handle, wait=60)
        assert capture.metadata["vllm_version"].startswith(version)
        assert capture.token_ids.tolist() == prompt
        assert (capture.hidden_states - reference_states(models["qwen3"], prompt, LAYER_IDS)).abs().max() < 1e-5
