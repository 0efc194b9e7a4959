"""`hsconnector extract` against a real engine: killed with SIGKILL, started again, compared with Hugging Face."""

from __future__ import annotations

import json
import os
import random
import shutil
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
from hsconnector.prompts.conversation import engine_messages, read_conversation, read_tools
from hsconnector.prompts.encoded import check_ids
from hsconnector.prompts.files import open_rows
from hsconnector.prompts.row import RowRefused
from tests.engine.server import ApiServer
from tests.hugging_face import reference_states
from tests.models import LAYER_IDS, VOCAB_SIZE, random_token_ids
from tests.prompts.shapes import SHAPES
from tests.prompts.shared import shared_chat, shared_tokenizer
from tests.prompts.talks import TALKS
from tests.prompts.test_corpus import given
from tests.prompts.test_engine_messages import TOOLS
from tests.sidecar import SidecarThread

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

COUNT = 60


@pytest.fixture(scope="module")
def server(
    models: dict[str, Path], sidecar: SidecarThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    """An engine whose tokenizer knows the markers of every shape of chat template, and whose own is Qwen3's."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copytree(models["qwen3"], folder / "model")
    shared_tokenizer().save_pretrained(folder / "model")
    trusting = ("--trust-request-chat-template",)
    running = ApiServer(folder / "model", folder / "log", connector={"sidecar": sidecar.url}, arguments=trusting)
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


@pytest.mark.parametrize("shape", SHAPES)
def test_the_engine_renders_each_shape_of_template_to_the_ids_that_are_asked_for(server: ApiServer, shape: str) -> None:
    """The template goes with the request, which the server is told to trust; what else goes is what `extract` sends."""
    chats = shared_chat(shape, open_end="train")
    compared = 0
    for name in TALKS:
        try:
            encoded = chats.encode(given(shape, name), TOOLS)
        except RowRefused:
            continue
        body = {**json.loads(encoded.request), "chat_template": SHAPES[shape].template}
        answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=60)
        assert answer.is_success, (name, answer.text)
        if shape == "harmony" and "thought" in name and name not in ("first thought", "thought in content"):
            # vLLM 0.32 hands a thought on as `reasoning`, this template asks for `thinking`: the row is refused.
            with pytest.raises(RowRefused, match="is rendered otherwise by the engine"):
                check_ids(answer.json()["tokens"], encoded)
            continue
        assert (name, answer.json()["tokens"]) == (name, encoded.token_ids)
        compared += 1
    assert compared >= 10


def test_talks_with_tools_and_thoughts_are_captured_with_the_ids_that_the_engine_renders(
    server: ApiServer, sidecar: SidecarThread, client: Client, tmp_path: Path
) -> None:
    data = tmp_path / "talks.jsonl"
    rows = [{"messages": talk, "tools": TOOLS} for name, talk in TALKS.items() if name not in ("long", "as text")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = subprocess.run(command(server, sidecar, data, "--json"), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert (summary["captured"], summary["local_rendering"]) == (len(rows), 0)
    found = {record.sample_id: record for record in captures(client, "talks")}
    for number, row in enumerate(rows):
        messages = engine_messages(read_conversation(row["messages"]))
        body = {"messages": messages, "tools": read_tools(TOOLS), "add_generation_prompt": False}
        rendered = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
        assert client.fetch(found[str(number)]).token_ids.tolist() == rendered


def test_what_beam_search_captures_is_of_no_sample(server: ApiServer, client: Client) -> None:
    """vllm#10754: its requests forget the options of the one that they serve, `"capture": false` as well."""
    before = {record.capture_id for record in client.find()}
    body = {"prompt": random_token_ids(40, seed=11), "max_tokens": 3, "use_beam_search": True, "n": 2, "temperature": 0}
    asked = {"capture": True, "dataset": "beams", "sample_id": "s"}
    for hidden_states in (asked, {"capture": False}):
        params = {"hidden_states": hidden_states}
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "kv_transfer_params": params}, timeout=120)
        assert answer.is_success, answer.text
    made = [record for record in client.find() if record.capture_id not in before]
    assert made, "the README says that it does"
    assert {(record.dataset, record.sample_id) for record in made} == {("", "")}


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
