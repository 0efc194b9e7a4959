"""Stores that were left in any state. The hostile files are made here, in code."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest
import xxhash

from hsconnector.capture.protocol import CaptureState, new_capture_id
from hsconnector.errors import StoreError
from server import recovery
from tests.server.engine import Engine, metric, rows_of, until
from tests.server.stores import fill, lend, listing, main_ends, shard
from tests.shards import overwrite
from tests.sidecar import start_sidecar


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


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
    "an unpaired surrogate": lambda data: swap(data, b'"dataset":"d"', b'"dataset":"\\ud800"'),
    "a layer id without end": lambda data: swap(data, b'"layer_ids":"[0,2,4]"', b'"layer_ids":"[0,2,%d]"' % 10**30),
    "layers below nothing": lambda data: swap(data, b'"num_layers":"4"', b'"num_layers":"-%d"' % 10**30),
}  # fmt: skip


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_damaged_shards_are_never_ready(store: Path, known: bool) -> None:
    """As left by a crash, a full disk or a copy that broke off (marker#970, InvokeAI#7009)."""
    good, *names = fill(store, 1 + len(HOSTILE))
    damaged = dict(zip(names, HOSTILE, strict=True))
    for name, damage in damaged.items():
        whole = shard(store, name).read_bytes()
        overwrite(shard(store, name), HOSTILE[damage](whole))
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

    def noted(path: Path) -> Any:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(recovery, "inspect_shard", noted)
    start_sidecar(store).stop()
    assert read == []
    os.utime(shard(store, names[1]))
    running = start_sidecar(store)
    assert read == [f"{names[1]}.safetensors"]
    assert listing(running) == dict.fromkeys(names, "ready")
    running.stop()
    start_sidecar(store).stop()
    assert len(read) == 1


# ---- a disk that is not there, or not readable


class Disk:
    """The folder of the shards, which can be taken away."""

    def __init__(self, store: Path) -> None:
        self.mounted, self.away = store / "captures", store.parent / "away"

    def take(self) -> None:
        self.mounted.rename(self.away)

    def bring(self) -> None:
        if self.mounted.exists():
            self.mounted.rmdir()
        self.away.rename(self.mounted)


def test_shards_that_were_away_for_one_start_are_ready_again(store: Path) -> None:
    """With what was acknowledged: nothing is lent twice."""
    names, disk = fill(store, 4), Disk(store)
    running = start_sidecar(store)
    assert len(lend(running.url)) == 4
    running.stop()
    disk.take()
    running = start_sidecar(store, sweep_s=0.01)
    assert listing(running) == dict.fromkeys(names, "expired")
    answer = httpx.get(f"{running.url}/v1/captures/{names[0]}").json()
    assert (answer["reason"], answer["detail"].split(",")[0]) == ("store_error", "its shard was gone")
    until(lambda: running.app._leases._tidied)
    running.stop()
    disk.bring()
    running = start_sidecar(store)
    try:
        assert listing(running) == dict.fromkeys(names, "ready")
        answer = httpx.get(f"{running.url}/v1/captures/{names[0]}").json()
        assert (answer["reason"], answer["detail"], answer["verdict"]["sound"]) == (None, "", True)
        assert httpx.get(f"{running.url}/v1/captures/{names[0]}/tensors").status_code == 200
        assert lend(running.url) == []
        assert not (store / "damaged").exists()
        assert running.app.store.used == sum(shard(store, name).stat().st_size for name in names)
    finally:
        running.stop()


def test_a_disk_that_goes_away_while_it_is_read(store: Path) -> None:
    (name,), disk = fill(store), Disk(store)
    running = start_sidecar(store)
    disk.take()
    assert httpx.get(f"{running.url}/v1/captures/{name}/tensors").status_code == 410
    running.stop()
    disk.bring()
    running = start_sidecar(store)
    assert listing(running) == {name: "ready"}
    running.stop()


def test_what_was_deleted_while_its_disk_was_away_stays_so(store: Path) -> None:
    (name, other), disk = fill(store, 2), Disk(store)
    disk.take()
    running = start_sidecar(store)
    for _ in range(2):
        assert httpx.delete(f"{running.url}/v1/captures/{name}").status_code == 204
    assert httpx.get(f"{running.url}/v1/captures/{name}").json()["detail"] == "deleted"
    running.stop()
    disk.bring()
    running = start_sidecar(store)
    assert listing(running) == {name: "expired", other: "ready"}
    running.stop()


def test_a_deletion_takes_the_shard_of_a_capture_whose_disk_came_back(store: Path) -> None:
    """The store had lost it, and only the next start would have listed it again."""
    (name,), disk = fill(store), Disk(store)
    running = start_sidecar(store)
    disk.take()
    assert httpx.get(f"{running.url}/v1/captures/{name}/tensors").status_code == 410
    disk.bring()
    assert httpx.delete(f"{running.url}/v1/captures/{name}").status_code == 204
    assert not shard(store, name).exists()
    assert running.app.store.used == 0
    running.stop()
    running = start_sidecar(store)
    assert listing(running) == {name: "expired"}
    assert not (store / "damaged").exists()
    running.stop()


def test_what_was_deleted_stays_so(store: Path) -> None:
    (name,) = fill(store)
    data = shard(store, name).read_bytes()
    running = start_sidecar(store)
    httpx.delete(f"{running.url}/v1/captures/{name}").raise_for_status()
    running.stop()
    shard(store, name).write_bytes(data)
    running = start_sidecar(store)
    assert listing(running) == {name: "expired"}
    assert len(list((store / "damaged").iterdir())) == 1
    running.stop()


def test_a_quarantined_capture_comes_back_with_its_verdict(store: Path) -> None:
    running = start_sidecar(store)
    with Engine(running.url) as engine:
        name = engine.open(expected_content_hash="f" * 64)
        engine.rows(name, rows_of(5))
        engine.commit(name, range(5))
    running.stop()
    (store / "quarantine").rename(store.parent / "away")
    start_sidecar(store).stop()
    (store / "quarantine").rmdir()
    (store.parent / "away").rename(store / "quarantine")
    running = start_sidecar(store)
    answer = httpx.get(f"{running.url}/v1/captures/{name}").json()
    assert (answer["state"], answer["verdict"]["reasons"]) == ("quarantined", ["wrong_content_hash"])
    running.stop()


def test_a_start_without_the_disk_of_many_shards_is_refused(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, disk = fill(store, recovery.MANY if hasattr(recovery, "MANY") else 10), Disk(store)
    disk.take()
    with pytest.raises(StoreError) as refused:
        start_sidecar(store)
    assert f"knows 10 ready captures and {store}/captures holds none of their shards" in str(refused.value)
    assert "mount its disk and start again, or, if they are gone for good, run `hsconnector reindex" in str(
        refused.value
    )
    assert "\n" not in str(refused.value)
    disk.bring()
    running = start_sidecar(store)
    assert listing(running) == dict.fromkeys(names, "ready")
    running.stop()
    disk.take()
    disk.mounted.mkdir()
    main_ends(0, "reindex", f"--store={store}")
    assert capsys.readouterr().out == "0 whole shards, 0 damaged files moved aside\n"
    running = start_sidecar(store)
    assert listing(running) == dict.fromkeys(names, "expired")
    running.stop()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_shard_that_cannot_be_read_stays_where_it_is(
    store: Path, code: int, known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name, other = fill(store, 2)
    os.utime(shard(store, name))
    if not known:
        for file in store.glob("catalog.sqlite*"):
            file.unlink()
    real = recovery.inspect_shard

    def inspect(path: Path) -> Any:
        if path == shard(store, name):
            raise OSError(code, os.strerror(code), str(path))
        return real(path)

    monkeypatch.setattr(recovery, "inspect_shard", inspect)
    running = start_sidecar(store)
    assert listing(running) == {other: "ready"} | ({name: "expired"} if known else {})
    running.stop()
    assert shard(store, name).exists() and not (store / "damaged").exists()
    assert f"{shard(store, name)} cannot be read now, it stays there and is not listed" in caplog.text
    monkeypatch.undo()
    running = start_sidecar(store)
    assert listing(running) == {name: "ready", other: "ready"}
    running.stop()


def test_what_cannot_be_moved_or_removed_ends_no_start(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Shards on another file system than the store, a folder named like a part, a file in the place of a folder."""
    name, bad = fill(store, 2)
    overwrite(shard(store, bad), b"no shard")
    rename = Path.rename

    def across(path: Path, target: Path) -> Path:
        if target.parent == store / "damaged":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", across)
    (store / "captures").rename(tmp_path / "disk")
    (store / "captures").symlink_to(tmp_path / "disk")
    (shard(store, name).parent / f".{new_capture_id()}.part").mkdir()
    free = next(folder for folder in ("00", "11", "22") if not (store / "captures" / folder).exists())
    (store / "captures" / free).write_text("no folder")
    for _ in range(2):
        running = start_sidecar(store)
        assert listing(running) == {name: "ready", bad: "expired"}
        running.stop()
    assert shard(store, bad).exists()
    assert f"{shard(store, bad)} is not a whole shard" in caplog.text
    assert f"it cannot be moved to {store / 'damaged'}: [Errno {errno.EXDEV}]" in caplog.text


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


def test_the_hash_is_over_the_data_section(store: Path) -> None:
    (name,) = fill(store)
    data = shard(store, name).read_bytes()
    header, verdict = recovery.inspect_shard(shard(store, name))
    assert header.metadata["data_hash"] == xxhash.xxh3_128_hexdigest(data[header_end(data) :])
    assert verdict.sound
    assert recovery.record_of_shard(shard(store, name), CaptureState.READY).num_rows == 20
