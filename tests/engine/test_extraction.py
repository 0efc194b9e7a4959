"""Hidden states of real engines against a Hugging Face forward pass, under every turn the scheduler can take.

Four engines: a plain model (one composite group) and a hybrid (hidden blocks of 32 tokens beside 128), each with
synchronous and asynchronous scheduling. Staging memory is small (512 KiB), so back-pressure is always at work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.shard import Capture
from hsconnector.client import Client
from hsconnector.errors import CaptureFailed
from tests.engine.inprocess import Engine, Result, started, tokens
from tests.engine.runners import V2
from tests.hugging_face import final_norm, reference_model, reference_states
from tests.models import LAYER_IDS
from tests.sidecar import SidecarThread

pytestmark = [pytest.mark.engine, pytest.mark.both_runners, pytest.mark.timeout(900)]

RING_BYTES = 512 << 10
OUTPUT = {"include_output_tokens": True}
TOLERANCE = 1e-5


@dataclass
class Rig:
    name: str
    asynchronous: bool
    engine: Engine
    client: Client
    model: Path
    free_at_start: int

    @property
    def output_is_exact(self) -> bool:
        return bool(V2) or not self.asynchronous

    def check_output(self, result: Result, wanted: list[int]) -> None:
        """Output rows are exact, or refused by name where this engine cannot compute them right (vllm#56417)."""
        if self.output_is_exact:
            capture = self.check(result, wanted)
            assert capture.metadata["rows"] == "prompt+output"
            return
        with pytest.raises(CaptureFailed, match=r"56417.*--no-async-scheduling") as failure:
            self.fetch(result)
        assert failure.value.reason == "unsupported_request"

    def fetch(self, result: Result, **options: Any) -> Capture:
        assert result.params is not None
        return self.client.fetch(result.params["handle"], wait=30, **options)

    def check(self, result: Result, wanted: list[int]) -> Capture:
        """The capture is of exactly these tokens, and every row equals Hugging Face's."""
        capture = self.fetch(result)
        assert capture.token_ids.tolist() == wanted
        right = reference_states(self.model, wanted, LAYER_IDS)
        difference = (capture.hidden_states - right).abs().amax(dim=(1, 2))
        assert capture.hidden_states.shape == right.shape
        assert difference.max() < TOLERANCE, f"row {int(difference.argmax())} differs by {difference.max():.2e}"
        return capture

    def find(self, sample_id: str, count: int = 1) -> list[CaptureRecord]:
        """So many captures of a sample, once the sender has told of them."""
        deadline = time.monotonic() + 30
        while len(found := self.client.find(sample_id=sample_id)) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(found) == count
        return found

    def reason(self, result: Result) -> str:
        with pytest.raises(CaptureFailed) as failure:
            self.fetch(result)
        return failure.value.reason


ENGINES = [("qwen3", False), ("qwen3", True), ("gpt-oss", False), ("gpt-oss", True)]
BLOCKS = {"qwen3": 18, "gpt-oss": 100}
"""Few enough that a crowd of requests is preempted; the longest prompt of these tests fits."""


@pytest.fixture(scope="module", params=ENGINES, ids=[f"{n}-{'async' if a else 'sync'}" for n, a in ENGINES])
def rig(
    request: pytest.FixtureRequest, models: dict[str, Path], sidecar: SidecarThread, client: Client
) -> Iterator[Rig]:
    name, asynchronous = request.param
    connector = {"sidecar": sidecar.url, "ring_bytes": RING_BYTES, "stall_timeout_s": 60}
    with started(
        models[name], asynchronous=asynchronous, num_gpu_blocks_override=BLOCKS[name], connector=connector
    ) as engine:
        assert engine.scheduler.vllm_config.scheduler_config.async_scheduling is asynchronous
        engine.wait_for_sidecar()
        yield Rig(name, asynchronous, engine, client, models[name], engine.free_blocks())


@pytest.fixture(autouse=True)
def nothing_leaks(rig: Rig) -> Iterator[None]:
    """Whatever a test does, every block is free again and nothing is pending afterwards."""
    yield
    rig.engine.run()
    assert rig.engine.free_blocks() == rig.free_at_start
    assert rig.engine.connector.tracker.tracked == 0
    assert not rig.engine.connector.has_pending_block_frees()


def test_lengths_around_block_boundaries(rig: Rig) -> None:
    """The group's own block size, not the global one (vllm#46301), 1 to 700 tokens in one batch."""
    prompts = [tokens(n, seed=n) for n in (1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 700)]
    for prompt, result in zip(prompts, rig.engine.generate(prompts), strict=True):
        capture = rig.check(result, prompt)
        assert capture.verdict is None or capture.verdict.sound
        assert capture.layer_ids == LAYER_IDS


def test_chunked_prefill_equals_one_chunk(rig: Rig) -> None:
    """vllm#39949: four chunks of 256 give one capture, equal to what one forward pass gives."""
    prompt = tokens(900, seed=1)
    rig.check(rig.engine.generate([prompt])[0], prompt)


def test_prefix_cache_hits(rig: Rig) -> None:
    """vllm#44485: cached tokens are rows like any other; the same prompt twice, then with a longer tail."""
    prompt = tokens(640, seed=2)
    for wanted in (prompt, prompt, prompt + tokens(60, seed=3)):
        rig.check(rig.engine.generate([wanted])[0], wanted)


def test_a_prefix_computed_in_the_same_step(rig: Rig) -> None:
    """A hit may be a block that another request of the same step is about to compute."""
    shared = tokens(128, seed=4)
    prompts = [shared + tokens(n, seed=40 + n) for n in (10, 30, 50)]
    for prompt, result in zip(prompts, rig.engine.generate(prompts), strict=True):
        rig.check(result, prompt)


def test_same_prompts_alone_together_and_again(rig: Rig) -> None:
    """speculators#279: nothing leaks between requests or calls."""
    prompts = [tokens(n, seed=50 + n) for n in (20, 90, 130, 200)]
    alone = [rig.engine.generate([prompt])[0] for prompt in prompts]
    together = rig.engine.generate(prompts)
    again = rig.engine.generate(prompts)
    for results in (alone, together, again):
        for prompt, result in zip(prompts, results, strict=True):
            rig.check(result, prompt)


def test_preempted_requests_come_back(rig: Rig) -> None:
    """A KV cache that holds about two of six requests: rows read before and after preemption fit together."""
    before = rig.engine.preemptions
    prompts = [tokens(370 + n, seed=60 + n) for n in range(6)]
    results = rig.engine.generate(prompts, max_tokens=40, hidden_states=OUTPUT if rig.output_is_exact else None)
    assert rig.engine.preemptions > before
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == 40
        rig.check(result, prompt + result.token_ids[:-1] if rig.output_is_exact else prompt)


def test_output_tokens_ended_by_length(rig: Rig) -> None:
    """The last sampled token was never an input, so there are prompt + output - 1 rows; also for max_tokens=1."""
    prompt = tokens(50, seed=5)
    for count in (1, 2, 33):
        (result,) = rig.engine.generate([prompt], max_tokens=count, hidden_states=OUTPUT)
        assert len(result.token_ids) == count
        assert result.finish_reason == "length"
        rig.check_output(result, prompt + result.token_ids[:-1])


def test_output_tokens_ended_by_eos(rig: Rig) -> None:
    prompt = tokens(40, seed=6)
    (free,) = rig.engine.generate([prompt], max_tokens=12)
    end = free.token_ids[5]
    (result,) = rig.engine.generate([prompt], max_tokens=12, stop_token_ids=[end], hidden_states=OUTPUT)
    assert result.finish_reason == "stop"
    assert len(result.token_ids) == free.token_ids.index(end) + 1
    rig.check_output(result, prompt + result.token_ids[:-1])


def test_output_tokens_ended_by_a_stop_string(rig: Rig) -> None:
    """A stop string reaches the scheduler as an abort; the end is judged by rows, not by status.

    The engine may have gone on for a step or two, so the capture's own tokens are the ones that count.
    """
    prompt = tokens(40, seed=7)
    (free,) = rig.engine.generate([prompt], max_tokens=40)
    name = f"stop-{id(rig)}"
    request_id = rig.engine.add(
        prompt, max_tokens=40, stop=[free.text[len(free.text) // 2 :][:3]], hidden_states={**OUTPUT, "sample_id": name}
    )
    rig.engine.run()
    result = rig.engine.results[request_id]
    assert result.finish_reason == "stop"
    (found,) = rig.find(name)
    stopped = Result(params={"handle": found.capture_id})
    ids = rig.fetch(stopped).token_ids.tolist() if rig.output_is_exact else prompt
    assert ids[: len(prompt)] == prompt
    assert not rig.output_is_exact or len(ids) >= len(prompt) + len(result.token_ids) - 1
    rig.check_output(stopped, ids)


def test_n_gives_one_capture_each(rig: Rig) -> None:
    """`n=2` makes two engine requests of one client request."""
    prompt = tokens(70, seed=8)
    name = f"several-{rig.name}-{rig.asynchronous}"
    rig.engine.add(prompt, n=2, temperature=1.0, seed=1, request_id=name, hidden_states={"sample_id": name})
    rig.engine.run()
    for capture in rig.find(name, 2):
        rig.check(Result(params={"handle": capture.capture_id}), prompt)


def test_requests_that_do_not_want_it_have_none(rig: Rig) -> None:
    """`capture: false` beside a request that is captured; opt-in settings have a test of their own."""
    prompt = tokens(30, seed=9)
    declined = rig.engine.add(prompt, hidden_states={"capture": False})
    wanted = rig.engine.add(prompt, hidden_states={"capture": True})
    rig.engine.run()
    assert rig.engine.results[declined].params is None
    rig.check(rig.engine.results[wanted], prompt)


def test_a_bad_wish_fails_the_capture_and_not_the_request(rig: Rig) -> None:
    prompt = tokens(30, seed=10)
    bad = rig.engine.add(prompt, hidden_states={"smaple_id": "x"})
    rig.engine.run()
    result = rig.engine.results[bad]
    assert len(result.token_ids) == 4
    with pytest.raises(CaptureFailed, match=r"smaple_id.*sample_id") as failure:
        rig.fetch(result)
    assert failure.value.reason == "bad_request"


def test_abort_in_the_middle_of_a_prefill(rig: Rig) -> None:
    """No shard with fewer rows than ids, as vLLM 0.32's example connector writes; the state says why."""
    request_id = rig.engine.add(tokens(900, seed=11), hidden_states={"sample_id": f"aborted-{id(rig)}"})
    rig.engine.step()
    rig.engine.abort(request_id)
    rig.engine.settle()
    (found,) = rig.find(f"aborted-{id(rig)}")
    with pytest.raises(CaptureFailed) as failure:
        rig.client.fetch(found.capture_id, wait=30)
    assert failure.value.reason == "aborted"


def test_abort_while_decoding_keeps_the_prompt(rig: Rig) -> None:
    """Every wanted row was computed, so the capture is as good as any other."""
    prompt = tokens(300, seed=12)
    name = f"decoding-{id(rig)}"
    request_id = rig.engine.add(prompt, max_tokens=200, hidden_states={"sample_id": name})
    while len(rig.engine.results[request_id].token_ids) < 3:
        rig.engine.step()
    rig.engine.abort(request_id)
    rig.engine.settle()
    (found,) = rig.find(name)
    rig.check(Result(params={"handle": found.capture_id}), prompt)


def test_abort_while_queued(rig: Rig) -> None:
    """vllm#56841: requests that never ran are not known, and the others are not hurt."""
    prompts = [tokens(500, seed=70 + n) for n in range(12)]
    ids = [
        rig.engine.add(prompt, hidden_states={"sample_id": f"queue-{id(rig)}-{n}"}) for n, prompt in enumerate(prompts)
    ]
    rig.engine.step()
    for request_id in ids[1:]:
        rig.engine.abort(request_id)
    rig.engine.run()
    rig.check(rig.engine.results[ids[0]], prompts[0])
    assert rig.client.find(sample_id=f"queue-{id(rig)}-11") == []


def test_rows_arrive_while_the_request_runs(rig: Rig, sidecar: SidecarThread) -> None:
    """A prompt many times larger than staging memory streams out before its request ends."""
    prompt = tokens(1800, seed=13)
    row_bytes = rig.engine.worker.sender.row_bytes
    assert len(prompt) * row_bytes > 10 * RING_BYTES
    name = f"streamed-{id(rig)}"
    request_id = rig.engine.add(prompt, max_tokens=100, hidden_states={"sample_id": name})
    early = 0
    while rig.engine.results[request_id].finish_reason is None:
        rig.engine.step()
        stream = rig.engine.worker.sender.stream
        assert stream.ring.size == RING_BYTES
        assert stream.ring.used <= RING_BYTES
        if rig.engine.results[request_id].finish_reason is None and not early:
            page = httpx.get(f"{sidecar.url}/v1/captures", params={"sample_id": name}).json()["data"]
            early = page[0]["num_rows"] if page and page[0]["state"] == "receiving" else 0
    assert early > 0
    rig.engine.run()
    rig.check(rig.engine.results[request_id], prompt)


def test_last_layer_is_before_the_norm(rig: Rig) -> None:
    """speculators#313: the slot of layer N differs from Hugging Face's last state and equals it after the norm."""
    prompt = tokens(60, seed=14)
    capture = rig.fetch(rig.engine.generate([prompt])[0])
    with torch.no_grad():
        last = reference_model(str(rig.model)).model(torch.tensor([prompt])).last_hidden_state[0]
    raw = capture.hidden_states[:, -1]
    assert capture.metadata["last_layer_norm"] == "pre"
    assert (raw - last).abs().max() > 1e-3
    assert (final_norm(rig.model, raw) - last).abs().max() < 1e-4


def test_reset_of_the_caches_fails_what_is_open(rig: Rig) -> None:
    """New weights under a running request would mix two models in one shard."""
    request_id = rig.engine.add(tokens(600, seed=15), hidden_states={"sample_id": f"reset-{id(rig)}"})
    rig.engine.step()
    rig.engine.scheduler.reset_connector_cache()
    rig.engine.run()
    assert len(rig.engine.results[request_id].token_ids) == 4
    assert rig.reason(rig.engine.results[request_id]) == "cache_reset"


def test_an_engine_that_is_reset_first_takes_the_last_step(rig: Rig) -> None:
    """In one process nothing steps after the last answer; the README says how."""
    rig.engine.settle()
    rig.engine.add(tokens(100, seed=17), max_tokens=1)
    while rig.engine.llm.has_unfinished_requests():
        rig.engine.step()
    assert rig.engine.scheduler.has_requests()
    assert rig.engine.scheduler.reset_prefix_cache() is False
    rig.engine.settle()
    assert rig.engine.scheduler.reset_prefix_cache() is True


def test_preempted_and_back_within_one_step(rig: Rig) -> None:
    """`reset_prefix_cache(reset_running_requests=True)`: the table is replaced, the cursor kept."""
    prompt = tokens(700, seed=16)
    request_id = rig.engine.add(prompt, max_tokens=30)
    for _ in range(5):
        rig.engine.step()
    rig.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.engine.run()
    rig.check(rig.engine.results[request_id], prompt)


def test_everything_is_finite_and_ordered(rig: Rig) -> None:
    """vllm#45849: NaN rows of hybrids; TorchSpec#87: no two slots are equal."""
    capture = rig.fetch(rig.engine.generate([tokens(200, seed=17)])[0])
    assert torch.isfinite(capture.hidden_states).all()
    for slot in range(1, 4):
        assert not torch.equal(capture.hidden_states[:, slot], capture.hidden_states[:, slot - 1])
