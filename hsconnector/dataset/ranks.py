"""The same number of steps on every rank, whatever each got from the work queue."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from hsconnector.errors import SettingsError

__all__ = ["even_steps"]

_Batch = TypeVar("_Batch")


def even_steps(
    batches: Iterable[_Batch],
    *,
    remainder: Literal["drop", "repeat"] = "drop",
    release: Callable[[_Batch], Any] | None = None,
) -> Iterator[_Batch]:
    """Batches until one rank has no more (`drop`), or until none has (`repeat`: a rank gets its last batch again).

    Every rank of the default process group iterates; before each batch they count, over gloo, who has one. A batch
    that is dropped goes to `release`: with `LeasedDataset.release` it comes again in the next pass over its queue. A
    batch that comes again may be acknowledged again. Without a process group the batches pass through.

    Raises SettingsError on every rank where, to be repeated, some rank has no batch at all.
    """
    if not dist.is_initialized():
        yield from batches
        return
    group = dist.new_group(backend="gloo")
    try:
        yield from _in_step(batches, group, remainder, release)
    finally:
        dist.destroy_process_group(group)


def _in_step(
    batches: Iterable[_Batch], group: Any, remainder: str, release: Callable[[_Batch], Any] | None
) -> Iterator[_Batch]:
    upcoming = iter(batches)
    last: list[_Batch] = []
    while True:
        batch = list(itertools.islice(upcoming, 1))
        having = torch.tensor(len(batch))
        dist.all_reduce(having, group=group)
        everybody = int(having) == dist.get_world_size()
        if not everybody and remainder == "repeat" and int(having) and not last:
            raise SettingsError(f"{dist.get_world_size() - int(having)} ranks got no batch at all: nothing to repeat")
        if int(having) == 0 or (remainder == "drop" and not everybody):
            if release is not None and batch:
                release(batch[0])
            return
        last = batch or last
        yield from last
