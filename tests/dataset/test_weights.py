"""Captures of other weights are as not there in both data sets; which are meant is never guessed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hsconnector.dataset import CaptureDataset, LeasedDataset
from hsconnector.errors import SettingsError
from tests.dataset.conftest import feed, tokens_of
from tests.sidecar import SidecarThread

A, B = "a" * 64, "b" * 64


def rows_file(folder: Path, numbers: list[int]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": tokens_of(number)}) + "\n" for number in numbers))
    return path


def test_captures_by_index(sidecar: SidecarThread, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vllm#57810: equal tokens under one name, of two weights."""
    old = feed(sidecar.url, [1, 2], weights_id=A)
    feed(sidecar.url, [1], weights_id=B)
    data = rows_file(tmp_path, [2, 1])
    for source in (sidecar.url, sidecar.store):
        for given in (None, data):
            with pytest.raises(SettingsError, match=r"2 of weights a{12}, 1 of weights b{12}.*with weights_id="):
                CaptureDataset(source, data=given)
            with caplog.at_level(logging.WARNING, "hsconnector.dataset"):
                dataset = CaptureDataset(source, data=given, weights_id="aaa")
            assert {dataset[0]["capture_id"], dataset[1]["capture_id"]} == set(old)
            assert caplog.records[-1].getMessage() == f"captures of other weights are left out: 1 of weights {B[:12]}"


def test_captures_lent(sidecar: SidecarThread) -> None:
    feed(sidecar.url, [1, 2], weights_id=A)
    feed(sidecar.url, [1, 3], weights_id=B)
    with pytest.raises(SettingsError, match=r"of weights a{12}.*of weights b{12}.*weights_id="):
        next(iter(LeasedDataset(sidecar.url, idle_s=0.0)))
    lent = LeasedDataset(sidecar.url, weights_id="b", idle_s=0.0)
    assert [sample["sample_id"] for sample in lent] == ["1", "3"]


def test_weights_that_change_while_captures_are_lent(sidecar: SidecarThread) -> None:
    """A run that began with the only weights there were does not go on with those that come later."""
    feed(sidecar.url, [1], weights_id=A)
    samples = iter(LeasedDataset(sidecar.url, idle_s=5.0, lease_captures=1, prefetch_bytes=1))
    assert next(samples)["sample_id"] == "1"
    feed(sidecar.url, [2], weights_id=B)
    with pytest.raises(SettingsError, match=r"is of weights b{12}, those before it of a{12}: say whose"):
        next(samples)
