"""Captures by index: order, masks, views, several sidecars, spawned workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch.utils.data import DataLoader

from hsconnector.dataset import CaptureDataset
from hsconnector.errors import CaptureNotFound, SettingsError, SidecarUnreachable
from tests.dataset.conftest import HIDDEN, LAYERS, feed, states_of, tokens_of
from tests.feeding import Feeder
from tests.shards import overwrite
from tests.sidecar import SidecarThread


def same(sample: dict[str, Any], number: int) -> bool:
    return bool(torch.equal(sample["hidden_states"], states_of(number))) and sample["token_ids"].tolist() == tokens_of(
        number
    )


def rows_file(folder: Path, numbers: list[int]) -> Path:
    path = folder / "rows.jsonl"
    masks = [[index % 2 for index, _ in enumerate(tokens_of(number))] for number in numbers]
    rows = [{"input_ids": tokens_of(n), "loss_mask": mask} for n, mask in zip(numbers, masks, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("local", [True, False])
def test_samples_in_the_order_of_their_ids(sidecar: SidecarThread, local: bool) -> None:
    feed(sidecar.url, [10, 9, 2, 1, 0])
    feed(sidecar.url, [3], dataset="else")
    dataset = CaptureDataset(sidecar.url, dataset="d", local=local)
    assert (dataset.sample_ids, len(dataset), dataset.layer_ids) == (["0", "1", "2", "9", "10"], 5, LAYERS)
    assert all(same(dataset[index], number) for index, number in enumerate([0, 1, 2, 9, 10]))
    assert same(dataset[-1], 10)
    with pytest.raises(IndexError):
        dataset[5]


def test_a_store_without_its_sidecar(sidecar: SidecarThread) -> None:
    feed(sidecar.url, range(4))
    sidecar.stop()
    dataset = CaptureDataset(sidecar.store, dataset="d")
    assert all(same(dataset[number], number) for number in range(4))


def test_rows_of_a_data_set_bring_their_masks(sidecar: SidecarThread, tmp_path: Path) -> None:
    """Row 0 of the data set is sample 7: index is the row, whatever the captures are called."""
    data = rows_file(tmp_path, [7, 3, 5])
    feed(sidecar.url, [3, 4, 5, 7])
    dataset = CaptureDataset(sidecar.url, data=data)
    assert [same(dataset[index], number) for index, number in enumerate([7, 3, 5])] == [True] * 3
    assert dataset[1]["loss_mask"].tolist() == [index % 2 for index, _ in enumerate(tokens_of(3))]
    view = CaptureDataset(sidecar.url, data=data, rows=(1, 3), layers=[5, 0])
    assert view.layer_ids == (0, 5)
    assert torch.equal(view[0]["hidden_states"], states_of(7)[1:3][:, [0, 2]])
    assert (view[0]["loss_mask"].tolist(), view[0]["token_ids"].tolist()) == ([1, 0], tokens_of(7)[1:3])


@pytest.mark.parametrize("local", [True, False])
def test_rows_are_found_by_content_whatever_sample_ids_are_shared(
    sidecar: SidecarThread, tmp_path: Path, local: bool
) -> None:
    """A row put in front of a data set: its capture has the sample id that another content got in the run before."""
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=HIDDEN) as feeder:
        for sample_id, number in (("0", 10), ("1", 11), ("2", 12), ("0", 20), ("0", 10)):
            name = feeder.capture(states_of(number), tokens_of(number), dataset="d", sample_id=sample_id)
    data = rows_file(tmp_path, [20, 10, 11, 12])
    for source in (sidecar.url, sidecar.store):
        dataset = CaptureDataset(source, data=data, local=local)
        assert [same(dataset[index], number) for index, number in enumerate([20, 10, 11, 12])] == [True] * 4
        assert dataset[1]["capture_id"] == name, "the newest of a content counts"
        assert dataset.sample_ids == ["0", "1", "2", "3"]


def test_rows_are_found_by_content_in_whatever_data_set(sidecar: SidecarThread, tmp_path: Path) -> None:
    feed(sidecar.url, [1, 2])
    feed(sidecar.url, [1], dataset="else")
    with pytest.raises(SettingsError, match="say which with dataset="):
        CaptureDataset(sidecar.url)
    dataset = CaptureDataset(sidecar.url, data=rows_file(tmp_path, [2, 1]))
    assert [same(dataset[index], number) for index, number in enumerate([2, 1])] == [True] * 2


def test_what_is_missing_is_named(sidecar: SidecarThread, tmp_path: Path) -> None:
    data = rows_file(tmp_path, [7, 3, 5])
    feed(sidecar.url, [7, 5])
    with pytest.raises(CaptureNotFound, match=r"1 of 3 samples have no ready capture: '1'"):
        CaptureDataset(sidecar.url, data=data)
    assert [sample["sample_id"] for sample in CaptureDataset(sidecar.url, data=data, missing="skip")] == ["7", "5"]
    with pytest.raises(CaptureNotFound, match="'8'"):
        CaptureDataset(sidecar.url, sample_ids=["5", "8"])
    assert same(CaptureDataset(sidecar.url, sample_ids=["7", "5"])[0], 7)


def test_captures_of_two_kinds_make_no_data_set(sidecar: SidecarThread) -> None:
    feed(sidecar.url, [1])
    feed(sidecar.url, [2], model="another")
    with pytest.raises(SettingsError, match=r"'another'.*choose with dataset= or model="):
        CaptureDataset(sidecar.url)
    assert len(CaptureDataset(sidecar.url, model="another")) == 1
    with pytest.raises(SettingsError, match=r"layers \[3\]"):
        CaptureDataset(sidecar.url, model="another", layers=[0, 3])


def test_the_newest_capture_of_a_sample_counts(sidecar: SidecarThread) -> None:
    feed(sidecar.url, [1, 2])
    newest = feed(sidecar.url, [1])
    dataset = CaptureDataset(sidecar.url)
    assert [dataset[index]["capture_id"] == newest[0] for index in range(2)] == [True, False]
    httpx.delete(f"{sidecar.url}/v1/captures/{newest[0]}").raise_for_status()
    older = dataset[0]
    assert same(older, 1) and older["capture_id"] != newest[0], "an older capture of the same content"


def test_one_of_two_sidecars_dies(sidecar: SidecarThread, other: SidecarThread) -> None:
    """Every id once, in the sampler's order, from two sidecars (asked for in Model-Optimizer#1509, #1611)."""
    for running in (sidecar, other):
        feed(running.url, range(12))
    dataset = CaptureDataset([sidecar.url, other.url], local=False)
    order = [5, 0, 11, 3, 8, 1, 10, 2, 9, 4, 7, 6]
    got = []
    for step, sample in enumerate(DataLoader(dataset, batch_size=None, sampler=order)):
        assert same(sample, order[step])
        got.append(int(sample["sample_id"]))
        if step == 4:
            sidecar.stop()
    assert got == order


