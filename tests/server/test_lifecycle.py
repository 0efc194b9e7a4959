from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load

from hsconnector.capture.protocol import Batch, CaptureState, FailReason, Rows, Span
from hsconnector.errors import StoreError
from tests.server.engine import Engine, SharedFile, metric, opening, rows_of, until
from tests.sidecar import SidecarThread, start_sidecar, start_sidecar_process


def wait_for_end(url: str, name: str) -> tuple[str, str | None]:
    found = httpx.get(f"{url}/v1/captures/{name}?wait=60", timeout=90).json()
    return found["state"], found["reason"]


def parts(store: Path) -> list[Path]:
    return list(store.rglob("*.part"))


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[SidecarThread]:
    """Gives producers up after half a second."""
    (tmp_path / "shm").mkdir()
    running = start_sidecar(tmp_path / "store", heartbeat_s=0.5, shm_dir=tmp_path / "shm")
    yield running
    running.stop()


def test_an_engine_that_falls_silent_is_lost(impatient: SidecarThread, tmp_path: Path) -> None:
    memory = SharedFile(tmp_path / "shm", 4096)
    with Engine(impatient.url, ring=memory.offer) as engine, httpx.Client(base_url=impatient.url) as http:
        done, name = engine.capture(3), engine.open()
        engine.rows(name, rows_of(2))
        assert wait_for_end(impatient.url, name) == ("failed", "engine_lost")
        assert wait_for_end(impatient.url, done) == ("ready", None)
        assert parts(impatient.store) == []
        answer = engine.post(Batch(engine.accepted.producer_id, engine.seq + 1))
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "producer_unknown")
        assert metric(http, "hsconnector_producers") == 0
        assert metric(http, "hsconnector_lost_producers_total") == 1
    memory.close()


def test_heartbeats_keep_an_engine(impatient: SidecarThread) -> None:
    with Engine(impatient.url) as engine:
        assert engine.accepted.heartbeat_s == 0.5
        name = engine.open()
        engine.rows(name, rows_of(2))
        for _ in range(15):
            time.sleep(0.1)
            engine.send()
        assert engine.commit(name, range(2)).state is CaptureState.READY


def test_an_engine_whose_batch_waits_is_not_lost(impatient: SidecarThread) -> None:
    """The writer is busy for longer than the deadline; the batch behind it must find its stream."""
    with Engine(impatient.url) as engine:
        name = engine.open()
        engine.rows(name, rows_of(2))
        impatient.app._writer.submit(time.sleep, 1.5)
        time.sleep(0.3)  # a look for silent producers is in the queue now, before the batch
        assert engine.commit(name, range(2)).state is CaptureState.READY


def test_health_answers_while_the_writer_is_busy(sidecar: SidecarThread, http: httpx.Client, engine: Engine) -> None:
    free = threading.Event()
    sidecar.app._writer.submit(free.wait, 60)
    sending = threading.Thread(target=engine.capture, args=(3,))
    sending.start()
    try:
        assert http.get("/health").status_code == 200
        assert http.get("/readyz").status_code == 200
        assert http.get("/v1/captures").json()["data"] == []
    finally:
        free.set()
        sending.join()


def test_states_survive_a_stop(tmp_path: Path) -> None:
    first = start_sidecar(tmp_path / "store")
    with Engine(first.url) as engine:
        values = rows_of(3)
        ready, failed, open_one = engine.capture(values), engine.open(), engine.open(request_id="cmpl-x-0-0123abcd")
        bad = engine.capture(rows_of(3) * 0)
        engine.fail(failed)
        engine.rows(open_one, values)
    first.stop()
    assert parts(tmp_path) == []
    second = start_sidecar(tmp_path / "store")
    with httpx.Client(base_url=second.url) as http:
        assert wait_for_end(second.url, ready) == ("ready", None)
        assert wait_for_end(second.url, bad) == ("quarantined", None)
        assert wait_for_end(second.url, failed) == ("failed", "aborted")
        assert wait_for_end(second.url, open_one) == ("failed", "sidecar_restarted")
        assert (load(http.get(f"/v1/captures/{ready}/tensors").content)["hidden_states"] == values).all()
        assert http.get("/v1/captures?client_id=x").json()["data"][0]["capture_id"] == open_one
        assert metric(http, "hsconnector_store_bytes") > 0
    second.stop()


