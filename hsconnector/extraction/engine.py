"""One running engine, through its OpenAI API."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
import msgspec

from hsconnector.client.connection import why
from hsconnector.client.envelope import PASSING, read_denial
from hsconnector.errors import HSConnectorError, SettingsError

__all__ = ["Engine", "EngineAway", "EngineBusy", "EngineRefused", "EngineUnusable", "ServedModel", "served_model"]


_T = TypeVar("_T")


class EngineBusy(HSConnectorError):
    """An engine that did not answer, or answered that it cannot now: ask again."""

    engine: Engine | None = None
    """Which one, once `Engines` knows."""


class EngineAway(EngineBusy):
    """Nothing takes connections there: the request was never made."""


class EngineRefused(HSConnectorError):
    """An engine that will not take this request, now or later."""


class EngineUnusable(HSConnectorError):
    """An engine that takes no request of this run."""


class ServedModel(msgspec.Struct, frozen=True):
    """An entry of `/v1/models`."""

    id: str
    root: str | None = None
    parent: str | None = None
    """Of an adapter: the model it belongs to."""
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[ServedModel]


class _Completion(msgspec.Struct, frozen=True):
    kv_transfer_params: dict[str, Any] | None = None


class _Tokenized(msgspec.Struct, frozen=True):
    tokens: list[int]


class Engine:
    """An engine at `url`, with or without `/v1` at its end; `http` is a client for that address."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url = engine_url(url)
        self._http = http
        self._renders: bool | None = None
        """Whether it answers `/tokenize` for messages; None for not known yet."""

    async def models(self) -> list[ServedModel]:
        """What it serves; raises EngineUnusable."""
        try:
            answer = await self._http.get("/v1/models")
        except httpx.TransportError as error:
            raise EngineUnusable(f"no engine answers at {self.url}: {why(error)}") from error
        if not answer.is_success:
            raise EngineUnusable(
                f"the engine at {self.url} answered {answer.status_code} to /v1/models: {_said(answer)}"
            )
        try:
            return msgspec.json.decode(answer.content, type=_Models).data
        except msgspec.MsgspecError as error:
            raise EngineUnusable(f"{self.url} does not answer like an engine: {error}") from error

    async def rendered(self, model: str, conversation: bytes) -> list[int] | None:
        """The token ids of a conversation, `Encoded.request`; None where it renders no messages at all.

        Raises EngineBusy, or EngineRefused for a conversation that it does not render.
        """
        if self._renders is False:
            return None
        answer = await self._sent("/tokenize", b'{"model":' + msgspec.json.encode(model) + b"," + conversation[1:])
        if answer.is_success:
            self._renders = True
            return self._decoded(answer, _Tokenized).tokens
        if self._renders is None:
            # A model without a template of its own refuses every conversation, the plainest one as well; so does a
            # gateway that lets nobody through to `/tokenize`.
            probe = {"model": model, "messages": [{"role": "user", "content": "a"}]}
            self._renders = (await self._sent("/tokenize", msgspec.json.encode(probe))).is_success
            if not self._renders:
                return None
        raise EngineRefused(f"the engine does not render its conversation ({answer.status_code}): {_said(answer)}")

    async def capture(self, body: dict[str, Any]) -> str:
        """Runs one completion; the id of its capture. Raises EngineBusy, EngineRefused or EngineUnusable."""
        answer = await self._sent("/v1/completions", msgspec.json.encode(body))
        if answer.status_code in (401, 403):
            raise EngineUnusable(f"the engine at {self.url} wants a key: {_said(answer)}; set --engine-key")
        if not answer.is_success:
            raise EngineRefused(f"the engine refused it ({answer.status_code}): {_said(answer)}")
        return self._capture_id(answer)

    async def _sent(self, path: str, body: bytes) -> httpx.Response:
        try:
            answer = await self._http.post(path, content=body, headers={"Content-Type": "application/json"})
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineAway(f"no engine answers at {self.url}: {why(error)}") from error
        except httpx.TransportError as error:
            raise EngineBusy(f"the engine at {self.url} did not answer: {why(error)}") from error
        if answer.status_code in PASSING:
            raise EngineBusy(f"the engine answered {answer.status_code}: {_said(answer)}")
        return answer

    def _decoded(self, answer: httpx.Response, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineBusy(f"the answer of the engine at {self.url} was cut or is none: {error}") from error

    def _capture_id(self, answer: httpx.Response) -> str:
        params = self._decoded(answer, _Completion).kv_transfer_params or {}
        capture_id = params.get("capture_id")
        if not isinstance(capture_id, str):
            raise EngineRefused(
                f"the answer of the engine at {self.url} names no capture: is it started with the "
                "HiddenStatesConnector (see `hsconnector launch`)?"
            )
        return capture_id


def served_model(models: list[ServedModel], wanted: str, url: str) -> tuple[ServedModel, ServedModel]:
    """The model to ask for and the base model under it (itself, unless it is an adapter); raises SettingsError."""
    names = {model.id: model for model in models}
    if not names:
        raise SettingsError(f"the engine at {url} serves no model")
    chosen = names.get(wanted) if wanted else models[0]
    if chosen is None:
        raise SettingsError(f"the engine at {url} serves {', '.join(names)}, not {wanted!r}")
    return chosen, names.get(chosen.parent or "", chosen)


def engine_url(url: str) -> str:
    """An engine's address without the `/v1` that OpenAI clients want."""
    return url.rstrip("/").removesuffix("/v1")


def _said(answer: httpx.Response) -> str:
    return read_denial(answer.content).message or answer.reason_phrase
