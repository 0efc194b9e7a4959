"""What is known of a capture: in the index, on the wire and in its shard."""

from __future__ import annotations

import enum
import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsconnector.capture.header import ShardHeader, build_header, parse_header
from hsconnector.capture.protocol import CaptureInfo, CaptureState, FailReason, Producer, RowsKind
from hsconnector.capture.record import (
    CaptureRecord,
    Finding,
    FindingKind,
    SlotStats,
    Verdict,
    describe,
    kept,
    metadata_of,
    record_of,
    record_of_header,
)
from hsconnector.errors import ShardError

ROOT = Path(__file__).parents[2]
ID = "0192f0c1d2e300000000000000000042"
ROW = {
    "capture_id": ID,
    "request_id": "chatcmpl-x-0123abcd",
    "state": "quarantined",
    "reason": None,
    "detail": "zero_rows rows [1]",
    "engine_id": "engine-1",
    "model": "org/model",
    "model_revision": "abc",
    "vllm_version": "0.32.0",
    "layer_ids": [0, 2],
    "num_layers": 2,
    "hidden_size": 8,
    "dtype": "bfloat16",
    "rows": "prompt",
    "num_rows": 3,
    "num_prompt_tokens": 3,
    "dataset": "d",
    "sample_id": "7",
    "tags": {"k": "v"},
    "lora": "l",
    "finish_reason": "stop",
    "content_hash": "c" * 64,
    "data_hash": "d" * 32,
    "created": 1000.25,
    "finished": 1001.5,
    "size": 4096,
    "mtime_ns": 1001500000000,
    "verdict": {
        "sound": False,
        "reasons": ["zero_rows"],
        "findings": [{"reason": "zero_rows", "count": 1, "rows": [1], "slots": [], "detail": ""}],
        "slots": [
            {
                "slot": 0,
                "layer_id": 0,
                "mean_norm": 1.5,
                "minimum": None,
                "maximum": 3.0,
                "zero_fraction": 0.0,
                "non_finite_rows": 0,
            }
        ],
    },
}
"""One capture as an index of version 2 holds it: a msgpack map by field name."""
RECORD = CaptureRecord(
    capture_id=ID,
    request_id="chatcmpl-x-0123abcd",
    state=CaptureState.QUARANTINED,
    detail="zero_rows rows [1]",
    engine_id="engine-1",
    model="org/model",
    model_revision="abc",
    vllm_version="0.32.0",
    layer_ids=(0, 2),
    num_layers=2,
    hidden_size=8,
    dtype="bfloat16",
    rows="prompt",
    num_rows=3,
    num_prompt_tokens=3,
    dataset="d",
    sample_id="7",
    tags={"k": "v"},
    lora="l",
    finish_reason="stop",
    content_hash="c" * 64,
    data_hash="d" * 32,
    created=1000.25,
    finished=1001.5,
    size=4096,
    mtime_ns=1001500000000,
    verdict=Verdict(
        False, ("zero_rows",), (Finding("zero_rows", 1, (1,)),), (SlotStats(0, 0, 1.5, None, 3.0, 0.0, 0),)
    ),
)


SINCE = {"weights_id": "", "kv_cache_dtype": "", "lora_weights_id": ""}
"""What an index of that time does not hold."""


def test_what_an_index_of_today_holds_is_read() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ROW), type=CaptureRecord) == RECORD
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(RECORD))
    assert written == {**ROW, **SINCE, "handle": "", "path": None}


def test_what_http_shows() -> None:
    shown = json.loads(json.dumps(describe(RECORD, "http://host:1", "/store/x")))
    expected: dict[str, Any] = {name: value for name, value in ROW.items() if name != "mtime_ns"} | SINCE
    assert shown == expected | {
        "object": "capture",
        "shape": [3, 2, 8],
        "handle": f"http://host:1/v1/captures/{ID}",
        "tensors": f"http://host:1/v1/captures/{ID}/tensors",
        "path": "/store/x",
    }
    read = msgspec.json.decode(json.dumps(shown), type=CaptureRecord)
    assert read == msgspec.structs.replace(RECORD, mtime_ns=0, handle=shown["handle"], path="/store/x")
    assert describe(RECORD, "", None, num_rows=2)["shape"] == [2, 2, 8]
    assert describe(RECORD, "", None, num_rows=0)["num_rows"] == 0


def test_a_newer_sidecar_may_know_more() -> None:
    newer = ROW | {
        "state": "failed",
        "reason": "eaten_by_bears",
        "weights_id": "w",
        "verdict": {"sound": False, "reasons": ["odd"], "findings": [{"reason": "odd", "count": 2, "slots": [1]}]},
    }
    record = msgspec.json.decode(json.dumps(newer), type=CaptureRecord)
    assert (record.reason, record.unsound, record.findings) == ("eaten_by_bears", ("odd",), "odd in slots [1]")


def test_phrases() -> None:
    assert RECORD.findings == "zero_rows in rows [1]"
    both = Verdict(False, (), (Finding("a", 1, (1, 2), (0,), "more"), Finding("b", 1)))
    assert both.phrase == "a in rows [1, 2] in slots [0] more; b"
    bare = CaptureRecord(capture_id=ID, state=CaptureState.QUARANTINED)
    assert (bare.findings, bare.unsound) == ("the verdict gives no reason", ())
    assert msgspec.structs.replace(bare, detail="d", verdict=Verdict(True)).findings == "d"


