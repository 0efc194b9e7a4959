"""Packed batches are those of the trainer's own data set and packing, bit for bit, over the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hsconnector.dataset import CaptureDataset, Pack
from hsconnector.integrations.speculators import trainer_sample
from tests.feeding import Feeder
from tests.models import LAYER_IDS, NUM_LAYERS
from tests.sidecar import SidecarThread
from tests.training import make_rows, write_dataset, write_plain_files

pytestmark = pytest.mark.trainer

HIDDEN, BUDGET = 16, 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_of_speculators_own_sampler(sidecar: SidecarThread, tmp_path: Path, dtype: torch.dtype) -> None:
    from speculators.train.data import ArrowDataset, CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    rows, generator = make_rows(seed=2), torch.Generator().manual_seed(1)
    with Feeder(sidecar.url, layer_ids=LAYER_IDS, hidden_size=HIDDEN, num_layers=NUM_LAYERS) as feeder:
        for row in reversed(rows):
            feeder.capture(torch.randn(len(row), len(LAYER_IDS), HIDDEN, generator=generator), row)
    folder = write_dataset(tmp_path / "rows", rows)
    write_plain_files(folder / "hidden_states", sidecar.url, rows)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"input_ids": row, "loss_mask": [0] * 10 + [1] * (len(row) - 10)}) + "\n" for row in rows)
    )
    theirs = ArrowDataset(BUDGET, folder, on_missing="raise", hidden_states_dtype=dtype)
    ours = CaptureDataset(sidecar.url, data=tmp_path / "rows.jsonl")
    assert ours.lengths.tolist() == theirs.approx_lengths
    batches = list(MultipackDistributedBatchSamplerV2(BUDGET, ours.lengths.tolist(), num_replicas=1, rank=0, seed=0))
    own = CollateFn(BUDGET, HIDDEN, num_target_layers=len(LAYER_IDS) - 1, dtype=dtype)
    for batch in [*batches, list(range(8))]:  # the last one is over the budget
        expected = own([theirs[index] for index in batch])
        found = Pack(BUDGET, dtype)([trainer_sample(sample) for sample in ours.__getitems__(batch)])
        cut = found.pop("tokens_cut")
        assert cut == max(0, sum(len(rows[index]) for index in batch) - BUDGET)
        assert expected.pop("error_records") == 0 and expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name
