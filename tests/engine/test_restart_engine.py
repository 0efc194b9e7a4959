"""An engine that is started again on other weights under the same name, and on the same ones elsewhere (vllm#57810)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hsconnector.client import Client
from tests.engine.server import ApiServer
from tests.hugging_face import reference_states
from tests.models import LAYER_IDS, random_token_ids, tiny_qwen3
from tests.sidecar import SidecarThread

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ROWS = [random_token_ids(length, seed=length) for length in (3, 40, 70)]


def extract(model: Path, sidecar: SidecarThread, data: Path, *more: str) -> tuple[dict[str, Any], str]:
    """What a run of the command on an engine of this folder says: its numbers, and the rest."""
    server = ApiServer(model, data.parent / f"{model.name}.log", connector={"sidecar": sidecar.url})
    try:
        words = ["extract", str(data), "--engine-url", server.url, "--sidecar", sidecar.url, "--json", *more]
        start = [sys.executable, "-c", "from hsconnector.cli import main; main()"]
        done = subprocess.run([*start, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr
    finally:
        server.stop()


def test_other_weights_in_a_folder_are_captured_anew_and_a_copy_is_the_same(
    sidecar: SidecarThread, client: Client, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in ROWS))
    folder, other = tiny_qwen3(tmp_path / "model", seed=0), tiny_qwen3(tmp_path / "other", seed=1)
    first, _ = extract(folder, sidecar, data)
    assert (first["captured"], first["stored"], first["of_other_weights"]) == (3, 0, 0)

    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    second, said = extract(folder, sidecar, data)
    assert (second["captured"], second["stored"], second["of_other_weights"]) == (3, 0, 3)
    assert "captures of others are not taken: 3 of weights" in said
    old, new = client.weights(dataset="rows")
    assert old.weights_id != new.weights_id and (old.captures, new.captures) == (3, 3)
    for record in client.find(weights_id=new.weights_id):
        capture = client.fetch(record)
        right = reference_states(folder, capture.token_ids.tolist(), LAYER_IDS)
        assert (capture.hidden_states - right).abs().max() < 1e-5

    copy = tmp_path / "a copy elsewhere"
    shutil.move(folder, copy)
    third, _ = extract(copy, sidecar, data)
    assert (third["captured"], third["stored"], third["of_other_weights"]) == (0, 3, 3)
