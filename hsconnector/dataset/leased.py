"""Captures from the work queues of sidecars."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch.utils.data import IterableDataset, get_worker_info

from hsconnector.capture.content import WeightsHeld
from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.shard import Capture
from hsconnector.client.leases import Lease, LeaseFilters, LeaseRequest, Leases
from hsconnector.client.sources import View
from hsconnector.dataset.failover import FIRST_PAUSE_S, Failures, Fetcher, Replica, open_sources
from hsconnector.dataset.prefetch import Prefetch
from hsconnector.dataset.samples import Sample, make_sample, rows_by_tokens
from hsconnector.errors import CaptureError, SettingsError, SidecarRefused, SidecarUnreachable, TransportError
from hsconnector.prompts.labels import DataRow, token_hash

__all__ = ["Acked", "LeasedDataset"]

_POLL_S = 0.5


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
    set (what `hsconnector extract` reads or saves): each capture's mask is that of the row with the same tokens, and a
    capture of other tokens raises SettingsError.

    Every rank and every DataLoader worker takes leases of its own, so no two get the same capture while a lease lasts:
    `deadline_s` must cover reading ahead and a step. `queue` names a pass over the captures: what is acknowledged is
    not delivered again in it, also after a restart; take another name for another epoch. Each worker reads ahead up to
    `prefetch_bytes`, and asks for at most `lease_captures` at a time. `dataset`, `model`, `layers` (layer ids) and
    `weights_id` (its first digits) choose captures; without the last, captures of two weights raise SettingsError.
    `layers` and `rows` (first and one past the last) give views.

    Iteration ends when nothing was free for `idle_s` seconds, also while the engine still makes captures; with None it
    never ends. What a crashed consumer held comes back at its deadline, so a run that wants all of it iterates until a
    pass gives nothing and `outstanding()` is 0. Ranks may get different numbers of samples.

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
    ) -> None:
        if idle_s is not None and not 0 <= idle_s < deadline_s:
            raise SettingsError(f"idle_s {idle_s:g} must be 0 or more and shorter than deadline_s {deadline_s:g}")
        if prefetch_bytes < 0 or lease_captures < 1:
            raise SettingsError(f"prefetch_bytes {prefetch_bytes} or lease_captures {lease_captures} is too small")
        self.idle_s, self.delete = idle_s, delete
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.wanted = LeaseRequest(
            consumer=f"{consumer}/rank{rank}",
            queue=queue,
            count=lease_captures,
            max_bytes=prefetch_bytes,
            deadline_s=deadline_s,
            filters=LeaseFilters(dataset, model, tuple(layers or ()), weights_id),
        )
        urls = [urls] if isinstance(urls, str) else list(urls)
        self._queues = [Leases(url, api_key=api_key) for url in urls]
        self._rows = rows_by_tokens(data)
        self._cut = rows if self._rows else None
        """Rows to take of a capture that is read whole, as all its tokens tell which row of `data` it is."""
        view = View(layers=layers, rows=None if self._rows else rows, verify=verify)
        self._fetcher = Fetcher(open_sources(urls, api_key, local), view, max_failures)
        self._unacked = _Unacked()
        self._weights: str | None = None
        """Whose weights this process reads, once that is known."""
        self._failures = Failures(max_failures)

    def __iter__(self) -> Iterator[Sample]:
        self._weights = self._only_weights()
        worker = get_worker_info()
        consumer = f"{self.wanted.consumer}/worker{worker.id if worker else 0}"
        wanted = msgspec.structs.replace(self.wanted, consumer=consumer)
        prefetch = Prefetch(lambda stop: self._lent(wanted, stop), self._read, self.wanted.max_bytes or 0)
        try:
            yield from prefetch
        finally:
            self._give_back(_by_lease([lent.lease for lent in prefetch.close()]))

    def ack(self, samples: Any) -> Acked:
        """Acknowledges samples, batches of them or their `lease` values. Harmless when repeated; from any thread.

        Raises SidecarUnreachable after `max_failures` calls in a row that some sidecar did not answer.
        """
        acked, late = 0, []
        with self._unacked.taken(_by_lease(samples)) as todo:
            for (index, lease_id), names in list(todo.items()):
                try:
                    answers = self._ack(index, lease_id, names)
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
        self._give_back(_by_lease(samples))

    def outstanding(self) -> int:
        """Captures of this queue that any consumer holds now; raises SidecarUnreachable."""
        holdings = [holding for leases in self._queues for holding in leases.holdings()]
        return sum(holding.held for holding in holdings if holding.queue == self.wanted.queue)

    def _ack(self, index: int, lease_id: str, names: Sequence[str]) -> Mapping[str, str]:
        try:
            return self._queues[index].acknowledge(lease_id, names, delete=self.delete)
        except SidecarRefused as error:
            if error.kind not in ("lease_expired", "lease_unknown"):
                raise
            return dict.fromkeys(names, error.kind)

    def _lent(self, wanted: LeaseRequest, stop: threading.Event) -> Iterator[_Lent]:
        """Captures as they are lent, from one sidecar after the other."""
        troubles = [Failures(self._failures.most) for _ in self._queues]
        wait = _POLL_S if len(troubles) == 1 else 0.0
        last = time.monotonic()
        while not stop.is_set():
            got = False
            for index, trouble in enumerate(troubles):
                try:
                    lease = self._take(index, wanted, wait)
                    trouble.clear()
                except SidecarUnreachable as error:
                    trouble.note(error)
                    continue
                for record in lease.captures:
                    got = True
                    yield _Lent(index, lease.lease_id or "", record)
            if got:
                last = time.monotonic()
            elif self._is_over(troubles, time.monotonic() - last):
                return
            else:
                stop.wait(FIRST_PAUSE_S)

    def _is_over(self, troubles: Sequence[Failures], idle: float) -> bool:
        """Whether nothing more will come; raises SidecarUnreachable where a sidecar that may hold more is away."""
        broken = [trouble for trouble in troubles if trouble.exhausted]
        over = self.idle_s is not None and idle >= self.idle_s
        if len(broken) == len(troubles) or (over and broken):
            broken[0].stop()
        return over and not any(trouble.consecutive for trouble in troubles)

    def _take(self, index: int, wanted: LeaseRequest, wait: float) -> Lease:
        return self._queues[index].take(wanted, wait=wait if self.idle_s is None else min(wait, self.idle_s))

    def _read(self, lent: _Lent) -> Sample | None:
        """The sample of a capture; None where it was deleted meanwhile."""
        try:
            capture = self._fetcher.fetch([Replica(lent.source, lent.record)])
        except CaptureError:
            self._pass_over(lent)
            return None
        self._refuse_other_weights(lent.record)
        sample = make_sample(capture, lent.record, self._row(capture))
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

    def _pass_over(self, lent: _Lent) -> None:
        """Acknowledges a capture that cannot be read; where that fails it comes with a later lease, and again here."""
        with contextlib.suppress(SidecarUnreachable):
            self._ack(lent.source, lent.lease_id, [lent.record.capture_id])

    def _row(self, capture: Capture) -> DataRow | None:
        if not self._rows:
            return None
        row = self._rows.get(token_hash(capture.token_ids.numpy().astype("<i8").tobytes()))
        if row is None:
            raise SettingsError(f"the tokens of capture {capture.capture_id} are those of no row of `data`")
        return row

    def _give_back(self, leases: _Leased) -> None:
        for (index, lease_id), names in leases.items():
            with contextlib.suppress(TransportError):
                self._queues[index].release(lease_id, names)


_Leased = dict[tuple[int, str], list[str]]
"""Captures by sidecar and lease."""


class _Unacked:
    """Captures whose acknowledgement no sidecar has answered yet; for any thread, and pickled without its lock."""

    def __init__(self, names: _Leased | None = None) -> None:
        self._names = names or {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[_Unacked], tuple[_Leased]]:
        with self._lock:
            return _Unacked, ({key: list(names) for key, names in self._names.items()},)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._names.values()))

    @contextlib.contextmanager
    def taken(self, more: _Leased) -> Iterator[_Leased]:
        """All of them and `more`, for this caller alone; what it leaves in the dictionary is put back at the end."""
        with self._lock:
            todo, self._names = self._names, {}
        try:
            yield _add(todo, more)
        finally:
            with self._lock:
                _add(self._names, todo)


def _add(leased: _Leased, more: _Leased) -> _Leased:
    for key, names in more.items():
        leased.setdefault(key, []).extend(names)
    return leased


@dataclass(frozen=True)
class _Lent:
    """A capture that sidecar number `source` has lent."""

    source: int
    lease_id: str
    record: CaptureRecord

    @property
    def size(self) -> int:
        return self.record.size

    @property
    def lease(self) -> str:
        """What `_by_lease` knows it by."""
        return f"{self.source}/{self.lease_id}/{self.record.capture_id}"


def _by_lease(samples: Any) -> _Leased:
    """The captures of each sidecar and lease among samples, batches of them, or `lease` values."""
    leases: _Leased = defaultdict(list)
    pending = [samples]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            pending.append(each["lease"])
        elif isinstance(each, str):
            index, lease_id, capture_id = each.split("/")
            leases[int(index), lease_id].append(capture_id)
        else:
            pending.extend(each)
    return leases
