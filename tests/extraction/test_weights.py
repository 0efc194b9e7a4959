"""Captures of other weights are as not there: under the same name in the same folder, or of another adapter's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsconnector.cli import main
from hsconnector.client import Client
from tests.extraction.fake_engine import FakeEngine
from tests.sidecar import SidecarThread

A, B, ADAPTER, ANOTHER = "a" * 64, "b" * 64, "c" * 64, "d" * 64
ROWS = 5


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [i, i + 1, 5]}) + "\n" for i in range(ROWS)))
    return path


@contextlib.contextmanager
def engine(sidecar: SidecarThread, weights_id: str, **adapters: str) -> Iterator[FakeEngine]:
    running = FakeEngine(sidecar.url, weights_id=weights_id)
    running.adapters = adapters
    try:
        yield running
    finally:
        running.end_stream()
        running.stop()


def extract(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["extract", *map(str, words), "--json"])
    said = capsys.readouterr()
    return (json.loads(said.out) if said.out else {}), said.err


def numbers(summary: dict[str, Any]) -> tuple[int, int, int]:
    return summary["captured"], summary["stored"], summary["of_other_weights"]


def test_other_weights_under_the_same_name_are_captured_anew(
    sidecar: SidecarThread, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vllm#57810: the folder's name is the same, the weights in it are not."""
    words = (data, "--sidecar", sidecar.url, "--engine-url")
    with engine(sidecar, A) as running:
        assert numbers(extract(capsys, *words, running.url)[0]) == (ROWS, 0, 0)
    with engine(sidecar, B) as running:
        summary, said = extract(capsys, *words, running.url)
        assert numbers(summary) == (ROWS, 0, ROWS)
        assert (
            f"the engine's weights are {B[:12]}; captures of others are not taken: {ROWS} of weights {A[:12]}" in said
        )
        assert numbers(extract(capsys, *words, running.url)[0]) == (0, ROWS, ROWS)
    with engine(sidecar, A) as running:
        assert numbers(extract(capsys, *words, running.url)[0]) == (0, ROWS, ROWS)


def test_captures_of_unknown_weights_are_taken_where_that_is_asked(
    sidecar: SidecarThread, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (data, "--sidecar", sidecar.url, "--engine-url")
    with engine(sidecar, "") as running:
        assert numbers(extract(capsys, *words, running.url, "--limit", 3)[0]) == (3, 0, 0)
    with engine(sidecar, A) as running:
        summary, _ = extract(capsys, *words, running.url, "--accept-unknown-weights")
        assert numbers(summary) == (ROWS - 3, 3, 0)
        summary, said = extract(capsys, *words, running.url)
        assert numbers(summary) == (3, ROWS - 3, 3) and "3 of weights unknown" in said


def test_an_adapters_own_weights_count_and_not_its_name(
    sidecar: SidecarThread, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vllm#49040: an adapter of a training step is loaded under the name of the one before."""
    words = (data, "--sidecar", sidecar.url, "--model", "adapter", "--engine-url")
    for adapter, expected in ((ADAPTER, (ROWS, 0)), (ADAPTER, (0, ROWS)), (ANOTHER, (ROWS, 0))):
        with engine(sidecar, A, adapter=adapter) as running:
            assert numbers(extract(capsys, *words, running.url)[0])[:2] == expected
    with Client(sidecar.url) as client:
        found = client.find()
    assert {record.lora_weights_id for record in found} == {ADAPTER, ANOTHER}
    left = [record for record in found if record.state == "ready"]
    assert len(left) == 2 * ROWS, "what was asked to know the adapter is removed"


def test_weights_that_change_during_a_run_fail_its_rows_by_name(
    sidecar: SidecarThread, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(sidecar, A) as running:
        running.changed_weights = B
        summary, said = extract(capsys, data, "--sidecar", sidecar.url, "--engine-url", running.url)
        assert (summary["captured"], summary["failed"]) == (0, ROWS)
        assert f"is of something else: weights {B[:12]!r} instead of {A[:12]!r}" in said


def test_two_engines_of_other_weights_are_refused(
    sidecar: SidecarThread, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(sidecar, A) as one, engine(sidecar, B):
        _, said = extract(capsys, data, "--sidecar", sidecar.url, "--engine-url", one.url)
        assert f"and weights {A[:12]}, {B[:12]}" in said and one.asked == []
