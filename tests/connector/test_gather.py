from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsconnector.connector.gather import NUM_BUFFERS, Blocks, DeviceGather, HostGather, gather_for, pin, rows_tensor
from hsconnector.errors import LayoutError
from tests.connector.lab import bounded
from tests.examples import examples

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def cache(
    num_blocks: int, size: int, slots: int, hidden: int, order: str = "bslh", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """`[num_blocks, size, slots, hidden]` whose memory runs in another order, with gaps; no two elements alike."""
    extents = {"b": num_blocks, "s": size, "l": slots, "h": hidden}
    shape = [extents[letter] for letter in order]
    padded = torch.empty(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., : shape[-1]]
    view = padded.permute([order.index(letter) for letter in "bslh"])
    count = view.numel()
    values = torch.arange(count) if dtype is torch.float32 else torch.arange(count) % 30000
    view.copy_(values.view(num_blocks, size, slots, hidden).to(dtype))
    return view


def oracle(view: torch.Tensor, spec_size: int, table: Sequence[int], rows: range) -> torch.Tensor:
    """Row by row, as the rule is written down: slot = block id times the spec's size, plus the offset."""
    size = view.shape[1]
    slots = [table[row // spec_size] * spec_size + row % spec_size for row in rows]
    return torch.stack([view[slot // size, slot % size] for slot in slots])


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, list[int], range]:
    size, kernel_blocks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    spec_size = size * kernel_blocks
    slots, hidden = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    blocks = draw(st.integers(2, 9))
    order = draw(st.sampled_from(["bslh", "blsh", "lbsh", "lbhs", "hslb"]))
    view = cache(blocks * kernel_blocks, size, slots, hidden, order, draw(st.sampled_from(DTYPES)))
    table = draw(st.lists(st.integers(1, blocks - 1), min_size=1, max_size=8))
    start = draw(st.integers(0, len(table) * spec_size - 1))
    stop = draw(st.integers(start + 1, len(table) * spec_size))
    return view, spec_size, table, range(start, stop)


@settings(deadline=None, max_examples=examples(300))
@given(cases())
def test_rows_are_what_the_rule_says(case: tuple[torch.Tensor, int, list[int], range]) -> None:
    view, spec_size, table, rows = case
    out = torch.full((len(rows), *view.shape[2:]), -7.0, dtype=view.dtype)
    gather_for(view, spec_size).copy(table, rows, out).wait()
    assert torch.equal(out, oracle(view, spec_size, table, rows))


@settings(deadline=None, max_examples=examples(60))
@given(cases(), st.integers(1, 7))
def test_pieces_are_the_same_as_one_shot(case: tuple[torch.Tensor, int, list[int], range], most: int) -> None:
    view, spec_size, table, rows = case
    gather = gather_for(view, spec_size)
    whole = torch.empty(len(rows), *view.shape[2:], dtype=view.dtype)
    pieces = torch.empty_like(whole)
    gather.copy(table, rows, whole)
    for start in range(0, len(rows), most):
        part = rows[start : start + most]
        gather.copy(table, part, pieces[start : start + len(part)])
    assert torch.equal(pieces, whole)


def test_blocks_of_22_beside_528() -> None:
    """vllm#46301: the hidden group's own block size, not the engine's."""
    view = torch.arange(10 * 22, dtype=torch.float32).view(10, 22, 1, 1)
    out = torch.empty(100, 1, 1)
    gather_for(view, 22).copy([3, 7, 1, 9, 2], range(100), out)
    blocks = [3] * 22 + [7] * 22 + [1] * 22 + [9] * 22 + [2] * 12
    assert out.flatten().tolist() == [block * 22 + row % 22 for row, block in enumerate(blocks)]


def test_block_0_is_never_read() -> None:
    view = cache(4, 4, 2, 3)
    view[0] = float("nan")
    out = torch.empty(12, 2, 3)
    gather_for(view, 4).copy([1, 2, 3], range(12), out)
    assert not out.isnan().any()


def test_what_the_kernel_calls_a_block_must_divide_the_specs() -> None:
    with pytest.raises(LayoutError, match=r"22.*16|16.*22"):
        Blocks(cache(2, 16, 1, 1), 22)


def test_the_cache_is_not_copied_on_the_way() -> None:
    """However its memory runs, a gather allocates no more than its list of block ids."""
    view = cache(4096, 16, 3, 32, "lbsh")
    gather = gather_for(view, 16)
    out = torch.empty(160, 3, 32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        gather.copy(list(range(1, 12)), range(8, 168), out)
    allocated = sum(max(0, event.self_device_memory_usage, event.self_cpu_memory_usage) for event in profile.events())
    assert 0 < allocated < 16 << 10


def test_rows_of_staging_memory() -> None:
    memory = mmap.mmap(-1, 4096)
    like = torch.empty(1, 4, 2, 3, dtype=torch.bfloat16)
    rows = rows_tensor(memory, 64, 5, like)
    assert rows.shape == (5, 2, 3)
    assert rows.dtype is torch.bfloat16
    rows.fill_(1.0)
    assert memory[:64] == bytes(64)
    assert memory[64 : 64 + 60] == b"\x80\x3f" * 30
    assert memory[124:] == bytes(4096 - 124)


class Untouchable:
    """A `torch.cuda` that must not be there."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"torch.cuda.{name} was touched on a CPU")


def test_a_cpu_never_meets_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """speculators#1133: vLLM's example connector cannot run on a CPU."""
    view = cache(5, 4, 2, 3)
    out = torch.empty(9, 2, 3)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cuda", Untouchable())
        gather = gather_for(view, 4)
        assert gather.largest() > 1 << 20
        ticket = gather.copy([1, 2, 3], range(2, 11), out)
        ticket.wait()
        assert ticket.done()
    assert isinstance(gather, HostGather)
    assert torch.equal(out, oracle(view, 4, [1, 2, 3], range(2, 11)))


@dataclass
class Device:
    """Stands in for a GPU's streams: what is recorded on the copy stream is done when the test says so."""

    finished: int = 0
    events: list[Event] = field(default_factory=list)
    waited_for_compute: int = 0

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        yield


@dataclass
class Event:
    device: Device
    number: int = 0
    waits: int = 0

    def record(self, stream: object) -> None:
        self.device.events.append(self)
        self.number = len(self.device.events)

    def query(self) -> bool:
        return self.number <= self.device.finished

    def synchronize(self) -> None:
        self.waits += 1
        self.device.finished = max(self.device.finished, self.number)


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device

    def wait_stream(self, other: object) -> None:
        self.device.waited_for_compute += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "device", made.on)
    return made


class TestDeviceBuffers:
    """The bookkeeping of the way off a GPU; the real thing is in `tests/gpu`."""

    def gather(self) -> tuple[torch.Tensor, DeviceGather]:
        view = cache(9, 4, 2, 3)
        return view, DeviceGather(Blocks(view, 4), buffer_bytes=8 * 24, num_buffers=2)

    def test_two_buffers_then_later(self, device: Device) -> None:
        view, gather = self.gather()
        assert gather.largest() == 8
        outs = [torch.empty(8, 2, 3) for _ in range(2)]
        tickets = [gather.copy([1, 2, 3, 4], range(8 * i, 8 * i + 8), out) for i, out in enumerate(outs)]
        assert device.waited_for_compute == 2
        assert [ticket.done() for ticket in tickets] == [False, False]
        assert gather.largest() == 0
        device.finished = 1
        assert [ticket.done() for ticket in tickets] == [True, False]
        assert gather.largest() == 8
        for i, out in enumerate(outs):
            assert torch.equal(out, oracle(view, 4, [1, 2, 3, 4], range(8 * i, 8 * i + 8)))

    def test_a_step_takes_as_many_pieces_as_there_are_buffers(self, device: Device) -> None:
        """No copy is done before the forward that it waits for: what does not fit must wait for the next step."""
        view = cache(9, 4, 2, 3)
        gather = DeviceGather(Blocks(view, 4), buffer_bytes=4 * 24)
        outs = []
        for _ in bounded(lambda: not gather.largest(), most=NUM_BUFFERS + 1):
            outs.append(torch.empty(4, 2, 3))
            gather.copy([1 + len(outs) % 8], range(4), outs[-1])
        assert len(outs) == NUM_BUFFERS
        for number, out in enumerate(outs, 1):
            assert torch.equal(out, oracle(view, 4, [1 + number % 8], range(4)))

    def test_a_buffer_is_waited_for_before_it_is_used_again(self, device: Device) -> None:
        _, gather = self.gather()
        outs = [torch.empty(4, 2, 3) for _ in range(3)]
        for out in outs:
            gather.copy([1], range(4), out)
        assert [event.waits for event in device.events] == [1, 0, 0]

    def test_a_ticket_waits_for_its_own_copy(self, device: Device) -> None:
        _, gather = self.gather()
        ticket = gather.copy([1], range(4), torch.empty(4, 2, 3))
        ticket.wait()
        assert ticket.done()

    def test_a_row_larger_than_the_buffer_still_goes(self, device: Device) -> None:
        view = cache(3, 2, 2, 3)
        gather = DeviceGather(Blocks(view, 2), buffer_bytes=1)
        assert gather.largest() == 1


@dataclass
class Driver:
    """What of CUDA's runtime locks pages."""

    status: int = 0
    calls: list[tuple[object, ...]] = field(default_factory=list)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("lock", address, size, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unlock", address))
        return 0


class TestPageLock:
    """Which calls are made; that the memory is locked then is tested in `tests/gpu`."""

    def locked(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Callable[[], None]]:
        @contextmanager
        def on(device: object) -> Iterator[None]:
            yield

        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        monkeypatch.setattr(torch.cuda, "device", on)
        memory = mmap.mmap(-1, 8192)
        return rows_address(memory), pin(memory, 8192, torch.device("cpu"))

    def test_what_is_locked_is_unlocked(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        driver = Driver()
        address, undo = self.locked(driver, monkeypatch)
        assert driver.calls == [("lock", address, 8192, 1)]
        undo()
        assert driver.calls[1:] == [("unlock", address)]
        assert caplog.text == ""

    def test_what_could_not_be_locked_is_said_and_left(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        driver = Driver(status=2)
        _, undo = self.locked(driver, monkeypatch)
        undo()
        assert [call[0] for call in driver.calls] == ["lock"]
        assert "could not be page-locked (CUDA error 2)" in caplog.text


def rows_address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
