"""Stores that were left in any state. The hostile files are made here, in code."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path

import httpx
import pytest
import xxhash

from hsconnector.cli import main
from hsconnector.protocol import CaptureState, new_capture_id
from server import recovery
from tests.server.engine import Engine, metric, rows_of
from tests.sidecar import SidecarThread, start_sidecar


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


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


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def swap(data: bytes, old: bytes, new: bytes) -> bytes:
    """The header changed without changing its length, the data hash untouched."""
    changed = data.replace(old, new, 1)
    return changed if len(changed) == len(data) else changed.replace(b" " * (len(changed) - len(data)), b"", 1)


HOSTILE = {
    "empty": lambda data: b"",
    "four bytes": lambda data: data[:4],
    "header only": lambda data: data[: header_end(data)],
    "cut header": lambda data: data[:100],
    "last byte cut": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "huge header length": lambda data: (100_000_001).to_bytes(8, "little") + data[8:],
    "header length of 2**64 - 1": lambda data: b"\xff" * 8 + data[8:],
    "garbage": lambda data: bytes(range(256)) * (len(data) // 256),
    "all zero": lambda data: bytes(len(data)),
    "data all zero": lambda data: data[: header_end(data)] + bytes(len(data) - header_end(data)),
    "one bit": lambda data: data[:-500] + bytes([data[-500] ^ 1]) + data[-499:],
    "one bit of a token id": lambda data: data[:-8] + bytes([data[-8] ^ 1]) + data[-7:],
    "layers as strings": lambda data: swap(data, b'"layer_ids":"[0,2,4]"', b'"layer_ids":"[0,2,x]"'),
    "another format": lambda data: swap(data, b"hsconnector/1", b"hsconnector/2"),
    "another capture": lambda data: swap(data, b'"capture_id":"0', b'"capture_id":"1'),
    "created never": lambda data: swap(data, b'"created":"', b'"created":"-'),
    "no metadata": lambda data: swap(data, b'"__metadata__"', b'"__metadatx__"'),
    "tags of numbers": lambda data: swap(data, b'"tags":"{', b'"tags":"['),
}  # fmt: skip


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_damaged_shards_are_never_ready(store: Path, known: bool) -> None:
    """CASES 46."""
    good, *names = fill(store, 1 + len(HOSTILE))
    damaged = dict(zip(names, HOSTILE, strict=True))
    for name, damage in damaged.items():
        whole = shard(store, name).read_bytes()
        shard(store, name).write_bytes(HOSTILE[damage](whole))
        assert shard(store, name).read_bytes() != whole, damage
    if not known:
        for file in store.glob("catalog.sqlite*"):
            file.unlink()
    running = start_sidecar(store)
    try:
        states = {damaged.get(name, name): state for name, state in listing(running).items()}
        assert states == {good: "ready"} | (dict.fromkeys(HOSTILE, "expired") if known else {})
        with httpx.Client(base_url=running.url) as http:
            assert http.get(f"/v1/captures/{good}/tensors").status_code == 200
            for name, damage in damaged.items():
                status = http.get(f"/v1/captures/{name}/tensors").status_code
                assert status == (410 if known else 404), damage
            assert metric(http, "hsconnector_damaged_files_total") == len(HOSTILE)
        assert {file.name.split(".")[0] for file in (store / "damaged").iterdir()} == set(damaged)
    finally:
        running.stop()


def test_what_does_not_belong_is_moved_aside(store: Path) -> None:
    (name,) = fill(store)
    folder = shard(store, name).parent
    (folder / "notes.txt").write_text("x")
    (folder / f"{new_capture_id()}.safetensors").symlink_to(shard(store, name))
    (folder / f".{new_capture_id()}.part").write_bytes(b"half")
    (store / "captures" / "loose.safetensors").write_bytes(shard(store, name).read_bytes())
    other = "00" if folder.name != "00" else "11"
    (store / "captures" / other).mkdir()
    (store / "captures" / other / f"{name}.safetensors").write_bytes(shard(store, name).read_bytes())
    running = start_sidecar(store)
    try:
        assert listing(running) == {name: "ready"}
        assert len(list((store / "damaged").iterdir())) == 4
        assert list(store.rglob("*.part")) == []
    finally:
        running.stop()


def test_locks_of_the_file_backend_are_no_damage(store: Path) -> None:
    """Beside the shards: held by a living engine, waiting for a reader, or left by a killed engine."""
    (name,) = fill(store)
    folder = shard(store, name).parent
    waiting = folder / f"{name}.safetensors.lock"
    held, orphan = (folder / f"{new_capture_id()[:-2]}{folder.name}.safetensors.lock" for _ in range(2))
    for lock in (waiting, held, orphan):
        lock.touch()
    (folder / f"{new_capture_id()}.safetensors.lock").symlink_to(shard(store, name))
    with held.open() as engine:
        fcntl.flock(engine, fcntl.LOCK_EX)
        running = start_sidecar(store)
        try:
            assert listing(running) == {name: "ready"}
            assert waiting.exists() and held.exists() and not orphan.exists()
            assert len(list((store / "damaged").iterdir())) == 1
            assert shard(store, name).exists()
        finally:
            running.stop()


def test_only_what_is_unknown_or_changed_is_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = fill(store, 3)
    read: list[str] = []
    real = recovery.inspect_shard
    monkeypatch.setattr(recovery, "inspect_shard", lambda path: (read.append(path.name), real(path))[1])
    start_sidecar(store).stop()
    assert read == []
    os.utime(shard(store, names[1]))
    running = start_sidecar(store)
    assert read == [f"{names[1]}.safetensors"]
    assert listing(running) == dict.fromkeys(names, "ready")
    running.stop()
    start_sidecar(store).stop()
    assert len(read) == 1


def test_a_shard_that_is_gone(store: Path) -> None:
    name, other = fill(store, 2)
    shard(store, name).unlink()
    running = start_sidecar(store)
    try:
        assert listing(running) == {name: "expired", other: "ready"}
        assert running.app.store.used == shard(store, other).stat().st_size
    finally:
        running.stop()


def test_a_crash_between_the_name_and_the_index(store: Path) -> None:
    """The shard is whole, the index still says receiving: the capture is ready."""
    (name,) = fill(store)
    with sqlite3.connect(store / "catalog.sqlite") as index:
        (record,) = index.execute("SELECT record FROM captures").fetchone()
        receiving = record.replace(b"\xa5state\xa5ready", b"\xa5state\xa9receiving")
        index.execute("UPDATE captures SET state = 'receiving', record = ?", (receiving,))
    index.close()
    running = start_sidecar(store)
    assert listing(running) == {name: "ready"}
    running.stop()


@pytest.mark.parametrize("index", [b"", b"garbage" * 1000, None], ids=["empty", "garbage", "absent"])
def test_an_index_that_is_lost_is_rebuilt_from_the_shards(store: Path, index: bytes | None) -> None:
    running = start_sidecar(store)
    with Engine(running.url) as engine:
        ready = engine.capture(
            20, dataset="d", sample_id="s", tags={"a": "ü"}, request_id="chatcmpl-x-0123abcd", lora="l"
        )
        bad = engine.capture(abs(rows_of(20) * 0))
        before = httpx.get(f"{running.url}/v1/captures/{ready}").json()
    running.stop()
    for file in store.glob("catalog.sqlite*"):
        file.unlink()
    if index is not None:
        (store / "catalog.sqlite").write_bytes(index)
    again = start_sidecar(store)
    try:
        assert listing(again) == {ready: "ready", bad: "quarantined"}
        assert listing(again, client_id="x") == {ready: "ready"}
        after = httpx.get(f"{again.url}/v1/captures/{ready}").json()
        differ = {key for key in before if before[key] != after[key]}
        assert differ <= {"created", "finished", "handle", "tensors"}
        assert abs(before["created"] - after["created"]) <= 0.001
        assert httpx.get(f"{again.url}/v1/captures/{bad}").json()["verdict"]["reasons"] == ["zero_rows", "equal_slots"]
    finally:
        again.stop()


def test_reindex(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, good = fill(store, 2)
    path = shard(store, name)
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-500] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    running = start_sidecar(store)
    assert listing(running) == {name: "ready", good: "ready"}
    running.stop()
    main_ends(0, "reindex", f"--store={store}")
    assert capsys.readouterr().out == "1 whole shards, 1 damaged files moved aside\n"
    running = start_sidecar(store)
    assert listing(running) == {name: "expired", good: "ready"}
    main_ends(1, "reindex", f"--store={store}")
    assert "in use by another sidecar" in capsys.readouterr().err
    running.stop()
    main_ends(2, "reindex", f"--store={store.parent}")
    assert "is not a store" in capsys.readouterr().err


def main_ends(code: int, *arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code or 0) == code


def test_the_hash_is_over_the_data_section(store: Path) -> None:
    (name,) = fill(store)
    data = shard(store, name).read_bytes()
    header, verdict = recovery.inspect_shard(shard(store, name))
    assert header.metadata["data_hash"] == xxhash.xxh3_128_hexdigest(data[header_end(data) :])
    assert verdict.sound
    assert recovery.record_of_shard(shard(store, name), CaptureState.READY).num_rows == 20
