"""What a test needs that not every machine has, said by a mark of that name; without it the test is left out.

A module says so in its `pytestmark`, a test by a decorator. Where a module says it, the module is not even imported.
This is a plug-in of pytest, which `tests/conftest.py` names.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Need:
    """What the tests with a mark need: `about` in words, `is_there` looks for it on this machine."""

    about: str
    is_there: Callable[[], bool]
    everywhere: bool = True
    """Whether a machine that has to run everything must have it."""


def _packages(*names: str) -> Callable[[], bool]:
    return lambda: all(importlib.util.find_spec(name) for name in names)


def _may_mount() -> bool:
    """Root in a container may lack the right to mount, which `unshare` needs as well."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def _gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


NEEDS = {
    "engine": Need("vLLM, which is started", _packages("vllm")),
    "trainer": Need("speculators, hs-connectors and SpecForge", _packages("speculators", "hs_connectors", "specforge")),
    "root": Need("root, with the right to mount", _may_mount),
    "service": Need("services that HSC_TEST_SERVICES names", lambda: "HSC_TEST_SERVICES" in os.environ),
    "gpu": Need("a GPU", _gpu, everywhere=False),
}


def marks_of(module: Path) -> set[str]:
    """The marks in a test module's `pytestmark`, read without importing it."""
    for statement in ast.parse(module.read_bytes()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
            return {node.attr for node in ast.walk(statement.value) if isinstance(node, ast.Attribute)}
    return set()


def absent_package(error: BaseException | None) -> str | None:
    """The package that an import lacked, where it is one that may be absent: neither ours nor Python's."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    return None if package in ("hsconnector", "server", "tests") or importlib.util.find_spec(package) else package


@dataclass
class LeftOut:
    """Which tests were left out of a run, and why."""

    unwanted: frozenset[str] = frozenset()
    """Marks whose tests are not to be run, whatever is there."""
    reasons: dict[str, set[str]] = field(default_factory=dict)
    """Names of files and tests by the sentence that says why they are left out."""
    failing: bool = False
    """Whether something is left out that a machine that has to run everything must run."""
    _known: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := self.unwanted - NEEDS.keys():
            raise ValueError(f"--without knows {', '.join(NEEDS)}, not {', '.join(sorted(unknown))}")

    def because_of(self, marks: Iterable[str], name: str) -> bool:
        """Whether what is called `name` is left out because of one of its marks; remembers it then."""
        for mark in NEEDS.keys() & marks:
            if mark in self.unwanted:
                self.add(f"marked {mark}, left out by --without", name)
                return True
            if not self._is_there(mark):
                self.add(f"marked {mark}, which needs {NEEDS[mark].about}", name, NEEDS[mark].everywhere)
                return True
        return False

    def add(self, reason: str, name: str, failing: bool = False) -> None:
        """Remembers that something is left out."""
        self.reasons.setdefault(reason, set()).add(name)
        self.failing |= failing

    def lines(self) -> list[str]:
        """One line for each reason."""
        return [f"left out, {reason}: {_few(sorted(names))}" for reason, names in sorted(self.reasons.items())]

    def _is_there(self, mark: str) -> bool:
        if mark not in self._known:
            self._known[mark] = NEEDS[mark].is_there()
        return self._known[mark]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


LEFT_OUT = pytest.StashKey[LeftOut]()
_FINE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("needs", "what tests need that not every machine has")
    group.addoption("--without", default="", metavar="MARKS", help=f"leave out tests marked so, of {', '.join(NEEDS)}")
    group.addoption("--strict-needs", action="store_true", help="fail where a test is skipped or lacks what it needs")


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.stash[LEFT_OUT] = LeftOut(frozenset(filter(None, config.getoption("--without").split(","))))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    for mark, need in NEEDS.items():
        config.addinivalue_line("markers", f"{mark}: needs {need.about}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    name = str(collection_path.relative_to(config.rootpath))
    return config.stash[LEFT_OUT].because_of(marks_of(collection_path), name) or None


class Module(pytest.Module):
    """A test module that is left out where a package that it imports is not installed."""

    def collect(self) -> Any:
        try:
            return super().collect()
        except self.CollectError as error:
            package = absent_package(error.__cause__)
            if package is None:
                raise
            self.config.stash[LEFT_OUT].add(f"cannot be imported without {package}", self.nodeid, failing=True)
            return []


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if config.stash[LEFT_OUT].because_of(marks_on(item), item.nodeid)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def marks_on(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("--strict-needs"):
        report.outcome, report.longrepr = "failed", f"skipped, where everything has to run: {report.longreprtext}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    left_out = session.config.stash[LEFT_OUT]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = (
            {reason: sorted(names) for reason, names in left_out.reasons.items()},
            left_out.failing,
        )
    elif left_out.failing and session.config.getoption("--strict-needs") and session.exitstatus in _FINE:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With pytest-xdist every worker process collects, and each leaves out the same."""
    reasons, failing = getattr(node, "workeroutput", {}).get("left_out", ({}, False))
    for reason, names in reasons.items():
        for name in names:
            node.config.stash[LEFT_OUT].add(reason, name, failing)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[LEFT_OUT].lines():
        terminalreporter.write_line(line)
