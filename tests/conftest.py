from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from httpx._transports import default as _transports

from tests.sidecar import SidecarThread, start_sidecar

pytest_plugins = ["tests.needs", "tests.engine.runners"]

# Every client reads the certificate store, which takes 40 ms, and no test speaks TLS.
_transports.create_ssl_context = functools.cache(_transports.create_ssl_context)  # type: ignore[attr-defined]

# Whatever a shell starts in the background ignores SIGINT, and so does all that it starts: tests of Ctrl-C would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarThread]:
    """A sidecar of the test's own; rooms that share one say so."""
    running = start_sidecar(tmp_path / "store")
    yield running
    running.stop()
