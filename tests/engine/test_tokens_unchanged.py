"""Extraction never changes what a client is answered: greedy, 64 tokens, both ways of scheduling."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.inprocess import started, tokens
from tests.sidecar import SidecarThread

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS = [tokens(n, seed=100 + n) for n in (1, 33, 128, 300)]


def answers(model: Path, asynchronous: bool, connector: dict[str, object] | None) -> list[list[int]]:
    options = {"connector": connector} if connector is not None else {"extract": False}
    with started(model, asynchronous=asynchronous, **options) as engine:
        return [result.token_ids for result in engine.generate(PROMPTS, max_tokens=64)]


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_same_tokens_with_and_without_extraction(models: dict[str, Path], sidecar: SidecarThread, name: str) -> None:
    connector: dict[str, object] = {"sidecar": sidecar.url, "include_output_tokens": True}
    plain = answers(models[name], False, None)
    assert [len(ids) for ids in plain] == [64] * len(PROMPTS)
    for asynchronous in (False, True):
        assert answers(models[name], asynchronous, None) == plain
        assert answers(models[name], asynchronous, connector) == plain
