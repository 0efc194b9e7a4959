"""Captures from the work queue: acknowledged at the step, read ahead within bounds, shared by many processes."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch.utils.data import DataLoader

from hsconnector.client.leases import LeaseRequest, Leases
from hsconnector.dataset import Acked, LeasedDataset
from hsconnector.errors import CaptureError, SettingsError, SidecarUnreachable
from tests.dataset.conftest import feed, states_of, tokens_of
from tests.dataset.trainers import train
from tests.proxy import Proxy
from tests.sidecar import SidecarThread, start_sidecar_process


def counts(url: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for entry in httpx.get(f"{url}/v1/leases").json()["data"]:
        total.update({name: value for name, value in entry.items() if isinstance(value, int)})
    return total


def names(samples: Any) -> list[str]:
    return [sample["sample_id"] for sample in samples]


def test_what_is_acknowledged_does_not_come_again(sidecar: SidecarThread) -> None:
    feed(sidecar.url, range(6))
    dataset = LeasedDataset(sidecar.url, dataset="d", idle_s=0.2, lease_captures=2)
    seen = []
    for sample in dataset:
        assert torch.equal(sample["hidden_states"], states_of(int(sample["sample_id"])))
        seen.append(sample["sample_id"])
        with dataset.step(sample):
            pass
    assert seen == ["0", "1", "2", "3", "4", "5"]
    assert list(dataset) == []
    assert names(LeasedDataset(sidecar.url, queue="epoch-2", idle_s=0.1)) == seen
    assert dataset.outstanding() == 0


def test_a_step_that_raises_gives_its_samples_back(sidecar: SidecarThread) -> None:
    feed(sidecar.url, range(2))
    dataset = LeasedDataset(sidecar.url, idle_s=0.2)
    with pytest.raises(ArithmeticError), dataset.step(list(dataset)):
        raise ArithmeticError
    again = list(dataset)
    assert names(again) == ["0", "1"]
    assert dataset.ack(again).acked == 2
    assert dataset.ack(again) == dataset.ack(again)
    assert dataset.ack(again).late == ()


def test_leaving_early_gives_back_what_was_read_ahead(sidecar: SidecarThread) -> None:
    feed(sidecar.url, range(6))
    dataset = LeasedDataset(sidecar.url, idle_s=0.2, lease_captures=4)
    samples = iter(dataset)
    first = next(samples)
    samples.close()  # type: ignore[attr-defined]
    assert dataset.outstanding() == 1
    assert names(LeasedDataset(sidecar.url, idle_s=0.1)) == ["1", "2", "3", "4", "5"]
    assert dataset.ack(first).acked == 1


def test_reading_ahead_is_bounded_in_bytes(sidecar: SidecarThread) -> None:
    feed(sidecar.url, range(20))
    size = max(each["size"] for each in httpx.get(f"{sidecar.url}/v1/captures").json()["data"])
    dataset = LeasedDataset(sidecar.url, idle_s=0.2, prefetch_bytes=3 * size, lease_captures=1)
    samples = iter(dataset)
    next(samples)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert counts(sidecar.url)["held"] <= 1 + 4 + 1, "given, read ahead, and one in hand"
    assert len(list(samples)) == 19


def test_masks_come_along(sidecar: SidecarThread, tmp_path: Path) -> None:
    feed(sidecar.url, [3, 4])
    path = tmp_path / "rows.jsonl"
    rows = [{"input_ids": tokens_of(n), "loss_mask": [0] * (len(tokens_of(n)) - 1) + [1]} for n in (4, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = list(LeasedDataset(sidecar.url, data=path, rows=(1, 4), layers=[2], idle_s=0.1))
    assert [sample["loss_mask"].tolist() for sample in samples] == [[0, 0, 0], [0, 0, 0]]
    assert torch.equal(samples[0]["hidden_states"], states_of(3)[1:4][:, [1]])
    assert list(LeasedDataset(sidecar.url, data=path, queue="q", idle_s=0.1))[1]["loss_mask"].sum() == 1
    (stranger,) = feed(sidecar.url, [5])
    with pytest.raises(CaptureError, match=rf"1 of 2 samples.*{stranger}.*no row of `data`"):
        list(LeasedDataset(sidecar.url, data=path, queue="r", idle_s=0.1))
    going_on = LeasedDataset(sidecar.url, data=path, queue="s", idle_s=0.1, max_bad=0.5, delete=True)
    assert (len(going_on), names(going_on)) == (2, ["3", "4"])
    assert [passed.capture_id for passed in going_on.passed_over] == [stranger]
    assert httpx.get(f"{sidecar.url}/v1/captures/{stranger}").json()["state"] == "ready", "another's shard stays"
    renamed = LeasedDataset(sidecar.url, data=path, dataset="else", queue="t", idle_s=0.1)
    assert (names(renamed), renamed.passed_over) == (["3", "4"], []), "rows come whatever their name"


def test_a_late_acknowledgement_is_told(sidecar: SidecarThread) -> None:
    (name,) = feed(sidecar.url, [1])
    dataset = LeasedDataset(sidecar.url, deadline_s=0.3, idle_s=0.1)
    (sample,) = dataset
    time.sleep(0.4)
    assert dataset.ack(sample).late == (name,)
    assert names(dataset) == ["1"]


def test_deleting_with_the_acknowledgement(sidecar: SidecarThread) -> None:
    (name,) = feed(sidecar.url, [1])
    dataset = LeasedDataset(sidecar.url, idle_s=0.1, delete=True)
    dataset.ack(list(dataset))
    assert httpx.get(f"{sidecar.url}/v1/captures/{name}").json()["state"] == "expired"


def test_a_capture_that_was_deleted_meanwhile_is_passed_over(sidecar: SidecarThread) -> None:
    ids = feed(sidecar.url, range(3))
    dataset = LeasedDataset(sidecar.url, local=False, idle_s=0.1)
    stop = threading.Event()
    lent = dataset._lent(LeaseRequest(consumer="c"), stop)
    first = next(lent)
    httpx.delete(f"{sidecar.url}/v1/captures/{ids[0]}").raise_for_status()
    assert dataset._read(first) is None
    stop.set()
    assert counts(sidecar.url)["acked"] == 1


def test_two_sidecars_of_which_one_dies(sidecar: SidecarThread, other: SidecarThread) -> None:
    """The other one's captures all come; then the loss is an error, not an endless retry (Model-Optimizer#1611)."""
    feed(sidecar.url, range(5))
    feed(other.url, range(5, 12))
    dataset = LeasedDataset([sidecar.url, other.url], idle_s=0.2, lease_captures=1, prefetch_bytes=0, max_failures=3)
    seen = []
    with pytest.raises(SidecarUnreachable, match="attempts in a row"):
        for sample in dataset:
            seen.append(sample["sample_id"])
            dataset.ack(sample)
            if len(seen) == 4:
                sidecar.stop()
    assert set(map(str, range(5, 12))) <= set(seen)
    assert len(seen) == len(set(seen))


