"""Captures from the work queues of sidecars."""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hsconnector.capture.content import WeightsHeld
from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.shard import Capture
from hsconnector.client.leases import Lease, LeaseFilters, LeaseRequest, Leases
from hsconnector.client.passed import Passed, PassedOver
from hsconnector.client.sources import View
from hsconnector.dataset.failover import FIRST_PAUSE_S, Failures, Fetcher, Replica, open_sources
from hsconnector.dataset.lent import Leased, Lent, Unacked, by_lease
from hsconnector.dataset.prefetch import Prefetch
from hsconnector.dataset.samples import Sample, make_sample, rows_by_tokens
from hsconnector.errors import (
    CaptureError,
    SettingsError,
    ShardError,
    SidecarRefused,
    SidecarUnreachable,
    StoreError,
    TransportError,
)
from hsconnector.prompts.labels import DataRow, token_hash

__all__ = ["Acked", "LeasedDataset"]

_POLL_S = 0.5
_FEW = 100
"""Captures that count at least when the fraction that is bad is told and nobody knows how many there will be."""


@dataclass(frozen=True)
class Acked:
    """What an acknowledgement did."""

    acked: int = 0
    late: tuple[str, ...] = ()
    """Captures whose deadline had passed: they are, or will be, delivered again. Use a longer `deadline_s`."""
    pending: int = 0
    """Captures whose sidecar did not answer; acknowledged again with the next call."""


