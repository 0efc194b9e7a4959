"""One contract, kept by the in-memory twin and by HTTP to a real sidecar, over TCP and a Unix socket."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hsconnector.capture.protocol import (
    PROTOCOL_VERSION,
    Batch,
    BatchAnswer,
    CaptureInfo,
    CaptureState,
    Commit,
    Fail,
    FailReason,
    Message,
    MessageStatus,
    Open,
    Producer,
    ProducerAccepted,
    RingOffer,
    Rows,
    Span,
    encode,
    new_capture_id,
    pack_token_ids,
)
from hsconnector.connector.memory_transport import InMemoryTransport
from hsconnector.connector.ring import Ring
from hsconnector.connector.transport import HttpTransport, Transport
from hsconnector.errors import ProducerUnknown, SidecarRefused, SidecarUnreachable, TransportError
from tests.connector.network import (
    BadSidecar,
    Behave,
    answer_slowly,
    hang,
    reset,
    says,
    take_slowly,
    unused_port,
)
from tests.server.engine import rows_of
from tests.sidecar import SidecarThread, start_sidecar

LAYERS, HIDDEN = (0, 2, 4), 32
ROW = len(LAYERS) * HIDDEN * 4
RING = 1 << 16


def producer(**fields: Any) -> Producer:
    about = {
        "engine_id": "engine",
        "model": "model",
        "vllm_version": "0.32.0",
        "layer_ids": LAYERS,
        "num_layers": 4,
        "hidden_size": HIDDEN,
        "dtype": "float32",
    }
    return Producer(**{**about, **fields})


@dataclass
class Side:
    """A transport and how to look at what arrived at its other end."""

    transport: Transport
    look: Callable[[str], tuple[CaptureState, str | None]]
    shm_dir: Path

    def open(self, **fields: Any) -> Stream:
        return Stream(self, self.transport.open(producer(**fields)))


@dataclass
class Stream:
    """One stream, batch after batch."""

    side: Side
    accepted: ProducerAccepted
    seq: int = 0

    def send(self, *messages: Message, payload: bytes = b"", **fields: Any) -> BatchAnswer:
        answer = self.side.transport.ingest(
            Batch(self.accepted.producer_id, self.seq, messages, **fields), [memoryview(payload)]
        )
        self.seq += 1
        return answer


def opening(num_rows: int) -> Open:
    name = new_capture_id()
    return Open(CaptureInfo(capture_id=name, request_id=f"r-{name}", num_prompt_tokens=num_rows, created=1.0))


def whole(num_rows: int = 4, span: Span | None = None) -> tuple[str, tuple[Message, ...], bytes]:
    """A capture in one batch: its id, its messages and its bytes."""
    first = opening(num_rows)
    name = first.capture.capture_id
    data = rows_of(num_rows, seed=num_rows).tobytes()
    rows = Rows(name, 0, num_rows, span or Span(0, len(data)))
    return name, (first, rows, Commit(name, num_rows, pack_token_ids(range(num_rows)), "stop")), data


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarThread]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "shm").mkdir()
        started = start_sidecar(root / "store", uds=root / "socket", shm_dir=root / "shm")
        yield started
        started.stop()


@pytest.fixture(params=["memory", "tcp", "uds"])
def side(request: pytest.FixtureRequest, sidecar: SidecarThread, tmp_path: Path) -> Iterator[Side]:
    if request.param == "memory":
        memory = InMemoryTransport(ring=lambda: (tmp_path / "ring").read_bytes())
        yield Side(memory, lambda name: (memory.captures[name].state, memory.captures[name].reason), shm_dir=tmp_path)
        return
    address = sidecar.url if request.param == "tcp" else f"unix://{sidecar.settings.uds}"
    transport = HttpTransport(address)

    def look(name: str) -> tuple[CaptureState, str | None]:
        found = httpx.get(f"{sidecar.url}/v1/captures/{name}").json()
        return CaptureState(found["state"]), found["reason"]

    yield Side(transport, look, sidecar.settings.shm_dir)
    transport.close()


class TestContract:
    def test_open(self, side: Side) -> None:
        accepted = side.open().accepted
        assert accepted.protocol == PROTOCOL_VERSION
        assert accepted.heartbeat_s > 0
        assert accepted.max_payload_bytes >= 1 << 16
        assert not accepted.shm

    def test_rows_one_batch_after_the_other(self, side: Side) -> None:
        stream = side.open()
        name, (first, _, commit), data = whole(6)
        assert stream.send(first).messages[0].state is CaptureState.RECEIVING
        for start in (0, 2, 4):
            part = data[start * ROW : (start + 2) * ROW]
            (answer,) = stream.send(Rows(name, start, 2, Span(0, len(part))), payload=part).messages
            assert (answer.status, answer.state) == (MessageStatus.OK, CaptureState.RECEIVING)
        assert side.look(name) == (CaptureState.RECEIVING, None)
        (answer,) = stream.send(commit).messages
        assert (answer.status, answer.state) == (MessageStatus.OK, CaptureState.READY)
        assert side.look(name) == (CaptureState.READY, None)

    def test_two_captures_in_one_batch(self, side: Side) -> None:
        stream = side.open()
        one, messages, data = whole(4)
        other, (first, rows, commit), more = whole(5)
        rows = Rows(other, 0, 5, Span(len(data), len(more)))
        answers = stream.send(*messages, first, rows, commit, payload=data + more).messages
        assert [answer.status for answer in answers] == [MessageStatus.OK] * 6
        assert side.look(one) == side.look(other) == (CaptureState.READY, None)

    def test_a_failure_keeps_its_reason(self, side: Side) -> None:
        stream = side.open()
        first = opening(4)
        name = first.capture.capture_id
        answers = stream.send(first, Fail(name, FailReason.ABORTED, "half way")).messages
        assert answers[1].state is CaptureState.FAILED
        stream.send(Fail(name, FailReason.STALLED, "again"))
        assert side.look(name) == (CaptureState.FAILED, "aborted")

    def test_an_empty_batch_is_a_heartbeat(self, side: Side) -> None:
        stream = side.open()
        assert stream.send() == BatchAnswer(0)
        assert stream.send() == BatchAnswer(1)

    def test_a_batch_sent_again_changes_nothing(self, side: Side) -> None:
        stream = side.open()
        name, messages, data = whole(4)
        answer = stream.send(*messages, payload=data)
        stream.seq -= 1
        assert stream.send(*messages, payload=data) == answer
        assert side.look(name) == (CaptureState.READY, None)
        assert stream.send() == BatchAnswer(1)

    @pytest.mark.parametrize("seq", [2, 7])
    def test_a_gap_is_refused(self, side: Side, seq: int) -> None:
        stream = side.open()
        stream.send()
        stream.seq = seq
        with pytest.raises(SidecarRefused, match=f"batch {seq} came where 1"):
            stream.send()

    def test_an_unknown_producer(self, side: Side) -> None:
        with pytest.raises(ProducerUnknown):
            side.transport.ingest(Batch("nobody", 0), [])

    def test_after_close_the_producer_is_unknown(self, side: Side) -> None:
        stream = side.open()
        first = opening(4)
        stream.send(first)
        stream.send(close=True)
        assert side.look(first.capture.capture_id) == (CaptureState.FAILED, "engine_shutdown")
        with pytest.raises(ProducerUnknown):
            stream.send()

    def test_another_protocol(self, side: Side) -> None:
        with pytest.raises(SidecarRefused, match=f"{PROTOCOL_VERSION}.*99|99.*{PROTOCOL_VERSION}"):
            side.open(protocol=99)

    @pytest.mark.parametrize("start", [1, 3])
    def test_rows_that_do_not_follow(self, side: Side, start: int) -> None:
        stream = side.open()
        first = opening(9)
        name = first.capture.capture_id
        answers = stream.send(first, Rows(name, start, 1, Span(0, ROW)), payload=bytes(ROW)).messages
        assert (answers[1].status, answers[1].reason) == (MessageStatus.FAILED, FailReason.BAD_MESSAGE)
        assert side.look(name) == (CaptureState.FAILED, "bad_message")

    def test_rows_had_before(self, side: Side) -> None:
        stream = side.open()
        name, (first, rows, commit), data = whole(4)
        again = Rows(name, 1, 2, Span(0, 2 * ROW))
        assert stream.send(first, rows, again, commit, payload=data).messages[3].state is CaptureState.READY

    def test_rows_of_another_size(self, side: Side) -> None:
        stream = side.open()
        first = opening(4)
        rows = Rows(first.capture.capture_id, 0, 4, Span(0, 4 * ROW - 1))
        assert stream.send(first, rows, payload=bytes(4 * ROW)).messages[1].reason is FailReason.BAD_MESSAGE

    def test_a_commit_that_miscounts(self, side: Side) -> None:
        stream = side.open()
        name, (first, rows, _), data = whole(4)
        answers = stream.send(first, rows, Commit(name, 5, pack_token_ids(range(5))), payload=data).messages
        assert (answers[2].status, answers[2].reason) == (MessageStatus.FAILED, FailReason.BAD_MESSAGE)

    def test_a_commit_of_nothing(self, side: Side) -> None:
        """A prompt without tokens has no hidden states, and its capture must end all the same."""
        stream = side.open()
        first = opening(0)
        answers = stream.send(first, Commit(first.capture.capture_id, 0, b"", "stop")).messages
        assert (answers[1].status, answers[1].reason) == (MessageStatus.FAILED, FailReason.BAD_MESSAGE)

    def test_a_capture_that_was_never_opened(self, side: Side) -> None:
        (answer,) = side.open().send(Commit(new_capture_id(), 0, b"")).messages
        assert (answer.status, answer.reason) == (MessageStatus.FAILED, FailReason.BAD_MESSAGE)

    def test_opened_again_after_it_failed(self, side: Side) -> None:
        """What the ledger tells twice is answered twice."""
        stream = side.open()
        first = opening(4)
        fail = Fail(first.capture.capture_id, FailReason.STALLED, "")
        stream.send(first, fail)
        answers = stream.send(first, fail).messages
        assert answers[0].status is MessageStatus.FAILED
        assert side.look(first.capture.capture_id) == (CaptureState.FAILED, "stalled")

    def test_rows_in_shared_memory(self, side: Side) -> None:
        path = side.shm_dir / "ring"
        path.write_bytes(bytes(RING))
        path.chmod(0o640)
        name, messages, data = whole(4, Span(512, 4 * ROW, shared=True))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), RING) as memory:
            memory[512 : 512 + len(data)] = data
        stream = side.open(ring=RingOffer("ring", RING))
        assert stream.accepted.shm
        path.unlink()
        assert [answer.status for answer in stream.send(*messages).messages] == [MessageStatus.OK] * 3
        assert side.look(name) == (CaptureState.READY, None)

    def test_close_is_harmless_twice(self, side: Side) -> None:
        side.transport.close()
        side.transport.close()


class TestHttp:
    def test_shared_memory_that_the_sidecar_does_not_see(self, sidecar: SidecarThread, tmp_path: Path) -> None:
        ring = Ring.shared(str(tmp_path), RING)
        transport = HttpTransport(sidecar.url)
        accepted = transport.open(producer(ring=RingOffer(ring.name, RING)))
        transport.close()
        assert not accepted.shm
        assert "No such file" in accepted.shm_reason

    def test_a_wrong_key(self, tmp_path: Path) -> None:
        keyed = start_sidecar(tmp_path / "store", api_key="right")
        try:
            for key in ("", "wrong"):
                transport = HttpTransport(keyed.url, key)
                with pytest.raises(SidecarRefused, match="401"):
                    transport.open(producer())
                transport.close()
            transport = HttpTransport(keyed.url, "right")
            assert transport.open(producer()).heartbeat_s > 0
            transport.close()
        finally:
            keyed.stop()

    def test_an_address_with_a_path(self, sidecar: SidecarThread) -> None:
        transport = HttpTransport(f"{sidecar.url}/prefix/")
        with pytest.raises(SidecarRefused, match=r"/prefix/+v1/producers: 404"):
            transport.open(producer())
        transport.close()

    def test_a_large_payload_in_the_body(self, sidecar: SidecarThread) -> None:
        """Longer than a piece, and than what a socket takes at once."""
        transport = HttpTransport(sidecar.url)
        stream = Stream(Side(transport, lambda name: (CaptureState.READY, None), Path()), transport.open(producer()))
        _, messages, data = whole(20_000)
        assert stream.send(*messages, payload=data).messages[2].state is CaptureState.READY
        transport.close()

    @pytest.mark.parametrize(
        ("behave", "error", "text"),
        [
            (hang, SidecarUnreachable, "Timeout"),
            (reset, SidecarUnreachable, "Error"),
            (take_slowly, SidecarUnreachable, "Timeout"),
            (answer_slowly, SidecarUnreachable, "Timeout"),
            (says(500, b'{"error": {"message": "oh", "type": "t"}}'), SidecarUnreachable, "500 oh"),
            (says(507, b"full"), SidecarUnreachable, "507 full"),
            (says(429), SidecarUnreachable, "429"),
            (says(404, b'{"error": {"message": "m", "type": "producer_unknown"}}'), ProducerUnknown, "404 m"),
            (says(404, b"<html>"), SidecarRefused, "404 <html>"),
            (says(307, head=b"location: http://127.0.0.1:1/\r\n"), SidecarRefused, "307"),
            (says(200, b"garbage"), SidecarRefused, "something else"),
            (says(200, b"\x91" * 100_000), SidecarRefused, "something else"),
            (says(400, b"[" * 100_000), SidecarRefused, r"400 \[\["),
            (says(400, b"\xff\xfe\x00"), SidecarRefused, "400"),
        ],
    )
    def test_whatever_goes_wrong_is_one_of_three_errors(
        self, behave: Behave, error: type[TransportError], text: str
    ) -> None:
        with BadSidecar(behave) as bad:
            transport = HttpTransport(bad.url, timeout=0.6)
            with pytest.raises(error, match=text):
                transport.ingest(Batch("p", 0), [bytes(8 << 20)])
            transport.close()

    def test_nobody_listens(self) -> None:
        transport = HttpTransport(f"http://127.0.0.1:{unused_port()}", timeout=1)
        with pytest.raises(SidecarUnreachable, match=r"ConnectError.*refused"):
            transport.open(producer())

    def test_no_such_socket(self, tmp_path: Path) -> None:
        transport = HttpTransport(f"unix://{tmp_path}/none", timeout=1)
        with pytest.raises(SidecarUnreachable, match="No such file"):
            transport.open(producer())

    def test_an_answer_without_end(self) -> None:
        with BadSidecar(says(200, bytes(17 << 20))) as bad:
            transport = HttpTransport(bad.url, timeout=10)
            with pytest.raises(SidecarRefused, match="more than"):
                transport.open(producer())
            transport.close()

    def test_the_next_call_goes_through_after_a_bad_one(self) -> None:
        accepted = ProducerAccepted(producer_id="p", shm=False, heartbeat_s=1.0, max_payload_bytes=1)
        answers = iter([says(500), says(200, encode(accepted))])
        with BadSidecar(lambda connection, stop: next(answers)(connection, stop)) as bad:
            transport = HttpTransport(bad.url, timeout=10)
            with pytest.raises(SidecarUnreachable):
                transport.open(producer())
            transport.close()
            transport = HttpTransport(bad.url, timeout=10)
            assert transport.open(producer()) == accepted
            transport.close()
