"""An index that is lost, damaged or not to be had; the shards say what there is."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import httpx
import pytest

from hsconnector.errors import StoreError
from tests.server.engine import Engine, rows_of
from tests.server.stores import fill, lend, listing, main_ends, shard
from tests.shards import overwrite
from tests.sidecar import start_sidecar


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


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


@pytest.mark.parametrize("by", ["serve", "reindex"])
@pytest.mark.parametrize("damage", ["page", "lease page", "record", "text"])
def test_a_damaged_index_is_begun_anew(
    store: Path, by: str, damage: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    names = fill(store, 12)
    index = sqlite3.connect(store / "catalog.sqlite")
    tables = dict(index.execute("SELECT name, rootpage FROM sqlite_master").fetchall())
    (size,) = index.execute("PRAGMA page_size").fetchone()
    if damage == "record":
        index.execute("UPDATE captures SET record = x'ff' WHERE capture_id = ?", names[:1])
    if damage == "text":
        index.execute("UPDATE captures SET record = cast(replace(record, 'cmpl', x'ffffffff') AS BLOB)")
    index.commit()
    index.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    index.close()
    if "page" in damage:
        with (store / "catalog.sqlite").open("r+b") as file:
            file.seek((tables["captures" if damage == "page" else "lease_items"] - 1) * size)
            file.write(b"\xff" * size)
    if by == "reindex":
        main_ends(0, "reindex", f"--store={store}")
        assert capsys.readouterr().out == "12 whole shards, 0 damaged files moved aside\n"
    running = start_sidecar(store)
    assert listing(running) == dict.fromkeys(names, "ready")
    assert sorted(lend(running.url)) == sorted(names)
    running.stop()
    (line,) = [entry.message for entry in caplog.records if entry.levelname == "ERROR"]
    (aside,) = [file.name for file in store.iterdir() if ".broken-" in file.name]
    assert "which only the index held, are lost" in line and aside in line


def test_an_index_that_cannot_be_used_now_is_one_line(store: Path) -> None:
    """Another process holds it. Nothing is lost: what was acknowledged is not lent again."""
    fill(store, 2)
    running = start_sidecar(store)
    assert len(lend(running.url)) == 2
    running.stop()
    other = sqlite3.connect(store / "catalog.sqlite", isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN IMMEDIATE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hsconnector.storage.sqlite.BUSY_S", 0.1, raising=False)
        with pytest.raises(StoreError) as refused:
            start_sidecar(store)
    assert str(refused.value) == (
        f"the store {store} cannot be opened: the index {store}/catalog.sqlite cannot be used: database is locked; "
        "another process holds it: let that end and start again"
    )
    other.close()
    running = start_sidecar(store)
    assert lend(running.url) == []
    running.stop()


def test_reindex(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, good = fill(store, 2)
    path = shard(store, name)
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-500] ^= 1
    overwrite(path, data)
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