def test_what_only_the_dead_one_holds_is_an_error_in_the_end(sidecar: SidecarThread, other: SidecarThread) -> None:
    """An error after some failures in a row, not an endless retry (Model-Optimizer#1611)."""
    feed(sidecar.url, range(3))
    feed(other.url, range(3, 6))
    dataset = CaptureDataset([sidecar.url, other.url], local=False, max_failures=2)
    assert len(dataset) == 6
    sidecar.stop()
    assert same(dataset[4], 4)
    with pytest.raises(SidecarUnreachable, match="2 attempts in a row failed"):
        dataset[1]


def test_a_damaged_copy_is_left_for_a_good_one(sidecar: SidecarThread, other: SidecarThread) -> None:
    (name,) = feed(sidecar.url, [4])
    feed(other.url, [4])
    path = sidecar.app.store.shard(name)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    overwrite(path, data)
    assert same(CaptureDataset([sidecar.url, other.url])[0], 4)


def test_spawned_workers(sidecar: SidecarThread) -> None:
    feed(sidecar.url, range(6))
    dataset = CaptureDataset(sidecar.url, local=False)
    assert same(dataset[0], 0), "a connection is open in this process"
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert [same(sample, number) for number, sample in enumerate(loader)] == [True] * 6


@pytest.mark.parametrize("sources", ["nowhere", [], "ftp://x"])
def test_sources_that_are_none(sources: Any) -> None:
    with pytest.raises(SettingsError):
        CaptureDataset(sources)
