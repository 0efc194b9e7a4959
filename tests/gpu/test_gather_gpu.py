"""Rows off a real GPU: run with `pytest tests/gpu` on a machine that has one."""

from __future__ import annotations

import random

import pytest
import torch

from hsconnector.capture.protocol import CaptureInfo, CaptureState, Producer, pack_token_ids
from hsconnector.connector.gather import Blocks, DeviceGather, gather_for, pin, rows_tensor
from hsconnector.connector.memory_transport import InMemoryTransport
from hsconnector.connector.ring import Ring
from hsconnector.connector.sender import Sender
from hsconnector.connector.settings import ConnectorSettings
from hsconnector.connector.step import Finish, Step, TableChange
from hsconnector.connector.worker import Worker
from tests.connector.test_gather import cache, oracle

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", torch.cuda.device_count() - 1)
ORDERS = ["lbhs", "lbsh", "bslh", "blsh"]
"""`LBNHC` and `LBHNC` are `lbsh` and `lbhs` here, and the two views as they lie."""


def on_gpu(*shape: int, order: str = "lbsh", dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """The same cache on the CPU and on the GPU, both with their memory in this order."""
    num_blocks, size, slots, hidden = shape
    host = cache(num_blocks, size, slots, hidden, order, dtype)
    extents = dict(zip("bslh", shape, strict=True))
    device = torch.empty([extents[letter] for letter in order], dtype=dtype, device=DEVICE)
    view = device.permute([order.index(letter) for letter in "bslh"])
    view.copy_(host)
    return host, view


@pytest.fixture
def pinned() -> Ring:
    ring = Ring.private(64 << 20)
    ring.before_unmap(pin(ring.memory, ring.size, DEVICE))
    return ring


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_rows_are_what_the_rule_says(pinned: Ring, order: str, dtype: torch.dtype, kernel_blocks: int) -> None:
    host, view = on_gpu(64, 16, 5, 128, order=order, dtype=dtype)
    gather = gather_for(view, 16 * kernel_blocks)
    assert isinstance(gather, DeviceGather)
    rnd = random.Random(0)
    blocks = 64 // kernel_blocks
    for _ in range(40):
        table = [rnd.randrange(1, blocks) for _ in range(8)]
        start = rnd.randrange(16 * kernel_blocks * 8 - 1)
        rows = range(start, rnd.randrange(start + 1, 16 * kernel_blocks * 8 + 1))
        out = rows_tensor(pinned.memory, 4096, len(rows), view)
        ticket = gather.copy(table, rows, out)
        ticket.wait()
        assert ticket.done()
        assert torch.equal(out, oracle(host, 16 * kernel_blocks, table, rows))


def test_the_ring_is_page_locked(pinned: Ring) -> None:
    _, view = on_gpu(4, 16, 2, 64)
    assert rows_tensor(pinned.memory, 0, 4, view).is_pinned()


def test_blocks_that_are_written_again_at_once(pinned: Ring) -> None:
    """Rows released to the engine are overwritten by the next forward, on the stream that the gather was queued on."""
    host, view = on_gpu(512, 16, 5, 1024)
    row_bytes = 5 * 1024 * 2
    gather = DeviceGather(Blocks(view, 16), buffer_bytes=1024 * row_bytes)
    table = list(range(1, 257))
    tickets, outs = [], []
    for turn in range(2):
        out = rows_tensor(pinned.memory, turn * 1024 * row_bytes, 1024, view)
        tickets.append(gather.copy(table, range(turn * 1024, turn * 1024 + 1024), out))
        outs.append(out)
        view[1 + turn * 64 : 65 + turn * 64] = -1.0
        torch.cuda._sleep(2_000_000)
    for turn, (ticket, out) in enumerate(zip(tickets, outs, strict=True)):
        ticket.wait()
        assert torch.equal(out, oracle(host, 16, table, range(turn * 1024, turn * 1024 + 1024)))


def test_writes_queued_before_are_seen(pinned: Ring) -> None:
    """The forward that computes the rows may still be running when the next step reads them."""
    _, view = on_gpu(64, 16, 5, 1024)
    gather = gather_for(view, 16)
    torch.cuda._sleep(20_000_000)
    view[1:9] = 3.0
    out = rows_tensor(pinned.memory, 0, 128, view)
    gather.copy(list(range(1, 9)), range(128), out).wait()
    assert (out == 3.0).all()


def test_its_buffers_and_no_more_memory(pinned: Ring) -> None:
    _, view = on_gpu(512, 16, 5, 1024)
    row_bytes = 5 * 1024 * 2
    gather = DeviceGather(Blocks(view, 16), buffer_bytes=256 * row_bytes, num_buffers=2)
    torch.cuda.synchronize(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    table = list(range(1, 257))
    for turn in range(16):
        rows = range(turn * 256, turn * 256 + min(256, gather.largest() or 256))
        gather.copy(table, rows, rows_tensor(pinned.memory, turn * 256 * row_bytes, len(rows), view))
    torch.cuda.synchronize(DEVICE)
    assert torch.cuda.max_memory_allocated(DEVICE) - before < 1 << 20


def test_a_whole_capture_through_the_worker() -> None:
    host, view = on_gpu(256, 16, 3, 256, dtype=torch.float32)
    producer = Producer(
        engine_id="gpu",
        model="m",
        vllm_version="0",
        layer_ids=(0, 1, 2),
        num_layers=2,
        hidden_size=256,
        dtype="float32",
    )
    settings = ConnectorSettings(transport="http", ring_bytes=1 << 20)
    transport = InMemoryTransport()
    sender = Sender(producer, settings, transport)

    def lock_pages(ring: Ring) -> None:
        ring.before_unmap(pin(ring.memory, ring.size, DEVICE))

    worker = Worker(gather_for(view, 16), sender, lock_pages)
    sender.start()
    count = 3000
    table = tuple(range(1, 1 + -(-count // 16)))
    info = CaptureInfo(capture_id="0" * 32, request_id="r", num_prompt_tokens=count, created=0.0)
    worker.step(Step(0, 16, begun=[info], tables=[TableChange("r", table, True)]))
    worker.step(Step(0, 16, finished=[Finish("r", count, pack_token_ids(range(count)), "stop")]))
    released: set[str] = set()
    while not released:
        worker.step(Step(0, 16))
        released = worker.take_released()
    worker.close(30)
    capture = transport.captures["0" * 32]
    assert capture.state is CaptureState.READY
    rows = torch.frombuffer(capture.data, dtype=torch.float32).view(count, 3, 256)
    assert torch.equal(rows, oracle(host, 16, table, range(count)))
