"""The id of the weights that the engine computes with, through the ways that they change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hsconnector.capture.protocol import CaptureInfo, CaptureState, FailReason
from hsconnector.connector.current import Current
from hsconnector.connector.memory_transport import InMemoryTransport
from hsconnector.connector.step import Failure
from hsconnector.connector.watch import Glance, Watch
from hsconnector.connector.weights import loaded_weights
from tests.connector.checkpoints import engine_config, tensors, write
from tests.connector.lab import Lab


def engine(folder: Path) -> tuple[torch.nn.Linear, Current]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return model, Current(engine_config(folder), Watch(model))


def test_at_start_it_is_the_checkpoints(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    _, current = engine(a)
    assert current.id == loaded_weights(engine_config(a)).id
    assert not current.renew()


def test_a_reset_of_the_caches_without_new_weights_changes_nothing(tmp_path: Path) -> None:
    _, current = engine(write(tmp_path / "a"))
    before = current.id
    assert [current.renew() for _ in range(3)] == [False] * 3
    assert current.id == before


def test_an_update_in_memory_has_an_id_of_its_own_and_the_old_weights_theirs(tmp_path: Path) -> None:
    model, current = engine(write(tmp_path / "a"))
    first, kept = current.id, model.weight.data.clone()
    ids = [first]
    for _ in range(3):
        model.weight.data.mul_(1.5)
        assert current.renew()
        ids.append(current.id)
    assert len(set(ids)) == 4
    assert "updated since" in current.weights.source
    model.weight.data.copy_(kept)
    assert current.renew() and current.id == first


def test_replicas_with_the_same_update_agree(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    engines = [engine(a), engine(a)]
    for model, current in engines:
        model.weight.data.mul_(1.5)
        assert current.renew()
    assert engines[0][1].id == engines[1][1].id


def test_an_update_in_memory_is_never_the_folders_whatever_lies_there_now(tmp_path: Path) -> None:
    """A trainer that sends weights also saves them, but perhaps not this step's."""
    a = write(tmp_path / "a", tensors(0))
    model, current = engine(a)
    model.weight.data.mul_(1.5)
    write(tmp_path / "b", tensors(1))
    (tmp_path / "b" / "model.safetensors").replace(a / "model.safetensors")
    assert current.renew() and current.id != loaded_weights(engine_config(a)).id


