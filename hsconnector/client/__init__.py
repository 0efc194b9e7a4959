"""Talking to a sidecar from Python: what a trainer or a notebook imports.

from hsconnector.client import Client

with Client("http://127.0.0.1:8190") as client:
    capture = client.fetch(response.kv_transfer_params["handle"])
    capture.hidden_states     # [T, L, H]
    capture.layer_ids         # what each slot holds
"""

from __future__ import annotations

from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.shard import Capture, open_shard
from hsconnector.client.captures import DEFAULT_URL, Client, Filters

__all__ = ["DEFAULT_URL", "Capture", "CaptureRecord", "Client", "Filters", "open_shard"]
