"""Which of vLLM's two model runners the engines of a run take: `pytest --runner v1` or `v2`.

V2 is the default wherever Triton has a backend, so on every GPU; on a CPU it comes with the package in `v2/`. A process
has one or the other, as vLLM looks for Triton when it is imported. Tests that prove something of both carry the mark
`both_runners`. This is a plug-in of pytest, which `tests/conftest.py` names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["V2", "require_runner"]

_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


class _Chosen:
    def __bool__(self) -> bool:
        return os.environ.get(_VARIABLE) == "1"


V2 = _Chosen()
"""True where the engines of this process, and those that it starts, take the V2 runner."""


def require_runner(config: Any) -> None:
    """Raises where an engine with this `VllmConfig` would take the other runner."""
    if config.use_v2_model_runner is not bool(V2):
        raise RuntimeError(f"the engine takes the V{2 if config.use_v2_model_runner else 1} runner")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runner", choices=["v1", "v2"], default="v1", help="vLLM's model runner of all engines")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "both_runners: what it proves of engines is proved of both model runners")
    if config.getoption("--runner") == "v2":
        folder = str(Path(__file__).parent / "v2")
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        os.environ[_VARIABLE] = "1"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Nothing of both runners in what was chosen to be run is fine."""
    if session.config.getoption("--runner") == "v2" and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
