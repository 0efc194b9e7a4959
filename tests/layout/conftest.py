from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet_engine() -> Iterator[None]:
    """Drawn layouts make vLLM warn thousands of times. Only here: its logger is the connector's parent."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
