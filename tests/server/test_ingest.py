from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from hsconnector.capture.content import Content
from hsconnector.capture.protocol import (
    MAX_MESSAGES_BYTES,
    Batch,
    BatchAnswer,
    CaptureState,
    Commit,
    Fail,
    FailReason,
    Message,
    MessageAnswer,
    MessageStatus,
    Open,
    ProducerAccepted,
    Rows,
    Span,
    decode,
    encode_batch,
    new_capture_id,
    pack_token_ids,
)
from tests.examples import examples
from tests.server.engine import LAYERS, ROW, Engine, files, metric, opening, rows_of, until
from tests.sidecar import SidecarThread, start_sidecar

OK, DUPLICATE, FAILED = MessageStatus.OK, MessageStatus.DUPLICATE, MessageStatus.FAILED


def state_of(http: httpx.Client, capture_id: str) -> tuple[str, str | None]:
    found = http.get(f"/v1/captures/{capture_id}").json()
    return found["state"], found["reason"]


def test_rows_arrive_while_the_request_runs(engine: Engine, http: httpx.Client, sidecar: SidecarThread) -> None:
    values = rows_of(50)
    name = engine.open(num_prompt_tokens=50, dataset="d", sample_id="s", tags={"split": "train"})
    for start in range(0, 50, 20):
        assert engine.rows(name, values[start : start + 20], start) == MessageAnswer(OK, CaptureState.RECEIVING)
        seen = http.get(f"/v1/captures/{name}").json()
        assert (seen["state"], seen["num_rows"]) == ("receiving", min(start + 20, 50))
        assert files(sidecar) == [f".{name}.part"]
    assert engine.commit(name, range(50)) == MessageAnswer(OK, CaptureState.READY)
    assert files(sidecar) == [f"{name}.safetensors"]
    tensors = load(http.get(f"/v1/captures/{name}/tensors").content)
    assert (tensors["hidden_states"] == values).all()
    assert tensors["token_ids"].tolist() == list(range(50))


def test_the_content_hash_is_that_of_the_protocol(engine: Engine, http: httpx.Client) -> None:
    name = engine.capture(3, lora="adapter", mm_hashes=("ab",))
    expected = Content("model", "", LAYERS, "adapter", ("ab",)).hash_of(pack_token_ids(range(3)))
    assert http.get(f"/v1/captures/{name}").json()["content_hash"] == expected
    other = engine.capture(3, lora="adapter", mm_hashes=("ab",), expected_content_hash=expected)
    assert state_of(http, other) == ("ready", None)


def test_a_batch_sent_again_is_answered_again_and_changes_nothing(engine: Engine, http: httpx.Client) -> None:
    values = rows_of(4)
    repeated, rows = (
        metric(http, 'hsconnector_batches_total{result="repeated"}'),
        metric(http, "hsconnector_rows_total"),
    )
    opened = opening()
    name = opened.capture.capture_id
    batch = Batch(engine.accepted.producer_id, 0, (opened, Rows(name, 0, 4, Span(0, values.nbytes))))
    answers = {engine.post(batch, values.tobytes()).content for _ in range(3)}
    assert len(answers) == 1
    engine.seq = 0
    assert engine.commit(name, range(4)).state is CaptureState.READY
    assert metric(http, 'hsconnector_batches_total{result="repeated"}') == repeated + 2
    assert metric(http, "hsconnector_rows_total") == rows + 4


@pytest.mark.parametrize("seq", [2, 5, -1])
def test_a_gap_is_refused(engine: Engine, seq: int) -> None:
    engine.send()
    answer = engine.post(Batch(engine.accepted.producer_id, seq))
    assert answer.status_code == 409
    assert answer.json()["error"]["type"] == "sequence_gap"
    assert f"batch {seq} came where 1 was next" in answer.json()["error"]["message"]
    assert engine.send() == ()


def test_an_unknown_stream_is_told_to_register_again(http: httpx.Client) -> None:
    answer = http.post("/v1/ingest", content=b"".join(encode_batch(Batch("nobody", 0))))
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "producer_unknown")


