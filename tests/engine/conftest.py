"""Engines are shared: starting one takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hsconnector.client import Client
from tests.sidecar import SidecarThread, start_sidecar


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.models import tiny_gpt_oss, tiny_qwen3  # which need torch

    folder = tmp_path_factory.mktemp("models")
    return {"qwen3": tiny_qwen3(folder / "qwen3"), "gpt-oss": tiny_gpt_oss(folder / "gpt-oss")}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarThread]:
    running = start_sidecar(tmp_path_factory.mktemp("store") / "store")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(sidecar: SidecarThread) -> Iterator[Client]:
    with Client(sidecar.url) as client:
        yield client
