"""How many of a drafter's tokens an engine accepts, from vLLM's own metrics: MODEL DRAFTER PROMPTS TOKENS REPORT.

PROMPTS is JSON lines with `prompt`; each is answered greedily with up to TOKENS tokens. REPORT becomes a JSON object
with `drafts`, the number of times the drafter was asked, and `accepted`, a count for each position of its drafts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

DRAFT_TOKENS = 3


def main(model: str, drafter: str, prompts: str, tokens: str, report: str) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": DRAFT_TOKENS},
    )
    asked = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
    chats = [[{"role": "user", "content": prompt}] for prompt in asked]
    engine.chat(chats, SamplingParams(temperature=0.0, max_tokens=int(tokens)))
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    found = {
        "drafts": metrics["vllm:spec_decode_num_drafts"].value,
        "accepted": list(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
