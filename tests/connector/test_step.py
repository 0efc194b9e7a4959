from __future__ import annotations

import pickle

from hsconnector.capture.protocol import CaptureInfo, FailReason, RowsKind
from hsconnector.connector.connector import StepMetadata
from hsconnector.connector.step import Failure, Finish, Step, TableChange

INFO = CaptureInfo(
    capture_id="0" * 32,
    request_id="r\ud800/../\0",
    num_prompt_tokens=3,
    created=1.5,
    rows=RowsKind.PROMPT_AND_OUTPUT,
    tags={"k": "v"},
    mm_hashes=("m",),
)
FULL = Step(
    2,
    16,
    lost=["a"],
    begun=[INFO],
    failed=[Failure("b", FailReason.ABORTED, "half")],
    tables=[TableChange("r", (1, 2), start_over=True), TableChange("r", (3,))],
    readable=[("r", 7)],
    finished=[Finish("c", 2, bytes(16), "stop")],
    reset=True,
    hits={INFO.request_id},
)


def test_it_travels_pickled_as_vllm_sends_it() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        metadata = pickle.loads(pickle.dumps(StepMetadata(FULL), protocol))
        assert metadata.step == FULL
        assert type(metadata.step.begun[0].rows) is RowsKind


def test_an_empty_step_is_small() -> None:
    assert len(pickle.dumps(StepMetadata(Step(0, 16)))) < 300


def test_refused_news_holds_nothing_and_fails_what_begins() -> None:
    refused = FULL.refused("two groups")
    assert refused.begun == [INFO]
    assert refused.failed == [Failure(INFO.request_id, FailReason.LAYOUT, "two groups")]
    assert (refused.tables, refused.readable, refused.lost) == ([], [], [])
    assert refused.finished == FULL.finished
    assert refused.reset and refused.hits == FULL.hits
