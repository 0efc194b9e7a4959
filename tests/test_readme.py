"""What the documents tell people to run is run, on captures in bfloat16, which numpy cannot hold (safetensors#598)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hsconnector.capture.layers import choose_layers
from hsconnector.cli.command_line import extraction_options
from hsconnector.connector.settings import ConnectorSettings
from tests.feeding import Feeder
from tests.sidecar import SidecarThread

README = (Path(__file__).parents[1] / "README.md").read_text()
LAYERS = (2, 18, 33, 36)
TOKENS = [5, 6, 7]


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def run(block: str, words: Mapping[str, str], names: dict[str, Any]) -> dict[str, Any]:
    """Executes a block after replacing `words`, each of which it must hold."""
    for word, put in words.items():
        assert word in block, word
        block = block.replace(word, put)
    exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.fixture
def capture_id(sidecar: SidecarThread) -> str:
    states = torch.randn(len(TOKENS), len(LAYERS), 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=16, dtype=torch.bfloat16) as feeder:
        return feeder.capture(states, TOKENS, dataset="mine", sample_id="17")


def test_reading_captures(sidecar: SidecarThread, capture_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks("python") if "hsconnector.client" in block)
    handle = f"{sidecar.url}/v1/captures/{capture_id}"
    names = run(block, {"http://127.0.0.1:8190": sidecar.url}, {"handle": handle})
    assert names["capture"].hidden_states.dtype is torch.bfloat16
    assert names["capture"].layer_ids == LAYERS
    assert capsys.readouterr().out == f"{capture_id} ready 3\n"


def test_a_loop_of_ones_own(sidecar: SidecarThread, capture_id: str, tmp_path: Path) -> None:
    (block,) = (block for block in blocks("python") if "hsconnector.dataset" in block)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": TOKENS, "loss_mask": [0, 1, 1]}))
    trained: list[dict[str, Any]] = []
    words = {
        "/data/captures": str(sidecar.store),
        "rows.jsonl": str(rows),
        "http://127.0.0.1:8190": sidecar.url,
        'queue="epoch-1"': 'queue="epoch-1", idle_s=0.2',
        "num_workers=2": "num_workers=0",
    }
    names = run(block, words, {"train": trained.append})
    assert names["offline"][0]["loss_mask"].tolist() == [0, 1, 1]
    assert [batch["capture_id"] for batch in trained] == [capture_id]


def test_the_serve_line_is_what_launch_runs() -> None:
    (block,) = (block for block in blocks("sh") if block.startswith("vllm serve"))
    words = shlex.split(block.replace("\\\n", " "))
    expected = extraction_options(choose_layers("auto", 36).layer_ids)
    assert words[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    assert words[3::2] == expected[::2]
    assert [json.loads(word) for word in words[4::2]] == [json.loads(word) for word in expected[1::2]]


def test_the_table_of_settings_is_complete() -> None:
    section = README.partition("## Settings")[2].partition("\nPer request")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [
        field.name for field in msgspec.structs.fields(ConnectorSettings)
    ]
