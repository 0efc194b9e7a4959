"""Start one engine with the recording connector, generate a few tokens, stop: MODEL REPORT_DIR OPTIONS_JSON."""

from __future__ import annotations

import json
import sys


def main(model: str, report: str, options: str) -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(options)
    layer_ids = asked.pop("layer_ids")
    engine = LLM(
        model=model,
        enforce_eager=True,
        disable_log_stats=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        kv_transfer_config={
            "kv_connector": "RecordingConnector",
            "kv_connector_module_path": "tests.engine.recording_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"report": report},
        },
        **asked,
    )
    prompt = {"prompt_token_ids": [index % 100 + 5 for index in range(300)]}
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    print("GENERATED", len(answer.outputs[0].token_ids))


if __name__ == "__main__":
    main(*sys.argv[1:])
