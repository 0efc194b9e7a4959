"""How many rows a second are read and prepared, without an engine? Prints rates; rows with ids are to reach 2,000.

python -m tests.bench.bench_prepare [rows]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hsconnector.capture.content import Content
from hsconnector.capture.protocol import pack_token_ids
from hsconnector.extraction.preparing import Recipe, default_workers, prepare
from hsconnector.prompts.files import open_rows
from hsconnector.prompts.preparation import Preparation
from hsconnector.prompts.prompt import Prompt
from tests.models import tiny_tokenizer

TOKENS = 512
"""In a row, about half of which count."""


def with_ids(count: int) -> Iterator[dict[str, Any]]:
    numbers = random.Random(0)
    for _ in range(count):
        token_ids = [numbers.randrange(150_000) for _ in range(TOKENS)]
        yield {"input_ids": token_ids, "loss_mask": [int(at > TOKENS // 2) for at in range(TOKENS)]}


def conversations(count: int) -> Iterator[dict[str, Any]]:
    numbers = random.Random(0)
    for row in range(count):
        words = [f"w{numbers.randrange(1000)}" for _ in range(TOKENS // 16)]
        turns = [("user", f"{row} " + " ".join(words)), ("assistant", " ".join(reversed(words)))] * 2
        yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def rate(path: Path, tokenizer: Path, workers: int) -> float:
    """Rows a second, hashed as a run hashes them to look them up."""
    recipe, content = Recipe(str(tokenizer), Preparation()), Content("bench", "", (1, 2, 3))
    begun, done = time.perf_counter(), 0
    for each in prepare(enumerate(open_rows(path).read()), recipe, workers):
        if not isinstance(each, Prompt):
            raise RuntimeError(str(each))
        content.hash_of(pack_token_ids(each.token_ids))
        done += 1
    return done / (time.perf_counter() - begun)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_tokenizer().save_pretrained(folder / "model")
        kinds = [("with ids", with_ids(count)), ("of conversations", conversations(count // 10))]
        for what, rows in kinds:
            path = folder / "rows.jsonl"
            path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
            rates = sorted(rate(path, folder / "model", default_workers()) for _ in range(3))
            print(f"{what}: {rates[1]:.0f} rows a second ({rates[0]:.0f} to {rates[2]:.0f})")


if __name__ == "__main__":
    main()