def test_a_reload_from_another_path_has_that_checkpoints_id(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", tensors(0)), write(tmp_path / "b", tensors(1))
    config = engine_config(a)
    model = torch.nn.Linear(8, 8)
    current = Current(config, Watch(model))
    config.model_config.model = str(b)
    model.weight.data.mul_(1.5)
    assert current.renew() and current.id == loaded_weights(engine_config(b)).id
    model.weight.data.mul_(1.5)
    assert current.renew() and current.id != loaded_weights(engine_config(b)).id


def test_where_the_model_cannot_be_seen_every_look_counts_as_an_update(tmp_path: Path) -> None:
    current = Current(engine_config(write(tmp_path / "a")), None)
    ids = [current.id]
    for _ in range(2):
        assert current.renew()
        ids.append(current.id)
    assert len(set(ids)) == 3


class Late(Glance):
    """A comparison that the device has not come to yet."""

    here = False

    def done(self) -> bool:
        return self.here


class Slow(Watch):
    """As on a GPU: what a glance finds is known some steps later."""

    def glance(self) -> Glance:
        self.last = Late(super().glance()._differs)
        return self.last


class Engine:
    """A worker that reads and sends, and weights that a test changes between its steps."""

    def __init__(self, folder: Path, kind: type[Watch] | None = Watch) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.config = engine_config(write(folder))
        self.watch: Any = kind(self.model) if kind is not None else None
        self.current = Current(self.config, self.watch)
        self.lab = Lab(InMemoryTransport(), weights=self.current)
        self.lab.sender.pump()

    def update(self) -> None:
        self.model.weight.data.mul_(1.5)

    def become(self, info: CaptureInfo) -> tuple[CaptureState, FailReason | None]:
        while self.lab.sender.pump() and not self.lab.sender.idle:
            pass
        capture = self.lab.twin.captures[info.capture_id]
        return capture.state, capture.reason

    def hit(self, info: CaptureInfo) -> CaptureInfo:
        self.lab.next.hits.add(info.request_id)
        return info


READY = (CaptureState.READY, None)
CHANGED = (CaptureState.FAILED, FailReason.WEIGHTS_CHANGED)


def test_what_is_open_fails_and_what_begins_is_of_the_new_weights(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "a")
    before = engine.lab.whole(40)
    open_now = engine.lab.begin(40)
    engine.lab.turn()
    engine.update()
    engine.lab.finish(open_now)
    after = engine.lab.begin(40)
    engine.lab.turn()
    engine.lab.finish(after)
    engine.lab.turn()
    assert [engine.become(info) for info in (before, open_now, after)] == [READY, CHANGED, READY]
    captures = engine.lab.twin.captures
    assert captures[before.capture_id].info.weights_id == ""
    assert captures[after.capture_id].info.weights_id == engine.current.id
    assert open_now.request_id in engine.lab.released


def test_a_capture_during_which_weights_changed_and_came_back_is_whole(tmp_path: Path) -> None:
    """No step ran on the others."""
    engine = Engine(tmp_path / "a")
    info = engine.lab.begin(40)
    engine.lab.turn()
    kept = engine.model.weight.data.clone()
    engine.update()
    engine.model.weight.data.copy_(kept)
    engine.lab.finish(info)
    engine.lab.turn()
    assert engine.become(info) == READY


def test_a_capture_waits_for_the_answer_of_its_last_look(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "a", Slow)
    first, second = engine.lab.begin(40), engine.lab.begin(40)
    engine.lab.turn()
    begun = engine.watch.last
    engine.lab.finish(first)
    engine.lab.turn()
    ended = engine.watch.last
    engine.lab.finish(second)
    begun.here = True
    engine.lab.turn()
    assert engine.become(first)[0] is CaptureState.RECEIVING
    ended.here = True
    engine.lab.turn()
    assert engine.become(first) == READY
    assert engine.become(second)[0] is CaptureState.RECEIVING
    engine.watch.last.here = True
    engine.lab.turn()
    assert engine.become(second) == READY
    assert engine.lab.worker._proofs == {} or max(engine.lab.worker._proofs.values()) <= engine.current.settled


def test_a_change_that_is_found_late_fails_what_ended_meanwhile(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "a", Slow)
    info = engine.lab.begin(40)
    engine.lab.turn()
    begun = engine.watch.last
    engine.update()
    engine.lab.finish(info)
    engine.lab.turn()
    ended = engine.watch.last
    begun.here = ended.here = True
    engine.lab.turn()
    assert engine.become(info) == CHANGED
    assert engine.lab.released == [info.request_id]


def test_rows_in_the_prefix_cache_are_of_old_weights_until_it_is_emptied(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "a")
    hit_before = engine.hit(engine.lab.begin(40))
    engine.lab.turn()
    engine.lab.finish(hit_before)
    engine.lab.turn()
    engine.update()
    stale, fresh = engine.hit(engine.lab.begin(40)), engine.lab.begin(40)
    engine.lab.turn()
    assert len(engine.lab.worker.reader) == 1
    still = engine.hit(engine.lab.begin(40))
    engine.lab.turn()
    engine.lab.next.emptied = True
    good = engine.hit(engine.lab.begin(40))
    engine.lab.turn()
    for info in (fresh, good):
        engine.lab.finish(info)
    engine.lab.turn()
    found = [engine.become(info) for info in (hit_before, stale, fresh, still, good)]
    assert found == [READY, CHANGED, READY, CHANGED, READY]
    assert "reset the prefix cache" in engine.lab.twin.captures[stale.capture_id].detail


def test_a_capture_that_fails_for_its_own_reason_keeps_it(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "a")
    engine.update()
    bad = engine.hit(engine.lab.begin(40))
    engine.lab.fail(bad, Failure(bad.request_id, FailReason.BAD_REQUEST, "tags"))
    engine.lab.turn()
    assert engine.become(bad) == (CaptureState.FAILED, FailReason.BAD_REQUEST)


@pytest.mark.parametrize("kind", [Watch, Slow])
def test_a_cache_that_is_emptied_with_the_update_holds_nothing_old(tmp_path: Path, kind: type[Watch]) -> None:
    engine = Engine(tmp_path / "a", kind)
    engine.update()
    engine.lab.next.emptied = True
    hit = engine.hit(engine.lab.begin(40))
    engine.lab.turn()
    if kind is Slow:
        engine.watch.last.here = True
        engine.lab.turn()
        hit = engine.hit(engine.lab.begin(40))
        engine.lab.turn()
        engine.watch.last.here = True
    assert not engine.current.stale
    engine.lab.finish(hit)
    engine.lab.turn()
    if kind is Slow:
        engine.watch.last.here = True
        engine.lab.turn()
    assert engine.become(hit) == READY


def test_a_cache_that_is_emptied_before_a_late_answer_holds_nothing_old(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "a", Slow)
    engine.update()
    engine.lab.begin(40)
    engine.lab.turn()
    late = engine.watch.last
    engine.lab.next.emptied = True
    engine.lab.turn()
    late.here = engine.watch.last.here = True
    engine.lab.turn()
    assert not engine.current.stale


def test_a_patch_that_no_glance_sees_is_found_where_the_caches_are_reset(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "a")
    engine.model.register_parameter("big", torch.nn.Parameter(torch.zeros(100_000)))
    engine.current = Current(engine.config, Watch(engine.model))
    engine.lab.worker._weights = engine.current
    before = engine.current.id
    engine.lab.turn()
    engine.model.get_parameter("big").data[5_000] = 1
    engine.lab.begin(40)
    engine.lab.turn()
    assert engine.current.id == before
    engine.lab.next.reset = True
    engine.lab.turn()
    assert engine.current.id != before


@pytest.mark.parametrize("watched", [True, False])
def test_a_reset_alone_is_an_update_only_where_the_model_cannot_be_seen(tmp_path: Path, watched: bool) -> None:
    engine = Engine(tmp_path / "a", Watch if watched else None)
    info = engine.lab.begin(40)
    engine.lab.turn()
    before = engine.current.id
    engine.lab.next.reset = True
    engine.lab.finish(info)
    engine.lab.turn()
    assert (engine.current.id == before) is watched
    assert engine.become(info) == (READY if watched else CHANGED)


def test_a_path_that_the_engine_reloads_from_is_seen_without_the_model(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "a", None)
    info = engine.lab.begin(40)
    engine.lab.turn()
    engine.config.model_config.model = str(write(tmp_path / "b", tensors(1)))
    engine.lab.finish(info)
    engine.lab.turn()
    assert engine.become(info) == CHANGED
    assert engine.current.id == loaded_weights(engine.config).id


def test_what_breaks_while_looking_for_the_model_ends_nothing(tmp_path: Path) -> None:
    class Runner:
        def get_model(self) -> torch.nn.Module:
            return Broken()

        def start(self, config: Any) -> Current:
            return Current.watched(config, "0.32.0")

    class Broken(torch.nn.Module):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no")

    config = engine_config(write(tmp_path / "a"))
    assert Runner().start(config).id == loaded_weights(config).id
    config.model_config = SimpleNamespace(model="x", revision=None, hf_config=None)
    assert "AttributeError" in Runner().start(config).weights.source
