"""How close is the sidecar, end to end, to a bare `pwrite` loop on the same disk? Prints ratios of paired medians.

python -m tests.bench.bench_ingest [folder]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np

from hsconnector.capture.protocol import (
    Batch,
    BatchAnswer,
    CaptureInfo,
    Commit,
    Message,
    Open,
    Producer,
    ProducerAccepted,
    RingOffer,
    Rows,
    Span,
    decode,
    encode,
    encode_batch,
    new_capture_id,
    pack_token_ids,
)
from tests.sidecar import start_sidecar_process

LAYERS, HIDDEN = 4, 4096
ROW = LAYERS * HIDDEN * 2
RING = 128 << 20
PIECE = 1 << 20
ROUNDS = 7


class Feed:
    """An engine's sender reduced to what costs time: messages, and rows that lie in the ring already."""

    def __init__(self, socket: Path, shm: Path) -> None:
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://sidecar", timeout=60)
        ring = shm / f"hsconnector-bench-{os.getpid()}"
        values = np.random.default_rng(0).standard_normal(RING // 4).astype(np.float32)
        ring.write_bytes((values.view(np.uint32) >> 16).astype(np.uint16).tobytes() * 2)
        producer = Producer(
            engine_id="bench",
            model="bench",
            vllm_version="0",
            layer_ids=tuple(range(LAYERS)),
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            dtype="bfloat16",
            ring=RingOffer(ring.name, RING),
        )
        try:
            self.accepted = decode(self.http.post("/v1/producers", content=encode(producer)).content, ProducerAccepted)
        finally:
            ring.unlink()
        if not self.accepted.shm:
            raise RuntimeError(self.accepted.shm_reason)
        self.seq = -1

    def send(self, messages: list[Message]) -> None:
        self.seq += 1
        body = b"".join(
            bytes(part) for part in encode_batch(Batch(self.accepted.producer_id, self.seq, tuple(messages)))
        )
        answer = decode(self.http.post("/v1/ingest", content=body).content, BatchAnswer)
        failed = [each for each in answer.messages if each.detail]
        if failed:
            raise RuntimeError(str(failed[0]))

    def captures(self, count: int, rows: int, batch: int) -> None:
        """`count` captures of `rows` rows, `batch` of them a call."""
        tokens, place = pack_token_ids(range(rows)), 0
        for first in range(0, count, batch):
            messages: list[Message] = []
            for _ in range(min(batch, count - first)):
                place = 0 if place + rows * ROW > RING else place
                name = new_capture_id()
                messages += [
                    Open(CaptureInfo(capture_id=name, request_id=name, num_prompt_tokens=rows, created=time.time())),
                    Rows(name, 0, rows, Span(place, rows * ROW, shared=True)),
                    Commit(name, rows, tokens),
                ]
                place += rows * ROW
            self.send(messages)


def bare(folder: Path, count: int, size: int) -> None:
    """The same bytes into the same number of new files, nothing else."""
    data = memoryview(bytes(PIECE))
    for number in range(count):
        fd = os.open(folder / f"{time.time_ns()}-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for offset in range(0, size, PIECE):
            os.pwrite(fd, data[: min(PIECE, size - offset)], offset)
        os.close(fd)


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def truncate(files: Iterator[Path]) -> None:
    """Gives the room back between rounds; deleting would slow later creations down."""
    for path in files:
        os.truncate(path, 0)


def compare(feed: Feed, store: Path, floor: Path, *, count: int, rows: int, batch: int) -> None:
    ours, theirs = [], []
    for _ in range(ROUNDS):
        theirs.append(timed(lambda: bare(floor, count, rows * ROW)))
        ours.append(timed(lambda: feed.captures(count, rows, batch)))
        truncate(floor.iterdir())
        truncate(store.rglob("*.safetensors"))
    seconds = statistics.median(ours)
    ratio = statistics.median(their / our for their, our in zip(theirs, ours, strict=True))
    megabytes = rows * ROW / 1e6
    print(
        f"{count} captures of {megabytes:.2f} MB, {batch} a call: {ratio:.2f} of bare pwrite "
        f"({count * megabytes / 1e3 / seconds:.2f} GB/s, {count / seconds:.0f} captures/s)"
    )


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        root = Path(name)
        floor = root / "floor"
        floor.mkdir()
        sidecar = start_sidecar_process(root / "store", uds=root / "socket")
        try:
            feed = Feed(root / "socket", Path("/dev/shm"))
            compare(feed, root / "store", floor, count=32, rows=256, batch=4)
            compare(feed, root / "store", floor, count=800, rows=3, batch=16)
            compare(feed, root / "store", floor, count=200, rows=3, batch=1)
            feed.http.close()
        finally:
            sidecar.stop()


if __name__ == "__main__":
    main()
