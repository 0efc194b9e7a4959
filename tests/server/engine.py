"""One engine's side of the wire, by hand: for tests that say exactly which messages are sent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from hsconnector.capture.protocol import (
    Batch,
    BatchAnswer,
    CaptureInfo,
    Commit,
    Fail,
    FailReason,
    Message,
    MessageAnswer,
    Open,
    Producer,
    ProducerAccepted,
    RingOffer,
    Rows,
    Span,
    decode,
    encode,
    encode_batch,
    new_capture_id,
    pack_token_ids,
)
from tests.sidecar import SidecarThread

LAYERS = (0, 2, 4)
HIDDEN = 32
ROW = len(LAYERS) * HIDDEN * 4
"""Bytes of a row."""


def rows_of(count: int, *, seed: int = 0, layers: int = len(LAYERS), hidden: int = HIDDEN) -> np.ndarray[Any, Any]:
    """`[count, layers, hidden]` float32, no two rows or slots alike."""
    return np.random.default_rng(seed).standard_normal((count, layers, hidden)).astype(np.float32)


def files(sidecar: SidecarThread) -> list[str]:
    """Every file under captures and quarantine."""
    return [p.name for area in ("captures", "quarantine") for p in (sidecar.store / area).rglob("*") if p.is_file()]


class Engine:
    """Registers as a producer and sends batches; `send` gives one answer per message."""

    def __init__(self, url: str, *, key: str | None = None, **producer: Any) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)
        self.producer = Producer(
            **{
                "engine_id": "engine",
                "model": "model",
                "vllm_version": "0.32.0",
                "layer_ids": LAYERS,
                "num_layers": 4,
                "hidden_size": HIDDEN,
                "dtype": "float32",
                **producer,
            }
        )
        answer = self.http.post("/v1/producers", content=encode(self.producer))
        if answer.status_code != 200:
            self.http.close()
            raise RuntimeError(answer.text)
        self.accepted = decode(answer.content, ProducerAccepted)
        self.seq = -1

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, batch: Batch, payload: bytes = b"") -> httpx.Response:
        """One batch as it is."""
        return self.http.post("/v1/ingest", content=b"".join(encode_batch(batch, [payload])))

    def send(self, *messages: Message, payload: bytes = b"", close: bool = False) -> tuple[MessageAnswer, ...]:
        """The next batch."""
        self.seq += 1
        answer = self.post(Batch(self.accepted.producer_id, self.seq, messages, close), payload)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.text}")
        return decode(answer.content, BatchAnswer).messages

    def open(self, capture_id: str = "", **info: Any) -> str:
        """Opens a capture."""
        message = opening(capture_id, **info)
        self.send(message)
        return message.capture.capture_id

    def rows(self, capture_id: str, rows: np.ndarray[Any, Any], start: int = 0) -> MessageAnswer:
        """Sends rows in the body."""
        data = rows.tobytes()
        return self.send(Rows(capture_id, start, len(rows), Span(0, len(data))), payload=data)[0]

    def commit(self, capture_id: str, token_ids: range | list[int]) -> MessageAnswer:
        """Commits."""
        return self.send(Commit(capture_id, len(token_ids), pack_token_ids(list(token_ids)), "stop"))[0]

    def fail(self, capture_id: str, reason: FailReason = FailReason.ABORTED) -> MessageAnswer:
        """Fails a capture."""
        return self.send(Fail(capture_id, reason, "for the test"))[0]

    def capture(self, rows: np.ndarray[Any, Any] | int = 5, **info: Any) -> str:
        """A whole capture in one batch; the token ids are 0, 1, 2..."""
        values = rows_of(rows) if isinstance(rows, int) else rows
        message = opening("", **{"num_prompt_tokens": len(values), **info})
        name = message.capture.capture_id
        self.send(
            message,
            Rows(name, 0, len(values), Span(0, values.nbytes)),
            Commit(name, len(values), pack_token_ids(range(len(values)))),
            payload=values.tobytes(),
        )
        return name


def opening(capture_id: str = "", **info: Any) -> Open:
    """An Open with what is not given filled in."""
    facts = {"request_id": "cmpl-request-0-0123abcd", "num_prompt_tokens": 5, "created": time.time(), **info}
    return Open(CaptureInfo(capture_id=capture_id or new_capture_id(), **facts))


class SharedFile:
    """A ring as an engine makes it."""

    def __init__(self, folder: Path, size: int, name: str = "ring") -> None:
        self.path = folder / name
        self.size = size
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
        os.posix_fallocate(self._fd, 0, size)

    @property
    def offer(self) -> RingOffer:
        return RingOffer(self.path.name, self.size)

    def write(self, data: bytes, offset: int = 0) -> None:
        os.pwrite(self._fd, data, offset)

    def shrink(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        os.close(self._fd)
        self.path.unlink(missing_ok=True)


def until(true: Callable[[], object], within_s: float = 60.0) -> None:
    """Returns once it is so; fails where it never is."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, f"it was not so within {within_s:g} s"
        time.sleep(0.01)


def metric(http: httpx.Client, name: str) -> float:
    """A metric's value now; `name` with its labels as exposed."""
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} "))
