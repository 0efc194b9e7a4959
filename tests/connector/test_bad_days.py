"""Real sidecars behind networks that are not well: whatever happens, blocks come back and captures end."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from hsconnector.capture.protocol import CaptureInfo
from hsconnector.connector import sender as sender_module
from hsconnector.connector.memory_transport import InMemoryTransport
from hsconnector.connector.transport import HttpTransport
from tests.connector.lab import LONG, Lab, Reader, running
from tests.connector.network import BadSidecar, Behave, Switch, eventually, hang, reset, says, take_slowly
from tests.sidecar import SidecarThread, start_sidecar, start_sidecar_process

FAULTS: dict[str, tuple[Behave | None, set[str]]] = {
    "refused": (None, {"sidecar_unreachable"}),
    "reset mid-body": (reset, {"sidecar_unreachable"}),
    "500": (says(500), {"sidecar_unreachable"}),
    "507": (says(507), {"sidecar_unreachable"}),
    "producer_unknown": (says(404, b'{"error": {"message": "m", "type": "producer_unknown"}}'), {"sidecar_restarted"}),
    "hang": (hang, {"sidecar_unreachable", "stalled"}),
    "slow": (take_slowly, {"sidecar_unreachable", "stalled"}),
    "garbage": (says(200, b"garbage"), {"sidecar_refused"}),
    "forbidden": (says(403, b"no"), {"sidecar_refused"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_happens_blocks_come_back_and_the_capture_ends_with_a_reason(
    name: str, switch: Switch, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#57530: every source of failure goes into one ledger. vllm#40344: an answer that never comes is no hang."""
    monkeypatch.setattr(sender_module, "LAST_PAUSE_S", 0.1)
    behave, reasons = FAULTS[name]
    with running(switch.url, timeout=1.0, stall_timeout_s=1.5) as lab:
        before = lab.whole(20)
        lab.until(lambda: reader.state(before) == "ready")
        caught = lab.begin(LONG)
        lab.turn()
        lab.readable(caught, 50)
        if behave is None:
            switch.down()
        switch.fault = behave
        lab.turn()
        lab.finish(caught)
        lab.until(lambda: caught.request_id in lab.released)
        lab.until(lambda: lab.sender.stream is None or name in ("hang", "slow"))
        meanwhile = lab.whole(30)
        lab.until(lambda: meanwhile.request_id in lab.released)
        switch.fault = None
        if behave is None:
            switch.up()
        lab.until(lambda: reader.state(caught) == "failed")
        assert reader.reason(caught) in reasons | {"sidecar_unreachable"}
        lab.until(lambda: reader.state(meanwhile) in ("failed", "ready"))
        after = lab.whole(LONG)
        lab.until(lambda: reader.state(after) in ("ready", "failed"))
        if reader.state(after) == "failed":
            after = lab.whole(LONG)
            lab.until(lambda: reader.state(after) == "ready")
        assert torch.equal(reader.rows(after), lab.expected(after))
        lab.until(lambda: after.request_id in lab.released)
        assert len(lab.released) == len(set(lab.released))


class TestAway:
    def test_absent_at_the_start(self, switch: Switch, reader: Reader) -> None:
        switch.down()
        with running(switch.url, timeout=1.0) as lab:
            info = lab.whole(20)
            assert lab.released == [info.request_id], "nobody to wait for"
            switch.up()
            lab.until(lambda: reader.state(info) == "failed")
            assert reader.reason(info) == "sidecar_unreachable"
            later = lab.whole(20)
            lab.until(lambda: reader.state(later) in ("ready", "failed"))

    def test_it_starts_over_when_the_sidecar_does(self, tmp_path: Path) -> None:
        first = start_sidecar_process(tmp_path / "store")
        port = int(first.url.rsplit(":", 1)[1])
        with running(first.url, timeout=5.0) as lab, Reader(first.url) as reader:
            done = lab.whole(20)
            lab.until(lambda: reader.state(done) == "ready")
            caught = lab.begin(LONG)
            lab.turn()
            lab.readable(caught, 50)
            lab.turn()
            first.kill()
            lab.until(lambda: lab.sender.stream is None)
            second = start_sidecar_process(tmp_path / "store", port=port)
            try:
                lab.until(lambda: lab.sender.stream is not None)
                lab.until(lambda: reader.state(caught) == "failed")
                assert reader.reason(caught) in ("sidecar_unreachable", "sidecar_restarted")
                later = lab.whole(LONG)
                lab.until(lambda: reader.state(later) == "ready")
                assert torch.equal(reader.rows(later), lab.expected(later))
                assert reader.state(done) == "ready"
            finally:
                lab.worker.close(5)
                second.stop()

    def test_one_that_is_paused_and_goes_on(self, tmp_path: Path) -> None:
        process = start_sidecar_process(tmp_path / "store")
        with running(process.url, timeout=1.0, stall_timeout_s=1.5) as lab, Reader(process.url) as reader:
            process.pause()
            try:
                caught = [lab.whole(LONG) for _ in range(3)]
                lab.until(lambda: len(lab.released) == 3)
            finally:
                process.resume()
            for info in caught:
                lab.until(lambda info=info: reader.state(info) in ("failed", "ready"))  # type: ignore[misc]
                assert reader.reason(info) in ("sidecar_unreachable", "stalled")
            lab.until(lambda: lab.sender.stream is not None)
            later = lab.whole(LONG)
            lab.until(lambda: reader.state(later) == "ready")
            lab.worker.close(5)
            process.stop()


