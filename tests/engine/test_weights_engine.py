"""Weights that change under a real engine: what is open fails, old rows are not taken, new ones are the new model's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hsconnector.client import Client
from hsconnector.connector.current import Current
from hsconnector.connector.weights import loaded_weights
from hsconnector.errors import CaptureFailed
from tests.engine.inprocess import Engine, Result, started, tokens
from tests.hugging_face import reference_states
from tests.models import LAYER_IDS, tiny_qwen3
from tests.sidecar import SidecarThread

pytestmark = [pytest.mark.engine, pytest.mark.both_runners, pytest.mark.timeout(900)]

SHARED = tokens(300, seed=1)


@dataclass
class Rig:
    engine: Engine
    client: Client
    a: Path
    b: Path

    @property
    def weights(self) -> Current:
        weights = self.engine.worker._weights
        assert isinstance(weights, Current)
        return weights

    def become(self, result: Result) -> str:
        assert result.params is not None
        try:
            self.client.fetch(result.params["handle"], wait=30)
        except CaptureFailed as failure:
            return failure.reason
        return "ready"

    def generate(self, prompt: list[int]) -> Result:
        (result,) = self.engine.generate([prompt])
        return result

    def difference(self, result: Result, model: Path, prompt: list[int]) -> float:
        assert result.params is not None
        capture = self.client.fetch(result.params["handle"], wait=30)
        return float((capture.hidden_states - reference_states(model, prompt, LAYER_IDS)).abs().max())


@pytest.fixture(scope="module")
def rig(sidecar: SidecarThread, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("weights")
    a, b = tiny_qwen3(folder / "a", seed=0), tiny_qwen3(folder / "b", seed=1)
    with started(a, connector={"sidecar": sidecar.url}) as engine:
        engine.wait_for_sidecar()
        yield Rig(engine, client, a, b)


def test_ways_to_change_the_weights_of_a_running_engine(rig: Rig) -> None:
    """One engine through all of them: each start takes half a minute (vllm#49040, vllm#54443)."""
    llm, first = rig.engine.llm, rig.weights.id
    assert first == loaded_weights(llm.vllm_config).id
    assert rig.become(rig.generate(SHARED)) == "ready"
    assert rig.become(rig.generate(SHARED)) == "ready"

    # Only asked to forget: the same weights.
    rig.engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert rig.become(rig.generate(SHARED)) == "ready"
    assert rig.weights.id == first

    # Reloaded from a path, in the middle of a prompt, without a word to the connector.
    running = rig.engine.add(tokens(600, seed=2))
    rig.engine.step()
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(rig.b)})
    rig.engine.run()
    assert rig.become(rig.engine.results[running]) == "weights_changed"
    assert rig.weights.id == loaded_weights(llm.vllm_config).id != first

    # The prefix cache still holds what the old weights computed, until it is emptied.
    assert rig.become(rig.generate(SHARED)) == "weights_changed"
    fresh = tokens(200, seed=3)
    assert rig.difference(rig.generate(fresh), rig.b, fresh) < 1e-5
    assert rig.engine.scheduler.reset_prefix_cache()
    assert rig.difference(rig.generate(SHARED), rig.b, SHARED) < 1e-5

    # Written in place behind PyTorch's counter, as a training step would be.
    second = rig.weights.id
    llm.apply_model(_train)
    assert rig.engine.scheduler.reset_prefix_cache()
    assert rig.become(rig.generate(SHARED)) == "ready"
    third = rig.weights.id
    assert len({first, second, third}) == 3


def _train(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.01)