@pytest.mark.parametrize("state", CaptureState)
@pytest.mark.parametrize("reason", [None, *FailReason])
def test_what_states_and_reasons_mean(state: CaptureState, reason: str | None) -> None:
    """A record read from the index has the reason as a plain string."""
    record = msgspec.structs.replace(RECORD, state=state, reason=reason and str(reason.value))  # type: ignore[attr-defined]
    expired = state is CaptureState.EXPIRED
    assert record.final is (state is not CaptureState.RECEIVING)
    assert record.consumed is (expired and reason == "consumed")
    assert record.lost is (expired and reason == "store_error")
    assert (kept(record).verdict is None) is (expired and not record.lost)


PRODUCER = Producer(
    engine_id="engine-1",
    model="org/model",
    model_revision="abc",
    vllm_version="0.32.0",
    layer_ids=(0, 2),
    num_layers=2,
    hidden_size=8,
    dtype="bfloat16",
)


def info(**more: Any) -> CaptureInfo:
    given = {"capture_id": ID, "request_id": "cmpl-7-0-0123abcd", "num_prompt_tokens": 2, "created": 1000.25, **more}
    return CaptureInfo(**given)


def header_of(metadata: dict[str, str], rows: int = 3) -> ShardHeader:
    head = build_header(metadata, "bfloat16", (rows, 2, 8))
    return parse_header(memoryview(head), len(head) + rows * (2 * 8 * 2 + 8), "x")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    texts=st.fixed_dictionaries(dict.fromkeys(("request_id", "dataset", "sample_id", "lora"), TEXTS)),
    tags=st.dictionaries(TEXTS, TEXTS, max_size=3),
    rows=st.sampled_from(RowsKind),
    tokens=st.integers(0, 2**53),
)
def test_a_shard_tells_what_was_known_of_its_capture(
    texts: dict[str, str], tags: dict[str, str], rows: RowsKind, tokens: int
) -> None:
    about = info(**texts, tags=tags, rows=rows, num_prompt_tokens=tokens)
    header = header_of(metadata_of(PRODUCER, about))
    begun = record_of(PRODUCER, about)
    for complete in (True, False):
        found = record_of_header(header, CaptureState.READY, complete=complete)
        assert found == msgspec.structs.replace(begun, state=CaptureState.READY, num_rows=3, size=header.file_bytes)


def test_every_text_of_the_metadata_is_demanded_of_a_sidecar_and_of_nobody_else() -> None:
    metadata = metadata_of(PRODUCER, info())
    unread = {"format", "layer_ids", "dims", "last_layer_norm", "dtype"}
    for name in metadata.keys() - unread:
        header = header_of({key: value for key, value in metadata.items() if key != name})
        with pytest.raises(ShardError, match=f"KeyError\\('{name}'\\)"):
            record_of_header(header, CaptureState.READY, complete=True)
        if name not in ("capture_id", "num_layers"):
            assert record_of_header(header, CaptureState.READY, complete=False).capture_id == ID


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", "many"),
        ("num_layers", f"-{10**30}"),
        ("num_prompt_tokens", "-1"),
        ("num_prompt_tokens", str(2**53 + 1)),
        ("created", "-1"),
        ("created", "nan"),
        ("created", "soon"),
        ("tags", "[]"),
        ("tags", '{"a":1}'),
        ("layer_ids", f"[0,{10**30}]"),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_metadata_that_cannot_be(name: str, value: str, complete: bool) -> None:
    header = header_of({**metadata_of(PRODUCER, info()), name: value})
    with pytest.raises(ShardError):
        record_of_header(header, CaptureState.READY, complete=complete)


FAIL_REASONS = (
    *("aborted", "stalled", "overflow", "sidecar_unreachable", "sidecar_restarted", "sidecar_refused", "engine_lost"),
    *("engine_shutdown", "external_prefix", "cache_reset", "weights_changed", "unsupported_request"),
    *("layout", "bad_request", "bad_message", "unsound", "disk_full", "store_error", "consumed", "internal_error"),
)
FINDINGS = ("non_finite", "zero_rows", "zero_slots", "constant_rows", "equal_slots", "wrong_content_hash")


@pytest.mark.parametrize(("kinds", "strings"), [(FailReason, FAIL_REASONS), (FindingKind, FINDINGS)])
def test_reasons_are_stable_documented_and_given(kinds: type[enum.StrEnum], strings: tuple[str, ...]) -> None:
    """They are on the wire, in indexes, in metrics and in people's scripts: none changes, none is a dead letter."""
    assert tuple(kinds) == strings
    source = inspect.getsource(kinds)
    code = "".join(path.read_text() for folder in ("hsconnector", "server") for path in (ROOT / folder).rglob("*.py"))
    for kind in kinds:
        assert re.search(rf'{kind.name} = "{kind}"\n +"""[A-Z`]', source), f"{kind} has no docstring"
        assert f"{kinds.__name__}.{kind.name}" in code, f"nothing gives {kind}"
