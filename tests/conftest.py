from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sidecar import SidecarThread, start_sidecar

pytest_plugins = ["tests.needs", "tests.engine.runners"]

# Whatever a shell starts in the background ignores SIGINT, and so does all that it starts: tests of Ctrl-C would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarThread]:
    """A sidecar of the test's own; rooms that share one say so."""
    running = start_sidecar(tmp_path / "store")
    yield running
    running.stop()
