"""A view of a shard: some of its rows and layers as a file of their own, made while it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import numpy as np

from hsconnector.capture.header import TOKEN_BYTES, ShardHeader, build_header, data_hasher
from server.shard_files import ShardFile
from server.shards import PIECE_BYTES

__all__ = ["ShardView"]


class ShardView:
    """Some rows and layers of a shard, as a small safetensors file with a `data_hash` of its own.

    Its metadata is the shard's with `layer_ids` and `data_hash` of the view; `content_hash` is left out, `view` says
    (JSON) which rows and layers these are, `source_data_hash` and `source_content_hash` what they were cut from.
    """

    def __init__(self, file: ShardFile, header: ShardHeader, rows: tuple[int, int], slots: tuple[int, ...]) -> None:
        """`rows` are the first and the one after the last, `slots` ascend; both lie within the header's shape."""
        self._file, self._header, self._rows, self._slots = file, header, rows, slots
        self.shape = (rows[1] - rows[0], len(slots), header.shape[2])
        digest = data_hasher()
        for piece in self._data():
            digest.update(piece)
        self.data_hash = digest.hexdigest()
        self.head = build_header(self._metadata(), header.dtype, self.shape)
        row_bytes = header.row_bytes // header.shape[1] * len(slots)
        self.size = len(self.head) + self.shape[0] * (row_bytes + TOKEN_BYTES)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The file's bytes."""
        yield self.head
        pieces = self._data()
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def _metadata(self) -> dict[str, str]:
        kept = dict(self._header.metadata)
        kept["source_data_hash"] = kept.get("data_hash", "")
        kept["source_content_hash"] = kept.pop("content_hash", "")
        layers = [self._header.layer_ids[slot] for slot in self._slots]
        kept["view"] = msgspec.json.encode({"rows": list(self._rows), "layers": layers}).decode()
        kept["layer_ids"] = msgspec.json.encode(layers).decode()
        kept["data_hash"] = self.data_hash
        return kept

    def _data(self) -> Iterator[bytes]:
        header, (start, stop) = self._header, self._rows
        step = max(1, PIECE_BYTES // header.row_bytes)
        for row in range(start, stop, step):
            count = min(step, stop - row)
            data = self._file.read(header.data_at + row * header.row_bytes, count * header.row_bytes)
            yield self._pick(data, count)
        tokens = header.data_at + header.tokens_at
        yield self._file.read(tokens + TOKEN_BYTES * start, TOKEN_BYTES * (stop - start))

    def _pick(self, data: bytes, count: int) -> bytes:
        if len(self._slots) == self._header.shape[1]:
            return data
        rows: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(data, np.uint8).reshape(
            count, self._header.shape[1], -1
        )
        return rows[:, list(self._slots)].tobytes()
