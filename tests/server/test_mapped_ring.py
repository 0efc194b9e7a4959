"""Memory that a producer shares: whatever it does to it, no wrong byte is stored and nothing crashes."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load

from hsconnector.capture.protocol import CaptureState, FailReason, MessageStatus, RingOffer, Rows, Span
from tests.server.engine import ROW, Engine, SharedFile, files, metric, rows_of
from tests.sidecar import SidecarThread

OK, FAILED = MessageStatus.OK, MessageStatus.FAILED


def test_rows_through_shared_memory(sidecar: SidecarThread, http: httpx.Client, ring: SharedFile) -> None:
    before = metric(http, 'hsconnector_row_bytes_total{via="shm"}')
    with Engine(sidecar.url, ring=ring.offer) as engine:
        assert (engine.accepted.shm, engine.accepted.shm_reason) == (True, "")
        ring.path.unlink()
        values = rows_of(100)
        data = values.tobytes()
        name = engine.open()
        ring.write(data[: 60 * ROW], 4096)
        engine.send(Rows(name, 0, 60, Span(4096, 60 * ROW, shared=True)))
        ring.write(data[60 * ROW :], 0)
        engine.send(Rows(name, 60, 40, Span(0, 40 * ROW, shared=True)))
        assert engine.commit(name, range(100)).state is CaptureState.READY
    assert (load(http.get(f"/v1/captures/{name}/tensors").content)["hidden_states"] == values).all()
    assert metric(http, 'hsconnector_row_bytes_total{via="shm"}') == before + len(data)


@pytest.mark.parametrize("offset", [(1 << 20) - ROW + 1, 1 << 20, 1 << 40, -1])
def test_a_span_outside_the_ring(sidecar: SidecarThread, ring: SharedFile, offset: int) -> None:
    with Engine(sidecar.url, ring=ring.offer) as engine:
        name = engine.open()
        (answer,) = engine.send(Rows(name, 0, 1, Span(offset, ROW, shared=True)))
        assert answer.reason is FailReason.BAD_MESSAGE
        assert "lies outside the ring of 1048576 bytes" in answer.detail


@pytest.mark.parametrize("size", [0, 1, 4096, ROW * 100 - 1])
def test_a_ring_that_shrinks_fails_the_capture_and_nothing_else(
    sidecar: SidecarThread, http: httpx.Client, ring: SharedFile, size: int
) -> None:
    with Engine(sidecar.url, ring=ring.offer) as engine:
        name, other = engine.open(), engine.open()
        ring.write(rows_of(100).tobytes())
        ring.shrink(size)
        (answer,) = engine.send(Rows(name, 0, 100, Span(0, ROW * 100, shared=True)))
        assert (answer.status, answer.reason) == (FAILED, FailReason.BAD_MESSAGE)
        assert "it has shrunk" in answer.detail
        assert engine.rows(other, rows_of(3)).status is OK
        assert engine.commit(other, range(3)).state is CaptureState.READY
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("size", [0, 5000])
def test_a_ring_that_shrinks_under_the_write(
    sidecar: SidecarThread, ring: SharedFile, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Between the check and the system call: EFAULT, or zeros from the rest of the last page."""
    real = os.pwrite
    with Engine(sidecar.url, ring=ring.offer) as engine:
        name = engine.open()
        ring.write(rows_of(100).tobytes())

        def shrink_then_write(fd: int, data: bytes, offset: int) -> int:
            ring.shrink(size)
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", shrink_then_write)
        count = 15 if size else 100
        (answer,) = engine.send(Rows(name, 0, count, Span(0, ROW * count, shared=True)))
        monkeypatch.undo()
        assert (answer.status, answer.reason) == (FAILED, FailReason.BAD_MESSAGE)
        assert "it has shrunk" in answer.detail
    assert files(sidecar) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../ring", "/dev/zero", "a/b", "x" * 300, "nul\0"])
def test_a_ring_has_a_bare_name(sidecar: SidecarThread, name: str) -> None:
    with Engine(sidecar.url, ring=RingOffer(name, 4096)) as engine:
        assert not engine.accepted.shm
        assert "bare file name" in engine.accepted.shm_reason
        assert "\n" not in engine.accepted.shm_reason


def test_rings_that_cannot_be_trusted(sidecar: SidecarThread, shm: Path, ring: SharedFile) -> None:
    (shm / "link").symlink_to(ring.path)
    (shm / "folder").mkdir()
    os.mkfifo(shm / "pipe")
    offers = {
        RingOffer("absent", 4096): "No such file",
        RingOffer("link", ring.size): "cannot be opened",
        RingOffer("folder", 4096): "not a regular file",
        RingOffer("pipe", 4096): "not a regular file",
        RingOffer("ring", ring.size + 1): "was offered with 1048577 bytes and has 1048576",
        RingOffer("ring", -1): "was offered with -1 bytes",
    }
    for offer, words in offers.items():
        is_refused(sidecar, offer, words)


@pytest.mark.root
def test_the_ring_of_another_user_cannot_be_trusted(sidecar: SidecarThread, shm: Path) -> None:
    (shm / "foreign").write_bytes(bytes(4096))
    os.chown(shm / "foreign", 65534, 65534)
    is_refused(sidecar, RingOffer("foreign", 4096), "belongs to user 65534 and group 65534")


def is_refused(sidecar: SidecarThread, offer: RingOffer, words: str) -> None:
    with Engine(sidecar.url, ring=offer) as engine:
        assert not engine.accepted.shm
        assert words in engine.accepted.shm_reason
        assert engine.capture(3)


def test_streams_let_their_memory_go(sidecar: SidecarThread, ring: SharedFile) -> None:
    def held() -> int:
        return sum(1 for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.resolve() == ring.path)

    before = held()
    with Engine(sidecar.url, ring=ring.offer) as engine:
        assert held() > before
        engine.send(close=True)
    assert held() == before
