"""500 random runs of vLLM's scheduler with the connector: no row wrong, missing or twice, no leak, no exception."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.v1.request import Request

from hsconnector.capture.protocol import CaptureState, FailReason
from hsconnector.connector.tracker import Tracker
from tests.connector.rig import VOCAB, Rig, engine_config
from tests.examples import examples
from tests.models import tiny_qwen3

SHAPES = ("composite", "hybrid", "first")
RUNS_EACH = examples(42)
"""Twelve combinations of shape, runner and scheduler: 504 runs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("rig") / "model")


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def config(request: pytest.FixtureRequest, model: Path) -> VllmConfig:
    return engine_config(str(model), request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Client:
    """Random traffic: shared prefixes, odd lengths, aborts, cache resets, memory that is withheld."""

    rig: Rig
    random: random.Random
    todo: list[tuple[list[int], int, bool]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        prefix = [self.random.randrange(VOCAB) for _ in range(80)]
        for _ in range(self.random.randint(3, 14)):
            shared = prefix[: self.random.choice([0, 16, 32, 48, 64, 80])]
            own = [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 60))]
            longest = self.random.choice([1, 10, 25, 90])
            self.todo.append((shared + own, self.random.randint(1, longest), self.random.random() < 0.4))

    def run(self) -> None:
        steps = 0
        stingy = self.random.random() < 0.3
        while self.todo or self.rig.scheduler.has_unfinished_requests():
            while self.todo and self.random.random() < 0.4:
                self.ids.append(self.rig.add(*self.todo.pop()))
            if stingy and not self.rig.preemptions:
                self.rig.held_back = 1.0
            elif steps % 20 == 0:
                self.rig.held_back = self.random.choice([0.0, 0.0, 0.5, 0.95, 1.0, 1.0])
            self._disturb()
            self.rig.step()
            self.rig.pump()
            steps += 1
            assert steps < 4000
        self.rig.drain()
        self.rig.held_back = 0.0
        for _ in range(5):
            self.rig.sender.pump()

    def _disturb(self) -> None:
        if self.ids and self.random.random() < 0.05:
            request_id = self.random.choice(self.ids)
            if not self.rig.requests[request_id].is_finished():
                self.rig.abort(request_id)
                self.aborted.add(request_id)
        if self.random.random() < 0.01 and not self.rig.connector.has_pending_block_frees():
            self.rig.scheduler.reset_prefix_cache(reset_running_requests=True)

    def check(self) -> int:
        rig = self.rig
        rows = rig.check_rows()
        assert rig.free_blocks() == rig.free_at_start
        assert len(rig.reported) == len(set(rig.reported))
        assert rig.connector.tracker is not None
        assert rig.connector.tracker.tracked == 0
        assert not rig.connector.tracker.holds_blocks
        for request_id in self.ids:
            captures = rig.captures_of(request_id)
            if request_id in self.aborted:
                assert all(c.state is CaptureState.READY or c.reason is FailReason.ABORTED for c in captures)
            else:
                assert [c.state for c in captures] == [CaptureState.READY]
        return rows


def play(config: VllmConfig, shape: str, v2: bool, seed: int) -> Client:
    rnd = random.Random(seed)
    blocks = rnd.choice([13, 16, 24, 40]) if shape == "composite" else rnd.choice([36, 40, 60, 90])
    rig = Rig(config, shape, v2, seed, num_blocks=blocks, ring_rows=rnd.choice([8, 40, 400]))
    client = Client(rig, rnd)
    client.run()
    return client


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_is_right(config: VllmConfig, shape: str, v2: bool) -> None:
    rows = preemptions = aborts = 0
    for seed in range(RUNS_EACH):
        client = play(config, shape, v2, seed)
        rows += client.check()
        preemptions += client.rig.preemptions
        aborts += len(client.aborted)
    assert rows > 240 * RUNS_EACH
    assert preemptions > RUNS_EACH // 4
    assert aborts > RUNS_EACH // 4


