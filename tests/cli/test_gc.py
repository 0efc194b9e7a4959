"""`hsconnector ls` and `hsconnector gc` against a real sidecar and a real store."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import httpx
import pytest
import torch

from hsconnector.cli import main
from hsconnector.cli.quantities import parse_bytes, parse_duration
from hsconnector.errors import SettingsError
from tests.feeding import Feeder
from tests.sidecar import SidecarThread, start_sidecar

LAYERS = (0, 2)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarThread]:
    running = start_sidecar(tmp_path / "store", heartbeat_s=600)
    yield running
    running.stop()


@pytest.fixture
def captures(sidecar: SidecarThread) -> list[str]:
    """Three of data set "a", one of "b", one that is all zeros, one that is open."""
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=8) as feeder:
        names = [
            feeder.capture(torch.randn(3, 2, 8), [1, 2, 3], dataset=dataset, sample_id=f"\x1b[31m{number}")
            for number, dataset in enumerate("aaab")
        ]
        names += [feeder.capture(torch.zeros(3, 2, 8), [1, 2, 3], dataset="zero"), feeder.open(3, dataset="a")]
    return names


class Run(Protocol):
    def __call__(self, *arguments: object, url: str = "", code: int = 0) -> str: ...


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in this process: what it printed, or what it complained of where it fails with `code`."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("HSC_API_KEY", raising=False)

    def call(*arguments: object, url: str = "", code: int = 0) -> str:
        monkeypatch.setenv("HSC_SIDECAR", url or "http://127.0.0.1:9")
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert (ended.value.code or 0) == code, said.out + said.err
        return said.out if code == 0 else said.err

    return call


def state(sidecar: SidecarThread, name: str) -> str:
    return str(httpx.get(f"{sidecar.url}/v1/captures/{name}").json()["state"])


def test_ls(run: Run, sidecar: SidecarThread, captures: list[str]) -> None:
    lines = run("ls", url=sidecar.url).splitlines()
    assert [line.split()[0] for line in lines[1:]] == sorted(captures, reverse=True)
    assert "\\x1b[31m3" in lines[3]
    assert "quarantined" in lines[2]
    chosen = run("ls", "--sidecar", sidecar.url, "--dataset", "a", "--state", "ready", "--since", "1h", "--json")
    assert [json.loads(line)["capture_id"] for line in chosen.splitlines()] == sorted(captures[:3], reverse=True)
    assert "no captures match" in run("ls", "--dataset", "c", url=sidecar.url)
    totals = json.loads(run("ls", "--totals", "--json", "--limit", 1, url=sidecar.url))
    assert {name: entry["captures"] for name, entry in totals["states"].items()} == {
        "receiving": 1,
        "quarantined": 1,
        "ready": 4,
    }
    used = sum(path.stat().st_size for path in sidecar.store.rglob("*.safetensors"))
    assert totals["bytes"] == used
    assert re.search(r"^ all +6 ", run("ls", "--totals", url=sidecar.url), re.MULTILINE)


def test_gc_says_what_would_go_and_removes_it_when_told(run: Run, sidecar: SidecarThread, captures: list[str]) -> None:
    lease = httpx.post(f"{sidecar.url}/v1/leases", json={"consumer": "c"}).json()
    assert lease["captures"][0]["capture_id"] == captures[0]
    said = run("gc", "--dataset", "a", url=sidecar.url)
    assert "2 captures would go" in said
    assert "1 that match stay: they are leased or being read" in said
    assert "say --delete" in said
    assert [state(sidecar, name) for name in captures[:3]] == ["ready"] * 3
    assert "2 captures are gone" in run("gc", "--dataset", "a", "--delete", url=sidecar.url)
    assert [state(sidecar, name) for name in captures] == [
        "ready",
        "expired",
        "expired",
        "ready",
        "quarantined",
        "receiving",
    ]
    found = json.loads(run("gc", "--max-bytes", 0, "--evict", "oldest", "--json", url=sidecar.url))
    assert [(each["capture_id"], each["why"]) for each in found["data"]] == [(name, "oldest") for name in captures[3:5]]
    assert "0 captures would go" in run("gc", "--ttl", "1h", url=sidecar.url)
    assert "0 captures would go" in run("gc", "--older-than", "1h", url=sidecar.url)


def test_gc_on_a_store_whose_sidecar_is_stopped(run: Run, sidecar: SidecarThread, captures: list[str]) -> None:
    assert "in use by another sidecar" in run("gc", "--store", sidecar.store, "--state", "ready", code=3)
    sidecar.stop()
    assert "4 captures are gone" in run("gc", "--store", sidecar.store, "--state", "ready", "--delete")
    left = [path.stem for path in sidecar.store.rglob("*.safetensors")]
    assert left == [captures[4]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sidecar", "http://x", "--store", "y"], "both given"),
        (["--store", "nowhere"], "is not a store"),
        (["--ttl", "soon"], "is no duration"),
        (["--max-bytes", "much"], "is no size"),
        (["--ttl", "1h", "--dataset", "a"], "do not go together"),
    ],
)
def test_gc_misused(run: Run, arguments: list[str], said: str) -> None:
    assert said in run("gc", *arguments, code=2)


def test_ls_without_a_sidecar(run: Run) -> None:
    assert "no sidecar answers" in run("ls", "--sidecar", "http://127.0.0.1:9", code=1)


def test_quantities() -> None:
    seconds = [parse_duration("--ttl", text) for text in ("90", "1.5m", "2h", "7d", "1W")]
    assert seconds == [90, 90, 7200, 604_800, 604_800]
    sizes = [parse_bytes("--max-bytes", text) for text in ("10", "1.5 kB", "2MiB", "500GB", "1T")]
    assert sizes == [10, 1500, 2 << 20, 500 * 10**9, 10**12]
    for text in ("", "-1s", "1y", "1e3", "٣s"):
        with pytest.raises(SettingsError):
            parse_duration("--ttl", text)
