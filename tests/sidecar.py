"""A real sidecar for tests: uvicorn in a thread of this process, or the `hsconnector serve` command in another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from server.listen import SidecarServer, listen, public_url_of, url_of
from server.service import Service
from server.settings import Settings

__all__ = ["SidecarProcess", "SidecarThread", "start_sidecar", "start_sidecar_process", "start_sidecar_with_shm"]

START_S = 30


class SidecarThread:
    """A sidecar on a thread; `url` is its address, `app` the `server.service.Service` behind it."""

    def __init__(self, store: Path, **settings: Any) -> None:
        self.store = store
        self.settings = Settings(store=store, **{"port": 0, **settings})
        self._sockets = listen(self.settings)
        self.url = url_of(self._sockets)
        try:
            self.app = Service(self.settings, public_url_of(self._sockets))
        except BaseException:
            self._close_sockets()
            raise
        started = threading.Event()
        self._server = SidecarServer(self.app, started.set)
        self._thread = threading.Thread(target=self._server.run, args=(self._sockets,), name="sidecar")
        self._thread.start()
        if not started.wait(START_S):
            raise RuntimeError("the sidecar did not start")

    def stop(self) -> None:
        """Stops as SIGTERM does; harmless when repeated."""
        self._server.should_exit = True
        self._thread.join(START_S)
        if self._thread.is_alive():
            raise RuntimeError("the sidecar did not stop")
        self._close_sockets()

    kill = stop
    """A thread cannot be killed; use `start_sidecar_process` where that matters."""

    def _close_sockets(self) -> None:
        for bound in self._sockets:
            bound.close()


def start_sidecar_with_shm(root: Path) -> SidecarThread:
    """A sidecar on a thread, with a folder of its own in the place of /dev/shm."""
    (root / "shm").mkdir()
    return start_sidecar(root / "store", shm_dir=root / "shm")


class SidecarProcess:
    """A sidecar started by the command, in a process of its own."""

    def __init__(self, store: Path, **settings: Any) -> None:
        self.store = store
        self.log_path = store.parent / f"{store.name}.sidecar.log"
        options = [f"--{name.replace('_', '-')}={value}" for name, value in {"port": 0, **settings}.items()]
        command = [
            sys.executable,
            "-c",
            "from hsconnector.cli import main; main()",
            "serve",
            f"--store={store}",
            *options,
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HSC_")}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment | {"PYTHONUNBUFFERED": "1"}
            )
        self.line = self._first_line()
        self.url = self.line.split()[3].rstrip(",") if self.line else ""

    def stop(self, timeout_s: float = START_S) -> int:
        """SIGTERM; the exit code."""
        return self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> int:
        """SIGKILL; the exit code."""
        return self._end(signal.SIGKILL, START_S)

    def pause(self) -> None:
        """SIGSTOP: a sidecar that hangs."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        """What it has logged."""
        return self.log_path.read_text()

    def _end(self, number: signal.Signals, timeout_s: float) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def _first_line(self) -> str:
        if self.process.stdout is None:
            raise RuntimeError("no pipe")
        return self.process.stdout.readline().strip()


def start_sidecar(store: Path, **settings: Any) -> SidecarThread:
    """A running sidecar on a free port; `settings` are those of `server.settings.Settings`."""
    return SidecarThread(Path(store), **settings)


def start_sidecar_process(store: Path, **settings: Any) -> SidecarProcess:
    """A running `hsconnector serve`; `settings` become options. `url` is empty where it could not start."""
    return SidecarProcess(Path(store), **settings)


def wait_until_ready(url: str, within_s: float = START_S) -> None:
    """Returns once `/readyz` says so."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"{url} is not ready")
