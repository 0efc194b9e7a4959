"""torch data sets over captures: `CaptureDataset` by index, `LeasedDataset` from the sidecars' work queue.

    from hsconnector.dataset import CaptureDataset, LeasedDataset

    dataset = CaptureDataset("http://127.0.0.1:8190", dataset="sharegpt", data="rows.jsonl", layers=[2, 16, 29, 32])
    dataset[7]["hidden_states"]        # [T, L, H], of row 7 of rows.jsonl

    online = LeasedDataset(["http://a:8190", "http://b:8190"], queue="epoch-1", dataset="sharegpt")
    for batch in DataLoader(online, batch_size=None, num_workers=2):
        with online.step(batch):       # acknowledged when the step is done, given back when it fails
            train(batch)

A sample is a dictionary of

    hidden_states   [T, L, H] tensor in the stored dtype; slot s is layer id `layers[s]`, ascending
    token_ids       [T] int64 tensor
    loss_mask       [T] int64 tensor of 0 and 1; only where `data` names the tokenised data set, which holds the masks
    sample_id       str, as the request named it; "" where it named none
    capture_id      str
    lease           str, only from `LeasedDataset`: what `ack` and `release` know the sample by

A sidecar keeps no loss masks: without `data` there is no `loss_mask`, and which tokens count is the trainer's business.
Nothing is shifted or padded, so batches of more than one sample need a `collate_fn`: `pad`, or `Pack(max_tokens)`.
Both kinds travel to spawned DataLoader workers; each process opens connections of its own.
"""

from __future__ import annotations

from hsconnector.client.passed import Passed
from hsconnector.dataset.captures import CaptureDataset
from hsconnector.dataset.collate import Pack, pad
from hsconnector.dataset.leased import Acked, LeasedDataset
from hsconnector.dataset.ranks import even_steps
from hsconnector.dataset.samples import Sample

__all__ = ["Acked", "CaptureDataset", "LeasedDataset", "Pack", "Passed", "Sample", "even_steps", "pad"]
