"""A store as sidecars left it whose index was of version 2: their tables, records and shard bytes, written out here.

Nothing of the product is used: what the product reads today must be what lies on people's disks.
"""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import xxhash

TABLES = """
CREATE TABLE captures (
    capture_id TEXT PRIMARY KEY,
    folder TEXT NOT NULL,
    request_id TEXT NOT NULL,
    dataset TEXT NOT NULL,
    sample_id TEXT NOT NULL,
    state TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    model TEXT NOT NULL,
    created REAL NOT NULL,
    size INTEGER NOT NULL,
    record BLOB NOT NULL,
    ended REAL,
    reason TEXT NOT NULL DEFAULT ''
);
CREATE INDEX captures_live ON captures (created) WHERE ended IS NULL;
CREATE INDEX captures_live_folder ON captures (folder) WHERE ended IS NULL;
CREATE INDEX captures_ended ON captures (ended) WHERE ended IS NOT NULL;
CREATE INDEX captures_request ON captures (request_id);
CREATE INDEX captures_sample ON captures (dataset, sample_id);
CREATE INDEX captures_sample_only ON captures (sample_id) WHERE sample_id != '';
CREATE INDEX captures_state ON captures (state, capture_id);
CREATE INDEX captures_content ON captures (content_hash) WHERE content_hash != '';
CREATE INDEX captures_created ON captures (created);
CREATE TABLE client_ids (
    client_id TEXT NOT NULL,
    capture_id TEXT NOT NULL,
    rank INTEGER NOT NULL,
    PRIMARY KEY (client_id, capture_id)
) WITHOUT ROWID;
PRAGMA user_version = 2;
"""
LEASE_TABLES = """
CREATE TABLE leases (
    lease_id TEXT PRIMARY KEY,
    queue TEXT NOT NULL,
    consumer TEXT NOT NULL,
    created REAL NOT NULL,
    deadline REAL NOT NULL,
    captures TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE lease_items (
    queue TEXT NOT NULL,
    capture_id TEXT NOT NULL,
    state TEXT NOT NULL,
    lease_id TEXT NOT NULL,
    deadline REAL NOT NULL,
    deliveries INTEGER NOT NULL,
    remove INTEGER NOT NULL,
    PRIMARY KEY (queue, capture_id)
) WITHOUT ROWID;
CREATE INDEX lease_items_capture ON lease_items (capture_id, state);
CREATE INDEX lease_items_due ON lease_items (state, deadline);
CREATE INDEX lease_items_lease ON lease_items (lease_id);
CREATE INDEX lease_items_remove ON lease_items (capture_id) WHERE remove = 1;
CREATE TABLE lease_counts (
    queue TEXT NOT NULL,
    consumer TEXT NOT NULL,
    outcome TEXT NOT NULL,
    count INTEGER NOT NULL,
    last REAL NOT NULL,
    PRIMARY KEY (queue, consumer, outcome)
) WITHOUT ROWID;
"""
SOUND = {"sound": True, "reasons": [], "findings": [], "slots": []}
UNSOUND = {
    "sound": False,
    "reasons": ["zero_rows"],
    "findings": [{"reason": "zero_rows", "count": 2, "rows": [0, 1], "slots": [], "detail": ""}],
    "slots": [
        {
            "slot": 0,
            "layer_id": 0,
            "mean_norm": None,
            "minimum": 0.0,
            "maximum": 0.0,
            "zero_fraction": 1.0,
            "non_finite_rows": 0,
        }
    ],
}
CREATED = 1_700_000_000.5
DATA = bytes(range(1, 17)) + (5).to_bytes(8, "little") + (6).to_bytes(8, "little")
"""Hidden states `[2, 1, 4]` in bfloat16, and two token ids."""


def shard_bytes(capture_id: str, request_id: str) -> bytes:
    """A whole shard of `DATA`."""
    about = {
        "format": "hsconnector/1",
        "capture_id": capture_id,
        "request_id": request_id,
        "engine_id": "engine",
        "model": "model",
        "model_revision": "",
        "vllm_version": "0.32.0",
        "dims": "token,layer,hidden",
        "layer_ids": "[2]",
        "num_layers": "4",
        "last_layer_norm": "pre",
        "dtype": "bfloat16",
        "rows": "prompt",
        "num_prompt_tokens": "2",
        "content_hash": "c" * 64,
        "data_hash": xxhash.xxh3_128_hexdigest(DATA),
        "dataset": "d",
        "sample_id": "",
        "tags": '{"k":"v"}',
        "lora": "",
        "finish_reason": "stop",
        "created": "1700000000.500",
    }
    header = {
        "__metadata__": about,
        "hidden_states": {"dtype": "BF16", "shape": [2, 1, 4], "data_offsets": [0, 16]},
        "token_ids": {"dtype": "I64", "shape": [2], "data_offsets": [16, 32]},
    }
    text = json.dumps(header, separators=(",", ":")).encode().ljust(1208)
    return len(text).to_bytes(8, "little") + text + DATA


