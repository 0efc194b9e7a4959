"""Captures sent to a sidecar over its own wire, as an engine would."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx
import torch

from hsconnector.capture.protocol import (
    Batch,
    BatchAnswer,
    CaptureInfo,
    Commit,
    Fail,
    FailReason,
    Message,
    Open,
    Producer,
    ProducerAccepted,
    Rows,
    Span,
    decode,
    encode,
    encode_batch,
    new_capture_id,
    pack_token_ids,
)


class Feeder:
    """One stream to a sidecar, opened with `layer_ids` and a hidden size; batches go in order and one at a time."""

    def __init__(
        self,
        url: str,
        *,
        layer_ids: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype = torch.float32,
        key: str = "",
        **about: Any,
    ) -> None:
        self.dtype = dtype
        producer = {
            "engine_id": "engine-0",
            "model": "tiny",
            "vllm_version": "0.32.0",
            "layer_ids": tuple(layer_ids),
            "num_layers": max(layer_ids),
            "hidden_size": hidden_size,
            "dtype": str(dtype).removeprefix("torch."),
            **about,
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = url
        self._http = httpx.Client(base_url=url, headers=headers, trust_env=False)
        answer = self._http.post("/v1/producers", content=encode(Producer(**producer))).raise_for_status()
        self._id, self._seq = decode(answer.content, ProducerAccepted).producer_id, 0

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def capture(self, states: torch.Tensor, token_ids: Sequence[int], **about: Any) -> str:
        """A whole capture of `states` `[T, L, H]`; the id. `about` is of `CaptureInfo`."""
        capture_id = self.open(len(token_ids), **about)
        payload = bytes(states.to(self.dtype).contiguous().view(torch.uint8).numpy().data)
        rows = Rows(capture_id, 0, len(token_ids), Span(0, len(payload)))
        self.send(rows, Commit(capture_id, len(token_ids), pack_token_ids(token_ids), "length"), payload=payload)
        return capture_id

    def open(self, num_prompt_tokens: int, **about: Any) -> str:
        """A capture that has begun."""
        fields = {
            "capture_id": new_capture_id(),
            "request_id": "chatcmpl-job-0badcafe",
            "created": time.time(),
            **about,
        }
        self.send(Open(CaptureInfo(num_prompt_tokens=num_prompt_tokens, **fields)))
        return str(fields["capture_id"])

    def fail(self, capture_id: str, reason: FailReason, detail: str = "") -> None:
        """The end of a capture without a shard."""
        self.send(Fail(capture_id, reason, detail))

    def close_stream(self) -> None:
        """The engine ends in order."""
        self.send(close=True)

    def send(self, *messages: Message, payload: bytes = b"", close: bool = False) -> BatchAnswer:
        """One batch."""
        body = b"".join(encode_batch(Batch(self._id, self._seq, messages, close), [payload]))
        self._seq += 1
        return decode(self._http.post("/v1/ingest", content=body).raise_for_status().content, BatchAnswer)