def test_acknowledgements_wait_for_a_sidecar_that_is_away(sidecar: SidecarThread) -> None:
    feed(sidecar.url, range(2))
    dataset = LeasedDataset(sidecar.url, idle_s=0.1, max_failures=2)
    first, second = dataset
    sidecar.stop()
    assert dataset.ack(first).pending == 1
    with pytest.raises(SidecarUnreachable, match="2 attempts"):
        dataset.ack(second)


class Slow(LeasedDataset):
    """One whose first acknowledgement is answered, and heard of only once `heard` is set."""

    sent: threading.Event
    heard: threading.Event

    def _ack(self, index: int, lease_id: str, captures: Sequence[str], *, delete: bool = False) -> Mapping[str, str]:
        answers = super()._ack(index, lease_id, captures, delete=delete)
        if not self.sent.is_set():
            self.sent.set()
            self.heard.wait()
        return answers


@pytest.mark.parametrize("lease_captures", [1, 2])
def test_two_threads_acknowledge_at_one_time(sidecar: SidecarThread, lease_captures: int) -> None:
    """Of two leases and of one; the prefetch thread does so for what was deleted meanwhile."""
    feed(sidecar.url, range(2))
    dataset = Slow(sidecar.url, idle_s=0.1, lease_captures=lease_captures)
    dataset.sent, dataset.heard = threading.Event(), threading.Event()
    first, second = dataset
    with ThreadPoolExecutor(1) as pool:
        acking = pool.submit(dataset.ack, first)
        dataset.sent.wait()
        here = dataset.ack(second)
        dataset.heard.set()
        there = acking.result()
    assert (here.acked, here.late, there.acked, there.late, there.pending) == (1, (), 1, (), 0)
    assert counts(sidecar.url)["acked"] == 2


