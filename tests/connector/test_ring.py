from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hsconnector.connector.ring import ALIGNMENT, PREFIX, Ring
from hsconnector.errors import RingError
from tests.examples import examples

PAGE = 4096


class TestReserve:
    def test_in_order_and_aligned(self) -> None:
        ring = Ring.private(1024)
        assert [ring.reserve(100), ring.reserve(1), ring.reserve(64)] == [0, 128, 192]
        assert ring.used == 256
        assert ring.largest() == 768

    def test_wraps_around(self) -> None:
        ring = Ring.private(1024)
        assert ring.reserve(512) == 0
        assert ring.reserve(384) == 512
        assert ring.reserve(512) is None
        ring.release()
        assert ring.largest() == 512
        assert ring.reserve(512) == 0
        assert ring.largest() == 0
        ring.release()
        assert ring.largest() == 384
        ring.release()
        assert (ring.used, ring.largest()) == (0, 1024)

    def test_too_large_for_ever(self) -> None:
        assert Ring.private(1024).reserve(1025) is None

    def test_nothing_is_no_reservation(self) -> None:
        assert Ring.private(1024).reserve(0) is None

    def test_the_newest_can_be_taken_back(self) -> None:
        ring = Ring.private(1024)
        ring.reserve(512)
        ring.reserve(384)
        ring.release()
        assert ring.reserve(192) == 0
        ring.cancel()
        assert ring.largest() == 512
        assert ring.reserve(512) == 0
        ring.release()
        ring.release()
        assert ring.used == 0

    def test_views_are_of_the_same_memory(self) -> None:
        ring = Ring.private(1024)
        ring.view(64, 3)[:] = b"abc"
        assert ring.memory[64:67] == b"abc"


class RingMachine(RuleBasedStateMachine):
    """Against a list of what is taken: nothing overlaps, what is released first was reserved first."""

    @initialize(size=st.integers(64, 4000))
    def begin(self, size: int) -> None:
        self.ring = Ring.private(size)
        self.taken: deque[tuple[int, int, int]] = deque()
        self.stamp = 0

    @rule(length=st.integers(1, 4100))
    def reserve(self, length: int) -> None:
        self._reserve(length)

    @rule()
    def reserve_the_largest(self) -> None:
        largest = self.ring.largest()
        if largest:
            assert self._reserve(largest) is not None

    @rule(length=st.integers(1, 4100))
    def more_than_the_largest_does_not_fit(self, length: int) -> None:
        if length > self.ring.largest():
            assert self.ring.reserve(length) is None

    @precondition(lambda self: self.taken)
    @rule()
    def release(self) -> None:
        start, length, stamp = self.taken.popleft()
        assert bytes(self.ring.view(start, length)) == bytes([stamp]) * length
        self.ring.release()

    @precondition(lambda self: self.taken)
    @rule()
    def cancel(self) -> None:
        self.taken.pop()
        self.ring.cancel()

    def _reserve(self, length: int) -> int | None:
        start = self.ring.reserve(length)
        if start is not None:
            assert start % ALIGNMENT == 0
            assert 0 <= start <= start + length <= self.ring.size
            self.stamp = (self.stamp + 1) % 256
            self.ring.view(start, length)[:] = bytes([self.stamp]) * length
            self.taken.append((start, length, self.stamp))
        return start

    @invariant()
    def nothing_overlaps(self) -> None:
        spans = sorted((start, start + length) for start, length, _ in self.taken)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))

    @invariant()
    def counts(self) -> None:
        assert sum(length for _, length, _ in self.taken) <= self.ring.used <= self.ring.size
        if not self.taken:
            assert self.ring.used == 0
            assert self.ring.largest() == self.ring.size // ALIGNMENT * ALIGNMENT


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


