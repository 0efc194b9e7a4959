"""The part that lives inside vLLM. Importing the class imports vLLM; importing this package does not."""

from __future__ import annotations

from typing import Any

__all__ = ["HiddenStatesConnector", "register"]


def __getattr__(name: str) -> Any:
    if name == "HiddenStatesConnector":
        from hsconnector.connector.connector import HiddenStatesConnector

        return HiddenStatesConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """vLLM's plug-in entry point: makes `kv_connector="HiddenStatesConnector"` known without a module path.

    vLLM calls it in every process, and may call it more than once in one.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "HiddenStatesConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "HiddenStatesConnector", "hsconnector.connector.connector", "HiddenStatesConnector"
        )
