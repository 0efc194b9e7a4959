"""The sender against real sidecars and networks that are not well; see `lab` and `network`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from hsconnector.capture.protocol import (
    Batch,
    BatchAnswer,
    CaptureInfo,
    CaptureState,
    Commit,
    FailReason,
    Open,
    Producer,
    ProducerAccepted,
    Rows,
    encode_batch,
    is_capture_id,
    new_capture_id,
)
from hsconnector.connector import sender as sender_module
from hsconnector.connector.memory_transport import InMemoryTransport
from hsconnector.connector.sender import MAX_LEDGER, MAX_QUEUED, Sender
from hsconnector.connector.settings import ConnectorSettings
from hsconnector.errors import SidecarRefused, SidecarUnreachable
from tests.connector.lab import LONG, ROW, Lab, Reader, producer, running, ship
from tests.connector.network import eventually
from tests.sidecar import SidecarThread, start_sidecar


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Moody(InMemoryTransport):
    """The in-memory twin on a bad day: what `trouble` holds is raised instead of taking a batch."""

    def __init__(self) -> None:
        super().__init__(heartbeat_s=6.0)
        self.trouble: Exception | None = None
        self.opened = 0
        self.seen: list[Batch] = []
        self.payloads: list[bytes] = []

    def open(self, producer: Producer) -> ProducerAccepted:
        self.opened += 1
        return super().open(producer)

    def ingest(self, batch: Batch, payload: Sequence[bytes | bytearray | memoryview]) -> BatchAnswer:
        encode_batch(batch, payload)
        self.seen.append(batch)
        self.payloads.append(b"".join(payload))
        if self.trouble is not None:
            raise self.trouble
        return super().ingest(batch, payload)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def moody(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab whose sender turns only when it is told to, and takes the first word for an answer."""
    monkeypatch.setattr(sender_module, "RETRY_S", 0.0)
    lab = Lab(Moody(), now=clock)
    lab.sender.pump()
    return lab


def twin(lab: Lab) -> Moody:
    assert isinstance(lab.twin, Moody)
    return lab.twin


