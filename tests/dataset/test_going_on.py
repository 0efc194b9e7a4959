"""Data sets go on: what is bad is passed over and named, a run that broke off is resumed, nothing stays leased."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hsconnector.dataset import CaptureDataset, LeasedDataset, Pack, even_steps, pad
from hsconnector.errors import CaptureError, CaptureNotFound, SettingsError, ShardError
from tests.dataset.conftest import feed, states_of, tokens_of
from tests.shards import overwrite
from tests.sidecar import SidecarThread

COUNT = 24
WORKERS = {"fork": 2, "spawn": 1}
"""Each spawned one imports torch."""


def damage(sidecar: SidecarThread, name: str) -> None:
    path = sidecar.app.store.shard(name)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    overwrite(path, data)


def rows_file(folder: Path, numbers: list[int]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": tokens_of(n)}) + "\n" for n in numbers))
    return path


def names(samples: Any) -> list[int]:
    return [int(sample["sample_id"]) for sample in samples]


class TestNames:
    def test_a_second_name_over_stored_rows(
        self, sidecar: SidecarThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        feed(sidecar.url, range(5), dataset="first")
        feed(sidecar.url, range(3, 8), dataset="second", model="another")
        data = rows_file(tmp_path, list(range(5)))
        with caplog.at_level(logging.INFO, "hsconnector.dataset"):
            dataset = CaptureDataset(sidecar.url, dataset="third", data=data, model="tiny")
        assert names(dataset) == [0, 1, 2, 3, 4]
        assert "5 of 5 rows stand under another data-set name than 'third': {'first': 5}" in caplog.text
        with pytest.raises(CaptureNotFound, match=r"no ready capture has the data-set name 'third'; .*'first': 5"):
            CaptureDataset(sidecar.url, dataset="third")
        leased = LeasedDataset(sidecar.url, dataset="third", data=data, model="tiny", idle_s=0.1)
        assert (names(leased), len(leased)) == ([0, 1, 2, 3, 4], 5)


class TestBadShards:
    def test_an_older_capture_of_the_same_content(self, sidecar: SidecarThread) -> None:
        feed(sidecar.url, [1])
        time.sleep(0.002)  # ids of one millisecond are in no order
        (newest,) = feed(sidecar.url, [1])
        damage(sidecar, newest)
        sample = CaptureDataset(sidecar.url)[0]
        assert torch.equal(sample["hidden_states"], states_of(1)) and sample["capture_id"] != newest

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_batches_go_on_and_name_it(self, sidecar: SidecarThread, method: str) -> None:
        ids = feed(sidecar.url, range(12))
        damage(sidecar, ids[3])
        sidecar.app.store.shard(ids[7]).unlink()
        dataset = CaptureDataset(sidecar.url, max_bad=0.2)
        loader = DataLoader(dataset, 4, num_workers=WORKERS[method], collate_fn=pad, multiprocessing_context=method)
        for _ in range(WORKERS[method]):
            got = [int(name) for batch in loader for name in batch["sample_id"]]
            assert got == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
        assert {passed.name: passed.capture_id for passed in dataset.passed_over} == {"3": ids[3], "7": ids[7]}
        with pytest.raises(ShardError):
            dataset[3]
        with pytest.raises(CaptureError, match=r"1 of 11 samples cannot be had, more than max_bad=0.05: '3'"):
            list(CaptureDataset(sidecar.url, max_bad=0.05))
        alone = DataLoader(dataset, batch_size=1, sampler=[3, 0], collate_fn=names)
        assert list(alone) == [[4], [0]], "another one stands in, so that every rank gets its batches"

    def test_a_queue_goes_on(self, sidecar: SidecarThread) -> None:
        ids = feed(sidecar.url, range(12))
        damage(sidecar, ids[0])
        dataset = LeasedDataset(sidecar.url, idle_s=0.1)
        assert names(dataset) == list(range(1, 12))
        assert [passed.capture_id for passed in dataset.passed_over] == [ids[0]]
        with pytest.raises(CaptureError, match=ids[0]):
            list(LeasedDataset(sidecar.url, queue="none", idle_s=0.1, max_bad=0))

    def test_a_limit_that_is_no_fraction(self) -> None:
        with pytest.raises(SettingsError, match="max_bad is 2"):
            LeasedDataset("http://127.0.0.1:1", max_bad=2)


class TestWorkers:
    def test_what_a_spawned_worker_is_sent_does_not_grow(self, sidecar: SidecarThread) -> None:
        ids = feed(sidecar.url, range(40))
        few, all_ = (CaptureDataset(sidecar.url, sample_ids=list(map(str, range(n)))) for n in (2, len(ids)))
        assert abs(len(ForkingPickler.dumps(all_)) - len(ForkingPickler.dumps(few))) < 50

    def test_slices_and_lengths(self, sidecar: SidecarThread) -> None:
        feed(sidecar.url, range(8))
        dataset = CaptureDataset(sidecar.url)
        part = dataset[2:5]
        assert (names(part), len(part), names(dataset[::-3])) == ([2, 3, 4], 3, [7, 4, 1])
        assert part.lengths.tolist() == [len(tokens_of(n)) for n in (2, 3, 4)]
        assert len(dataset[8:]) == 0
        assert CaptureDataset(sidecar.url, rows=(1, 3)).lengths.tolist() == [
            len(sample["token_ids"]) for sample in CaptureDataset(sidecar.url, rows=(1, 3))
        ]

    def test_as_hugging_face_data_set(self, sidecar: SidecarThread) -> None:
        feed(sidecar.url, range(4))
        found = CaptureDataset(sidecar.url).as_hf_dataset().select([2, 1])
        assert torch.equal(found[0]["hidden_states"], states_of(2))
        assert found[:]["sample_id"] == ["2", "1"]


class TestPasses:
    def test_a_pass_over_old_captures_ends_at_once(self, sidecar: SidecarThread) -> None:
        """Not after `idle_s`: with ten seconds to wait for, one answer of the sidecar that nothing is free will do."""
        feed(sidecar.url, [1])
        time.sleep(1.0)
        dataset = LeasedDataset(sidecar.url, idle_s=1.0)
        begin = dataset._queues[0].newest()
        assert begin is not None and dataset._is_quiet(1.0) and not dataset._is_quiet(3600.0)
        other = LeasedDataset(sidecar.url, consumer="other", idle_s=1.0)
        held = next(iter(other))
        assert not dataset._is_quiet(1.0), "another run may give it back"
        other.ack(held)
        assert names(dataset) == []

    def test_epochs_and_shuffled_windows(self, sidecar: SidecarThread) -> None:
        feed(sidecar.url, range(COUNT))
        orders = []
        for queue in ("a", "b"):
            dataset = LeasedDataset(sidecar.url, queue=queue, idle_s=0.1, shuffle=8, seed=3)
            for epoch in range(2):
                dataset.set_epoch(epoch)
                samples = list(dataset)
                assert dataset.ack(samples).acked == COUNT
                orders.append(names(samples))
        assert all(sorted(order) == list(range(COUNT)) for order in orders)
        assert orders[0] == orders[2] != orders[1] == orders[3]
        assert max(index - place for place, index in enumerate(orders[0])) < 8

    def test_batches_of_a_token_budget(self, sidecar: SidecarThread) -> None:
        feed(sidecar.url, range(COUNT))
        dataset = LeasedDataset(sidecar.url, idle_s=0.1, batch_tokens=20)
        seen = []
        for batch in DataLoader(dataset, batch_size=None, collate_fn=Pack(20)):
            assert batch["hidden_states"].shape[:2] == (1, 20) and batch["tokens_cut"] == 0
            with dataset.step(batch):
                seen += [int(name) for name in batch["sample_id"]]
        assert seen == list(range(COUNT)) and dataset.outstanding() == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_resumed_loader_gets_all_that_was_not_acknowledged(sidecar: SidecarThread, method: str) -> None:
    """What workers had read ahead for a loop that broke off comes again at once, not at its deadline."""
    feed(sidecar.url, range(COUNT))

    def loader(dataset: LeasedDataset) -> Any:
        return DataLoader(
            dataset, batch_size=2, num_workers=WORKERS[method], collate_fn=list, multiprocessing_context=method
        )

    first = LeasedDataset(sidecar.url, idle_s=0.2)
    done: list[int] = []
    for batch in loader(first):
        done += names(batch)
        first.ack(batch)
        if len(done) >= 6:
            break
    again = LeasedDataset(sidecar.url, idle_s=0.2)
    again.load_state_dict(first.state_dict())
    assert again.outstanding() == 0
    rest = [number for batch in loader(again) for number in names(batch)]
    assert sorted(done + rest) == list(range(COUNT))
    with again:
        assert again.outstanding() == len(rest)
    assert first.outstanding() == 0
    with pytest.raises(SettingsError, match="give it the same names"):
        LeasedDataset(sidecar.url, consumer="other").load_state_dict(first.state_dict())


@hypothesis.settings(max_examples=12, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data())
def test_each_sample_once_whatever_breaks(sidecar: SidecarThread, data: st.DataObject) -> None:
    """Ranks that end at any batch, with leases in hand, and are resumed: all good ones once, the bad ones named."""
    if not hasattr(sidecar, "fed"):
        sidecar.fed = feed(sidecar.url, range(COUNT), dataset="h")  # type: ignore[attr-defined]
        damage(sidecar, sidecar.fed[5])  # type: ignore[attr-defined]
    queue = f"q{time.monotonic_ns()}"
    ranks = data.draw(st.integers(1, 3), "ranks")
    settings: dict[str, Any] = {"queue": queue, "idle_s": 0.05, "lease_captures": data.draw(st.integers(1, 5))}
    settings |= {"shuffle": data.draw(st.sampled_from([0, 4])), "batch_tokens": data.draw(st.sampled_from([None, 15]))}
    trained: Counter[int] = Counter()
    bad: set[str] = set()
    for breaks in (*data.draw(st.lists(st.integers(0, 4), max_size=3), "breaks"), None):
        for rank in range(ranks):
            dataset = LeasedDataset(sidecar.url, rank=rank, **settings)
            dataset.load_state_dict(dataset.state_dict())
            for step, batch in enumerate(dataset):
                if step == breaks:
                    break
                with dataset.step(batch):
                    trained.update(names(batch if isinstance(batch, list) else [batch]))
            bad |= {passed.capture_id for passed in dataset.passed_over}
    last = LeasedDataset(sidecar.url, **settings)
    assert trained == Counter({number: 1 for number in range(COUNT) if number != 5})
    assert (bad, last.outstanding()) == ({sidecar.fed[5]}, 0)  # type: ignore[attr-defined]


def rank_of_two(rank: int, url: str, rendezvous: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    remainders: tuple[Literal["drop", "repeat"], ...] = ("drop", "repeat")
    for remainder in remainders:
        dataset = LeasedDataset(url, queue=remainder, rank=rank, idle_s=0.2, lease_captures=1, prefetch_bytes=0)
        loader = DataLoader(dataset, batch_size=3, collate_fn=list)
        seen = []
        for batch in even_steps(loader, remainder=remainder, release=dataset.release):
            with dataset.step(batch):
                seen.append(names(batch))
        dist.barrier()
        found[remainder] = (seen, dataset.outstanding())
    dist.destroy_process_group()
    results.put((rank, found))


def test_two_ranks_make_as_many_steps(sidecar: SidecarThread, tmp_path: Path) -> None:
    feed(sidecar.url, range(20))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=rank_of_two, args=(rank, sidecar.url, str(tmp_path / "meet"), results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
    for remainder in ("drop", "repeat"):
        steps = [found[rank][remainder][0] for rank in range(2)]
        assert len(steps[0]) == len(steps[1])
        assert found[0][remainder][1] == 0, "nothing stays leased"
        seen = Counter(number for rank in steps for batch in rank for number in batch)
        if remainder == "repeat":
            assert set(seen) == set(range(20))
        else:
            assert max(seen.values()) == 1


def test_without_a_process_group_batches_pass_through() -> None:
    assert list(even_steps([1, 2, 3])) == [1, 2, 3]
