"""Data sets and real `speculators train` runs for tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors.torch import save_file

from hsconnector.client import Client
from hsconnector.errors import CaptureExpired
from tests.models import END_TOKEN_ID

TARGETS = (0, 1, 3)
"""What the runs train on, of `tests.models.LAYER_IDS`; the last layer comes on top."""

STEPS = range(10, 21)
NOBODY = "http://127.0.0.1:9/v1"
_PROGRAM = Path(__file__).with_name("train_cpu.py")
_SHAPES = {
    "eagle3": (),
    "dflash": ("--block-size", "4", "--max-anchors", "32", "--mask-token-id", str(END_TOKEN_ID)),
}


def make_rows(seed: int, count: int = 24) -> list[list[int]]:
    """Prompts of 40 to 100 ordinary tokens of the tiny models."""
    source = random.Random(seed)
    return [[source.randrange(END_TOKEN_ID) for _ in range(source.randint(40, 100))] for _ in range(count)]


def write_dataset(path: Path, rows: Sequence[Sequence[int]]) -> Path:
    """As `speculators prepare-data` does."""
    masks = [[0] * 10 + [1] * (len(row) - 10) for row in rows]
    columns: dict[str, Any] = {"input_ids": rows, "loss_mask": masks, "seq_len": [len(row) for row in rows]}
    Dataset.from_dict(columns).with_format("torch").save_to_disk(path)
    return path


def write_plain_files(folder: Path, url: str, rows: Sequence[Sequence[int]]) -> Path:
    """The captures of these rows as `hs_{i}.safetensors`, by the tokens they hold."""
    folder.mkdir()
    with Client(url) as client:
        captures = []
        for record in client.find(state="ready"):
            with contextlib.suppress(CaptureExpired):
                captures.append(client.fetch(record))
    by_tokens = {tuple(capture.token_ids.tolist()): capture for capture in captures}
    for index, row in enumerate(rows):
        capture = by_tokens[tuple(row)]
        tensors = {"hidden_states": capture.hidden_states.contiguous(), "token_ids": capture.token_ids}
        save_file(tensors, folder / f"hs_{index}.safetensors")
    return folder


@dataclass(frozen=True)
class Run:
    """What a training run logged of its steps."""

    steps: list[dict[str, float]]
    output: str

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def error_records(self) -> float:
        return sum(step["error_records"] for step in self.steps)


def train(work: Path, name: str, program: str, kind: str, model: Path, data: Path, *more: str) -> Run:
    """A finished run of `hsconnector train` or `speculators train`; AssertionError with its output if it failed."""
    metrics = work / f"{name}.jsonl"
    done = subprocess.run(
        [
            sys.executable,
            str(_PROGRAM),
            str(metrics),
            program,
            *training_arguments(work, name, kind, model, data, more),
        ],
        cwd=work,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    logged = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Run([entry["train"] for entry in logged if "train" in entry], done.stdout)


def training_arguments(
    work: Path, name: str, kind: str, model: Path, data: Path, more: Sequence[str] = ()
) -> list[str]:
    """Twelve steps or so, small enough for a CPU."""
    return [
        "train",
        *("--verifier-name-or-path", str(model), "--data-path", str(data), "--speculator-type", kind),
        *("--target-layer-ids", *map(str, TARGETS)),
        *("--hidden-states-dtype", "float32", "--draft-attn-impl", "sdpa", "--loss-implementation", "eager"),
        *("--optimizer", "adamw", "--total-seq-len", "256", "--num-layers", "1", "--train-data-ratio", "0.75"),
        *("--epochs", "2", "--save-path", str(work / name), "--log-dir", str(work / f"{name}-logs")),
        *(() if "--num-workers" in more else ("--num-workers", "0")),
        *_SHAPES[kind],
        *more,
    ]
