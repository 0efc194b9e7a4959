"""An OpenAI server that answers as vLLM does and sends real captures to a real sidecar, with faults on request.

It stands where a vLLM engine would stand: the wire to the sidecar is the real one, the states are made up.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hsconnector.capture.protocol import Commit, FailReason, Rows, Span, new_capture_id, pack_token_ids
from tests.feeding import Feeder

LAYERS = (0, 2, 4)
NUM_LAYERS = 4
HIDDEN = 8
MAX_MODEL_LEN = 64
AFTER_CUT_S = 0.1
VOCABULARY = 1000


class FakeEngine:
    """Serves on a free port until `stop`.

    `fault` is called with the number of each request and its sample's id, and answers with one of

        ""            all is well
        "busy"        503, nothing captured
        "drop"        captured, and the answer lost
        "failed"      200, and a capture that fails
        "unsound"     200, and a capture of zeros
        "shifted"     200, and a capture of other tokens
        "endless"     200, and a capture that never ends
        "unheard"     200, and a capture the sidecar never hears of
        "bare"        200, and no kv_transfer_params
        "refused"     400
        "key"         401

    `point` is called at each step of a request, from that request's thread. After `cut`, which stands for the end of
    the client, a request whose capture is open ends a while later as `after_cut` says, any other is dropped.
    """

    def __init__(
        self,
        sidecar_url: str,
        *,
        model: str = "tiny",
        layer_ids: tuple[int, ...] = LAYERS,
        fault: Callable[[int, str], str] = lambda number, sample: "",
        key: str = "",
        port: int = 0,
        weights_id: str = "",
    ) -> None:
        self.fault = fault
        self.point: Callable[[], None] = lambda: None
        self.after_cut: Callable[[], bool] = lambda: True
        self.render: Callable[[dict[str, Any]], list[int] | str] | None = None
        """What `/tokenize` answers, a text for 400; None for an engine without it."""
        self.without = 404
        """What an engine without it answers."""
        self.rendered = 0
        self.asked: list[str] = []
        """The sample id of each request."""
        self.bodies: list[dict[str, Any]] = []
        self.running = 0
        self.cuts = 0
        self._model = model
        self._layers = layer_ids
        self._lock = threading.Lock()
        self._feeder = Feeder(
            sidecar_url,
            layer_ids=layer_ids,
            hidden_size=HIDDEN,
            num_layers=NUM_LAYERS,
            model=model,
            key=key,
            weights_id=weights_id,
        )
        self.changed_weights = ""
        """Whose weights its captures are of, where not those of its start."""
        self.adapters: dict[str, str] = {}
        """The weights ids of adapters that requests may name as their model."""
        routes = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
        ]
        self._socket = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off", access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="fake-engine")
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="fake-engine-heart")
        self._heart.start()

    def stop(self) -> None:
        self._stopped.set()
        self._heart.join()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self._feeder.__exit__()

    def end_stream(self) -> None:
        """The engine is gone, and says so."""
        self._feeder.close_stream()

    def cut(self) -> None:
        """The client of all requests that run is gone."""
        with self._lock:
            self.cuts += 1

    def rest(self) -> None:
        """Returns when no request is being worked on."""
        while self.running:
            time.sleep(0.005)

    def _beat(self) -> None:
        while not self._stopped.wait(2.0):
            with self._lock, contextlib.suppress(httpx.HTTPError):
                self._feeder.send()

    async def _models(self, request: Request) -> Response:
        card = {"id": "served", "object": "model", "root": self._model, "parent": None, "max_model_len": MAX_MODEL_LEN}
        adapter = {"id": "adapter", "object": "model", "root": "/adapters/a", "parent": "served"}
        return JSONResponse({"object": "list", "data": [card, adapter]})

    async def _tokenize(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.rendered += 1
        if self.render is None:
            return _error(self.without, "made up: not here")
        said = self.render(body)
        if isinstance(said, str):
            return _error(400, said)
        return JSONResponse({"count": len(said), "max_model_len": MAX_MODEL_LEN, "tokens": said})

    async def _completions(self, request: Request) -> Response:
        born = self.cuts
        try:
            body = json.loads(await request.body())
        except ClientDisconnect:
            return Response(status_code=400)
        if await request.is_disconnected():
            return Response(status_code=400)
        with self._lock:
            number = len(self.asked)
            asked = body["kv_transfer_params"]["hidden_states"]
            self.asked.append(asked.get("sample_id", ""))
            asked = {**asked, "lora": body["model"] if body["model"] in self.adapters else ""}
            self.bodies.append(body)
            self.running += 1
        try:
            return await run_in_threadpool(self._complete, number, body["prompt"], asked, born)
        finally:
            with self._lock:
                self.running -= 1

    def _complete(self, number: int, token_ids: list[int], asked: dict[str, Any], born: int) -> Response:
        self.point()
        fault = self.fault(number, asked.get("sample_id", ""))
        if fault in ("busy", "refused", "key"):
            status = {"busy": 503, "refused": 400, "key": 401}[fault]
            return _error(status, f"made up: {fault}")
        if wrong := _wrong(token_ids):
            return _error(400, wrong)
        if fault == "bare":
            return _answer(None)
        capture_id = new_capture_id()
        if fault != "unheard":
            if not self.open(capture_id, token_ids, asked, born):
                return _error(503, "cut")
            self.point()
            self.end(capture_id, token_ids, fault, born)
            self.point()
        return _error(502, "the answer was lost") if fault == "drop" else _answer(capture_id)

    def open(self, capture_id: str, token_ids: list[int], asked: dict[str, Any], born: int) -> bool:
        """Begins a capture, unless the client is gone."""
        names = ("dataset", "sample_id", "tags", "expected_content_hash", "lora")
        about = {name: asked[name] for name in names if name in asked}
        about["weights_id"] = self.changed_weights
        about["lora_weights_id"] = self.adapters.get(about.get("lora", ""), "")
        with self._lock:
            if self.cuts != born:
                return False
            self._feeder.open(len(token_ids), capture_id=capture_id, **about)
            return True

    def end(self, capture_id: str, token_ids: list[int], fault: str, born: int) -> None:
        """Ends a capture as `fault` says."""
        if self.cuts != born:
            time.sleep(AFTER_CUT_S)
            if not self.after_cut():
                fault = "aborted"
        if fault == "endless":
            return
        with self._lock:
            if fault in ("failed", "aborted"):
                self._feeder.fail(capture_id, FailReason.STALLED if fault == "failed" else FailReason.ABORTED)
                return
            states = made_up_states(token_ids, len(self._layers)) * (0 if fault == "unsound" else 1)
            payload = bytes(states.numpy().tobytes())
            sent = [token + 1 for token in token_ids] if fault == "shifted" else token_ids
            rows = Rows(capture_id, 0, len(token_ids), Span(0, len(payload)))
            commit = Commit(capture_id, len(token_ids), pack_token_ids(sent), "length")
            self._feeder.send(rows, commit, payload=payload)


def made_up_states(token_ids: list[int], slots: int = len(LAYERS)) -> torch.Tensor:
    """States `[T, L, H]` that depend on the tokens."""
    generator = torch.Generator().manual_seed(sum((i + 1) * token for i, token in enumerate(token_ids)))
    return torch.randn(len(token_ids), slots, HIDDEN, generator=generator)


def _wrong(token_ids: list[int]) -> str:
    if max(token_ids) >= VOCABULARY:
        return f"Token id {max(token_ids)} is out of vocabulary"
    if len(token_ids) >= MAX_MODEL_LEN:
        return f"This model's maximum context length is {MAX_MODEL_LEN} tokens"
    return ""


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "made_up", "code": status}}, status)


def _answer(capture_id: str | None) -> Response:
    params = {"capture_id": capture_id, "handle": f"http://nowhere/v1/captures/{capture_id}"} if capture_id else None
    choice = {"index": 0, "text": "a", "finish_reason": "length"}
    return JSONResponse({"object": "text_completion", "choices": [choice], "kv_transfer_params": params})
