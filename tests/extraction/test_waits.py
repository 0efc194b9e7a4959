"""Who waits for whom is told while a run stands still: for an engine, for rows, or the rows for busy engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

from hsconnector.capture.content import Content
from hsconnector.client.async_client import AsyncClient
from hsconnector.client.connection import connect_async
from hsconnector.extraction.engine import Engine
from hsconnector.extraction.extraction import Extraction, Order
from hsconnector.extraction.ledger import Ledger
from hsconnector.prompts.prompt import Missing, Prompt
from tests.extraction.fake_engine import LAYERS, FakeEngine
from tests.extraction.test_engines import until
from tests.extraction.test_extraction import fresh_rows, samples
from tests.sidecar import SidecarThread


class Told:
    """A run that stands still until it has told what is waited for."""

    def __init__(self, sidecar: SidecarThread, engine_url: str, words: str) -> None:
        self.ledger = Ledger(2)
        self.heard = threading.Event()
        self._sidecar, self._engine_url, self._words = sidecar, engine_url, words

    def run(self, rows: Iterator[Prompt | Missing]) -> None:
        asyncio.run(self._run(rows))
        assert self.heard.is_set() and self.ledger.complete and self.ledger.waits == ""

    def _changed(self) -> None:
        if self.ledger.waits == self._words:
            self.heard.set()

    async def _run(self, rows: Iterator[Prompt | Missing]) -> None:
        async with (
            connect_async(self._engine_url, key="", timeout_s=60, connections=4) as to_engine,
            connect_async(self._sidecar.url, key="", timeout_s=60, connections=4) as to_sidecar,
        ):
            order = Order(model="served", dataset=self._words, concurrency=1, pause_s=0.05)
            engines, there = [Engine(self._engine_url, to_engine)], AsyncClient(self._sidecar.url, to_sidecar)
            content = Content("tiny", "", LAYERS)
            await Extraction(order, engines, there, content, self.ledger, changed=self._changed).run(rows)


def test_rows_wait_for_engines_that_are_busy(sidecar: SidecarThread) -> None:
    engine = FakeEngine(sidecar.url)
    told = Told(sidecar, engine.url, "the engines are busy")
    engine.point = lambda: until(told.heard)
    try:
        told.run(samples(fresh_rows(2)))
    finally:
        engine.stop()


def test_engines_wait_for_rows(sidecar: SidecarThread) -> None:
    engine = FakeEngine(sidecar.url)
    told = Told(sidecar, engine.url, "the engines wait for rows")

    def slow() -> Iterator[Prompt | Missing]:
        until(told.heard)
        yield from samples(fresh_rows(2))

    try:
        told.run(slow())
    finally:
        engine.stop()


def test_an_engine_that_is_away_is_named(sidecar: SidecarThread) -> None:
    gone = FakeEngine(sidecar.url)
    gone.stop()
    told = Told(sidecar, gone.url, f"waiting for {gone.url}")
    back: list[FakeEngine] = []

    def come_back() -> None:
        until(told.heard)
        back.append(FakeEngine(sidecar.url, port=int(gone.url.rpartition(":")[2])))

    coming = threading.Thread(target=come_back)
    coming.start()
    try:
        told.run(samples(fresh_rows(2)))
    finally:
        told.heard.set()
        coming.join()
        back[0].stop()
