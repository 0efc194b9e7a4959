from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.connector.network import Switch
from tests.sidecar import SidecarThread, start_sidecar_with_shm

if TYPE_CHECKING:
    from tests.connector.lab import Reader


@pytest.fixture(autouse=True)
def heard_log() -> Iterator[None]:
    """The connector logs below vLLM's logger, which whatever ran before may have cut off or turned down."""
    logger = logging.getLogger("vllm")
    before = logger.level, logger.propagate
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    yield
    logger.setLevel(before[0])
    logger.propagate = before[1]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarThread]:
    started = start_sidecar_with_shm(tmp_path_factory.mktemp("sidecar"))
    yield started
    started.stop()


@pytest.fixture
def reader(sidecar: SidecarThread) -> Iterator[Reader]:
    from tests.connector.lab import Reader  # which needs torch

    with Reader(sidecar.url) as made:
        yield made


@pytest.fixture
def switch(sidecar: SidecarThread) -> Iterator[Switch]:
    with Switch(sidecar.url) as made:
        yield made
