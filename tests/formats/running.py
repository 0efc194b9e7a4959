"""The command line as a person runs it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from hsconnector.cli import main


def export(*arguments: str | Path) -> tuple[int, str]:
    """`hsconnector export`: exit code, and what it said."""
    said = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(said):
        try:
            main(["export", *map(str, arguments)])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, said.getvalue()
