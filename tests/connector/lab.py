"""A worker and its sender without an engine: steps are said by hand, rows lie in a cache of random numbers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import torch
from safetensors.torch import load

from hsconnector.capture.protocol import CaptureInfo, Producer, new_capture_id, pack_token_ids
from hsconnector.connector.current import Current
from hsconnector.connector.gather import Gather, gather_for
from hsconnector.connector.memory_transport import InMemoryTransport
from hsconnector.connector.sender import Sender
from hsconnector.connector.settings import ConnectorSettings
from hsconnector.connector.step import Failure, Finish, Step, TableChange
from hsconnector.connector.transport import HttpTransport, Transport
from hsconnector.connector.worker import Worker

LAYERS, HIDDEN, BLOCK = (0, 2, 4), 32, 16
ROW = len(LAYERS) * HIDDEN * 4
BLOCKS = 256
LONG = 400
"""Rows of a prompt that is more than twice the ring."""


def producer(**fields: Any) -> Producer:
    about = {
        "engine_id": "engine",
        "model": "model",
        "vllm_version": "0.32.0",
        "layer_ids": LAYERS,
        "num_layers": 4,
        "hidden_size": HIDDEN,
        "dtype": "float32",
        "instance": new_capture_id(),
    }
    return Producer(**{**about, **fields})


def bounded(true: Callable[[], object], most: int = 2000) -> Iterator[int]:
    """Counts turns until it is so; a loop that does not end is a failure and no wait."""
    for count in range(most):
        if true():
            return
        yield count
    raise AssertionError(f"it had not come true after {most} turns")


def ship(lab: Lab) -> None:
    """Lets a sender that turns only when it is told to work until nothing is left."""
    for _ in bounded(lambda: not lab.sender.pump() or lab.sender.idle, most=50_000):
        pass


class Lab:
    """One producer. `turn` is one engine step; `released` has what was reported, in order."""

    def __init__(
        self,
        transport: Transport,
        /,
        *,
        now: Callable[[], float] = time.monotonic,
        gather: Gather | None = None,
        locks: Any = None,
        weights: Current | None = None,
        **settings: Any,
    ) -> None:
        self.settings = msgspec.structs.replace(
            ConnectorSettings(transport="http", ring_bytes=1 << 16, stall_timeout_s=60.0), **settings
        )
        generator = torch.Generator().manual_seed(7)
        self.cache = torch.rand(BLOCKS, BLOCK, len(LAYERS), HIDDEN, generator=generator)
        self.sender = Sender(producer(), self.settings, transport, now=now, locks=locks)
        self.worker = Worker(gather or gather_for(self.cache, BLOCK), self.sender, weights=weights)
        self.released: list[str] = []
        self.tables: dict[str, tuple[int, ...]] = {}
        self.next = Step(0, BLOCK)
        self._blocks = 0

    def begin(self, num_rows: int, request_id: str = "", **about: Any) -> CaptureInfo:
        """A request whose whole prompt is scheduled in the next step, and readable in the one after it."""
        name = new_capture_id()
        info = CaptureInfo(
            capture_id=name,
            request_id=request_id or f"request-{name}",
            num_prompt_tokens=num_rows,
            created=time.time(),
            **about,
        )
        count = -(-num_rows // BLOCK)
        table = tuple(1 + (self._blocks + index) % (BLOCKS - 1) for index in range(count))
        self._blocks += count
        self.tables[info.request_id] = table
        self.next.begun.append(info)
        self.next.tables.append(TableChange(info.request_id, table, start_over=True))
        return info

    def readable(self, info: CaptureInfo, rows: int) -> None:
        self.next.readable.append((info.request_id, rows))

    def finish(self, info: CaptureInfo) -> None:
        count = info.num_prompt_tokens
        self.next.finished.append(Finish(info.request_id, count, pack_token_ids(range(count)), "stop"))

    def fail(self, info: CaptureInfo, failure: Failure) -> None:
        self.next.failed.append(failure)

    def turn(self) -> None:
        step, self.next = self.next, Step(0, BLOCK)
        self.worker.step(step)
        self.released.extend(self.worker.take_released())

    def whole(self, num_rows: int, request_id: str = "", **about: Any) -> CaptureInfo:
        """A request from its first step to its last."""
        info = self.begin(num_rows, request_id, **about)
        self.turn()
        self.finish(info)
        self.turn()
        return info

    def until(self, true: Callable[[], object], within_s: float = 60.0) -> None:
        """Engine steps until it is so."""
        end = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < end, "it never came true"
            self.turn()
            time.sleep(0.01)

    def expected(self, info: CaptureInfo) -> torch.Tensor:
        rows = self.cache[list(self.tables[info.request_id])].flatten(0, 1)
        return rows[: info.num_prompt_tokens]

    @property
    def twin(self) -> InMemoryTransport:
        transport = self.sender._transport
        assert isinstance(transport, InMemoryTransport)
        return transport


class Reader:
    """What a client sees of a sidecar."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def record(self, info: CaptureInfo) -> dict[str, Any]:
        answer = self.http.get(f"/v1/captures/{info.capture_id}")
        return dict(answer.json()) if answer.status_code in (200, 202) else {"state": None, "reason": None}

    def state(self, info: CaptureInfo) -> str | None:
        return self.record(info)["state"]

    def reason(self, info: CaptureInfo) -> str | None:
        return self.record(info)["reason"]

    def rows(self, info: CaptureInfo) -> torch.Tensor:
        return load(self.http.get(f"/v1/captures/{info.capture_id}/tensors").raise_for_status().content)[
            "hidden_states"
        ]


@contextlib.contextmanager
def running(address: str, timeout: float = 30.0, **settings: Any) -> Iterator[Lab]:
    """A lab whose sender runs on its thread, over HTTP."""
    lab = Lab(HttpTransport(address, timeout=timeout), **settings)
    lab.sender.start()
    try:
        yield lab
    finally:
        lab.worker.close(0)
