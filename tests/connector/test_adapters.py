"""Whose adapter: ids of LoRA adapters, and what happens when their files change under an engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hsconnector.connector.adapters import Adapters, adapter_id
from hsconnector.errors import CheckpointError
from tests.connector.checkpoints import write_adapter


def request(path: Path | str, *, number: int = 1, in_place: bool = False, name: str = "sql") -> Any:
    """What the scheduler's request says of its adapter."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=in_place)


def test_a_copy_of_an_adapter_has_the_same_id_and_another_adapter_has_not(tmp_path: Path) -> None:
    a = write_adapter(tmp_path / "a", base_model_name_or_path="here", revision="1")
    b = write_adapter(tmp_path / "b", base_model_name_or_path="there")
    assert adapter_id(a) == adapter_id(b)
    assert adapter_id(a) != adapter_id(write_adapter(tmp_path / "c", seed=1))
    assert adapter_id(a) != adapter_id(write_adapter(tmp_path / "d", lora_alpha=32))


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no adapter in .*: none of adapter_model\.safetensors"):
        adapter_id(tmp_path)


def test_an_adapter_keeps_its_id_while_its_files_stay(tmp_path: Path) -> None:
    a = write_adapter(tmp_path / "a")
    adapters = Adapters()
    assert adapters.id_of(request(a)) == adapters.id_of(request(a)) == adapter_id(a)
    assert adapters.id_of(request(a, number=2, name="other name")) == adapter_id(a)


def test_a_path_that_is_pointed_elsewhere_is_another_adapter(tmp_path: Path) -> None:
    a, b = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", seed=1)
    adapters = Adapters()
    assert adapters.id_of(request(a)) != adapters.id_of(request(b)) == adapter_id(b)


def test_files_that_change_where_requests_load_in_place_are_read_again(tmp_path: Path) -> None:
    a = write_adapter(tmp_path / "a")
    adapters = Adapters()
    before = adapters.id_of(request(a, in_place=True))
    write_adapter(a, seed=1)
    assert before != adapters.id_of(request(a, in_place=True)) == adapter_id(a)


def test_files_that_change_under_a_loaded_adapter_leave_nothing_certain(tmp_path: Path) -> None:
    """The engine holds the old ones, until it has let them go for others: nobody can tell from outside."""
    a = write_adapter(tmp_path / "a")
    adapters = Adapters()
    before = adapters.id_of(request(a))
    write_adapter(a, seed=1)
    now = adapters.id_of(request(a))
    assert now not in (before, adapter_id(a))
    assert adapters.id_of(request(a)) == now
    assert Adapters().id_of(request(a)) == adapter_id(a)


def test_an_adapter_that_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    adapters = Adapters()
    gone = adapters.id_of(request(tmp_path / "gone"))
    assert gone == adapters.id_of(request(tmp_path / "gone")) != Adapters().id_of(request(tmp_path / "gone"))


def test_files_that_vanish_under_a_loaded_adapter_leave_nothing_certain(tmp_path: Path) -> None:
    a = write_adapter(tmp_path / "a")
    adapters = Adapters()
    before = adapters.id_of(request(a))
    shutil.rmtree(a)
    assert adapters.id_of(request(a)) != before
