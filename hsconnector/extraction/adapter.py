"""Whose weights an adapter has, which only the engine that loaded it can tell."""

from __future__ import annotations

from hsconnector.client.async_client import AsyncClient
from hsconnector.extraction.engine import Engine, EngineBusy, EngineRefused, EngineUnusable

__all__ = ["adapter_weights"]


async def adapter_weights(engine: Engine, sidecar: AsyncClient, model: str, *, wait_s: float) -> str:
    """The weights id of the adapter that an engine serves as `model`: a capture of one token says it, and is removed.

    Raises EngineUnusable where it cannot be had.
    """
    wish = {"capture": True, "include_output_tokens": False, "tags": {"purpose": "whose adapter"}}
    body = {
        "model": model,
        "prompt": [0],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"hidden_states": wish},
    }
    try:
        capture_id = await engine.capture(body)
    except (EngineBusy, EngineRefused) as error:
        raise EngineUnusable(f"whose weights the adapter {model!r} has cannot be asked: {error}") from error
    record = await sidecar.wait(capture_id, wait_s)
    if record is None or not record.num_rows:
        state = "was never heard of" if record is None else f"is {record.state} ({record.reason}: {record.detail})"
        raise EngineUnusable(f"capture {capture_id}, which is to say whose adapter {model!r} is, {state}")
    await sidecar.delete(capture_id)
    return record.lora_weights_id
