"""A real engine's captures are right by the rule that finds each fault, also in 16 bits.

`HSC_LONG=1` takes 24 samples of each model and dtype and spoils five of each in every way; else a few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hsconnector.capture.shard import Capture
from hsconnector.client import Client
from hsconnector.reference.model import ReferenceModel
from hsconnector.reference.passes import Claim
from tests.engine.inprocess import started, tokens
from tests.models import tiny_gpt_oss, tiny_qwen3
from tests.reference.faults import FAULTS, Fault, Right
from tests.sidecar import SidecarThread
from tests.smollm2 import chats, smollm2

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3000)]

LONG = bool(os.environ.get("HSC_LONG"))
SAMPLES, SPOILT = (24, 5) if LONG else (4, 1)
CASES = [("smollm2", "float32"), ("smollm2", "bfloat16")]
if LONG:
    CASES += [("smollm2", "float16"), ("qwen3", "float32"), ("gpt-oss", "float32")]
    CASES += [("qwen3", "bfloat16"), ("gpt-oss", "bfloat16"), ("qwen3", "float16")]


class Remembering(ReferenceModel):
    """Computes a text once: a pass in 16 bits takes seconds on a CPU."""

    def states(self, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
        known: dict[tuple[int, ...], torch.Tensor] = self.__dict__.setdefault("known", {})
        key = tuple(token_ids)
        if key not in known:
            known[key] = super().states(token_ids, range(self.num_layers + 1))
        return known[key][:, list(layer_ids)].clone()

    def in_dtype(self, dtype: str) -> ReferenceModel:
        other = super().in_dtype(dtype)
        other.__class__ = Remembering
        return other


@dataclass(frozen=True)
class Captured:
    captures: list[Capture]
    reference: ReferenceModel
    other_model: ReferenceModel


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def captured(
    request: pytest.FixtureRequest, sidecar: SidecarThread, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Captured]:
    name, dtype = request.param
    folder, chosen = tmp_path_factory.getbasetemp() / f"{name}-compared", getattr(torch, dtype)
    folder.mkdir(exist_ok=True)
    layers: tuple[int, ...]
    if name == "smollm2":
        model, layers = smollm2(folder, chosen), (0, 2, 15, 27, 30)
        prompts = chats(model, SAMPLES)
    else:
        model, layers = (tiny_qwen3 if name == "qwen3" else tiny_gpt_oss)(folder / dtype, dtype=chosen), (0, 1, 3, 6)
        prompts = [tokens(20 + 2 * number, seed=number) for number in range(SAMPLES)]
    options: dict[str, Any] = {"layer_ids": layers, "dtype": dtype, "connector": {"sidecar": sidecar.url}}
    with started(model, **options) as engine:
        engine.wait_for_sidecar()
        answers = [result.params or {} for result in engine.generate(prompts, max_tokens=1)]
    captures = [client.fetch(answer["handle"], wait=60) for answer in answers]
    yield Captured(captures, Remembering(model, device="cpu"), shuffled(model))


def shuffled(model: Path) -> ReferenceModel:
    """Another model of the same shape."""
    other = ReferenceModel(model, device="cpu")
    generator = torch.Generator().manual_seed(1)
    for weight in other._model.parameters():
        if weight.dim() == 2:
            weight.data = weight.data[torch.randperm(len(weight), generator=generator)]
    return other


def test_every_capture_is_right(captured: Captured) -> None:
    assert len(captured.captures) == SAMPLES
    for capture in captured.captures:
        judged = Claim(capture.token_ids.tolist(), capture.layer_ids).judge(capture.hidden_states, captured.reference)
        assert judged.difference.ok, judged
        print(f"median {judged.difference.median:.2f}, worst row {judged.difference.row:.2f}")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_is_found_and_named(captured: Captured, fault: Fault) -> None:
    for capture in captured.captures[:SPOILT]:
        right = Right(
            capture.hidden_states,
            capture.token_ids.tolist(),
            capture.layer_ids,
            captured.reference,
            captured.other_model,
        )
        if not fault.shows_in(right):
            continue
        spoilt = capture.hidden_states.clone()
        fault.spoil(right, spoilt)
        judged = Claim(right.token_ids, right.layer_ids).judge(spoilt, captured.reference)
        assert not judged.difference.ok and fault.says in judged.diagnosis, judged
