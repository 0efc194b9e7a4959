"""Training processes on a work queue: one that is steady, and three that are not. Every grant and ack is logged."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from hsconnector.client.leases import Lease, LeaseRequest
from hsconnector.dataset import LeasedDataset

DEADLINE_S = 3.0


class Logged(LeasedDataset):
    """Writes a line for each capture that a sidecar lends, and for each that it says is acknowledged."""

    log = ""

    def _take(self, index: int, wanted: LeaseRequest, wait: float) -> Lease:
        lease = super()._take(index, wanted, wait)
        self._write("lent", [record.capture_id for record in lease.captures])
        return lease

    def _ack(self, index: int, lease_id: str, names: Sequence[str], *, delete: bool = False) -> Mapping[str, str]:
        answers = super()._ack(index, lease_id, names, delete=delete)
        self._write("acked", [name for name, answer in answers.items() if answer == "acked"])
        return answers

    def _write(self, what: str, names: Sequence[str]) -> None:
        with Path(self.log).open("a") as file:
            file.write("".join(f"{what} {name}\n" for name in names))


def train(url: str, log: str, role: str) -> None:
    """Trains until nothing is left: a pass gave nothing and nobody holds anything."""
    dataset = Logged(url, consumer=role, deadline_s=DEADLINE_S, idle_s=0.3, lease_captures=5, prefetch_bytes=60_000)
    dataset.log = log
    steps = 0
    while True:
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=4, num_workers=2, collate_fn=list, multiprocessing_context="fork"
        )
        before = steps
        for batch in loader:
            steps += 1
            step(dataset, batch, role, steps)
        if steps == before and dataset.outstanding() == 0:
            return


def step(dataset: LeasedDataset, batch: list[Any], role: str, number: int) -> None:
    """One optimiser step, and what this role does wrong."""
    if role == "crashes" and number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if role == "finishes late" and number == 1:
        time.sleep(2 * DEADLINE_S)
    try:
        with dataset.step(batch):
            if role == "raises" and number % 3 == 0:
                raise ArithmeticError("the loss is not finite")
    except ArithmeticError:
        return
    if role == "repeats":
        dataset.ack(batch)