def test_kill_9_in_the_middle(tmp_path: Path) -> None:
    first = start_sidecar_process(tmp_path / "store", shm_dir=tmp_path)
    memory = SharedFile(tmp_path, 1 << 20)
    with Engine(first.url, ring=memory.offer) as engine:
        values = rows_of(50)
        ready, name = engine.capture(values), engine.open()
        memory.write(values.tobytes())
        engine.send(Rows(name, 0, 50, Span(0, values.nbytes, shared=True)))
        assert len(parts(tmp_path)) == 1
        assert first.kill() == -9
        with pytest.raises(httpx.ConnectError):
            engine.send()
    second = start_sidecar_process(tmp_path / "store", shm_dir=tmp_path)
    assert parts(tmp_path) == []
    assert wait_for_end(second.url, name) == ("failed", "sidecar_restarted")
    assert wait_for_end(second.url, ready) == ("ready", None)
    assert (load(httpx.get(f"{second.url}/v1/captures/{ready}/tensors").content)["hidden_states"] == values).all()
    with Engine(second.url, ring=memory.offer) as engine:
        assert engine.accepted.shm
        assert engine.fail(name).reason is FailReason.SIDECAR_RESTARTED
    memory.close()
    assert second.stop() == 0


def test_stop_lets_long_polls_go_and_ends_what_is_open(tmp_path: Path) -> None:
    running = start_sidecar_process(tmp_path / "store")
    answers: list[str] = []
    with Engine(running.url) as engine:
        name = engine.open()
        engine.rows(name, rows_of(3))
        reader = threading.Thread(target=lambda: answers.append(wait_for_end(running.url, name)[0]))
        reader.start()
        with httpx.Client(base_url=running.url) as http:
            until(lambda: metric(http, "hsconnector_waiting_readers") == 1)
        assert running.stop() == 0
        reader.join()
    assert answers == ["receiving"]
    assert parts(tmp_path) == []
    assert "Traceback" not in running.log()


def test_one_sidecar_a_store(tmp_path: Path, sidecar: SidecarThread) -> None:
    with pytest.raises(StoreError, match="in use by another sidecar"):
        start_sidecar(sidecar.store)
    other = start_sidecar(tmp_path / "store")
    other.stop()
    start_sidecar(tmp_path / "store").stop()


def test_the_store_is_made_for_us_and_our_group(tmp_path: Path) -> None:
    start_sidecar(tmp_path / "deep" / "store").stop()
    assert (tmp_path / "deep" / "store").stat().st_mode & 0o777 == 0o750


