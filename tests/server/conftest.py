"""A sidecar for each module, emptied between tests; an engine and a reader for each test."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.engine import Engine, SharedFile
from tests.sidecar import SidecarThread, start_sidecar_with_shm


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HSC_API_KEY", "HSC_INGEST_API_KEY", "HSC_STORE", "HSC_PORT", "HSC_HOST"):
        monkeypatch.delenv(name, raising=False)
    logging.getLogger("httpx").setLevel(logging.WARNING)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarThread]:
    sidecar = start_sidecar_with_shm(tmp_path_factory.mktemp("sidecar"))
    yield sidecar
    sidecar.stop()


@pytest.fixture
def sidecar(running: SidecarThread) -> Iterator[SidecarThread]:
    yield running
    running.app._writer.submit(_empty, running).result()


@pytest.fixture
def shm(sidecar: SidecarThread) -> Path:
    return sidecar.settings.shm_dir


@pytest.fixture
def engine(sidecar: SidecarThread) -> Iterator[Engine]:
    with Engine(sidecar.url) as made:
        yield made


@pytest.fixture
def http(sidecar: SidecarThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=sidecar.url, timeout=60) as client:
        yield client


@pytest.fixture
def ring(shm: Path) -> Iterator[SharedFile]:
    made = SharedFile(shm, 1 << 20)
    yield made
    made.close()


def _empty(sidecar: SidecarThread) -> None:
    app = sidecar.app
    app._ingest.close()
    for area in (app.store.captures, app.store.quarantine):
        for path in area.rglob("*.safetensors"):
            path.unlink()
    with contextlib.closing(sqlite3.connect(app.catalog.path)) as index, index:
        index.execute("DELETE FROM captures")
        index.execute("DELETE FROM client_ids")
    app.store.used = 0
