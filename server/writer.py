"""The one thread that changes streams, shards and index."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from server.metrics import Metrics

__all__ = ["Writer"]

_T = TypeVar("_T")


class Writer(ThreadPoolExecutor):
    """Runs one call after the other; `places` of them may wait, more wait for a place."""

    def __init__(self, metrics: Metrics, places: int) -> None:
        super().__init__(1, thread_name_prefix="hsconnector-writer")
        self._metrics = metrics
        self._places = asyncio.Semaphore(places)

    async def run(self, function: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """The result of a call on the writer's thread."""
        self._metrics.queue.inc()
        try:
            async with self._places:
                call = functools.partial(function, *arguments, **named)
                return await asyncio.get_running_loop().run_in_executor(self, call)
        finally:
            self._metrics.queue.dec()
