"""The id of the weights that the engine computes with, through the ways that they change."""

from __future__ import annotations

from pathlib import Path

import torch

from hsconnector.connector.current import Current
from hsconnector.connector.watch import Watch
from hsconnector.connector.weights import loaded_weights
from tests.connector.checkpoints import engine_config, tensors, write


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