def test_acknowledgements_of_the_step_are_not_made_by_reading_ahead(sidecar: SidecarThread) -> None:
    """Its caller would not hear what became of them."""
    names_of = feed(sidecar.url, range(2))
    dataset = LeasedDataset(sidecar.url, local=False, idle_s=0.1, lease_captures=1, max_failures=5)
    lent = list(dataset._lent(LeaseRequest(consumer="c"), threading.Event()))
    first = dataset._read(lent[0])
    with Proxy(sidecar.url, drop=1) as away:
        back, dataset._queues[0] = dataset._queues[0], Leases(away.url)
        assert dataset.ack(first).pending == 1
        dataset._queues[0] = back
    httpx.delete(f"{sidecar.url}/v1/captures/{names_of[1]}").raise_for_status()
    assert dataset._read(lent[1]) is None
    assert counts(sidecar.url)["acked"] == 1
    assert dataset.ack([]) == Acked(acked=1)


def test_what_is_not_acknowledged_yet_travels(sidecar: SidecarThread) -> None:
    feed(sidecar.url, range(1))
    dataset = LeasedDataset(sidecar.url, idle_s=0.1)
    (sample,) = dataset
    sidecar.stop()
    assert dataset.ack(sample).pending == 1
    travelled = pickle.loads(pickle.dumps(dataset))
    assert travelled.ack([]).pending == 1


def test_a_spawned_worker_takes_leases_of_its_own(sidecar: SidecarThread) -> None:
    feed(sidecar.url, range(6))
    dataset = LeasedDataset(sidecar.url, consumer="run", rank=3, idle_s=0.2)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, collate_fn=list, multiprocessing_context="spawn")
    seen = []
    for batch in loader:
        with dataset.step(batch):
            seen += names(batch)
    assert sorted(seen) == ["0", "1", "2", "3", "4", "5"]
    (entry,) = httpx.get(f"{sidecar.url}/v1/leases").json()["data"]
    assert (entry["consumer"], entry["acked"], entry["held"]) == ("run/rank3/worker0", 6, 0)


@pytest.mark.parametrize("wrong", [{"idle_s": 5, "deadline_s": 5}, {"prefetch_bytes": -1}, {"lease_captures": 0}])
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        LeasedDataset("http://127.0.0.1:1", **wrong)


def test_four_processes_of_two_workers_each(tmp_path: Path) -> None:
    """One is killed while it holds captures, one raises, one finishes late, one repeats its acknowledgements.

    Every capture is acknowledged exactly once, and none is lent after that.
    """
    sidecar = start_sidecar_process(tmp_path / "store")
    log = tmp_path / "log"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.dataset.trainers"])
    try:
        ids = feed(sidecar.url, range(80))
        roles = ("repeats", "crashes", "raises", "finishes late")
        trainers = [context.Process(target=train, args=(sidecar.url, str(log), role)) for role in roles]
        for trainer in trainers:
            trainer.start()
        ids += feed(sidecar.url, range(80, 120))
        for trainer in trainers:
            trainer.join()
        assert [trainer.exitcode for trainer in trainers] == [0, -9, 0, 0]
        found = counts(sidecar.url)
        assert (found["acked"], found["held"]) == (120, 0)
        assert found["expired"] > 0, "the killed one held some"
        assert found["redelivered"] > 0
    finally:
        assert sidecar.stop() == 0
    events = [line.split() for line in log.read_text().splitlines()]
    assert Counter(name for what, name in events if what == "acked") == Counter(ids)
    done: set[str] = set()
    for what, name in events:
        assert name not in done, f"{what} {name} after its acknowledgement"
        if what == "acked":
            done.add(name)
