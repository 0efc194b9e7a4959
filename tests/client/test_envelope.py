from __future__ import annotations

import pickle

import pytest

from hsconnector.client.envelope import PASSING, error_of, read_denial
from hsconnector.errors import (
    CaptureError,
    CaptureExpired,
    CaptureFailed,
    CaptureNotFound,
    CaptureQuarantined,
    SidecarRefused,
    SidecarUnreachable,
)
from server.app import STATUS, envelope


@pytest.mark.parametrize("kind", [kind for kind in STATUS if issubclass(kind, CaptureError)])
def test_each_answer_about_a_capture_is_the_exception_it_was_in_the_sidecar(kind: type[CaptureError]) -> None:
    status, name = STATUS[kind]
    body = bytes(envelope(status, name, "it\nis so", capture_id="c", reason="aborted").body)
    error = error_of(status, body, url="http://h", capture="c")
    assert type(error) is kind and str(error) == "it is so"
    assert isinstance(error, CaptureError) and (error.capture_id, error.reason) == ("c", "aborted")


@pytest.mark.parametrize(
    ("status", "kind"), [(404, CaptureNotFound), (410, CaptureExpired), (424, CaptureFailed), (403, SidecarRefused)]
)
def test_without_the_envelope_the_status_decides(status: int, kind: type[Exception]) -> None:
    assert type(error_of(status, b"<html>no", url="http://h", capture="c")) is kind
    assert type(error_of(status, b"<html>no", url="http://h")) is SidecarRefused


def test_the_type_decides_and_the_text_does_not() -> None:
    body = bytes(envelope(424, "capture_failed", "was in quarantine: capture_quarantined").body)
    assert type(error_of(424, body, url="http://h", capture="c")) is CaptureFailed
    body = bytes(envelope(424, "capture_quarantined", "is unsound").body)
    assert type(error_of(424, body, url="http://h", capture="c")) is CaptureQuarantined


@pytest.mark.parametrize("status", sorted(PASSING))
def test_a_sidecar_that_cannot_now_is_not_one_that_says_no(status: int) -> None:
    error = error_of(
        status, bytes(envelope(status, "store_error", "the disk is full").body), url="http://h", capture="c"
    )
    assert type(error) is SidecarUnreachable and str(error) == f"http://h answered {status}: the disk is full"


def test_a_refusal_carries_the_name_of_its_reason() -> None:
    error = error_of(409, bytes(envelope(409, "lease_expired", "too late").body), url="http://h/v1/leases")
    assert isinstance(error, SidecarRefused) and error.kind == "lease_expired"
    assert str(error) == "http://h/v1/leases answered 409: too late"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.kind) == (str(error), error.kind)


@pytest.mark.parametrize(
    "body", [b"", b"plain", b"\xff\xfe", b"[" * 100_000, b'{"error": "text"}', b'{"error": {"message": 7}}', b"null"]
)
def test_other_bodies_are_quoted(body: bytes) -> None:
    denial = read_denial(body)
    assert denial.type is None and denial.message == body[:200].decode(errors="replace")


def test_fields_of_other_servers_do_not_hide_the_message() -> None:
    body = b'{"error": {"message": "a  b", "type": null, "param": null, "code": "x", "more": [1]}}'
    assert read_denial(body).message == "a b"
    assert len(read_denial(bytes(envelope(400, "bad_request", "x" * 5000).body)).message) == 1000
