"""Paged blocks to contiguous rows: the only room that indexes a KV tensor.

The hidden-state cache is registered as `[num_blocks, L, block, H]` (vLLM 0.29 and newer) or `[num_blocks, block, L, H]`
(0.28), with any strides. Here it is always looked at as `[num_blocks, block, L, H]`. The tensor may be cut into smaller
kernel blocks than the spec's: then block `b` of a table is the tensor's blocks `b * k .. b * k + k`.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hsconnector.connector.stream import Ticket
from hsconnector.layout.locate import check_view_block_size

__all__ = ["Blocks", "DeviceGather", "Gather", "HostGather", "gather_for", "pin", "rows_tensor"]

log = logging.getLogger("vllm.hsconnector.gather")

BUFFER_BYTES = 4 << 20
"""What one call takes on its way off a GPU; the worker asks for pieces of this size."""
NUM_BUFFERS = 16
"""Together they bound what leaves the cache in one step: no copy is done before the forward ahead of it is."""
PORTABLE = 1
"""`cudaHostRegisterPortable`: page-locked for every context, not only the one that asked."""


class Arrived:
    """A copy that was finished when the call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


ARRIVED = Arrived()


class Blocks:
    """The cache as `[num_blocks, block, L, H]`, and which part of it a range of rows is.

    Block tables count in blocks of `spec_block_size` tokens, the view may be cut into smaller ones.
    """

    def __init__(self, view: torch.Tensor, spec_block_size: int) -> None:
        self.view = view
        self.spec_block_size = spec_block_size
        self.kernel_blocks = check_view_block_size(spec_block_size, view.shape[1])
        self.block_size: int = view.shape[1]
        self.row_shape = tuple(view.shape[2:])

    def copy_rows(self, table: Sequence[int], rows: range, out: torch.Tensor) -> None:
        """Rows `rows` of the request with this block table into `out` `[len(rows), L, H]`, on the cache's device.

        Whole blocks go through one `index_select`, a partial head and tail through one `copy_` each.
        """
        size = self.block_size
        first, last = rows.start // size, (rows.stop - 1) // size
        head_end = min(rows.stop, (first + 1) * size)
        if rows.start % size or head_end == rows.stop:
            self._copy_part(table, rows.start, head_end, out[: head_end - rows.start])
            first += 1
        whole_end = rows.stop // size
        if whole_end > first:
            self._copy_whole(table, first, whole_end, rows, out)
        if last >= max(first, whole_end):
            start = last * size
            self._copy_part(table, start, rows.stop, out[start - rows.start :])

    def _copy_part(self, table: Sequence[int], start: int, stop: int, out: torch.Tensor) -> None:
        block, offset = divmod(start, self.block_size)
        out.copy_(self.view[self._tensor_block(table, block), offset : offset + stop - start])

    def _copy_whole(self, table: Sequence[int], first: int, end: int, rows: range, out: torch.Tensor) -> None:
        ids = torch.tensor([self._tensor_block(table, block) for block in range(first, end)], dtype=torch.int64)
        start = first * self.block_size - rows.start
        target = out[start : start + (end - first) * self.block_size]
        shaped = target.view(end - first, self.block_size, *self.row_shape)
        torch.index_select(self.view, 0, ids.to(self.view.device, non_blocking=True), out=shaped)

    def _tensor_block(self, table: Sequence[int], block: int) -> int:
        index, part = divmod(block, self.kernel_blocks)
        return table[index] * self.kernel_blocks + part


class Gather(Protocol):
    """Copies rows off the cache into host memory."""

    blocks: Blocks

    def largest(self) -> int:
        """How many rows one call may take now; 0 means later."""
        ...

    def copy(self, table: Sequence[int], rows: range, out: torch.Tensor) -> Ticket:
        """Rows of a request into `out` `[len(rows), L, H]` in host memory."""
        ...


class HostGather:
    """Straight from a cache in host memory into the ring."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def largest(self) -> int:
        return 1 << 30

    def copy(self, table: Sequence[int], rows: range, out: torch.Tensor) -> Ticket:
        self.blocks.copy_rows(table, rows, out)
        return ARRIVED


class DeviceGather:
    """From a GPU's cache through a few device buffers, used in turn, into pinned host memory.

    The gather runs on the compute stream, behind the steps that wrote the rows and before those that will write their
    blocks again; the copy to the host runs on a stream of its own. A buffer is used again only when its copy is done.
    """

    def __init__(self, blocks: Blocks, buffer_bytes: int = BUFFER_BYTES, num_buffers: int = NUM_BUFFERS) -> None:
        view = blocks.view
        row_bytes = blocks.row_shape[0] * blocks.row_shape[1] * view.element_size()
        self.blocks = blocks
        self._rows = max(1, buffer_bytes // row_bytes)
        shape = (num_buffers, self._rows, *blocks.row_shape)
        self._buffers = torch.empty(shape, dtype=view.dtype, device=view.device)
        self._tickets: deque[Ticket] = deque([ARRIVED] * num_buffers)
        """The last copy of each buffer, the buffer to use next in front."""
        self._next = 0
        self._stream = torch.cuda.Stream(device=view.device)  # type: ignore[no-untyped-call]

    def largest(self) -> int:
        return self._rows if self._tickets[0].done() else 0

    def copy(self, table: Sequence[int], rows: range, out: torch.Tensor) -> Ticket:
        self._tickets[0].wait()
        buffer = self._buffers[self._next][: len(rows)]
        self.blocks.copy_rows(table, rows, buffer)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            out.copy_(buffer, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        ticket = EventTicket(event, buffer.device)
        self._tickets.popleft()
        self._tickets.append(ticket)
        self._next = (self._next + 1) % len(self._tickets)
        return ticket


class EventTicket:
    """A copy that a CUDA event stands for.

    The sender's thread asks too, and has no device of its own: without `device` the driver would make a context on the
    first GPU, whichever this engine runs on.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        with torch.cuda.device(self._device):
            self._event.synchronize()


def gather_for(view: torch.Tensor, spec_block_size: int) -> Gather:
    """The way off the device that the cache lies on; `view` is `[num_blocks, block, L, H]`."""
    blocks = Blocks(view, spec_block_size)
    if view.device.type == "cuda":
        return DeviceGather(blocks)
    return HostGather(blocks)


def rows_tensor(memory: mmap.mmap, offset: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """`count` rows `[count, L, H]` of `like`'s dtype over host memory at a byte offset."""
    row_shape = like.shape[2:]
    elements = count * row_shape[0] * row_shape[1]
    flat = torch.frombuffer(memory, dtype=like.dtype, count=elements, offset=offset)
    return flat.view(count, *row_shape)


def pin(memory: mmap.mmap, size: int, device: torch.device) -> Callable[[], None]:
    """Page-locks memory for asynchronous copies from a GPU; returns the call that undoes it, which any thread may make.

    Call it on the engine's thread: on another one it could fall into the capture of a CUDA graph and spoil it.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    with torch.cuda.device(device):
        status = int(runtime.cudaHostRegister(address, size, PORTABLE))
    if status != 0:
        log.warning("staging memory could not be page-locked (CUDA error %d): copies from the GPU will wait", status)
        return lambda: None

    def undo() -> None:
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(address)

    return undo
