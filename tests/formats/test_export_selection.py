"""`hsconnector export`: whose captures are taken, by content, weights and data-set name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.formats.running import export
from tests.formats.samples import DataSet, feed, make_rows
from tests.sidecar import SidecarThread

A, B = "a" * 64, "b" * 64


@pytest.fixture
def rows() -> DataSet:
    return make_rows(3)


@pytest.fixture
def data(rows: DataSet, tmp_path: Path) -> Path:
    return rows.write_lines(tmp_path / "rows.jsonl")


def manifest(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return found


def test_captures_of_two_weights_are_refused_until_one_is_chosen(
    rows: DataSet, data: Path, model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    """vllm#57810: equal tokens and names, other weights; the newest are not always the right ones."""
    old = feed(sidecar.url, model, enumerate(rows.token_ids), weights_id=A)
    feed(sidecar.url, model, enumerate(rows.token_ids[:2]), weights_id=B)
    for source in (sidecar.url, sidecar.store):
        for more in (("--data", data), ()):
            command = (source, "-f", "speculators", *more)
            code, said = export(*command, "-o", tmp_path / "none")
            assert code == 2 and f"3 of weights {A[:12]}, 2 of weights {B[:12]}" in said and "--weights-id" in said
            out = tmp_path / f"out-{len(more)}-{source == sidecar.url}"
            code, said = export(*command, "-o", out, "--weights-id", "aa")
            assert code == 0 and f"captures of other weights are left out: 2 of weights {B[:12]}" in said
            assert {entry["capture_id"] for entry in manifest(out)["files"]} == set(old)
            assert manifest(out)["description"]["weights_id"] == A
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "none", "--weights-id", "c")
    assert code == 2 and "weights id 'c' begins 0 of the ids that are here" in said


def test_the_same_weights_under_two_names_are_one(
    rows: DataSet, data: Path, model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    feed(sidecar.url, model, enumerate(rows.token_ids[:2]), weights_id=A)
    feed(sidecar.url, model, [(2, rows.token_ids[2])], weights_id=A, called="/a/copy/elsewhere")
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "out", "--data", data)
    assert code == 0 and "3 files written" in said


def test_rows_are_found_under_whatever_data_set_name(
    rows: DataSet, data: Path, model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    """A second name over stored rows exports them; a name alone chooses, and says what other names hold."""
    feed(sidecar.url, model, enumerate(rows.token_ids), dataset="first")
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "out", "--data", data, "--dataset", "second")
    assert code == 0 and "captures under other data-set names are taken too: 3 under 'first'" in said
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "none", "--dataset", "second")
    assert code == 1 and "there are captures under other data-set names: 3 under 'first'" in said
    feed(sidecar.url, model, [(0, rows.token_ids[0])], dataset="second")
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "one", "--dataset", "second")
    assert code == 0 and "1 files written" in said
    assert "captures under other data-set names are left out: 3 under 'first'" in said


def test_captures_that_are_no_rows_of_the_data_set_do_not_stand_in_the_way(
    rows: DataSet, data: Path, model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    """A store holds captures of another model too, and of other layers, all of other rows."""
    feed(sidecar.url, model, enumerate(rows.token_ids), weights_id=A)
    feed(sidecar.url, model, enumerate(make_rows(2, seed=5).token_ids), weights_id=B, called="org/other")
    feed(sidecar.url, model, enumerate(make_rows(2, seed=6).token_ids), weights_id=A, layer_ids=(1, 6))
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "out", "--data", data)
    assert code == 0 and "3 files written" in said, said