class LeasedDataset(IterableDataset[Sample]):
    """Captures from the work queues of sidecars, at least once each, until they are acknowledged.

    Samples are those of `hsconnector.dataset`, with `lease`, and with `loss_mask` where `data` names the tokenised data
    set (what `hsconnector extract` reads or saves): each capture's mask is that of the row with the same tokens. With
    `data` captures of every data-set name are lent, and what is no row of it is passed over; without, `dataset`, a
    name, chooses, as do `model`, `layers` (layer ids) and `weights_id` (its first digits), without which captures of
    two weights raise SettingsError. `layers` and `rows` (first and one past the last) give views.

    Every rank and every DataLoader worker takes leases of its own, so no two get the same capture while a lease lasts:
    `deadline_s` must cover reading ahead and a step. `queue` names a pass over the captures: what is acknowledged is
    not delivered again in it, also after a restart; for another epoch `set_epoch`, or another name. Each worker reads
    ahead up to `prefetch_bytes`, and asks for at most `lease_captures` at a time. `shuffle` samples beyond that are
    held, and drawn from with `seed`. With `batch_tokens` a worker gives lists of samples of at most so many tokens
    (one that is longer comes alone), for `DataLoader(…, batch_size=None, collate_fn=Pack(batch_tokens))`.

    Iteration ends when nothing was free for `idle_s` seconds, also while the engine still makes captures; at once
    where nothing is being received, every capture ended `idle_s` seconds ago, and no run (`consumer`) but this one
    holds any. With None it never ends. What a crashed consumer held comes back at its deadline, so a run that wants
    all of it iterates until a pass gives nothing and `outstanding()` is 0; one that is restarted under its names calls
    `load_state_dict`, which gives back at once what it held. After a loop that breaks off, `close` (or `with`) leaves
    nothing leased. Ranks may get different numbers of samples: `even_steps` makes them equal.

    What is damaged or gone is acknowledged, so that the queue goes on, and named in `passed_over`; with `data` also
    what is no row of it, unless `dataset` is given and it has another name. More than the fraction `max_bad` of the
    rows of `data` raises CaptureError, which lists them; without `data`, of what was lent so far, at least of 100.

    A sidecar that does not answer is left out while others deliver, and raises SidecarUnreachable in the end; so does
    the only one, after `max_failures` attempts in a row. With `delete` an acknowledged shard is removed.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        queue: str = "",
        consumer: str = "trainer",
        dataset: str | None = None,
        model: str | None = None,
        weights_id: str | None = None,
        data: str | os.PathLike[str] | None = None,
        layers: Sequence[int] | None = None,
        rows: tuple[int, int] | None = None,
        verify: bool = True,
        local: bool = True,
        deadline_s: float = 600.0,
        prefetch_bytes: int = 256 << 20,
        lease_captures: int = 8,
        idle_s: float | None = 10.0,
        delete: bool = False,
        rank: int | None = None,
        api_key: str | None = None,
        max_failures: int = 5,
        max_bad: float = 0.01,
        shuffle: int = 0,
        seed: int = 0,
        batch_tokens: int | None = None,
    ) -> None:
        if idle_s is not None and not 0 <= idle_s < deadline_s:
            raise SettingsError(f"idle_s {idle_s:g} must be 0 or more and shorter than deadline_s {deadline_s:g}")
        if prefetch_bytes < 0 or lease_captures < 1:
            raise SettingsError(f"prefetch_bytes {prefetch_bytes} or lease_captures {lease_captures} is too small")
        if shuffle < 0 or (batch_tokens is not None and batch_tokens < 1):
            raise SettingsError(f"shuffle {shuffle} must be 0 or more, batch_tokens {batch_tokens} 1 or more")
        self.idle_s, self.delete = idle_s, delete
        self.shuffle, self.seed, self.batch_tokens = shuffle, seed, batch_tokens
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._run, self._name = consumer, dataset
        self._passed, self._seen = PassedOver(max_bad), 0
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.wanted = LeaseRequest(
            consumer=f"{consumer}/rank{rank}",
            queue=queue,
            count=lease_captures,
            max_bytes=prefetch_bytes,
            deadline_s=deadline_s,
            filters=LeaseFilters(None if data else dataset, model, tuple(layers or ()), weights_id),
        )
        urls = [urls] if isinstance(urls, str) else list(urls)
        self._queues = [Leases(url, api_key=api_key) for url in urls]
        self._by_tokens = rows_by_tokens(data)
        self._cut = rows if self._by_tokens else None
        """Rows to take of a capture that is read whole, as all its tokens tell which row of `data` it is."""
        view = View(layers=layers, rows=None if self._by_tokens else rows, verify=verify)
        self._fetcher = Fetcher(open_sources(urls, api_key, local), view, max_failures)
        self._unacked = Unacked()
        self._weights: str | None = None
        """Whose weights this process reads, once that is known."""
        self._failures = Failures(max_failures)

    def __iter__(self) -> Iterator[Any]:
        self._weights = self._only_weights()
        wanted = msgspec.structs.replace(self.wanted, consumer=self._consumer(), queue=self.queue)
        prefetch = Prefetch(lambda stop: self._lent(wanted, stop), self._read, self.wanted.max_bytes or 0)
        held: list[Sample] = []
        batch: list[Sample] = []
        try:
            samples = _shuffled(prefetch, held, self.shuffle, self._random()) if self.shuffle > 1 else iter(prefetch)
            yield from samples if self.batch_tokens is None else _filling(samples, batch, self.batch_tokens)
        finally:
            self._give_back(by_lease([lent.lease for lent in prefetch.close()]))
            self._give_back(by_lease([*held, *batch]))

    def ack(self, samples: Any) -> Acked:
        """Acknowledges samples, batches of them or their `lease` values. Harmless when repeated; from any thread.

        Raises SidecarUnreachable after `max_failures` calls in a row that some sidecar did not answer.
        """
        acked, late = 0, []
        with self._unacked.taken(by_lease(samples)) as todo:
            for (index, lease_id), names in list(todo.items()):
                try:
                    answers = self._ack(index, lease_id, names, delete=self.delete)
                except SidecarUnreachable as error:
                    self._failures.count(error)
                    continue
                self._failures.clear()
                del todo[index, lease_id]
                late += [name for name in names if answers.get(name) not in ("acked", "already_acked")]
                acked += sum(answer == "acked" for answer in answers.values())
        return Acked(acked, tuple(late), len(self._unacked))

    @contextlib.contextmanager
    def step(self, samples: Any) -> Iterator[None]:
        """One optimiser step: acknowledges the samples at its end, gives them back when it raises."""
        try:
            yield
        except BaseException:
            self.release(samples)
            raise
        self.ack(samples)

    def release(self, samples: Any) -> None:
        """Gives samples back at once; what no sidecar answers for comes back at its deadline."""
        self._give_back(by_lease(samples))

    def outstanding(self) -> int:
        """Captures of this queue that any consumer holds now; raises SidecarUnreachable."""
        holdings = [holding for leases in self._queues for holding in leases.holdings()]
        return sum(holding.held for holding in holdings if holding.queue == self.queue)

    def give_back(self) -> None:
        """Gives back whatever this rank holds in its queue (a DataLoader worker: whatever it holds itself).

        After a loop that broke off: batches on their way from a worker are known to nobody but the sidecar.
        """
        worker = get_worker_info()
        for leases in self._queues:
            for holding in leases.holdings():
                mine = holding.consumer == self._consumer() if worker else self._is_of_rank(holding.consumer)
                if mine and holding.held and holding.queue == self.queue:
                    leases.release_all(holding.queue, holding.consumer)

    def close(self) -> None:
        """Gives everything back and closes the connections; what no sidecar answers for comes back at its deadline."""
        with contextlib.suppress(TransportError):
            self.give_back()
        for leases in self._queues:
            leases.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Who takes from which queue; what is acknowledged is known to the sidecars, which outlive a trainer."""
        return {"queue": self.wanted.queue, "consumer": self.wanted.consumer, "epoch": int(self._epoch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the run that made `state` ended: whatever it had not acknowledged is free again at once.

        Only one such run may live. Raises SettingsError where the queue or the consumer is another one.
        """
        mine = {**self.state_dict(), "epoch": state.get("epoch")}
        if dict(state) != mine:
            raise SettingsError(f"the state is of {dict(state)}, this data set of {mine}: give it the same names")
        self.set_epoch(state["epoch"])
        self.give_back()

    def set_epoch(self, epoch: int) -> None:
        """Another pass over all captures, in another order where they are shuffled; seen by persistent workers too.

        Epoch 0 is the queue `queue`, any other the queue `{queue}/epoch-{epoch}`.
        """
        self._epoch.fill_(epoch)

    @property
    def queue(self) -> str:
        """The queue of this epoch."""
        epoch = int(self._epoch)
        return f"{self.wanted.queue}/epoch-{epoch}" if epoch else self.wanted.queue

    @property
    def passed_over(self) -> list[Passed]:
        """Captures that could not be used so far, here and in DataLoader workers."""
        return self._passed.all()

    def __len__(self) -> int:
        """Different rows of `data`; TypeError without, as only the sidecars know what they will lend."""
        if not self._by_tokens:
            raise TypeError("a LeasedDataset has a length only with `data`")
        return len(self._by_tokens)

    def _consumer(self) -> str:
        worker = get_worker_info()
        return f"{self.wanted.consumer}/worker{worker.id if worker else 0}"

    def _is_of_rank(self, consumer: str) -> bool:
        return consumer.startswith(f"{self.wanted.consumer}/worker")

    def _random(self) -> random.Random:
        return random.Random(f"{self.seed}/{int(self._epoch)}/{self._consumer()}")

    def _ack(self, index: int, lease_id: str, names: Sequence[str], *, delete: bool = False) -> Mapping[str, str]:
        try:
            return self._queues[index].acknowledge(lease_id, names, delete=delete)
        except SidecarRefused as error:
            if error.kind not in ("lease_expired", "lease_unknown"):
                raise
            return dict.fromkeys(names, error.kind)

    def _lent(self, wanted: LeaseRequest, stop: threading.Event) -> Iterator[Lent]:
        """Captures as they are lent, from one sidecar after the other."""
        troubles = [Failures(self._failures.most) for _ in self._queues]
        wait = _POLL_S if len(troubles) == 1 else 0.0
        last = time.monotonic()
        while not stop.is_set():
            got, receiving = False, 0
            for index, trouble in enumerate(troubles):
                try:
                    lease = self._take(index, wanted, wait)
                    trouble.clear()
                except SidecarUnreachable as error:
                    trouble.note(error)
                    continue
                receiving += lease.receiving
                for record in lease.captures:
                    got = True
                    yield Lent(index, lease.lease_id or "", record)
            if got:
                last = time.monotonic()
            elif self._is_over(troubles, time.monotonic() - last, receiving):
                return
            else:
                stop.wait(FIRST_PAUSE_S)

    def _is_over(self, troubles: Sequence[Failures], idle: float, receiving: int) -> bool:
        """Whether nothing more will come; raises SidecarUnreachable where a sidecar that may hold more is away."""
        broken = [trouble for trouble in troubles if trouble.exhausted]
        over = self.idle_s is not None and idle >= self.idle_s
        if len(broken) == len(troubles) or (over and broken):
            broken[0].stop()
        if any(trouble.consecutive for trouble in troubles):
            return False
        return over or (self.idle_s is not None and not receiving and self._is_quiet(self.idle_s))

    def _is_quiet(self, seconds: float) -> bool:
        """Whether every capture ended so many seconds ago and no other run holds any; the clocks must agree on that."""
        with contextlib.suppress(SidecarUnreachable):
            return all(_age(leases.newest()) >= seconds for leases in self._queues) and not any(
                holding.held and holding.queue == self.queue and not holding.consumer.startswith(f"{self._run}/rank")
                for leases in self._queues
                for holding in leases.holdings()
            )
        return False

    def _take(self, index: int, wanted: LeaseRequest, wait: float) -> Lease:
        return self._queues[index].take(wanted, wait=wait if self.idle_s is None else min(wait, self.idle_s))

    def _read(self, lent: Lent) -> Sample | None:
        """The sample of a capture; None where it is passed over."""
        self._seen += 1
        try:
            capture = self._fetcher.fetch([Replica(lent.source, lent.record)])
        except (CaptureError, ShardError, StoreError) as error:
            self._pass_over(lent, str(error))
            return None
        row = self._row(capture)
        if row is None and self._by_tokens:
            expected = self._name not in (None, lent.record.dataset)
            self._pass_over(lent, None if expected else "its tokens are those of no row of `data`")
            return None
        self._refuse_other_weights(lent.record)
        sample = make_sample(capture, lent.record, row)
        if self._cut is not None:
            sample |= {name: sample[name][slice(*self._cut)] for name in ("hidden_states", "token_ids", "loss_mask")}
        return {**sample, "lease": lent.lease}

    def _refuse_other_weights(self, record: CaptureRecord) -> None:
        """Raises SettingsError: equal tokens of other weights are other states, and nobody asked for both."""
        self._weights = record.weights_id if self._weights is None else self._weights
        if self._weights != record.weights_id:
            raise SettingsError(
                f"capture {record.capture_id} is of weights {record.weights_id[:12] or 'unknown'}, those before it of "
                f"{self._weights[:12] or 'unknown'}: say whose with weights_id="
            )

    def _only_weights(self) -> str | None:
        """Whose weights all captures of the sidecars are of, None where there are none yet; raises SettingsError."""
        filters = self.wanted.filters
        if filters.weights_id is not None:
            return None
        held: list[WeightsHeld] = []
        for leases in self._queues:
            with contextlib.suppress(SidecarUnreachable):
                held += leases.weights(filters)
        if len({each.weights_id for each in held}) > 1:
            raise SettingsError(f"there are {', '.join(map(str, held))}: say whose are wanted with weights_id=")
        return held[0].weights_id if held else None

    def _pass_over(self, lent: Lent, reason: str | None) -> None:
        """Acknowledges a capture that cannot be used, so that the queue goes on; its shard, if any, stays.

        Where that fails it comes with a later lease, and again here. Without a reason it was
        to be expected: captures of other names than `dataset` need not be rows of `data`.
        """
        with contextlib.suppress(SidecarUnreachable):
            self._ack(lent.source, lent.lease_id, [lent.record.capture_id])
        if reason is None:
            return
        known = len(self._by_tokens) or max(self._seen, _FEW)
        name = lent.record.capture_id
        self._passed.note(Passed(name, name, f"{lent.record.sample_id!r} of {lent.record.dataset!r}: {reason}"), known)

    def _row(self, capture: Capture) -> DataRow | None:
        if not self._by_tokens:
            return None
        return self._by_tokens.get(token_hash(capture.token_ids.numpy().astype("<i8").tobytes()))

    def _give_back(self, leases: Leased) -> None:
        for (index, lease_id), names in leases.items():
            with contextlib.suppress(TransportError):
                self._queues[index].release(lease_id, names)


def _age(record: CaptureRecord | None) -> float:
    """Seconds since a capture ended; of none, for ever."""
    return time.time() - (record.finished or record.created) if record else math.inf


def _shuffled(samples: Iterable[Sample], held: list[Sample], window: int, choose: random.Random) -> Iterator[Sample]:
    """Each sample once, drawn from the next `window`, which `held` holds."""
    for sample in samples:
        held.append(sample)
        if len(held) >= window:
            yield held.pop(choose.randrange(len(held)))
    choose.shuffle(held)
    while held:
        yield held.pop()


def _filling(samples: Iterable[Sample], held: list[Sample], budget: int) -> Iterator[list[Sample]]:
    """Batches of samples, at most `budget` tokens each (one sample may have more); `held` is the one in the making."""
    tokens = 0
    for sample in samples:
        length = len(sample["token_ids"])
        if held and tokens + length > budget:
            yield _taken(held)
            tokens = 0
        held.append(sample)
        tokens += length
    if held:
        yield _taken(held)


def _taken(held: list[Sample]) -> list[Sample]:
    batch = list(held)
    held.clear()
    return batch