class Outside:
    """Another connector beside ours, as `MultiConnector` lets ours see it: it brings prefixes, but no hidden states."""

    def __init__(self, rig: Rig, rnd: random.Random) -> None:
        self.random = rnd
        self.brought = 0
        self._ask, self._tell = rig.connector.get_num_new_matched_tokens, rig.connector.update_state_after_alloc
        rig.connector.get_num_new_matched_tokens = self.match  # type: ignore[method-assign, assignment]
        rig.connector.update_state_after_alloc = self.tell  # type: ignore[method-assign, assignment]

    def match(self, request: Request, local: int) -> tuple[int, bool]:
        assert self._ask(request, local) == (0, False)
        most = (request.num_tokens - 1) // 16 * 16
        tokens = max(0, most - local) if self.random.random() < 0.15 else 0
        self.brought += tokens > 0
        return tokens, False

    def tell(self, request: Request, blocks: object, external: int) -> None:
        self._tell(request, blocks, 0)


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_another_connector_brought_are_never_taken_for_ours(config: VllmConfig, shape: str, v2: bool) -> None:
    """Neither by the request that brought them, at first or back from preemption, nor by one that hits its blocks."""
    ready = failed = 0
    for seed in range(16):
        rnd = random.Random(seed)
        rig = Rig(config, shape, v2, seed, num_blocks=20 if shape == "composite" else 48, ring_rows=40)
        client, outside = Client(rig, rnd), Outside(rig, rnd)
        client.run()
        rig.check_rows()
        captures = [capture for request_id in client.ids for capture in rig.captures_of(request_id)]
        reasons = [capture.reason for capture in captures]
        assert set(reasons) <= {None, FailReason.EXTERNAL_PREFIX, FailReason.ABORTED}
        assert rig.free_blocks() == rig.free_at_start
        ready, failed = ready + reasons.count(None), failed + reasons.count(FailReason.EXTERNAL_PREFIX)
        assert outside.brought or not reasons.count(FailReason.EXTERNAL_PREFIX)
    assert ready > 30 and failed > 5


def fails(config: VllmConfig, shape: str, v2: bool, seeds: range) -> bool:
    """Whether any of these runs goes wrong, by a wrong row, a lost one, a leak or an exception."""
    for seed in seeds:
        try:
            play(config, shape, v2, seed).check()
        except Exception:
            return True
    return False


class TestSimplerRulesFail:
    """The rig sees each mistake that a simpler rule would make."""

    def test_reading_in_the_step_that_schedules(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        """A prefix-cache hit may be a block that another request of the same step is about to compute."""
        arrive = Tracker._arrive

        def eager(self, arrival, scheduled, step):  # type: ignore[no-untyped-def]
            arrive(self, arrival, scheduled, step)
            if step.begun and step.begun[-1].request_id == arrival.request_id:
                step.readable.append((arrival.request_id, arrival.num_computed))

        monkeypatch.setattr(Tracker, "_arrive", eager)
        assert fails(config, "composite", False, range(40))

    def test_keeping_the_table_of_a_preempted_request(
        self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Tracker, "_lose", lambda self, request_id, step: None)
        assert fails(config, "composite", True, range(40))

    def test_holding_by_status(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        """An aborted request whose prompt was not fully scheduled has rows that were never computed."""
        monkeypatch.setattr(Tracker, "_shortfall", lambda *args: None)
        assert fails(config, "composite", False, range(95, 295))

    def test_a_block_size_that_is_not_the_groups_own(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        post_init = Rig.__post_init__

        def global_size(self) -> None:  # type: ignore[no-untyped-def]
            post_init(self)
            self.worker.reader.block_size = 16
            self.worker._gather._blocks.kernel_blocks = 2

        monkeypatch.setattr(Rig, "__post_init__", global_size)
        assert fails(config, "hybrid", False, range(3))
