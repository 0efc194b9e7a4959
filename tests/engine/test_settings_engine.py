"""Settings seen on a real engine, several engines one after the other in one process (leaks: vllm#45206)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsconnector.client import Client
from hsconnector.errors import SettingsError, UnsupportedError
from tests.engine.inprocess import Engine, started, tokens
from tests.sidecar import SidecarThread

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def wait_for(condition: Callable[[], bool]) -> bool:
    ready = threading.Event()
    for _ in range(600):
        if condition():
            return True
        ready.wait(0.05)
    return False


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def sender_threads() -> int:
    return sum(thread.name == "hsconnector-sender" for thread in threading.enumerate())


def ask(engine: Engine, **hidden_states: Any) -> dict[str, Any] | None:
    request_id = engine.add(tokens(20, seed=300), hidden_states=hidden_states or None)
    engine.run()
    assert len(engine.results[request_id].token_ids) == 4
    return engine.results[request_id].params


def test_engines_come_and_go(models: dict[str, Path], sidecar: SidecarThread, client: Client) -> None:
    """Opt-in, sampling, plain HTTP and output tokens; threads, files and shared memory are back at the end."""
    settings: list[dict[str, Any]] = [
        {"capture": "opt_in"},
        {"sample_rate": 0.0},
        {"transport": "http"},
        {"include_output_tokens": True},
        {"transport": "shm"},
    ]
    counts = []
    for extra in settings:
        with started(models["qwen3"], connector={"sidecar": sidecar.url, **extra}) as engine:
            asked = ask(engine, capture=True)
            assert asked is not None
            capture = client.fetch(asked["handle"], wait=30)
            assert len(capture.token_ids) == (23 if "include_output_tokens" in extra else 20)
            unasked = ask(engine)
            assert (unasked is None) == bool({"capture", "sample_rate"} & set(extra))
            engine.connector.shutdown()
            engine.connector.shutdown()
        counts.append((sender_threads(), open_files()))
    assert counts[-1][0] == 0
    assert counts[-1][1] <= counts[0][1] + 3
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"hsconnector-{os.getpid()}-")]


@pytest.mark.parametrize(
    ("connector", "options", "error", "words"),
    [
        ({"sidcar": "http://127.0.0.1:1"}, {}, SettingsError, r"'sidcar'.*'sidecar'.*'http://127.0.0.1:1'"),
        ({"ring_bytes": "many"}, {}, SettingsError, r"ring_bytes.*'many'"),
        ({"ring_bytes": 1}, {}, SettingsError, r"ring_bytes.*1.*65536"),
        ({"capture": "some"}, {}, SettingsError, r"capture.*'some'"),
        ({"sidecar": "unix:///tmp/x.sock"}, {}, SettingsError, "public_url"),
        ({}, {"speculative_config": None}, UnsupportedError, "extract_hidden_states"),
        (
            {"ring_bytes": 1 << 16},
            {"layer_ids": tuple(range(7)), "wide": True},
            SettingsError,
            r"65536.*114688",
        ),
    ],
)
def test_refused_at_start(
    models: dict[str, Path],
    tmp_path: Path,
    connector: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    """One line naming the value and the way out, before a request is taken."""
    from tests.models import tiny_qwen3

    model = models["qwen3"]
    if options.pop("wide", False):
        model = tiny_qwen3(tmp_path / "wide", hidden_size=4096, intermediate_size=64, num_hidden_layers=6)
    with pytest.raises(error, match=words) as failure, started(model, connector=connector, **options):
        pass
    assert "\n" not in str(failure.value)
