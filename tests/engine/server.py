"""vLLM's OpenAI server in a process of its own, as people run it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.engine.inprocess import extraction

__all__ = ["ApiServer", "free_port"]

START_S = 300


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ApiServer:
    """A running server; `url` is its address. `environment` goes on top of this process's."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        connector: dict[str, Any],
        layer_ids: tuple[int, ...] = (0, 1, 3, 6),
        arguments: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(model)
        self.log_path = log
        configs = extraction(layer_ids, connector)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--port", str(self.port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "2048", "--max-num-batched-tokens", "256", "--max-num-seqs", "8", *arguments]
        for name, value in configs.items():
            command += [f"--{name.replace('_', '-')}", json.dumps(value)]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=sink,
                env=os.environ | settings | (environment or {}),
                start_new_session=True,
            )
        self._wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is left of the group."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the server, its engine and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def log(self) -> str:
        """What it has printed."""
        return self.log_path.read_text(errors="replace")

    def kv_usage(self) -> float:
        """The share of KV-cache blocks in use, from the server's own metrics."""
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if line.startswith("vllm:kv_cache_usage_perc{"):
                return float(line.rpartition(" ")[2])
        raise RuntimeError("no vllm:kv_cache_usage_perc in /metrics")

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log()[-4000:]}")
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        self.kill()
        raise RuntimeError(f"the server did not start in {START_S} s:\n{self.log()[-4000:]}")
