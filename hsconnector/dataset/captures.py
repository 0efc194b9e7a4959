"""Captures by index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from torch.utils.data import Dataset

from hsconnector.client.sources import View
from hsconnector.dataset.failover import Fetcher, Sources, open_sources
from hsconnector.dataset.samples import Sample, choose_entries, common_layers, make_sample

__all__ = ["CaptureDataset"]


class CaptureDataset(Dataset[Sample]):
    """Captures by index; the order is that of `data`, of `sample_ids`, or else of the sample ids, numbers by value.

    `sources` are store folders and sidecar addresses. `data` is a tokenised data set (what `hsconnector extract` reads
    or saves): index `i` is its row `i`, found by content hash, and samples carry its `loss_mask`. `missing="skip"`
    leaves out what has no capture, otherwise that is an error. All captures are of one model, layer set and dtype:
    `dataset`, `model` and `weights_id` (its first digits) choose where a store holds several; the rows of `data` are
    found whatever data-set name they were captured under. `layers` (layer ids) and `rows` (first and one past the
    last) give views; `verify` compares checksums; with `local` a sidecar's shards on this host are opened directly.

    A sample that several sources hold is read from the next when one does not answer; after `max_failures` attempts
    in a row without an answer SidecarUnreachable is raised. Raises SettingsError, CaptureNotFound, TransportError when
    made, and CaptureError or ShardError for a sample that is gone or damaged.
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
    ) -> None:
        view = View(layers=layers, rows=rows, verify=verify)
        self._fetcher = Fetcher(open_sources(sources, api_key, local), view, max_failures)
        by_content = data is not None and sample_ids is None
        found = self._fetcher.list(None if by_content else dataset, model)
        self._entries = choose_entries(found, sample_ids, data, missing, weights_id)
        self.layer_ids = common_layers(self._entries, view)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Sample:
        entry = self._entries[index]
        capture = self._fetcher.fetch(entry.replicas)
        return make_sample(capture, entry.replicas[0].record, entry.row)

    @property
    def sample_ids(self) -> list[str]:
        """The sample id (or, without one, the capture id) of each index."""
        return [entry.name for entry in self._entries]
