"""The `vllm serve` line that extracts hidden states, in one place for `plan` and `launch`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hsconnector.client.address import DEFAULT_SIDECAR
from hsconnector.vllm_facts import server_start

__all__ = ["extraction_options", "printable", "serve_command"]


def extraction_options(
    layer_ids: Sequence[int],
    *,
    sidecar: str = DEFAULT_SIDECAR,
    settings: Mapping[str, Any] | None = None,
) -> list[str]:
    """vLLM's two options that turn extraction on; `settings` are further keys of `kv_connector_extra_config`."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "hsconnector.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"sidecar": sidecar, **(settings or {})},
    }
    return ["--speculative-config", _compact(speculative), "--kv-transfer-config", _compact(transfer)]


def serve_command(
    model: str,
    layer_ids: Sequence[int],
    *,
    sidecar: str = DEFAULT_SIDECAR,
    settings: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
    distribution: str = "vllm",
) -> list[str]:
    """The whole command as a list of words, for vLLM installed as this distribution.

    `options` are further words for vLLM, given through unchanged.
    """
    extraction = extraction_options(layer_ids, sidecar=sidecar, settings=settings)
    return [*server_start(model, distribution), *extraction, *options]


def printable(command: Sequence[str]) -> str:
    """The command for a shell, one option a line."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and lines[0]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n    ".join(" ".join(words) for words in lines)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
