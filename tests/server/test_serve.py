"""The command as people start it."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import httpx
import pytest

from hsconnector.cli import main
from tests.server.engine import Engine
from tests.sidecar import start_sidecar_process

COMMAND = Path(sys.executable).with_name("hsconnector")


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stderr: str


def serve(*options: str, **variables: str) -> Done:
    """A command that does not get as far as listening, in this process: each start of one takes a second."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HSC_")}
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, environment | variables, clear=True),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        main(["serve", "--port=0", *options])
    return Done(int(ended.value.code or 0), said.getvalue())


def test_one_line_when_ready_and_exit_0_on_sigterm(tmp_path: Path) -> None:
    running = start_sidecar_process(tmp_path / "store")
    assert running.line == f"hsconnector sidecar on {running.url}, store {tmp_path / 'store'}"
    with Engine(running.url) as engine:
        assert engine.capture(3)
    assert running.stop() == 0


def test_a_busy_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve(f"--store={tmp_path / 'store'}", f"--port={port}")
    assert done.returncode == 3
    assert done.stderr == f"hsconnector: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("place", ["file/store", "/proc/none/store"])
def test_a_store_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    done = serve(f"--store={tmp_path / place}")
    assert done.returncode == 3
    assert done.stderr.startswith(f"hsconnector: the store {tmp_path / place} cannot be written: ")
    assert done.stderr.count("\n") == 1


def test_a_store_in_use(tmp_path: Path) -> None:
    running = start_sidecar_process(tmp_path / "store")
    done = serve(f"--store={tmp_path / 'store'}")
    assert done.returncode == 3
    assert "is in use by another sidecar" in done.stderr
    assert running.stop() == 0


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--host=0.0.0.0", "refusing to listen on 0.0.0.0 without a key"),
        ("--on-unsound=panic", "on_unsound = 'panic'"),
        ("--config=/none.toml", "is not a file"),
        ("--api-key-file=/none", "cannot be read"),
        ("--no-tcp", "nothing to listen on"),
    ],
)
def test_bad_settings_are_usage_errors(tmp_path: Path, option: str, words: str) -> None:
    done = serve(f"--store={tmp_path / 'store'}", option)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_options_win_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sidecar.toml"
    file.write_text('host = "10.0.0.1"')
    config = f"--config={file}"
    assert "refusing to listen on 10.0.0.1 " in serve(config).stderr
    assert "refusing to listen on 10.0.0.2 " in serve(config, HSC_HOST="10.0.0.2").stderr
    assert "refusing to listen on 10.0.0.3 " in serve(config, "--host=10.0.0.3", HSC_HOST="10.0.0.2").stderr


def test_an_option_that_says_what_the_default_is_wins_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve(f"--store={tmp_path / 'store'}", f"--port={port}", "--host=127.0.0.1", HSC_HOST="10.0.0.2")
    assert done.stderr.startswith(f"hsconnector: cannot listen on 127.0.0.1:{port}: ")


def test_beside_a_server_py_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("raise SystemExit('the wrong server')")
    command: list[str | Path] = [COMMAND, "serve", "--port=0", f"--store={tmp_path / 'file'}", "--on-unsound=panic"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "wrong server" not in done.stderr
    assert (done.returncode, "on_unsound" in done.stderr) == (2, True)


def test_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    running = start_sidecar_process(tmp_path / "store", uds=path)
    assert running.line == f"hsconnector sidecar on {running.url} and unix://{path}, store {tmp_path / 'store'}"
    assert path.stat().st_mode & 0o777 == 0o660
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://sidecar") as http:
        assert http.get("/v1/captures").status_code == 200
    taken = serve(f"--store={tmp_path / 'other'}", f"--uds={path}")
    assert (taken.returncode, "Address already in use" in taken.stderr) == (3, True)
    assert running.stop() == 0
    assert not path.exists()


def test_on_a_unix_socket_only(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    environment = {**os.environ, "HSC_STORE": str(tmp_path / "store"), "HSC_UDS": str(path), "HSC_TCP": "false"}
    running = subprocess.Popen(
        [COMMAND, "serve"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == f"hsconnector sidecar on unix://{path}, store {tmp_path / 'store'}\n"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://sidecar") as http:
        assert http.get("/health").status_code == 200
    running.terminate()
    running.communicate(timeout=30)
    assert running.returncode == 0
