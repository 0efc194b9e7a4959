"""The sidecar is absent, killed, hung or refuses while requests run: the engine never notices.

Every request is answered as ever, every block comes back within the deadline, every capture ends `ready` or `failed`
with one reason, and capturing resumes by itself.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.record import CaptureRecord
from hsconnector.client import Client
from hsconnector.errors import SidecarUnreachable
from tests.engine.inprocess import Engine, Result, started, tokens
from tests.sidecar import SidecarProcess, start_sidecar_process, wait_until_ready

pytestmark = [pytest.mark.engine, pytest.mark.both_runners, pytest.mark.timeout(600)]

STALL_S = 3.0
PROMPTS = [tokens(n, seed=400 + n) for n in (40, 200, 600)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Day:
    """An engine and a sidecar that comes and goes on one port and one store."""

    def __init__(self, engine: Engine, store: Path, port: int) -> None:
        self.engine = engine
        self.store = store
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.sidecar: SidecarProcess | None = None
        self.answers: list[list[int]] = []

    def start(self) -> None:
        self.sidecar = start_sidecar_process(self.store, port=self.port, heartbeat_s=5)
        wait_until_ready(self.url)

    def ask(self) -> list[Result]:
        results = self.engine.generate(PROMPTS, max_tokens=16)
        answers = [result.token_ids for result in results]
        self.answers = self.answers or answers
        assert answers == self.answers
        return results

    def records(self, results: list[Result]) -> list[CaptureRecord]:
        """What became of these captures, as the sidecar tells it once it knows all of them."""
        with Client(self.url) as client:
            return [client.wait(result.params["capture_id"], 30) for result in results if result.params]

    def until_capturing(self) -> None:
        """Asks until a capture is ready again."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if all(record.state is CaptureState.READY for record in self.records(self.ask())):
                    return
            except SidecarUnreachable:
                pass
            time.sleep(0.2)
        raise AssertionError("capturing did not resume")


@pytest.fixture(scope="module")
def engine_and_port(models: dict[str, Path]) -> Iterator[tuple[Engine, int]]:
    port = free_port()
    connector = {"sidecar": f"http://127.0.0.1:{port}", "stall_timeout_s": STALL_S, "ring_bytes": 1 << 20}
    with started(models["qwen3"], connector=connector) as engine:
        yield engine, port


@pytest.fixture
def day(engine_and_port: tuple[Engine, int], tmp_path: Path) -> Iterator[Day]:
    engine, port = engine_and_port
    free = engine.free_blocks()
    day = Day(engine, tmp_path / "store", port)
    yield day
    engine.settle()
    assert engine.free_blocks() == free
    if day.sidecar is not None:
        day.sidecar.kill()


def test_absent_at_first(day: Day) -> None:
    """What failed meanwhile is told when the sidecar is there, each with its reason."""
    missed = day.ask()
    day.start()
    day.until_capturing()
    for record in day.records(missed):
        assert (record.state, record.reason) == (CaptureState.FAILED, "sidecar_unreachable")


def test_killed_while_requests_run(day: Day) -> None:
    day.start()
    day.until_capturing()
    ids = [day.engine.add(prompt, max_tokens=16) for prompt in PROMPTS]
    day.engine.step()
    assert day.sidecar is not None
    day.sidecar.kill()
    began = time.monotonic()
    day.engine.run()
    assert time.monotonic() - began < 10 * STALL_S
    results = [day.engine.results[request_id] for request_id in ids]
    assert [result.token_ids for result in results] == day.answers
    day.start()
    day.until_capturing()
    for record in day.records(results):
        assert record.state is CaptureState.FAILED
        assert record.reason in ("sidecar_unreachable", "sidecar_restarted")
    assert not list(day.store.rglob("*.part"))


def test_hung_while_requests_run(day: Day) -> None:
    """SIGSTOP: connections stay open and nothing answers; a capture holds its blocks for the stall time at most."""
    day.start()
    day.until_capturing()
    assert day.sidecar is not None
    day.sidecar.pause()
    results = day.ask() + day.ask()
    day.sidecar.resume()
    day.until_capturing()
    for record in day.records(results):
        assert record.state in (CaptureState.FAILED, CaptureState.READY)
        if record.state is CaptureState.FAILED:
            assert record.reason in ("sidecar_unreachable", "stalled", "engine_lost", "bad_message")


def test_refusing_a_key(day: Day) -> None:
    day.sidecar = start_sidecar_process(day.store, port=day.port, api_key="another")
    refused = day.ask()
    assert all(result.params is not None for result in refused)
    day.sidecar.stop()
    day.start()
    day.until_capturing()
    for record in day.records(refused):
        assert record.reason in ("sidecar_refused", "sidecar_unreachable")


def test_disk_full(day: Day) -> None:
    """Captures fail by name and those that were ready stay readable."""
    day.sidecar = start_sidecar_process(day.store, port=day.port, quota="6MB", full_wait_s=0)
    wait_until_ready(day.url)
    day.until_capturing()
    records = [record for _ in range(3) for record in day.records(day.ask())]
    states = {(record.state, record.reason) for record in records}
    assert (CaptureState.FAILED, "disk_full") in states
    assert states <= {(CaptureState.FAILED, "disk_full"), (CaptureState.READY, None)}
    with Client(day.url) as client:
        for record in client.captures(state="ready"):
            assert len(client.fetch(record.capture_id).token_ids) == record.num_rows
