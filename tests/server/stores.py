"""Stores for tests of what a start finds."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from hsconnector.cli import main
from tests.server.engine import Engine
from tests.sidecar import SidecarThread, start_sidecar


def fill(store: Path, count: int = 1) -> list[str]:
    """A store with some ready captures, and no sidecar."""
    running = start_sidecar(store)
    with Engine(running.url) as engine:
        names = [engine.capture(20, dataset="d", tags={"n": str(n % 10)}) for n in range(count)]
    running.stop()
    return names


def shard(store: Path, name: str) -> Path:
    return store / "captures" / name[-2:] / f"{name}.safetensors"


def listing(sidecar: SidecarThread, **query: str) -> dict[str, str]:
    items = httpx.get(f"{sidecar.url}/v1/captures", params=query).json()["data"]
    return {item["capture_id"]: item["state"] for item in items}


def lend(url: str) -> list[str]:
    """Takes and acknowledges what is free."""
    lease = httpx.post(f"{url}/v1/leases", json={"consumer": "c", "count": 100}).json()
    if lease["captures"]:
        httpx.post(f"{url}/v1/leases/{lease['lease_id']}/ack").raise_for_status()
    return [each["capture_id"] for each in lease["captures"]]


def main_ends(code: int, *arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code or 0) == code
