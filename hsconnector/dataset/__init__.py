"""torch data sets over captures: `CaptureDataset` by index, `LeasedDataset` from the sidecars' work queue.

    from hsconnector.dataset import CaptureDataset, LeasedDataset

    dataset = CaptureDataset("http://127.0.0.1:8190", dataset="sharegpt", data="rows.jsonl", layers=[2, 16, 29, 32])
    dataset[7]["hidden_states"]        # [T, L, H], of row 7 of rows.jsonl

    online = LeasedDataset(["http://a:8190", "http://b:8190"], queue="epoch-1", dataset="sharegpt")
    for batch in DataLoader(online, batch_size=None, num_workers=2):
        with online.step(batch):       # acknowledged when the step is done, given back when it fails
            train(batch)

A sample is a dictionary: `hidden_states` `[T, L, H]` in the stored dtype, `token_ids` `[T]` int64, `loss_mask` `[T]`
int64 where `data` names the tokenised data set (0 and 1), `sample_id`, `capture_id`, and `lease` from a queue. Nothing
is shifted or padded. Both kinds travel to spawned DataLoader workers; each process opens connections of its own.
"""

from __future__ import annotations

from hsconnector.dataset.captures import CaptureDataset
from hsconnector.dataset.leased import Acked, LeasedDataset
from hsconnector.dataset.samples import Sample

__all__ = ["Acked", "CaptureDataset", "LeasedDataset", "Sample"]
