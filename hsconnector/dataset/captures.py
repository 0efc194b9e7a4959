"""Captures by index."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from hsconnector.client.passed import Passed, PassedOver
from hsconnector.client.sources import View
from hsconnector.dataset.failover import Fetcher, Sources, open_sources
from hsconnector.dataset.samples import Entry, Sample, choose_entries, common_layers, make_sample
from hsconnector.dataset.table import Table
from hsconnector.errors import CaptureError, CaptureNotFound, ShardError, StoreError

__all__ = ["CaptureDataset"]

_BAD = (CaptureError, ShardError, StoreError)


class CaptureDataset(Dataset[Sample]):
    """Captures by index; the order is that of `data`, of `sample_ids`, or else of the sample ids, numbers by value.

    `sources` are store folders and sidecar addresses. `data` is a tokenised data set (what `hsconnector extract` reads
    or saves): index `i` is its row `i`, found by content hash whatever data-set name it was captured under, and samples
    carry its `loss_mask`. Without `data` a name, `dataset`, chooses. `missing="skip"` leaves out what has no capture,
    otherwise that is an error. All captures are of one model, layer set and dtype: `dataset`, `model` and `weights_id`
    (its first digits) choose where a store holds several. `layers` (layer ids) and `rows` (first and one past the last)
    give views; `verify` compares checksums; with `local` a sidecar's shards on this host are opened directly.

    What is damaged or gone in one source is read from another one, or from an older capture of the same content.
    Where none is good, `dataset[i]` raises CaptureError, ShardError or StoreError; a DataLoader's batch and iteration
    pass over it, and `passed_over` names it. (`batch_size=None` asks for single samples, so it raises.) Where nothing
    is left of a batch the next good sample stands in, so that every rank gets its batches. More than the fraction
    `max_bad` of all samples raises CaptureError, which lists them.

    A sample that several sources hold is read from the next when one does not answer; after `max_failures` attempts
    in a row without an answer SidecarUnreachable is raised. Raises SettingsError, CaptureNotFound, TransportError when
    made.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        dataset: str | None = None,
        model: str | None = None,
        weights_id: str | None = None,
        sample_ids: Sequence[str] | None = None,
        data: str | os.PathLike[str] | None = None,
        missing: Literal["error", "skip"] = "error",
        layers: Sequence[int] | None = None,
        rows: tuple[int, int] | None = None,
        verify: bool = True,
        local: bool = True,
        api_key: str | None = None,
        max_failures: int = 5,
        max_bad: float = 0.01,
    ) -> None:
        view = View(layers=layers, rows=rows, verify=verify)
        self._fetcher = Fetcher(open_sources(sources, api_key, local), view, max_failures)
        self._passed = PassedOver(max_bad)
        entries = choose_entries(self._fetcher.list(model), dataset, sample_ids, data, missing, weights_id)
        self.layer_ids = common_layers(entries, view)
        held = torch.tensor([entry.replicas[0].record.num_rows for entry in entries], dtype=torch.int64)
        self._lengths = held if rows is None else held.clamp(max=rows[1]) - held.clamp(max=rows[0])
        self._entries = Table(entries, Entry)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> CaptureDataset: ...
    def __getitem__(self, index: int | slice) -> Sample | CaptureDataset:
        """A sample, or for a slice the data set of those samples, of which nothing is read yet."""
        if isinstance(index, slice):
            part = copy.copy(self)
            part._entries = self._entries[index]
            part._lengths = self._lengths[list(range(len(self))[index])]
            return part
        entry = self._entries[index]
        capture = self._fetcher.fetch(entry.replicas)
        return make_sample(capture, entry.replicas[0].record, entry.row)

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """A batch, as torch's DataLoader asks for it, without what cannot be read."""
        samples = [sample for sample in map(self._get, indices) if sample is not None]
        return samples or [self._stand_in(indices[-1])]

    def __iter__(self) -> Iterator[Sample]:
        return (sample for sample in map(self._get, range(len(self))) if sample is not None)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, `[N]` int64, for samplers that fill a budget."""
        return self._lengths.numpy()

    @property
    def sample_ids(self) -> list[str]:
        """The sample id (or, without one, the capture id) of each index."""
        return [self._entries[index].name for index in range(len(self))]

    @property
    def passed_over(self) -> list[Passed]:
        """What could not be read so far, here and in DataLoader workers."""
        return self._passed.all()

    def as_hf_dataset(self) -> Any:
        """A `datasets.Dataset` of the same order: `sample_id` and `length` are columns, tensors are read when asked.

        Rows are samples as here, so `select`, `shuffle` and `train_test_split` copy no states. Needs `datasets`.
        """
        import datasets

        columns = {"index": range(len(self)), "sample_id": self.sample_ids, "length": self.lengths}
        return datasets.Dataset.from_dict(columns).with_transform(self._columns)

    def _columns(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        samples = [self[index] for index in rows["index"]]
        return {name: [sample[name] for sample in samples] for name in samples[0]}

    def _get(self, index: int) -> Sample | None:
        """The sample; None where it is passed over."""
        try:
            return self[index]
        except _BAD as error:
            entry = self._entries[index]
            self._passed.note(Passed(entry.name, entry.replicas[0].record.capture_id, str(error)), len(self))
            return None

    def _stand_in(self, index: int) -> Sample:
        """The next sample that can be read."""
        for step in range(1, len(self)):
            sample = self._get((index + step) % len(self))
            if sample is not None:
                return sample
        raise CaptureNotFound(f"none of {len(self)} samples can be read")
