from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


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