def test_what_one_message_does_wrong_stays_with_its_capture(engine: Engine, http: httpx.Client) -> None:
    values = rows_of(4)
    first, second = opening(), opening()
    one, two = first.capture.capture_id, second.capture.capture_id
    span = Span(0, values.nbytes)
    messages: list[Message] = [first, second, Rows(one, 0, 4, span), Rows(two, 1, 4, span)]
    messages += [Commit(name, 4, pack_token_ids(range(4))) for name in (one, two)]
    answers = engine.send(*messages, payload=values.tobytes())
    assert [answer.status for answer in answers] == [OK, OK, OK, FAILED, OK, FAILED]
    assert answers[3].detail == answers[5].detail == "rows from 1 came where row 0 was next"
    assert state_of(http, one) == ("ready", None)
    assert state_of(http, two) == ("failed", "bad_message")


@pytest.mark.parametrize(
    "span",
    [
        Span(0, ROW * 4),
        Span(ROW, ROW * 3 + 1),
        Span(-1, ROW * 3),
        Span(1, ROW * 3),
        Span(ROW * 3, ROW * 3),
        Span(2**63, ROW * 3),
        Span(0, ROW * 3, shared=True),
        Span(-ROW, ROW * 3, shared=True),
    ],
)
def test_a_span_outside_the_payload(engine: Engine, sidecar: SidecarThread, span: Span) -> None:
    name = engine.open()
    count = 4 if span.length == ROW * 4 else 3
    (answer,) = engine.send(Rows(name, 0, count, span), payload=bytes(ROW * 3))
    assert (answer.status, answer.reason) == (FAILED, FailReason.BAD_MESSAGE)
    assert "span" in answer.detail
    assert files(sidecar) == []


def test_rows_had_before_are_duplicates(engine: Engine) -> None:
    values = rows_of(6)
    name = engine.open()
    engine.rows(name, values)
    assert engine.rows(name, values[:3]).status is DUPLICATE
    assert engine.commit(name, range(6)).state is CaptureState.READY
    assert engine.rows(name, values).status is DUPLICATE
    assert engine.commit(name, range(6)) == MessageAnswer(DUPLICATE, CaptureState.READY)
    assert engine.fail(name) == MessageAnswer(DUPLICATE, CaptureState.READY)
    assert engine.send(opening(name))[0] == MessageAnswer(DUPLICATE, CaptureState.READY)


@pytest.mark.parametrize(
    ("rows", "message", "words"),
    [
        (3, lambda name: Commit(name, 4, pack_token_ids(range(4))), "names 4 rows, 3 were received"),
        (3, lambda name: Commit(name, 3, bytes(23)), "3 rows need 24 bytes of token ids, the commit has 23"),
        (0, lambda name: Commit(name, 0, b""), "without rows"),
    ],
)
def test_a_commit_that_contradicts(
    engine: Engine, sidecar: SidecarThread, rows: int, message: object, words: str
) -> None:
    name = engine.open()
    if rows:
        engine.rows(name, rows_of(rows))
    (answer,) = engine.send(message(name))  # type: ignore[operator]
    assert answer.reason is FailReason.BAD_MESSAGE
    assert words in answer.detail
    assert files(sidecar) == []


def test_a_quarantined_commit_is_answered_with_what_is_unsound(engine: Engine, http: httpx.Client) -> None:
    """The engine's log says why; sent again, it is answered with the same."""
    name = engine.open()
    engine.rows(name, rows_of(5) * 0)
    answer = engine.commit(name, range(5))
    assert (answer.status, answer.state, answer.reason) == (OK, CaptureState.QUARANTINED, None)
    assert "zero_rows in rows [0, 1, 2, 3, 4]" in answer.detail
    assert answer.detail == http.get(f"/v1/captures/{name}").json()["detail"]
    assert engine.commit(name, range(5)).detail == answer.detail


