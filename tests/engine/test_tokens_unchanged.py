"""Extraction never changes what a client is answered: greedy, 64 tokens, both ways of scheduling."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.inprocess import started, tokens
from tests.sidecar import SidecarThread

pytestmark = [pytest.mark.engine, pytest.mark.both_runners, pytest.mark.timeout(600)]

PROMPTS = [tokens(n, seed=100 + n) for n in (1, 33, 128, 300)]


def without_repeats(model: Path, to: Path) -> Path:
    """The same model, but it never says a token twice in a row.

    Extraction proposes the last token again as its draft. Where the draft is right the V1 runner loses count under
    asynchronous scheduling (vllm#56417): a defect of the engine, which the connector names at start.
    """
    shutil.copytree(model, to)
    weights = load_file(to / "model.safetensors")
    weights["lm_head.weight"] -= 8 * weights["model.embed_tokens.weight"]
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def answers(model: Path, asynchronous: bool, connector: dict[str, object] | None) -> list[list[int]]:
    options = {"connector": connector} if connector is not None else {"extract": False}
    with started(model, asynchronous=asynchronous, **options) as engine:
        return [result.token_ids for result in engine.generate(PROMPTS, max_tokens=64)]


def test_same_tokens_with_and_without_extraction(
    models: dict[str, Path], sidecar: SidecarThread, tmp_path: Path
) -> None:
    connector: dict[str, object] = {"sidecar": sidecar.url, "include_output_tokens": True}
    model = without_repeats(models["qwen3"], tmp_path / "model")
    plain = answers(model, False, None)
    assert [len(ids) for ids in plain] == [64] * len(PROMPTS)
    assert all(left != right for ids in plain for left, right in pairwise(ids))
    for asynchronous in (False, True):
        assert answers(model, asynchronous, None) == plain
        assert answers(model, asynchronous, connector) == plain


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_same_tokens_where_the_model_repeats_itself(models: dict[str, Path], sidecar: SidecarThread, name: str) -> None:
    """Accepted drafts, on engines as they are shipped for CPUs: synchronous."""
    plain = answers(models[name], False, None)
    assert any(left == right for ids in plain for left, right in pairwise(ids))
    assert answers(models[name], False, {"sidecar": sidecar.url}) == plain
