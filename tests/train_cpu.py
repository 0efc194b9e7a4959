"""A real `speculators train` on a machine without an accelerator, as a program:

    python tests/train_cpu.py METRICS hsconnector train …     through our command
    python tests/train_cpu.py METRICS speculators train …     theirs, without any code of ours

METRICS becomes a file with one JSON object a step. Two globals of the trainer are changed, because it takes an
accelerator for granted; nothing else is.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import torch


class Recorder(logging.Filter):
    """Writes what the trainer logs of each step. Its logging set-up drops foreign handlers, so this is a filter."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, Mapping) and ("train" in record.msg or "val" in record.msg):
            self._file.write(json.dumps(record.msg, default=str) + "\n")
            self._file.flush()
        return True


def main() -> None:
    metrics, program, *arguments = sys.argv[1:]
    patch_trainer()
    with Path(metrics).open("w") as file:
        logging.getLogger("speculators.metrics").addFilter(Recorder(file))
        if program == "hsconnector":
            from hsconnector.cli import main as run

            run(arguments)
        else:
            from speculators.cli import app

            app(arguments, standalone_mode=False)


def patch_trainer() -> None:
    """Before the trainer is imported: its device is the CPU, and there is nothing to wait for."""
    import speculators.train.distributed as distributed

    distributed.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *_arguments: None


if __name__ == "__main__":
    main()