class TestShipping:
    @pytest.mark.parametrize("transport", ["shm", "http"])
    def test_captures_larger_than_the_ring(self, sidecar: SidecarThread, reader: Reader, transport: str) -> None:
        with running(sidecar.url, transport=transport, shm_dir=str(sidecar.settings.shm_dir)) as lab:
            infos = [lab.whole(count) for count in (1, LONG, 16, 17, 5 * LONG)]
            lab.until(lambda: len(lab.released) == 5)
            for info in infos:
                lab.until(lambda info=info: reader.state(info) == "ready")  # type: ignore[misc]
                assert torch.equal(reader.rows(info), lab.expected(info))
            assert os.listdir(sidecar.settings.shm_dir) == []

    def test_rows_arrive_before_the_request_ends(self, sidecar: SidecarThread, reader: Reader) -> None:
        with running(sidecar.url) as lab:
            info = lab.begin(LONG)
            lab.turn()
            lab.readable(info, 100)
            lab.until(lambda: reader.record(info).get("num_rows") == 100)
            assert reader.state(info) == "receiving"

    def test_a_large_commit_is_a_batch_of_its_own(self, moody: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """Token ids count: a message block has a largest size."""
        monkeypatch.setattr(sender_module, "MAX_BATCH_BYTES", 4 * ROW + 33)
        for _ in range(6):
            moody.whole(4)
        ship(moody)
        assert [capture.state for capture in moody.twin.captures.values()] == [CaptureState.READY] * 6
        assert max(len(batch.messages) for batch in twin(moody).seen) <= 4

    def test_a_batch_in_the_body_is_no_larger_than_the_sidecar_takes(self, tmp_path: Path) -> None:
        small = start_sidecar(tmp_path / "store", max_payload_bytes=1 << 16)
        try:
            with running(small.url, ring_bytes=1 << 20) as lab, Reader(small.url) as reader:
                info = lab.whole(3 * LONG)
                lab.until(lambda: reader.state(info) == "ready")
                assert lab.worker._chunk_rows == (1 << 16) // ROW
        finally:
            small.stop()

    def test_odd_request_ids(self, sidecar: SidecarThread, reader: Reader) -> None:
        """`X-Request-Id` comes as the client wrote it."""
        odd = [
            "../../x",
            "a/b",
            "..%2f",
            "a\0b",
            "x" * 4096,
            "x" * 200_000,
            "ünï→🎉",
            "CON",
            "\ud800 half",
            "\r\n",
            " ",
        ]
        with running(sidecar.url) as lab:
            infos = [lab.whole(3, request_id=text) for text in odd]
            for info in infos:
                lab.until(lambda info=info: reader.state(info) == "ready")  # type: ignore[misc]
            assert sorted(lab.released) == sorted(odd)
            assert reader.record(infos[0])["request_id"] == "../../x"
            assert reader.record(infos[8])["request_id"] == r"\ud800 half"
        files = [path for path in (sidecar.store / "captures").rglob("*") if path.is_file()]
        assert {info.capture_id for info in infos} <= {path.stem for path in files}
        assert all(is_capture_id(path.stem) and path.suffix == ".safetensors" for path in files)

    def test_half_a_pair_in_other_texts(self, moody: Lab) -> None:
        info = moody.whole(3, lora="\udfff", mm_hashes=("\ud800",), dataset="\ud800", sample_id="\ud801")
        moody.sender.fail(moody.whole(3), FailReason.INTERNAL_ERROR, "\ud800" * 5000)
        ship(moody)
        assert moody.twin.captures[info.capture_id].state is CaptureState.READY


class TestLedger:
    def test_what_an_answering_but_slow_sidecar_has_not_heard_is_bounded(self, moody: Lab) -> None:
        """Beyond the bound a capture fails at once, and is told so when there is room again."""
        stream = moody.sender.stream
        assert stream is not None
        for index in range(MAX_QUEUED + 3 * MAX_LEDGER):
            moody.sender.begin(stream, capture(index))
        assert len(stream.queue) == MAX_QUEUED and len(stream.open) == MAX_QUEUED
        assert len(moody.sender._ledger) == MAX_LEDGER
        ship(moody)
        assert moody.sender.idle and len(stream.queue) == 0
        found = [c for c in moody.twin.captures.values() if c.reason is FailReason.OVERFLOW]
        assert len(found) == MAX_LEDGER
        assert all(f"{MAX_QUEUED} messages wait for the sidecar's answer" in c.detail for c in found)

    def test_a_long_outage_is_told_a_batch_at_a_time(self, moody: Lab, clock: Clock) -> None:
        """What begins after it does not wait for all of it to be told."""
        twin(moody).trouble = SidecarUnreachable("away")
        moody.whole(4)
        clock.seconds += 100
        moody.sender.pump()
        moody.turn()
        for index in range(MAX_LEDGER):
            moody.sender.begin(None, capture(index))
        twin(moody).trouble = None
        clock.seconds += 100
        moody.sender.pump()
        moody.turn()
        later = moody.whole(4)
        ship(moody)
        moody.turn()
        ship(moody)
        assert twin(moody).captures[later.capture_id].state is CaptureState.READY
        assert moody.sender.idle and len(twin(moody).captures) >= MAX_LEDGER

    def test_the_ledger_is_bounded(self, moody: Lab, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
        twin(moody).trouble = SidecarUnreachable("away")
        moody.whole(4)
        twin(moody).open = _unreachable  # type: ignore[method-assign]
        clock.seconds += 100
        moody.sender.pump()
        clock.seconds += 100
        moody.sender.pump()
        moody.turn()
        for index in range(MAX_LEDGER + 50):
            moody.sender.begin(moody.sender.stream, capture(index))
        assert len(moody.sender._ledger) == MAX_LEDGER
        del twin(moody).open
        twin(moody).trouble = None
        clock.seconds += 100
        with caplog.at_level(logging.WARNING, "vllm.hsconnector"):
            ship(moody)
        assert "51 older failures" in caplog.text
        failed = [c for c in moody.twin.captures.values() if c.reason is FailReason.SIDECAR_UNREACHABLE]
        assert len(failed) >= MAX_LEDGER
        assert moody.sender.idle

    def test_a_full_ledger_forgets_the_oldest(self, moody: Lab) -> None:
        for index in range(MAX_LEDGER + 3):
            moody.sender.begin(None, capture(index))
        ship(moody)
        told = moody.twin.captures
        assert [capture(index).capture_id in told for index in (0, 2, 3, MAX_LEDGER + 2)] == [False, False, True, True]

    def test_tries_are_further_and_further_apart(self, moody: Lab, clock: Clock) -> None:
        """A sidecar that takes the stream and refuses every batch is not asked a thousand times a second."""
        twin(moody).trouble = SidecarRefused("no such thing")
        moody.whole(4)
        for _ in range(1000):
            moody.sender.pump()
        assert twin(moody).opened <= 2
        for _ in range(1000):
            clock.seconds += 0.01
            moody.sender.pump()
        assert twin(moody).opened <= 15
        twin(moody).trouble = None
        clock.seconds += 10
        ship(moody)
        moody.whole(4)
        ship(moody)
        assert [c.state for c in moody.twin.captures.values()] == [CaptureState.FAILED, CaptureState.READY]

    def test_memory_of_an_unanswered_batch_is_not_used_again(self, moody: Lab, clock: Clock) -> None:
        """The sidecar may still be reading it, however long that takes."""
        lost = moody.sender.stream
        assert lost is not None
        twin(moody).trouble = SidecarUnreachable("slow")
        first = moody.whole(40)
        clock.seconds += 100
        moody.sender.pump()
        ring = lost.ring
        unanswered = bytes(ring.view(0, 40 * ROW))
        assert unanswered == twin(moody).payloads[-1]
        twin(moody).trouble = None
        clock.seconds += 100
        moody.turn()
        ship(moody)
        again = moody.sender.stream
        assert again is not None
        assert again.ring is not ring
        second = moody.whole(100)
        ship(moody)
        assert bytes(ring.view(0, 40 * ROW)) == unanswered
        states = moody.twin.captures
        assert (states[first.capture_id].state, states[second.capture_id].state) == ("failed", "ready")


def _unreachable(producer: Producer) -> ProducerAccepted:
    raise SidecarUnreachable("away")


def capture(index: int) -> CaptureInfo:
    return CaptureInfo(capture_id=f"{index:032x}", request_id=f"r{index}", num_prompt_tokens=1, created=0.0)


class TestStream:
    def test_heartbeats_at_a_third_of_the_deadline(self, moody: Lab, clock: Clock) -> None:
        assert not moody.sender.pump()
        clock.seconds += 1.9
        assert not moody.sender.pump()
        clock.seconds += 0.2
        assert moody.sender.pump()
        assert twin(moody).seen[-1].messages == ()
        assert not moody.sender.pump()

    def test_an_idle_engine_stays_known(self, tmp_path: Path) -> None:
        impatient = start_sidecar(tmp_path / "store", heartbeat_s=1.0)
        try:
            with running(impatient.url) as lab:
                stream = lab.sender.stream
                assert stream is not None
                eventually(lambda: stream.seq >= 5)
                assert lab.sender.stream is stream
        finally:
            impatient.stop()

    @pytest.mark.parametrize(
        ("detail", "said"),
        [("zero_rows: rows 3 to 4", "zero_rows: rows 3 to 4"), ("", "the sidecar's record of it says why")],
    )
    def test_the_log_says_why_a_capture_is_quarantined(
        self, clock: Clock, detail: str, said: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Judging(Moody):
            def ingest(self, batch: Batch, payload: Sequence[bytes | bytearray | memoryview]) -> BatchAnswer:
                answer = super().ingest(batch, payload)
                judged = [
                    msgspec.structs.replace(message, state=CaptureState.QUARANTINED, detail=detail)
                    if message.state is CaptureState.READY
                    else message
                    for message in answer.messages
                ]
                return msgspec.structs.replace(answer, messages=tuple(judged))

        lab = Lab(Judging(), now=clock)
        lab.sender.pump()
        info = lab.whole(4)
        with caplog.at_level(logging.WARNING, "vllm.hsconnector"):
            ship(lab)
        assert f"capture {info.capture_id} is quarantined: {said}" in caplog.messages

    def test_a_failure_of_one_capture_is_its_own(self, moody: Lab) -> None:
        good, bad = moody.begin(4), moody.begin(4)
        moody.turn()
        moody.sender.fail(bad, FailReason.STALLED, "no")
        moody.finish(good)
        moody.turn()
        ship(moody)
        states = moody.twin.captures
        assert (states[good.capture_id].state, states[bad.capture_id].reason) == ("ready", FailReason.STALLED)

    def test_a_failure_the_sidecar_never_heard_of(self, moody: Lab) -> None:
        moody.sender.fail(capture(1), FailReason.ABORTED, "early")
        ship(moody)
        assert moody.twin.captures[capture(1).capture_id].reason is FailReason.ABORTED
        stream = moody.sender.stream
        assert stream is not None
        assert (stream.open, stream.failing) == ({}, {})

    def test_what_the_sidecar_fails_is_told_to_the_worker(self, moody: Lab) -> None:
        info = moody.begin(40)
        moody.turn()
        ship(moody)
        moody.twin.captures[info.capture_id].state = CaptureState.FAILED
        moody.readable(info, 10)
        moody.turn()
        ship(moody)
        moody.turn()
        assert len(moody.worker.reader) == 0
        assert moody.sender.take_refused() == set()

    def test_nothing_is_kept_of_what_is_over(self, moody: Lab) -> None:
        for round_ in range(20):
            moody.whole(30)
            moody.sender.fail(capture(round_), FailReason.ABORTED, "")
            ship(moody)
            moody.turn()
        stream = moody.sender.stream
        assert stream is not None
        assert (stream.open, stream.failing, list(stream.queue), stream.ring.used) == ({}, {}, [], 0)
        assert not moody.sender._ledger
        assert not moody.sender._refused
        assert len(moody.worker.reader) == 0
        assert moody.worker._copies == {}

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"protocol": 2}, "speaks protocol 2"),
            ({"heartbeat_s": 0.0}, "makes no sense"),
            ({"heartbeat_s": float("nan")}, "makes no sense"),
            ({"max_payload_bytes": 0}, "makes no sense"),
            ({"shm": True}, "none was offered"),
        ],
    )
    def test_an_answer_that_makes_no_sense(
        self, fields: dict[str, object], text: str, caplog: pytest.LogCaptureFixture, clock: Clock
    ) -> None:
        class Confused(InMemoryTransport):
            def open(self, producer: Producer) -> ProducerAccepted:
                good = {"producer_id": "p", "shm": False, "heartbeat_s": 1.0, "max_payload_bytes": 1 << 20}
                return ProducerAccepted(**{**good, **fields})  # type: ignore[arg-type]

        lab = Lab(Confused(), now=clock)
        with caplog.at_level(logging.WARNING, "vllm.hsconnector"):
            assert not lab.sender.pump()
        assert text in caplog.text
        assert lab.sender.stream is None

    def test_answers_to_another_batch(self, clock: Clock) -> None:
        class Behind(InMemoryTransport):
            def ingest(self, batch: Batch, payload: object) -> BatchAnswer:
                return BatchAnswer(batch.seq - 1, ())

        lab = Lab(Behind(), now=clock)
        lab.sender.pump()
        clock.seconds += 1000
        lab.sender.pump()
        assert lab.sender.stream is None

    def test_shm_insisted_on(self, sidecar: SidecarThread, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with (
            caplog.at_level(logging.WARNING, "vllm.hsconnector"),
            running(sidecar.url, transport="shm", shm_dir=str(tmp_path)) as lab,
        ):
            eventually(lambda: lab.sender._said)
            info = lab.whole(4)
            assert lab.released == [info.request_id]
        assert "transport is 'shm' and shared memory is not to be had" in caplog.text

    def test_no_room_for_shared_memory(
        self, sidecar: SidecarThread, reader: Reader, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One line in the log, and rows travel in the body."""
        with (
            caplog.at_level(logging.INFO, "vllm.hsconnector"),
            running(sidecar.url, transport="auto", shm_dir="/does/not/exist") as lab,
        ):
            info = lab.whole(LONG)
            lab.until(lambda: reader.state(info) == "ready")
        assert caplog.text.count("no shared memory, rows travel in the body") == 1

    def test_no_staging_memory_at_all(self, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
        lab = Lab(InMemoryTransport(), now=clock, ring_bytes=1 << 62)
        with caplog.at_level(logging.WARNING, "vllm.hsconnector"):
            assert not lab.sender.pump()
        assert "lower ring_bytes" in caplog.text


class TestBugs:
    def test_a_bug_gives_up_the_stream_and_goes_on(self, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
        transport = Moody()
        lab = Lab(transport)
        lab.sender.start()
        good = lab.whole(4)
        lab.until(lambda: lab.sender.idle)
        transport.trouble = ZeroDivisionError("oh")
        info = lab.whole(4)
        eventually(lambda: "a bug in the sender" in caplog.text)
        transport.trouble = None
        lab.until(lambda: info.capture_id in transport.captures and lab.sender.idle)
        later = lab.whole(4)
        lab.until(lambda: lab.sender.idle)
        lab.worker.close(5)
        states = transport.captures
        assert states[good.capture_id].state is CaptureState.READY
        assert states[info.capture_id].reason in (FailReason.INTERNAL_ERROR, FailReason.SIDECAR_UNREACHABLE)
        assert states[later.capture_id].state is CaptureState.READY

    def test_what_cannot_be_sent_is_not_tried_for_ever(self) -> None:
        class Picky(Moody):
            def ingest(self, batch: Batch, payload: Sequence[bytes | bytearray | memoryview]) -> BatchAnswer:
                for message in batch.messages:
                    if isinstance(message, Open) and message.capture.request_id == "poison":
                        raise ZeroDivisionError("poison")
                return super().ingest(batch, payload)

        transport = Picky()
        lab = Lab(transport)
        lab.sender.start()
        lab.whole(4, request_id="poison")
        lab.until(lambda: lab.sender.stream is not None and lab.sender.stream.seq > 0, within_s=30)
        later = lab.whole(4)
        lab.until(lambda: later.capture_id in transport.captures and lab.sender.idle)
        lab.worker.close(5)
        assert transport.captures[later.capture_id].state is CaptureState.READY

    def test_a_bug_while_connecting_is_no_flood(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken(InMemoryTransport):
            def open(self, producer: Producer) -> ProducerAccepted:
                raise ZeroDivisionError("open")

        sender = Sender(producer(), ConnectorSettings(transport="http"), Broken())
        sender.start()
        time.sleep(0.5)
        sender.close(1)
        assert 1 <= caplog.text.count("a bug in the sender; the stream") <= 5


def test_commits_and_rows_are_in_order(moody: Lab) -> None:
    moody.whole(LONG)
    for _ in range(10):
        ship(moody)
        moody.turn()
    ship(moody)
    messages = [message for batch in twin(moody).seen for message in batch.messages]
    assert isinstance(messages[0], Open)
    assert isinstance(messages[-1], Commit)
    rows = [message for message in messages if isinstance(message, Rows)]
    assert rows[0].start == 0
    assert sum(message.count for message in rows) == LONG
    assert new_capture_id() > messages[0].capture.capture_id
