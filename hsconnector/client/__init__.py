"""Talking to a sidecar from Python: what a trainer or a notebook imports.

    from hsconnector.client import Client

    with Client("http://127.0.0.1:8190") as client:      # api_key="…", or HSC_API_KEY in the environment
        capture = client.fetch(response.kv_transfer_params["handle"])
        capture.hidden_states     # [T, L, H], in the dtype of the engine
        capture.token_ids         # [T], int64
        capture.layer_ids         # what each slot holds
        capture.metadata["tags"]  # the texts of a capture; its tags (dict[str, str]) as JSON

        for record in client.find(dataset="sharegpt", state="ready"):
            record.tags           # dict[str, str]

A capture on this host is read from its file, any other over HTTP; either way its checksum is verified.
"""

from __future__ import annotations

from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.shard import Capture, open_shard
from hsconnector.client.address import DEFAULT_SIDECAR
from hsconnector.client.captures import Client, Collection, Filters, Leaving, Limits

__all__ = [
    "DEFAULT_SIDECAR",
    "Capture",
    "CaptureRecord",
    "Client",
    "Collection",
    "Filters",
    "Leaving",
    "Limits",
    "open_shard",
]