def test_a_failure_keeps_its_reason(engine: Engine, http: httpx.Client, sidecar: SidecarThread) -> None:
    name = engine.open()
    engine.rows(name, rows_of(2))
    assert engine.fail(name) == MessageAnswer(OK, CaptureState.FAILED, FailReason.ABORTED, "for the test")
    assert engine.fail(name, FailReason.STALLED).reason is FailReason.ABORTED
    assert engine.rows(name, rows_of(2), 2).reason is FailReason.ABORTED
    assert engine.send(opening(name))[0].reason is FailReason.ABORTED
    assert state_of(http, name) == ("failed", "aborted")
    assert files(sidecar) == []


def test_messages_of_a_capture_never_opened(engine: Engine, http: httpx.Client) -> None:
    name = new_capture_id()
    for message in (Fail(name, FailReason.ABORTED), Rows(name, 0, 1, Span(0, 1)), Commit(name, 1, bytes(8))):
        (answer,) = engine.send(message)
        assert (answer.status, answer.reason) == (FAILED, FailReason.BAD_MESSAGE)
        assert "never opened" in answer.detail
    assert http.get(f"/v1/captures/{name}").status_code == 404


def test_a_capture_opened_again_in_another_stream(engine: Engine, sidecar: SidecarThread) -> None:
    name = engine.open()
    with Engine(sidecar.url) as second:
        (answer,) = second.send(opening(name))
        assert (answer.status, answer.reason) == (FAILED, FailReason.ENGINE_LOST)
        assert second.fail(name).reason is FailReason.ENGINE_LOST
    assert engine.rows(name, rows_of(1)).reason is FailReason.ENGINE_LOST
    assert files(sidecar) == []


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"capture_id": "../../../../tmp/x"}, "is not 32 lower-case hex digits"),
        ({"capture_id": "A" * 32}, "is not 32 lower-case hex digits"),
        ({"num_prompt_tokens": -1}, "num_prompt_tokens is -1"),
        ({"num_prompt_tokens": 2**63}, "num_prompt_tokens"),
        ({"created": float("nan")}, "created is nan"),
        ({"created": float("inf")}, "created is inf"),
        ({"dataset": "é" * 129}, "dataset has 258 bytes, the most is 256"),
        ({"sample_id": "x" * 257}, "sample_id has 257 bytes"),
        ({"tags": {"k" * 257: "v"}}, "the key of tag"),
        ({"tags": {f"{n}": "v" * 250 for n in range(20)}}, "the texts have"),
        ({"request_id": "x" * 70_000}, "the request id has more than"),
    ],
)
def test_a_capture_that_describes_itself_badly(
    engine: Engine, sidecar: SidecarThread, info: dict[str, Any], words: str
) -> None:
    (answer,) = engine.send(opening(**info))
    assert (answer.status, answer.reason) == (FAILED, FailReason.BAD_MESSAGE)
    assert words in answer.detail
    assert files(sidecar) == []


@pytest.mark.parametrize("request_id", ["../../x", "a/b", "..%2f", "\0", "x" * 4096, "сука-名前", "CON", "\n<script>"])
def test_strange_request_ids_are_captured_under_our_own_name(
    engine: Engine, http: httpx.Client, sidecar: SidecarThread, request_id: str
) -> None:
    around = sorted(str(path) for path in sidecar.store.parent.rglob("*") if sidecar.store not in path.parents)
    name = engine.capture(3, request_id=request_id)
    assert http.get("/v1/captures", params={"request_id": request_id}).json()["data"][0]["capture_id"] == name
    assert files(sidecar) == [f"{name}.safetensors"]
    assert sorted(str(path) for path in sidecar.store.parent.rglob("*") if sidecar.store not in path.parents) == around


def test_a_closed_stream_fails_what_is_open(engine: Engine, http: httpx.Client, sidecar: SidecarThread) -> None:
    done, name = engine.capture(3), engine.open()
    engine.rows(name, rows_of(2))
    engine.send(close=True)
    assert state_of(http, name) == ("failed", "engine_shutdown")
    assert state_of(http, done) == ("ready", None)
    assert files(sidecar) == [f"{done}.safetensors"]
    assert engine.post(Batch(engine.accepted.producer_id, engine.seq + 1)).status_code == 404


