"""One running engine, through its OpenAI API."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from hsconnector.client.connection import why
from hsconnector.client.envelope import PASSING, read_denial
from hsconnector.errors import HSConnectorError, SettingsError

__all__ = ["Engine", "EngineBusy", "EngineRefused", "EngineUnusable", "ServedModel", "served_model"]


class EngineBusy(HSConnectorError):
    """An engine that did not answer, or answered that it cannot now: ask again."""


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


class Engine:
    """An engine at `url`, with or without `/v1` at its end; `http` is a client for that address."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url = engine_url(url)
        self._http = http

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

    async def capture(self, body: dict[str, Any]) -> str:
        """Runs one completion; the id of its capture. Raises EngineBusy, EngineRefused or EngineUnusable."""
        try:
            answer = await self._http.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            raise EngineBusy(f"the engine at {self.url} did not answer: {why(error)}") from error
        if answer.status_code in (401, 403):
            raise EngineUnusable(f"the engine at {self.url} wants a key: {_said(answer)}; set --engine-key")
        if answer.status_code in PASSING:
            raise EngineBusy(f"the engine answered {answer.status_code}: {_said(answer)}")
        if not answer.is_success:
            raise EngineRefused(f"the engine refused it ({answer.status_code}): {_said(answer)}")
        return self._capture_id(answer)

    def _capture_id(self, answer: httpx.Response) -> str:
        try:
            params = msgspec.json.decode(answer.content, type=_Completion).kv_transfer_params or {}
        except msgspec.MsgspecError as error:
            raise EngineBusy(f"the engine's answer was cut or is none: {error}") from error
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