class TestClose:
    """vllm#42753: time enough, everything is shipped; too little, it ends in time; none, it ends at once."""

    def slow(self, switch: Switch, timeout: float, delay: float) -> tuple[Lab, list[CaptureInfo], float]:
        lab = Lab(HttpTransport(switch.url, timeout=30.0), ring_bytes=1 << 20)
        lab.sender.start()
        eventually(lambda: lab.sender.stream)
        switch.delay = delay
        infos = [lab.whole(20) for _ in range(5)]
        started = time.monotonic()
        lab.worker.close(timeout)
        return lab, infos, time.monotonic() - started

    def test_time_enough(self, switch: Switch, reader: Reader) -> None:
        _, infos, _ = self.slow(switch, timeout=60.0, delay=0.2)
        assert [reader.state(info) for info in infos] == ["ready"] * 5

    @pytest.mark.parametrize("timeout", [0.0, 0.5])
    def test_too_little_time(
        self, switch: Switch, reader: Reader, caplog: pytest.LogCaptureFixture, timeout: float
    ) -> None:
        lab, infos, took = self.slow(switch, timeout=timeout, delay=20.0)
        assert took < 20.0
        switch.down()
        assert lab.sender._thread is not None
        lab.sender._thread.join(30)
        assert not lab.sender._thread.is_alive()
        assert all(reader.state(info) in (None, "failed", "receiving") for info in infos)
        lost = [info for info in infos if info.capture_id in caplog.text]
        assert len(lost) == 5
        switch.up()

    def test_what_is_open_fails_as_a_shutdown(self, sidecar: SidecarThread, reader: Reader) -> None:
        with running(sidecar.url) as lab:
            info = lab.begin(LONG)
            lab.turn()
            lab.worker.close(30)
            assert (reader.state(info), reader.reason(info)) == ("failed", "engine_shutdown")
            lab.worker.close(30)

    def test_with_nobody_there(self) -> None:
        lab = Lab(HttpTransport("http://127.0.0.1:9", timeout=1.0))
        lab.sender.start()
        lab.whole(4)
        lab.worker.close(10)
        lab.worker.close(10)
        assert lab.sender.stream is None

    def test_before_it_was_started(self) -> None:
        lab = Lab(InMemoryTransport())
        lab.worker.close(1)
        lab.worker.close(1)

    def test_steps_after_the_end_hold_nothing(self, sidecar: SidecarThread) -> None:
        with running(sidecar.url) as lab:
            lab.worker.close(5)
            info = lab.whole(4)
            assert lab.released == [info.request_id]

    def test_nothing_leaks(self, sidecar: SidecarThread) -> None:
        """vllm#45206: threads and file descriptors after five lives are what they were after one."""

        def life() -> None:
            shm = str(sidecar.settings.shm_dir)
            with running(sidecar.url, transport="shm", shm_dir=shm) as lab:
                lab.whole(LONG)
                lab.until(lambda: lab.sender.idle and len(lab.released) == 1)
                lab.worker.close(30)

        def ours() -> set[str]:
            links = {}
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    links[name] = os.readlink(f"/proc/self/fd/{name}")
            return {link for link in links.values() if "hsconnector-" in link}

        others = set(sidecar.app._ingest.streams)
        for _ in range(5):
            life()
        gc.collect()
        assert not [thread for thread in threading.enumerate() if thread.name == "hsconnector-sender"]
        eventually(lambda: not ours())
        eventually(lambda: set(sidecar.app._ingest.streams) <= others)


KILLED = """
import sys, time
from tests.connector.lab import Lab
from hsconnector.connector.transport import HttpTransport
lab = Lab(HttpTransport(sys.argv[1]), transport="shm", shm_dir=sys.argv[2])
lab.sender.start()
info = lab.begin(400)
lab.turn()
lab.readable(info, 30)
lab.turn()
lab.until(lambda: lab.sender.idle)
print(info.capture_id, flush=True)
time.sleep(60)
"""


def test_a_killed_engine_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    impatient = start_sidecar(tmp_path / "store", shm_dir=tmp_path / "shm", heartbeat_s=1.5)
    try:
        with Reader(impatient.url) as reader:
            process = subprocess.Popen(
                [sys.executable, "-c", KILLED, impatient.url, str(tmp_path / "shm")],
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            assert process.stdout is not None
            info = CaptureInfo(
                capture_id=process.stdout.readline().strip(), request_id="", num_prompt_tokens=0, created=0.0
            )
            assert reader.state(info) == "receiving"
            process.send_signal(signal.SIGKILL)
            process.communicate()
            assert os.listdir(tmp_path / "shm") == []
            eventually(lambda: reader.state(info) == "failed")
            assert reader.reason(info) == "engine_lost"
        assert list((tmp_path / "store").rglob("*.part*")) == []
    finally:
        impatient.stop()


def test_a_hung_sidecar_at_the_start_holds_the_engine_for_a_moment_only() -> None:
    with BadSidecar(hang) as bad:
        lab = Lab(HttpTransport(bad.url, timeout=20.0))
        lab.sender.start(first_try_s=0.1)
        info = lab.whole(4)
        assert lab.released == [info.request_id]
        bad.stop()
        lab.worker.close(5)