# ---- no room


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SidecarThread]:
    """A store on a file system of 3 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=True)
    try:
        running = start_sidecar(folder / "store", full_wait_s=0)
        yield running
        running.stop()
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def limited_store(tmp_path: Path) -> Iterator[SidecarThread]:
    """A store with a quota of 1 MB."""
    running = start_sidecar(tmp_path / "store", quota=1_000_000, full_wait_s=0)
    yield running
    running.stop()


MEGABYTE = rows_of(1000)
"""384 kB."""


def fill_delete_resume(sidecar: SidecarThread) -> None:
    with Engine(sidecar.url) as engine, httpx.Client(base_url=sidecar.url) as http:
        kept = []
        for _ in range(1000):
            name = engine.open(num_prompt_tokens=1000)
            last = engine.rows(name, MEGABYTE)
            if last.reason is not None:
                break
            assert engine.commit(name, range(1000)).state is CaptureState.READY
            kept.append(name)
        assert last.reason is FailReason.DISK_FULL
        assert len(kept) >= 2
        assert wait_for_end(sidecar.url, name) == ("failed", "disk_full")
        assert parts(sidecar.store) == []
        assert http.get("/readyz").status_code == 503
        assert "disk_full" in http.get("/readyz").json()["reasons"][0]
        for ready in kept:
            assert (load(http.get(f"/v1/captures/{ready}/tensors").content)["hidden_states"] == MEGABYTE).all()
        assert http.delete(f"/v1/captures/{kept[0]}").status_code == 204
        again = engine.open(num_prompt_tokens=1000)
        engine.rows(again, MEGABYTE)
        assert engine.commit(again, range(1000)).state is CaptureState.READY
        assert http.get("/readyz").json() == {"ready": True, "reasons": []}


@pytest.mark.root
def test_a_full_disk(small_disk: SidecarThread) -> None:
    fill_delete_resume(small_disk)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    running = start_sidecar_process(tmp_path / "store")
    pid = running.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    with Engine(running.url) as engine:
        before, name = engine.capture(MEGABYTE), engine.open()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (300_000, hard))
        assert engine.rows(name, MEGABYTE).reason is FailReason.DISK_FULL
        assert wait_for_end(running.url, name) == ("failed", "disk_full")
        assert httpx.get(f"{running.url}/v1/captures/{before}/tensors").status_code == 200
        assert parts(tmp_path) == []
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert wait_for_end(running.url, engine.capture(MEGABYTE)) == ("ready", None)
    assert running.stop() == 0


def test_a_full_quota(limited_store: SidecarThread) -> None:
    """A full disk costs the captures that find no room, and nothing else (SpecForge#426)."""
    fill_delete_resume(limited_store)
    used = sum(path.stat().st_size for path in limited_store.store.rglob("*.safetensors"))
    assert limited_store.app.store.used == used


def test_a_quota_counts_what_is_there_at_start(limited_store: SidecarThread) -> None:
    with Engine(limited_store.url) as engine:
        engine.capture(MEGABYTE)
    used = limited_store.app.store.used
    limited_store.stop()
    again = start_sidecar(limited_store.store, quota=1_000_000)
    assert again.app.store.used == used > 384_000
    again.stop()


def test_others_go_on_while_one_finds_no_room(limited_store: SidecarThread) -> None:
    with Engine(limited_store.url) as engine:
        small, large = engine.open(), engine.open()
        engine.rows(small, rows_of(3))
        (answer,) = engine.send(Rows(large, 0, 3000, Span(0, 3 * MEGABYTE.nbytes)), payload=MEGABYTE.tobytes() * 3)
        assert answer.reason is FailReason.DISK_FULL
        assert "of 1000000 bytes of the quota are used" in answer.detail
        assert engine.commit(small, range(3)).state is CaptureState.READY


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.ENOSPC, "disk_full"), (errno.EDQUOT, "disk_full"), (errno.EFBIG, "disk_full"), (errno.EIO, "store_error")],
)
def test_every_kind_of_no(
    engine: Engine, sidecar: SidecarThread, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    name, late = engine.open(), engine.open()
    engine.rows(late, rows_of(2))
    monkeypatch.setattr(os, "pwrite", fails)
    assert engine.rows(name, rows_of(2)).reason == reason
    assert engine.commit(late, range(2)).reason == reason
    monkeypatch.undo()
    assert list(sidecar.store.rglob("*.part")) == list(sidecar.store.rglob("*.safetensors")) == []
    assert engine.capture(2)


def test_a_bug_of_ours_fails_its_capture_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("boo\nhoo")

    name, other = engine.open(), engine.open()
    engine.rows(other, rows_of(2))
    monkeypatch.setattr("server.shards.ShardWriter.append", fails)
    answer = engine.rows(name, rows_of(2))
    monkeypatch.undo()
    assert (answer.reason, answer.detail) == (FailReason.INTERNAL_ERROR, "ZeroDivisionError: boo hoo")
    assert engine.commit(other, range(2)).state is CaptureState.READY


def test_an_index_that_cannot_be_written_loses_nothing(
    engine: Engine, http: httpx.Client, sidecar: SidecarThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = sidecar.app.catalog
    writer = catalog._writer._driver
    blocker = __import__("sqlite3").connect(catalog.path)
    writer.execute("PRAGMA busy_timeout = 1")
    blocker.execute("BEGIN IMMEDIATE")
    try:
        name = engine.capture(3)
        assert http.get(f"/v1/captures/{name}").json()["state"] == "ready"
        assert http.get(f"/v1/captures/{name}/tensors").status_code == 200
        assert "locked" in http.get("/readyz").json()["reasons"][0]
    finally:
        blocker.rollback()
        blocker.close()
    engine.send()
    assert http.get("/readyz").status_code == 200
    assert http.get("/v1/captures").json()["data"][0]["capture_id"] == name
    writer.execute("PRAGMA busy_timeout = 10000")


# ---- what to do with the unsound


@pytest.mark.parametrize(("policy", "state", "reason"), [("reject", "failed", "unsound"), ("warn", "ready", None)])
def test_policies(tmp_path: Path, policy: str, state: str, reason: str | None) -> None:
    """One NaN costs its own capture only (SpecForge#104), whatever becomes of that one (speculators#615)."""
    running = start_sidecar(tmp_path / "store", on_unsound=policy)
    try:
        with Engine(running.url) as engine:
            values = rows_of(64)
            values[17, 2, 5] = float("nan")
            name, good = engine.capture(values), engine.capture(3)
            assert wait_for_end(running.url, name) == (state, reason)
            assert wait_for_end(running.url, good) == ("ready", None)
            about = httpx.get(f"{running.url}/v1/captures/{name}").json()
            assert "non_finite in rows [17] in slots [2]" in about["detail"]
            count = sum(1 for _ in running.store.rglob(f"{name}*"))
            assert count == (0 if policy == "reject" else 1)
    finally:
        running.stop()


def test_findings_are_counted(engine: Engine, http: httpx.Client) -> None:
    names = [
        'hsconnector_findings_total{reason="zero_rows"}',
        'hsconnector_captures_total{reason="",state="quarantined"}',
    ]
    before = [metric(http, name) for name in names]
    engine.capture(rows_of(9) * 0)
    assert [metric(http, name) for name in names] == [count + 1 for count in before]


def test_no_capture_leaves_anything_in_memory(engine: Engine, sidecar: SidecarThread) -> None:
    for _ in range(20):
        engine.capture(2)
        engine.fail(engine.open())
        engine.send(opening("bad"))
    ingest = sidecar.app._ingest
    assert (ingest._owners, sidecar.app._holdings._ended, sidecar.app.catalog._pending) == ({}, [], {})
    assert ingest.streams[engine.accepted.producer_id].open == {}
