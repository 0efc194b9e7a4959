"""Real training from a real engine: our backend generating, our backend from the store, the stock `file` backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hsconnector.client import Client
from tests.engine.server import ApiServer
from tests.sidecar import SidecarThread
from tests.training import NOBODY, STEPS, make_rows, train, write_dataset, write_plain_files

pytestmark = [pytest.mark.engine, pytest.mark.trainer, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(
    models: dict[str, Path], sidecar: SidecarThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    """Without prefix caching, so that the same prompt asked again gives the same bits."""
    running = ApiServer(
        models["qwen3"],
        tmp_path_factory.mktemp("server") / "log",
        connector={"sidecar": sidecar.url, "file_backend": True, "store_dir": str(sidecar.store)},
        arguments=("--no-enable-prefix-caching",),
    )
    yield running
    running.stop()


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_three_ways_to_train_give_the_losses_of_plain_files(
    kind: str, models: dict[str, Path], server: ApiServer, sidecar: SidecarThread, tmp_path: Path
) -> None:
    model, rows = models["qwen3"], make_rows(seed=len(kind))
    data = write_dataset(tmp_path / "data", rows)
    engine = ("--vllm-endpoint", f"{server.url}/v1")
    nobody = ("--vllm-endpoint", NOBODY, "--on-missing", "raise")
    ours = ("--sidecar", sidecar.url)

    generating = train(tmp_path, "generating", "hsconnector", kind, model, data, *engine, *ours, "--hsc-keep", "yes")
    files = write_plain_files(tmp_path / "files", sidecar.url, rows)
    plain = train(tmp_path, "plain", "speculators", kind, model, data, *nobody, "--hidden-states-path", str(files))
    assert len(plain.steps) in STEPS and plain.error_records == 0
    assert generating.steps == plain.steps
    stored = train(tmp_path, "stored", "hsconnector", kind, model, data, *nobody, *ours)
    assert stored.steps == plain.steps

    before = shards(sidecar)
    stock = train(
        tmp_path, "stock", "speculators", kind, model, data, *engine, "--hidden-states-path", str(tmp_path / "none")
    )
    assert stock.steps == plain.steps
    assert shards(sidecar) == before, "the stock backend removes what it has read, and its locks"


def test_without_keep_a_generated_capture_is_gone_once_it_is_read(
    models: dict[str, Path], server: ApiServer, sidecar: SidecarThread, tmp_path: Path
) -> None:
    rows = make_rows(seed=7)
    data = write_dataset(tmp_path / "data", rows)
    before = shards(sidecar)
    engine = ("--vllm-endpoint", f"{server.url}/v1", "--sidecar", sidecar.url)
    run = train(tmp_path, "deleting", "hsconnector", "eagle3", models["qwen3"], data, *engine, "--num-workers", "1")
    assert len(run.steps) in STEPS and run.error_records == 0
    assert {name for name in shards(sidecar) - before if not name.endswith(".lock")} == set()
    with Client(sidecar.url) as client:
        assert len(client.find(state="expired")) >= 2 * len(rows)


def test_an_answer_names_the_file_and_its_lock_is_there_first(server: ApiServer, sidecar: SidecarThread) -> None:
    body = {"model": server.model, "prompt": [5, 6, 7, 8], "max_tokens": 1}
    told = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["kv_transfer_params"]
    path = Path(told["hidden_states_path"])
    assert path.parent.parent == sidecar.store / "captures" and path.stem == told["capture_id"]
    assert path.with_name(f"{path.name}.lock").exists()
    with Client(sidecar.url) as client:
        assert client.wait(told["handle"]).path == str(path)


def shards(sidecar: SidecarThread) -> set[str]:
    return {path.name for path in (sidecar.store / "captures").rglob("*") if path.is_file()}
