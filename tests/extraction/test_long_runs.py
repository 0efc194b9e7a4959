"""Very many rows: the memory of a run stays flat, and a run over what is stored gets to what is missing at once.

Here the numbers are small; `HSC_LONG=1` takes those that the limits are meant for, which is an hour on two cores.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from hsconnector.capture.content import Content
from hsconnector.capture.protocol import new_capture_id, pack_token_ids
from hsconnector.capture.record import CaptureRecord
from hsconnector.storage.folder import Folder
from tests.extraction.fake_engine import LAYERS
from tests.extraction.quick_engine import TOKENS, QuickEngine
from tests.sidecar import SidecarProcess, start_sidecar_process

LONG = os.environ.get("HSC_LONG") == "1"
pytestmark = pytest.mark.timeout(4 * 3600 if LONG else 300)
ROWS = 300_000 if LONG else 600
STORED = 1_000_000 if LONG else 5_000
MOST_BYTES_A_ROW = 50
SLACK = 0 if LONG else 8 << 20
"""Bytes: in a short run what is kept of each row drowns in what a process allocates at times."""
RESUMED_WITHIN_S = 60
COMMAND = [sys.executable, "-c", "from hsconnector.cli import main; main()", "extract"]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    running = start_sidecar_process(tmp_path / "store")
    yield running
    running.stop()


@pytest.fixture
def engine(sidecar: SidecarProcess) -> Iterator[QuickEngine]:
    running = QuickEngine(sidecar.url)
    yield running
    running.stop()


def token_ids(row: int) -> list[int]:
    return [row % 1000, row // 1000 % 1000, row // 1_000_000]


def written(path: Path, rows: int) -> Path:
    with path.open("w") as file:
        file.writelines(f'{{"input_ids": {token_ids(row)}}}\n' for row in range(rows))
    return path


def resident(process: int) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def started(data: Path, engine: QuickEngine, sidecar: SidecarProcess, *more: str) -> subprocess.Popen[str]:
    words = [*COMMAND, str(data), "--engine-url", engine.url, "--sidecar", sidecar.url, *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_the_memory_of_a_run_is_flat(sidecar: SidecarProcess, engine: QuickEngine, tmp_path: Path) -> None:
    data = written(tmp_path / "many.jsonl", ROWS)
    process = started(data, engine, sidecar, "--save-dataset", str(tmp_path / "saved"), "--concurrency", "64")
    seen: list[tuple[int, int]] = []
    while process.poll() is None:
        if engine.sent > ROWS // 5 and (not seen or engine.sent > seen[-1][0]) and engine.sent < ROWS:
            seen.append((engine.sent, resident(process.pid)))
        time.sleep(0.2)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert f"{ROWS} captured ({ROWS * TOKENS} tokens)" in out
    slope = statistics.linear_regression(*zip(*seen, strict=True)).slope
    print(f"{ROWS} rows: {slope:.1f} bytes a row over {len(seen)} looks, {seen[-1][1] >> 20} MB at the end")
    assert slope * ROWS < MOST_BYTES_A_ROW * ROWS + SLACK


def test_a_run_over_what_is_stored_gets_to_what_is_missing_at_once(
    sidecar: SidecarProcess, engine: QuickEngine, tmp_path: Path
) -> None:
    """The third row is missing, one after a tenth, and the last: all else is in the index, the most without a file."""
    rows = STORED + 3
    missing = {2, rows // 10, rows - 1}
    data = written(tmp_path / "stored.jsonl", rows)
    started(data, engine, sidecar, "--limit", "2").communicate()
    engine.sent, engine.first_at = 0, 0.0
    assert fill(sidecar.store, [row for row in range(2, rows) if row not in missing]) == STORED
    begun = time.monotonic()
    process = started(data, engine, sidecar)
    out, _ = process.communicate()
    asked_s, through_s = engine.first_at - begun, time.monotonic() - begun
    print(f"{STORED} stored rows: asked after {asked_s:.1f} s, through in {through_s:.1f} s")
    assert process.returncode == 0, out
    assert out.startswith(f"{rows} rows, 3 captured (9 tokens), {STORED} were there")
    assert asked_s < RESUMED_WITHIN_S


def fill(store: Path, rows: Sequence[int]) -> int:
    """Puts a capture of each row into the index, like the one that is there; how many."""
    content = Content("tiny", "", LAYERS)
    with sqlite3.connect(Folder(store).index_path, timeout=60) as index:
        columns = "folder, request_id, dataset, state, model, created, size"
        *about, packed = index.execute(f"SELECT {columns}, record FROM captures LIMIT 1").fetchone()
        like = msgspec.msgpack.decode(packed, type=CaptureRecord)

        def made(row: int) -> tuple[object, ...]:
            name, digest = new_capture_id(), content.hash_of(pack_token_ids(token_ids(row)))
            record = msgspec.structs.replace(like, capture_id=name, content_hash=digest, sample_id=str(row))
            return *about, msgspec.msgpack.encode(record), name, digest, str(row)

        into = f"INSERT INTO captures ({columns}, record, capture_id, content_hash, sample_id)"
        for piece in batched(rows, 5000):
            index.executemany(f"{into} VALUES ({', '.join('?' * 11)})", map(made, piece))
            index.commit()
        (count,) = index.execute("SELECT count(*) FROM captures").fetchone()
    index.close()
    return int(count)


def batched(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    yield from (rows[first : first + size] for first in range(0, len(rows), size))