def record(capture_id: str, request_id: str, state: str, **facts: Any) -> dict[str, Any]:
    """A capture's record, every field as it was written."""
    return {
        "capture_id": capture_id,
        "request_id": request_id,
        "state": state,
        "reason": None,
        "detail": "",
        "engine_id": "engine",
        "model": "model",
        "model_revision": "",
        "vllm_version": "0.32.0",
        "layer_ids": [2],
        "num_layers": 4,
        "hidden_size": 4,
        "dtype": "bfloat16",
        "rows": "prompt",
        "num_rows": 0,
        "num_prompt_tokens": 2,
        "dataset": "d",
        "sample_id": "",
        "tags": {"k": "v"},
        "lora": "",
        "finish_reason": "",
        "content_hash": "",
        "data_hash": "",
        "created": CREATED,
        "finished": None,
        "size": 0,
        "mtime_ns": 0,
        "verdict": None,
        **facts,
    }


class OldStore:
    """A store of version 2 in the making; no sidecar may be running on it."""

    def __init__(self, root: Path, *, lease_tables: bool = True) -> None:
        self.root = root
        (root / "captures").mkdir(parents=True)
        (root / "quarantine").mkdir()
        self.index = sqlite3.connect(root / "catalog.sqlite")
        self.index.execute("PRAGMA journal_mode = WAL")
        self.index.executescript(TABLES + (LEASE_TABLES if lease_tables else ""))
        self._made = 0

    def close(self) -> None:
        """What was added is there."""
        self.index.commit()
        self.index.close()

    def whole(self, state: str = "ready", verdict: dict[str, Any] = SOUND, client: str = "") -> str:
        """A capture with a shard."""
        name = self._new_id()
        request = f"chatcmpl-{client or name}-0123abcd"
        path = self.shard(name, state)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(shard_bytes(name, request))
        about = os.stat(path)
        facts = {"num_rows": 2, "finish_reason": "stop", "content_hash": "c" * 64, "finished": CREATED + 1}
        facts |= {"data_hash": xxhash.xxh3_128_hexdigest(DATA), "size": about.st_size, "mtime_ns": about.st_mtime_ns}
        self._add(record(name, request, state, verdict=verdict, **facts))
        return name

    def without_shard(self, state: str, **facts: Any) -> str:
        """A failure, a tombstone, or a capture that was being received."""
        name = self._new_id()
        self._add(record(name, f"chatcmpl-{name}-0123abcd", state, **facts))
        return name

    def shard(self, name: str, state: str = "ready") -> Path:
        """Where a shard lies."""
        area = "quarantine" if state == "quarantined" else "captures"
        return self.root / area / name[-2:] / f"{name}.safetensors"

    def lease(self, lease_id: str, deadline: float, **states: str) -> None:
        """A lease of consumer "trainer" in queue "q", with the state of each of its captures."""
        row = (lease_id, "q", "trainer", CREATED, deadline, json.dumps(list(states)))
        self.index.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?)", row)
        for name, state in states.items():
            item = ("q", name, state, lease_id, deadline, 1, int(state == "gone"))
            self.index.execute("INSERT INTO lease_items VALUES (?, ?, ?, ?, ?, ?, ?)", item)

    def count(self, outcome: str, count: int, last: float) -> None:
        """A count of consumer "trainer" in queue "q"."""
        self.index.execute("INSERT INTO lease_counts VALUES ('q', 'trainer', ?, ?, ?)", (outcome, count, last))

    def _new_id(self) -> str:
        self._made += 1
        return f"{self._made:030x}{self._made * 7 % 256:02x}"

    def _add(self, record: dict[str, Any]) -> None:
        name, request = record["capture_id"], record["request_id"]
        columns = [record[key] for key in ("request_id", "dataset", "sample_id", "state", "content_hash", "model")]
        ended = record["finished"] or record["created"] if record["state"] in ("failed", "expired") else None
        row = (name, name[-2:], *columns, record["created"], record["size"], msgspec.msgpack.encode(record), ended)
        marks = ", ".join("?" * (len(row) + 1))
        self.index.execute(f"INSERT INTO captures VALUES ({marks})", (*row, record["reason"] or ""))
        base = request.removesuffix("-0123abcd")
        for client in (base, base.removeprefix("chatcmpl-")):
            self.index.execute("INSERT INTO client_ids VALUES (?, ?, 0)", (client, name))
