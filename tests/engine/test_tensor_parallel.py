"""Two tensor-parallel ranks: rank 0 sends, both report, every block comes back (vllm#43805)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsconnector.client import Client
from tests.engine.inprocess import started, tokens
from tests.hugging_face import reference_states
from tests.models import LAYER_IDS
from tests.sidecar import SidecarThread

pytestmark = [pytest.mark.engine, pytest.mark.both_runners, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_both_ranks_report_and_nothing_leaks(
    models: dict[str, Path], sidecar: SidecarThread, client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    connector = {"sidecar": sidecar.url, "ring_bytes": 1 << 20}
    with started(models[name], tensor_parallel_size=2, connector=connector) as engine:
        free = engine.free_blocks()
        prompts = [tokens(n, seed=200 + n) for n in (1, 64, 200, 500)]
        results = engine.generate([*prompts, *prompts])
        aborted = engine.add(tokens(900, seed=210))
        engine.step()
        engine.abort(aborted)
        engine.run()
        assert engine.free_blocks() == free
        assert not engine.connector.has_pending_block_frees()
        for prompt, result in zip([*prompts, *prompts], results, strict=True):
            assert result.params is not None
            capture = client.fetch(result.params["handle"], wait=30)
            assert capture.token_ids.tolist() == prompt
            difference = (capture.hidden_states - reference_states(models[name], prompt, LAYER_IDS)).abs().max()
            assert difference < 1e-5
