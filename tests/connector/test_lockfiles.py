"""Lock files, against the reader they are made for: hs-connectors' own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hs_connectors import FileTransfer
from safetensors.torch import save_file

from hsconnector.capture.protocol import CaptureInfo, Commit, FailReason, Producer, new_capture_id, pack_token_ids
from hsconnector.connector.lockfiles import LINGER_S, LockFiles, shard_path
from hsconnector.connector.memory_transport import InMemoryTransport
from hsconnector.connector.sender import Sender
from hsconnector.connector.settings import ConnectorSettings, parse_settings
from hsconnector.errors import SettingsError

pytestmark = pytest.mark.trainer

READER = FileTransfer(Path("unused"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "captures").mkdir()
    return tmp_path


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def write(path: str) -> None:
    save_file({"hidden_states": torch.ones(2, 1, 3), "token_ids": torch.arange(2)}, path)


def read_in_thread(path: str) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def read() -> None:
        try:
            found.append(READER.get_generated({"hidden_states_path": path}))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, found


def test_a_reader_waits_until_the_capture_is_whole_and_takes_the_lock_away(store: Path) -> None:
    locks, capture_id = LockFiles(str(store)), new_capture_id()
    path = shard_path(str(store), capture_id)
    locks.hold(capture_id)
    thread, found = read_in_thread(path)
    thread.join(0.3)
    assert thread.is_alive() and not found
    write(path)
    locks.drop(capture_id, ready=True)
    thread.join()
    (sample,) = found
    assert isinstance(sample, dict) and sample["token_ids"].tolist() == [0, 1]
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_a_reader_that_comes_late_reads_at_once(store: Path) -> None:
    locks, capture_id = LockFiles(str(store)), new_capture_id()
    path = shard_path(str(store), capture_id)
    locks.hold(capture_id)
    write(path)
    locks.drop(capture_id, ready=True)
    assert READER.get_generated({"hidden_states_path": path}) is not None
    assert not os.path.exists(f"{path}.lock")


def test_a_capture_that_failed_leaves_no_lock_and_its_readers_end(store: Path) -> None:
    locks, capture_id = LockFiles(str(store)), new_capture_id()
    path = shard_path(str(store), capture_id)
    locks.hold(capture_id)
    thread, found = read_in_thread(path)
    thread.join(0.3)
    assert thread.is_alive()
    locks.drop(capture_id, ready=False)
    thread.join()
    assert isinstance(found[0], FileNotFoundError)
    assert READER.get_generated({"hidden_states_path": path}) is None
    assert os.listdir(os.path.dirname(path)) == []


def test_a_lock_that_no_reader_came_for_is_removed_later(store: Path) -> None:
    clock = Clock()
    locks, first, second = LockFiles(str(store), clock), new_capture_id(), new_capture_id()
    locks.hold(first)
    locks.drop(first, ready=True)
    clock.seconds = LINGER_S
    locks.hold(second)
    assert os.path.exists(f"{shard_path(str(store), first)}.lock")
    locks.drop(second, ready=True)
    clock.seconds += 1
    locks.hold(new_capture_id())
    assert not os.path.exists(f"{shard_path(str(store), first)}.lock")
    assert os.path.exists(f"{shard_path(str(store), second)}.lock")


def test_closing_drops_what_is_held_and_dropping_twice_is_harmless(store: Path) -> None:
    locks, capture_id = LockFiles(str(store)), new_capture_id()
    locks.hold(capture_id)
    locks.close()
    locks.drop(capture_id, ready=True)
    locks.close()
    assert not locks.held
    assert not os.path.exists(f"{shard_path(str(store), capture_id)}.lock")


def test_a_store_that_is_not_there_costs_no_more_than_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    locks = LockFiles(str(tmp_path / "elsewhere"))
    locks.hold(new_capture_id())
    locks.hold(new_capture_id())
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "store_dir" in caplog.text and not locks.held


def test_file_backend_needs_to_know_the_store() -> None:
    with pytest.raises(SettingsError, match="absolute path on this host, got 'store'"):
        parse_settings({"file_backend": True, "store_dir": "store"})
    with pytest.raises(SettingsError, match="file_backend, which is off"):
        parse_settings({"store_dir": "/store"})


@pytest.fixture
def sender(store: Path) -> Iterator[tuple[Sender, LockFiles]]:
    producer = Producer(
        engine_id="e", model="m", vllm_version="0", layer_ids=(0,), num_layers=1, hidden_size=1, dtype="float32"
    )
    locks = LockFiles(str(store))
    made = Sender(producer, ConnectorSettings(transport="http", ring_bytes=1 << 16), InMemoryTransport(), locks=locks)
    made.pump()
    yield made, locks
    made.close(0)


def capture() -> CaptureInfo:
    return CaptureInfo(capture_id=new_capture_id(), request_id="r", num_prompt_tokens=0, created=0.0)


def test_the_sender_holds_a_lock_from_the_first_step_to_the_final_answer(sender: tuple[Sender, LockFiles]) -> None:
    made, locks = sender
    info = capture()
    assert made.begin(made.stream, info)
    assert locks.held == {info.capture_id}
    made.commit(made.stream, Commit(info.capture_id, 0, pack_token_ids([])))  # type: ignore[arg-type]
    assert locks.held == {info.capture_id}
    made.pump()
    assert not locks.held


def test_the_sender_drops_the_locks_of_captures_that_fail_or_are_lost(
    sender: tuple[Sender, LockFiles], store: Path
) -> None:
    made, locks = sender
    failed, lost = capture(), capture()
    for info in (failed, lost):
        made.begin(made.stream, info)
    made.fail(failed, FailReason.ABORTED, "")
    assert locks.held == {lost.capture_id}
    made.close(0)
    assert not locks.held
    assert not list(store.rglob("*.lock"))


def test_without_a_stream_nothing_is_locked(store: Path) -> None:
    producer = Producer(
        engine_id="e", model="m", vllm_version="0", layer_ids=(0,), num_layers=1, hidden_size=1, dtype="float32"
    )
    locks = LockFiles(str(store))
    made = Sender(producer, ConnectorSettings(transport="http"), InMemoryTransport(), locks=locks)
    assert not made.begin(None, capture())
    assert not locks.held