class TestShared:
    def test_a_file_of_its_own_until_the_sidecar_has_it(self, tmp_path: Path) -> None:
        old = os.umask(0)
        try:
            ring = Ring.shared(str(tmp_path), 3 * PAGE)
        finally:
            os.umask(old)
        path = tmp_path / ring.name
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o640
        assert (status.st_size, status.st_blocks * 512 >= 3 * PAGE) == (3 * PAGE, True)
        ring.view(PAGE, 2)[:] = b"hi"
        assert path.read_bytes()[PAGE : PAGE + 2] == b"hi"
        ring.unlink()
        ring.unlink()
        assert (list(tmp_path.iterdir()), ring.name) == ([], "")
        ring.view(PAGE, 2)[:] = b"ho"

    def test_nothing_stays_when_it_goes(self, tmp_path: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        ring = Ring.shared(str(tmp_path), PAGE)
        undone = []
        ring.before_unmap(lambda: undone.append(True))
        del ring
        assert (list(tmp_path.iterdir()), undone) == ([], [True])
        assert len(os.listdir("/proc/self/fd")) == before

    def test_someone_else_removed_the_file(self, tmp_path: Path) -> None:
        ring = Ring.shared(str(tmp_path), PAGE)
        (tmp_path / ring.name).unlink()
        ring.unlink()
        assert ring.name == ""

    def test_no_such_directory(self, tmp_path: Path) -> None:
        with pytest.raises(RingError, match=r"cannot create .*No such file"):
            Ring.shared(str(tmp_path / "missing"), PAGE)

    @pytest.mark.parametrize("size", [1 << 62, 1 << 80])
    def test_sizes_that_no_machine_has(self, tmp_path: Path, size: int) -> None:
        with pytest.raises(RingError, match="lower ring_bytes"):
            Ring.shared(str(tmp_path), size)
        with pytest.raises(RingError, match="lower ring_bytes"):
            Ring.private(size)
        assert list(tmp_path.iterdir()) == []

    def test_no_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Docker's /dev/shm has 64 MB; a file that is merely sparse would be a SIGBUS later."""

        def full(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RingError, match=r"No space left on device.*docker run --shm-size"):
            Ring.shared(str(tmp_path), PAGE)
        assert list(tmp_path.iterdir()) == []
        assert len(os.listdir("/proc/self/fd")) == before

    def test_a_file_size_limit(self, tmp_path: Path) -> None:
        """A real refusal of the kernel, in a process of its own."""
        done = in_process(
            "import resource, signal\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
            "try:\n"
            f"    Ring.shared({str(tmp_path)!r}, 1 << 20)\n"
            "except RingError as error:\n"
            "    print(error)\n"
        )
        out, _ = done.communicate()
        assert "has no room for 1048576 bytes" in out
        assert list(tmp_path.iterdir()) == []


class TestDeadEngines:
    def waiting(self, folder: Path) -> subprocess.Popen[str]:
        """An engine that has made a ring and waits for a sidecar."""
        process = in_process(
            f"ring = Ring.shared({str(folder)!r}, 4096)\nprint(ring.name, flush=True)\nimport time\ntime.sleep(60)\n"
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith(PREFIX)
        return process

    def age(self, folder: Path) -> None:
        for path in folder.iterdir():
            os.utime(path, (1, 1))

    def test_the_ring_of_a_killed_engine_goes_with_the_next(self, tmp_path: Path) -> None:
        process = self.waiting(tmp_path)
        (left,) = tmp_path.iterdir()
        self.age(tmp_path)
        Ring.shared(str(tmp_path), PAGE).unlink()
        assert list(tmp_path.iterdir()) == [left], "its owner lives"
        end(process)
        Ring.shared(str(tmp_path), PAGE).unlink()
        assert list(tmp_path.iterdir()) == []

    def test_looking_for_dead_ones_keeps_nothing_open(self, tmp_path: Path) -> None:
        """Whether a file is removed, too young, or held by an engine that lives."""
        dead, living = self.waiting(tmp_path), self.waiting(tmp_path)
        end(dead)
        self.age(tmp_path)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            Ring.shared(str(tmp_path), PAGE).unlink()
        assert len(list(tmp_path.iterdir())) == 1
        assert len(os.listdir("/proc/self/fd")) == before
        end(living)

    def test_a_young_one_is_left_alone(self, tmp_path: Path) -> None:
        end(self.waiting(tmp_path))
        Ring.shared(str(tmp_path), PAGE).unlink()
        assert len(list(tmp_path.iterdir())) == 1

    def test_other_files_are_nobodys_business(self, tmp_path: Path) -> None:
        (tmp_path / "other").write_bytes(b"")
        (tmp_path / f"{PREFIX}folder").mkdir()
        (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "other")
        os.mkfifo(tmp_path / f"{PREFIX}pipe")
        self.age(tmp_path)
        before = sorted(tmp_path.iterdir())
        Ring.shared(str(tmp_path), PAGE).unlink()
        assert sorted(tmp_path.iterdir()) == before

    def test_nothing_is_left_of_one_killed_after_it_was_taken(self, tmp_path: Path) -> None:
        process = in_process(
            f"ring = Ring.shared({str(tmp_path)!r}, 4096)\nring.unlink()\nprint('taken', flush=True)\n"
            "import time\ntime.sleep(60)\n"
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        end(process)
        assert list(tmp_path.iterdir()) == []


def in_process(code: str) -> subprocess.Popen[str]:
    head = "from hsconnector.connector.ring import Ring\nfrom hsconnector.errors import RingError\n"
    return subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
