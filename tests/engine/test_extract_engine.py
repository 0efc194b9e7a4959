"""`hsconnector extract` against a real engine: killed with SIGKILL, started again, compared with Hugging Face."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.record import CaptureRecord
from hsconnector.client import Client
from hsconnector.prompts.files import open_rows
from hsconnector.prompts.row import RowRefused
from tests.engine.server import ApiServer
from tests.hugging_face import reference_states
from tests.models import LAYER_IDS, VOCAB_SIZE, random_token_ids
from tests.sidecar import SidecarThread

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

COUNT = 60


@pytest.fixture(scope="module")
def server(
    models: dict[str, Path], sidecar: SidecarThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = ApiServer(models["qwen3"], log, connector={"sidecar": sidecar.url})
    yield running
    running.stop()


def command(server: ApiServer, sidecar: SidecarThread, data: Path, *more: str) -> list[str]:
    start = [sys.executable, "-c", "from hsconnector.cli import main; main()", "extract", str(data)]
    return [*start, "--engine-url", server.url, "--sidecar", sidecar.url, *more]


def captures(client: Client, dataset: str) -> list[CaptureRecord]:
    return client.find(dataset=dataset)


def prompts() -> list[list[int]]:
    """Half of them begin alike, so that the prefix cache is hit."""
    lengths, common = random.Random(4), random_token_ids(100, seed=99)
    own = [random_token_ids(lengths.randrange(1, 400), seed=seed) for seed in range(COUNT)]
    return [(common if row % 2 else []) + token_ids for row, token_ids in enumerate(own)]


def test_killed_and_started_again_each_sample_is_captured_once_and_exactly(
    server: ApiServer, sidecar: SidecarThread, client: Client, models: dict[str, Path], tmp_path: Path
) -> None:
    data = tmp_path / "killed.jsonl"
    data.write_text("".join(json.dumps({"input_ids": token_ids}) + "\n" for token_ids in prompts()))
    words = command(server, sidecar, data, "--concurrency", "12", "--layers", "0,1,3,6")
    for share in (0.2, 0.6):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ)
        while len(captures(client, "killed")) < share * COUNT:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.kill()
        process.communicate()
    done = sum(record.state is CaptureState.READY for record in captures(client, "killed"))
    assert done < COUNT
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    ready = {record.sample_id: record for record in captures(client, "killed") if record.state is CaptureState.READY}
    whole = (CaptureState.READY, CaptureState.QUARANTINED)
    found = [record.sample_id for record in captures(client, "killed") if record.state in whole]
    assert Counter(found) == {str(row): 1 for row in range(COUNT)}
    for row, token_ids in list(enumerate(prompts()))[::6]:
        capture = client.fetch(ready[str(row)])
        assert capture.token_ids.tolist() == token_ids
        reference = reference_states(models["qwen3"], token_ids, LAYER_IDS)
        assert (capture.hidden_states - reference).abs().max() < 1e-5


def test_what_the_engine_will_not_take_is_named_and_conversations_go_through(
    server: ApiServer, sidecar: SidecarThread, client: Client, tmp_path: Path
) -> None:
    talk = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}]
    rows: list[object] = [
        {"conversations": talk},
        {"input_ids": [1, VOCAB_SIZE + 1000]},
        {"input_ids": [1] * 2048},
        {"input_ids": []},
        {"input_ids": [7] * 2047},
    ]
    data, folder = tmp_path / "odd.jsonl", tmp_path / "tokens"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = command(server, sidecar, data, "--save-dataset", str(folder))
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if line.startswith("row ")]
    assert lines[0].startswith("row 1: the engine refused it (400): ") and "out of vocabulary" in lines[0]
    assert lines[1].startswith("row 2: has 2048 tokens, the engine takes 2047")
    assert lines[2:] == ["row 3: has no tokens"]
    saved = {row["row"]: row for row in open_rows(folder).read() if not isinstance(row, RowRefused)}
    assert set(saved) == {0, 4}
    found = {record.sample_id: record for record in captures(client, "odd")}
    assert set(found) == {"0", "4"}
    assert client.fetch(found["0"]).token_ids.tolist() == saved[0]["input_ids"]
    assert 0 < sum(saved[0]["loss_mask"]) < len(saved[0]["loss_mask"])
    assert "not compared" not in ended.stdout
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    body = {"messages": messages, "add_generation_prompt": False}
    assert httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"] == saved[0]["input_ids"]


def test_other_layers_than_asked_for_are_refused_before_anything_is_asked(
    server: ApiServer, sidecar: SidecarThread, client: Client, tmp_path: Path
) -> None:
    data = tmp_path / "layers.jsonl"
    data.write_text('{"input_ids": [1, 2]}\n')
    ended = subprocess.run(
        command(server, sidecar, data, "--layers", "eagle3"), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "captures layers [0, 1, 3, 6], asked for are [" in ended.stderr
    assert captures(client, "layers") == []