@pytest.mark.parametrize(
    "body", [b"", b"1234567", bytes(8), b"\xff" * 8, b"\xff" * 100, (5).to_bytes(8, "little") + b"\xc1" * 5]
)
def test_a_malformed_body(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/ingest", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "bad_message"


def test_a_body_over_the_limit_is_refused_before_it_is_sent(sidecar: SidecarThread) -> None:
    limit = sidecar.app.body_limit
    host, port = sidecar.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as plain:
        plain.sendall(f"POST /v1/ingest HTTP/1.1\r\nHost: localhost\r\nContent-Length: {limit + 1}\r\n\r\n".encode())
        assert plain.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_of_unknown_length_is_cut_off(tmp_path: Path) -> None:
    running = start_sidecar(tmp_path / "store", max_payload_bytes=1 << 16)
    try:
        body = (bytes(1 << 20) for _ in range(MAX_MESSAGES_BYTES // (1 << 20) + 2))
        answer = httpx.post(f"{running.url}/v1/ingest", content=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "body_too_large")
    finally:
        running.stop()


@pytest.mark.parametrize("first", [60, 5], ids=["at-once", "in-pieces"])
def test_a_body_that_keeps_growing_is_no_silence(tmp_path: Path, first: int) -> None:
    """Uploading takes three times as long as a producer may be silent; `first` bytes come before the first pause."""
    running = start_sidecar(tmp_path / "store", heartbeat_s=1.5)
    try:
        with Engine(running.url) as engine:
            name = engine.open()
            values = rows_of(2000)
            batch = Batch(engine.accepted.producer_id, 1, (Rows(name, 0, len(values), Span(0, values.nbytes)),))
            body = b"".join(encode_batch(batch, [values.tobytes()]))

            def slowly() -> Iterator[bytes]:
                yield body[:first]
                step = len(body) // 22 + 1
                for start in range(first, len(body), step):
                    time.sleep(0.2)
                    yield body[start : start + step]

            answer = engine.http.post("/v1/ingest", content=slowly(), headers={"content-length": str(len(body))})
            assert answer.status_code == 200, answer.text
            assert state_of(engine.http, name) == ("receiving", None)
            until(lambda: state_of(engine.http, name)[0] != "receiving")
            assert state_of(engine.http, name) == ("failed", "engine_lost"), "silence after the body is silence"
    finally:
        running.stop()


# ---- registering


@pytest.mark.parametrize(
    ("facts", "status", "kind", "words"),
    [
        ({"protocol": 2}, 409, "protocol_mismatch", "this sidecar speaks protocol 1, the producer 2"),
        ({"dtype": "float8_e4m3fn"}, 422, "bad_producer", "bfloat16, float16, float32"),
        ({"layer_ids": ()}, 422, "bad_producer", "must ascend"),
        ({"layer_ids": (2, 1)}, 422, "bad_producer", "must ascend"),
        ({"layer_ids": (1, 1)}, 422, "bad_producer", "must ascend"),
        ({"layer_ids": (-1, 1)}, 422, "bad_producer", "must ascend"),
        ({"layer_ids": (0, 1, 2, 3, 5)}, 422, "bad_producer", "within 0..4"),
        ({"hidden_size": 0}, 422, "bad_producer", "hidden_size is 0"),
        ({"hidden_size": 1 << 40}, 422, "bad_producer", "a row has"),
        (
            {"layer_ids": tuple(range(1025)), "num_layers": 2000},
            422,
            "bad_producer",
            "1025 layer ids, the most is 1024",
        ),
        ({"patience_s": 0.0}, 422, "bad_producer", "patience_s is 0.0"),
        ({"patience_s": float("nan")}, 422, "bad_producer", "patience_s is nan"),
        ({"patience_s": float("inf")}, 422, "bad_producer", "patience_s is inf"),
        ({"model": "x" * 5000}, 422, "bad_producer", "model has 5000 bytes"),
    ],
)
def test_a_producer_that_makes_no_sense(
    sidecar: SidecarThread, facts: dict[str, Any], status: int, kind: str, words: str
) -> None:
    with pytest.raises(RuntimeError) as refused:
        Engine(sidecar.url, **facts)
    assert str(refused.value).startswith('{"error":{"message":')
    assert kind in str(refused.value)
    assert f'"code":{status}' in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa1x\x01", b"\x91" * 5000])
def test_a_producer_that_is_not_one(http: httpx.Client, body: bytes) -> None:
    assert http.post("/v1/producers", content=body).status_code == 400


def test_a_newer_producer_with_fields_unknown_here_is_told_the_versions(http: httpx.Client) -> None:
    answer = http.post("/v1/producers", content=b"\x82\xa8protocol\x07\xa3new\x01")
    assert answer.status_code == 409
    assert "this sidecar speaks protocol 1, the producer 7" in answer.json()["error"]["message"]


# ---- shared memory


# ---- fuzz: whatever comes, every answer has a shape and no reader sees a wrong byte


NAMES = [new_capture_id() for _ in range(3)]
VALUES = rows_of(8)


@st.composite
def any_messages(draw: st.DrawFn) -> list[Message]:
    name = st.sampled_from(NAMES)
    span = st.builds(
        Span, st.integers(-5, 9).map(lambda n: n * ROW), st.integers(-1, 9).map(lambda n: n * ROW), st.booleans()
    )
    message = st.one_of(
        st.builds(lambda n: opening(n), name),
        st.builds(lambda n, s, c: Rows(n, s, c, Span(s * ROW, c * ROW)), name, st.integers(0, 7), st.integers(1, 8)),
        st.builds(Rows, name, st.integers(-1, 8), st.integers(-1, 8), span),
        st.builds(lambda n, c: Commit(n, c, pack_token_ids(range(c))), name, st.integers(0, 9)),
        st.builds(Commit, name, st.integers(-1, 9), st.binary(max_size=16)),
        st.builds(Fail, name, st.sampled_from(FailReason)),
    )
    return draw(st.lists(message, max_size=12))


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(any_messages(), min_size=1, max_size=5), cut=st.integers(0, 200), flip=st.integers(0, 255))
def test_any_messages_in_any_order(
    sidecar: SidecarThread, http: httpx.Client, batches: list[list[Message]], cut: int, flip: int
) -> None:
    renamed = {name: new_capture_id() for name in NAMES}
    payload = VALUES.tobytes()
    with Engine(sidecar.url) as engine:
        for messages in batches:
            sent = [_renamed(message, renamed) for message in messages]
            assert len(engine.send(*sent, payload=payload)) == len(sent)
            body = bytearray(b"".join(encode_batch(Batch(engine.accepted.producer_id, engine.seq, tuple(sent)))))
            whole = engine.http.post("/v1/ingest", content=bytes(body))
            assert len(decode(whole.content, BatchAnswer).messages) == len(sent)
            assert engine.http.post("/v1/ingest", content=bytes(body[: max(0, len(body) - 1 - cut)])).status_code == 400
            body[cut % len(body)] ^= flip
            assert engine.http.post("/v1/ingest", content=bytes(body)).status_code in (200, 400, 404, 409)
        engine.seq = _next_seq(sidecar, engine) - 1
        engine.send(close=True)
    for name in renamed.values():
        answer = http.get(f"/v1/captures/{name}/tensors?quarantined=1")
        if answer.status_code == 200:
            tensors = load(answer.content)
            assert (tensors["hidden_states"] == VALUES[: len(tensors["hidden_states"])]).all()
        else:
            assert answer.status_code in (404, 424)


def _next_seq(sidecar: SidecarThread, engine: Engine) -> int:
    """A flipped bit may have made a batch of the next number."""
    return sidecar.app._ingest.streams[engine.accepted.producer_id].last_seq + 1


def _renamed(message: Message, names: dict[str, str]) -> Message:
    if isinstance(message, Open):
        return opening(names[message.capture.capture_id])
    kind, facts = type(message), {name: getattr(message, name) for name in message.__struct_fields__}
    return kind(**facts | {"capture_id": names[message.capture_id]})


def test_the_answer_to_registering_is_complete(engine: Engine) -> None:
    accepted = engine.accepted
    assert accepted == ProducerAccepted(
        producer_id=accepted.producer_id, shm=False, heartbeat_s=15.0, max_payload_bytes=64 << 20
    )
