"""Tests that lack what they need are left out with one line, and fail where everything has to run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.needs import NEEDS, Need

pytest_plugins = ["pytester"]

FRAMEWORKS = ("vllm", "torch", "transformers", "datasets", "speculators", "hs_connectors", "specforge")
WITHOUT_FRAMEWORKS = f"""
import importlib.abc, importlib.util, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {FRAMEWORKS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {FRAMEWORKS!r} else found(name, package)
sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def left_out(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("left out")]


def test_without_frameworks_the_rest_of_the_suite_is_collected() -> None:
    """Nothing stops the collection; files are left out by mark, or because of what they import."""
    words = [sys.executable, "-c", WITHOUT_FRAMEWORKS, "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "HSC_"))}
    done = subprocess.run(
        words, cwd=Path(__file__).parents[1], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in left_out(lines)][-3:] == [
        "left out, marked engine, which needs vLLM, which is started",
        "left out, marked gpu, which needs a GPU",
        "left out, marked trainer, which needs speculators, hs-connectors and SpecForge",
    ]
    assert "left out, cannot be imported without torch: tests/" in done.stdout
    files = {line.partition("::")[0] for line in lines if "::" in line}
    assert {"tests/connector/test_tracker.py", "tests/layout/test_rules.py", "tests/server/test_serve.py"} <= files
    assert not [file for file in files if file.startswith(("tests/engine/", "tests/gpu/", "tests/integrations/"))]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A suite of its own on a machine that has a trainer and nothing else that a test may need."""
    there = {"trainer"}
    for mark, need in NEEDS.items():
        is_there = (lambda: True) if mark in there else (lambda: False)
        monkeypatch.setitem(needs.NEEDS, mark, Need(need.about, is_there, need.everywhere))
    pytester.makeini("[pytest]\naddopts = --strict-markers -p tests.needs -p no:cacheprovider -p no:hypothesispytest")
    return pytester


def run(suite: pytest.Pytester, text: str, *arguments: str) -> pytest.RunResult:
    suite.makepyfile(test_it=text)
    return suite.runpytest_inprocess(*arguments)


MARKED = """
import pytest
@pytest.mark.gpu
def test_gpu(): pass
@pytest.mark.{mark}
def test_marked(): pass
def test_plain(): pass
"""


def test_what_a_test_needs_is_said_in_one_line(suite: pytest.Pytester) -> None:
    done = run(suite, MARKED.format(mark="engine"))
    assert done.ret == 0
    done.assert_outcomes(passed=1, deselected=2)
    assert left_out(done.outlines) == [
        "left out, marked engine, which needs vLLM, which is started: test_it.py::test_marked",
        "left out, marked gpu, which needs a GPU: test_it.py::test_gpu",
    ]


def test_what_is_there_is_run(suite: pytest.Pytester) -> None:
    run(suite, MARKED.format(mark="trainer")).assert_outcomes(passed=2, deselected=1)


def test_many_are_counted(suite: pytest.Pytester) -> None:
    text = "import pytest\n@pytest.mark.root\n@pytest.mark.parametrize('i', range(7))\ndef test_it(i): pass\n"
    (line,) = left_out(run(suite, text).outlines)
    assert line.endswith("test_it.py::test_it[0], test_it.py::test_it[1], test_it.py::test_it[2] and 4 more")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (MARKED.format(mark="engine"), 1),
        (MARKED.format(mark="gpu"), 0),
        (MARKED.format(mark="trainer"), 0),
        ("import no_such_package\n", 1),
        ("import pytest\npytestmark = pytest.mark.root\nraise RuntimeError\n", 1),
        ("import pytest\ndef test_it(): pytest.skip('no reason')\n", 1),
    ],
    ids=["engine", "gpu", "trainer", "import", "module", "skip"],
)
def test_where_everything_has_to_run_it_fails(suite: pytest.Pytester, text: str, code: int) -> None:
    assert run(suite, text).ret in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert run(suite, text, "--strict-needs").ret == code


def test_a_module_that_is_not_wanted_is_not_imported(suite: pytest.Pytester) -> None:
    text = "import pytest\npytestmark = [pytest.mark.timeout(5), pytest.mark.trainer]\nraise RuntimeError\n"
    done = run(suite, text, "--without", "engine,trainer")
    assert done.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert left_out(done.outlines) == ["left out, marked trainer, left out by --without: test_it.py"]


@pytest.mark.parametrize("text", ["import hsconnector.no_such_thing\n", "from json import no_such_name\n"])
def test_a_broken_import_is_an_error(suite: pytest.Pytester, text: str) -> None:
    assert run(suite, text).ret == pytest.ExitCode.INTERRUPTED


def test_a_mark_that_is_none_is_refused(suite: pytest.Pytester) -> None:
    done = run(suite, MARKED.format(mark="gpu"), "--without", "engines")
    assert done.ret == pytest.ExitCode.USAGE_ERROR and "not engines" in done.stderr.str()


def test_every_need_is_a_mark(suite: pytest.Pytester) -> None:
    assert list(NEEDS) == ["engine", "trainer", "root", "service", "gpu"]
    said = suite.runpytest_inprocess("--markers").stdout.str()
    for mark in NEEDS:
        assert re.search(rf"^@pytest\.mark\.{mark}: needs ", said, re.MULTILINE)
