"""The fake engine for very many rows: no faults, and the captures of all requests that wait go in one batch."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from hsconnector.capture.protocol import CaptureInfo, Commit, Message, Open, Rows, Span, new_capture_id, pack_token_ids
from tests.extraction.fake_engine import HIDDEN, LAYERS, FakeEngine, made_up_states

TOKENS = 3
"""In each row."""
_STATES = bytes(made_up_states([1] * TOKENS).numpy().tobytes())


class QuickEngine(FakeEngine):
    """Keeps nothing of what it was asked but the number, and the time of the first request."""

    def __init__(self, sidecar_url: str) -> None:
        self.sent = 0
        self.first_at = 0.0
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[str]]] = []
        self._sending: asyncio.Task[None] | None = None
        super().__init__(sidecar_url)

    async def _completions(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        self.first_at = self.first_at or time.monotonic()
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((body, done))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        answer = {"object": "text_completion", "kv_transfer_params": {"capture_id": await done}}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _send_all(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            names = await run_in_threadpool(self._captured, [body for body, _ in taken])
            for (_, done), name in zip(taken, names, strict=True):
                done.set_result(name)
            self.sent += len(taken)

    def _captured(self, bodies: list[dict[str, Any]]) -> list[str]:
        names = [new_capture_id() for _ in bodies]
        messages: list[Message] = []
        for name, body in zip(names, bodies, strict=True):
            asked = body["kv_transfer_params"]["hidden_states"]
            about = {key: asked[key] for key in ("dataset", "sample_id", "tags", "expected_content_hash")}
            info = CaptureInfo(capture_id=name, request_id=name, num_prompt_tokens=TOKENS, created=time.time(), **about)
            span = Span(0, TOKENS * len(LAYERS) * HIDDEN * 4)
            messages += [Open(info), Rows(name, 0, TOKENS, span), Commit(name, TOKENS, pack_token_ids(body["prompt"]))]
        with self._lock:
            self._feeder.send(*messages, payload=_STATES)
        return names
