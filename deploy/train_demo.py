"""From prompts to a trained drafter, on this machine.

SmolLM2-135M-Instruct answers prompts, `hsconnector extract` captures the conversations through the engine, `speculators
train` makes an EAGLE-3 drafter of the sidecar's captures, and vLLM serves it on prompts it has not seen. How many of
its tokens the engine accepts is compared with the same drafter before training. Before it trains, captures are compared
with a Hugging Face pass of the same tokens.

`--short` shows the same in bfloat16, which people train in and which is 30 times slower on a CPU: answers are made in
float32, few and short conversations are captured in bfloat16 and checked, and the drafter is trained for one epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from demo import BIN, ROOT, WORK, DemoFailed, Started, build_model, console, free_ports, progress, wait_for
from openai import DefaultHttpxClient, OpenAI

from hsconnector.errors import HSConnectorError

PROMPTS = ROOT / "tests/data/prompts.jsonl"
UNSEEN = ROOT / "tests/data/prompts-heldout.jsonl"
TRAINER = ROOT / "tests/train_cpu.py"
FOLDER = WORK / "train"
ANSWER_TOKENS = 64
DRAFT_VOCABULARY = 4096
CHECKED = 8
"""Captures that are compared with Hugging Face, evenly spread."""
SHORT_PROMPTS, SHORT_TOKENS = 40, 96
"""Of the short form: prompts, and where a conversation is cut."""
ON_ALL_CORES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Of two cores vLLM would take one and leave the other idle."""
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Threads that wait give their core away, which a machine that does other work too needs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=1000, help="at most so many prompts")
    parser.add_argument("--answers", type=int, default=1, help="conversations for each prompt")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--short", action="store_true", help="a little of it, in bfloat16, up to the trained drafter")
    parser.add_argument("--plot", type=Path, default=FOLDER / "train_demo.png", help="where the picture goes")
    options = parser.parse_args()
    if options.short:
        options.prompts, options.answers, options.epochs = min(options.prompts, SHORT_PROMPTS), 1, 1
    os.environ.update(PATIENT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    started = Started()
    try:
        run(started, options)
    except (DemoFailed, HSConnectorError) as error:
        console.print(f"demo failed: {error}", markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        started.stop()
    return 0


def run(started: Started, options: argparse.Namespace) -> None:
    model = build_model(WORK / "SmolLM2-135M-Instruct")
    sidecar_port, engine_port = free_ports(2)
    sidecar, engine = f"http://127.0.0.1:{sidecar_port}", f"http://127.0.0.1:{engine_port}"
    hsconnector = str(BIN / "hsconnector")
    started.start("sidecar", [hsconnector, "serve", "--store", str(FOLDER / "store"), "--port", str(sidecar_port)])
    wait_for(f"{sidecar}/readyz", started, 60)

    def start_engine(dtype: str) -> None:
        started.start("engine", engine_command(hsconnector, model, sidecar, engine_port, dtype), **ON_ALL_CORES)
        wait_for(f"{engine}/health", started, 600)
        progress(f"the engine is ready, in {dtype}")

    start_engine("float32")
    count = converse(engine, model, options.prompts, options.answers)
    progress(f"the model has answered: {count} conversations")
    if options.short:
        started.stop_last()
        start_engine("bfloat16")
        extract(hsconnector, engine, sidecar, "--max-tokens", str(SHORT_TOKENS), "--too-long", "truncate")
    else:
        extract(hsconnector, engine, sidecar)
    started.stop_last()  # two cores are few
    data = prepare()
    progress("the conversations are captured")
    check(hsconnector, sidecar, count)
    if options.short:
        train(model, data, sidecar, FOLDER / "drafter", "--epochs", "1", "--hidden-states-dtype", "bfloat16")
        first, last = losses()[0], losses()[-1]
        console.print(f"\nThe drafter was trained on bfloat16 captures: loss {first:.3f} at first, {last:.3f} at last")
        return
    trained, untrained = FOLDER / "drafter", FOLDER / "untrained"
    in_float32 = ("--hidden-states-dtype", "float32")
    train(model, data, sidecar, untrained, "--dry-run", *in_float32)
    often = str(options.epochs)
    train(model, data, sidecar, trained, "--epochs", often, "--checkpoint-freq", often, *in_float32)
    progress("the drafter is trained")
    accepted = {
        "untrained": acceptance(model, untrained),
        "trained": acceptance(model, newest_checkpoint(trained)),
    }
    progress("both drafters have been served")
    print_table(accepted)
    draw(options.plot, losses(), accepted)
    console.print(f"\nThe picture is {options.plot}, the drafter {newest_checkpoint(trained)}", soft_wrap=True)
    if sum(accepted["trained"]) <= sum(accepted["untrained"]) + 0.1:
        raise DemoFailed("training has not made the drafter clearly better")


def engine_command(hsconnector: str, model: Path, sidecar: str, port: int, dtype: str) -> list[str]:
    return [
        *(hsconnector, "launch", str(model), "--layers", "eagle3", "--sidecar", sidecar),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--enforce-eager"),
        *("--max-model-len", "1024", "--max-num-batched-tokens", "1024", "--max-num-seqs", "32"),
    ]


def converse(engine: str, model: Path, most: int, answers: int) -> int:
    """Conversations of the model with itself as the assistant: the first answer is greedy, others are drawn."""
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[:most]]
    asks = [(prompt, number) for number in range(answers) for prompt in prompts]
    with (
        DefaultHttpxClient(trust_env=False, timeout=1200) as http,
        OpenAI(base_url=f"{engine}/v1", api_key="none", http_client=http, max_retries=0) as openai,
        ThreadPoolExecutor(32) as pool,
    ):
        said = list(pool.map(lambda ask: answer(openai, str(model), *ask), asks))
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in said]
    (FOLDER / "conversations.jsonl").write_text("\n".join(dict.fromkeys(lines)) + "\n")
    return len(set(lines))


def answer(openai: OpenAI, model: str, prompt: str, number: int) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": prompt}]
    response: Any = openai.chat.completions.create(
        model=model,
        messages=asked,  # type: ignore[arg-type]
        max_tokens=ANSWER_TOKENS,
        temperature=0.7 if number else 0.0,
        seed=number,
        extra_body={"kv_transfer_params": {"hidden_states": {"capture": False}}},
    )
    return [*asked, {"role": "assistant", "content": response.choices[0].message.content}]


def extract(hsconnector: str, engine: str, sidecar: str, *more: str) -> None:
    command = [hsconnector, "extract", str(FOLDER / "conversations.jsonl"), "--engine-url", engine]
    command += ["--sidecar", sidecar, "--layers", "eagle3", "--save-dataset", str(FOLDER / "rows")]
    finish("extract", [*command, *more])


def check(hsconnector: str, sidecar: str, count: int) -> None:
    """What is trained on is what the model computes: raises DemoFailed where a capture is not."""
    every = str(max(1, count // CHECKED))
    finish("verify", [hsconnector, "verify", "--sidecar", sidecar, "--every", every], HF_HUB_OFFLINE="1")
    progress(f"each {every}th capture equals Hugging Face's pass; the table is in {FOLDER / 'verify.log'}")


def prepare() -> Path:
    """The rows as the trainer reads them, and how often each token is said, from which it makes a small vocabulary."""
    import torch
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    lines = [json.loads(line) for line in (FOLDER / "rows/data.jsonl").read_text().splitlines()]
    columns = {name: [row[name] for row in lines] for name in ("input_ids", "loss_mask", "seq_len")}
    Dataset.from_dict(columns).with_format("torch").save_to_disk(FOLDER / "data")
    said = torch.tensor(
        [token for row in lines for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    )
    tokens, counts = said.unique(return_counts=True)
    torch.save(dict(zip(tokens.tolist(), counts.tolist(), strict=True)), FOLDER / "data/token_freq.pt")
    return FOLDER / "data"


def train(model: Path, data: Path, sidecar: str, save: Path, *more: str) -> None:
    command = [sys.executable, str(TRAINER), str(FOLDER / f"{save.name}.jsonl"), "hsconnector", "train"]
    command += ["--verifier-name-or-path", str(model), "--data-path", str(data), "--speculator-type", "eagle3"]
    command += ["--sidecar", sidecar, "--on-missing", "raise", "--save-path", str(save), "--num-workers", "0"]
    command += ["--draft-attn-impl", "sdpa", "--loss-implementation", "eager"]
    command += ["--optimizer", "adamw", "--lr", "0.002", "--num-layers", "1", "--total-seq-len", "512"]
    command += ["--target-layer-ids", "2", "15", "27", "--draft-vocab-size", str(DRAFT_VOCABULARY)]
    command += ["--train-data-ratio", "0.95", "--log-dir", str(FOLDER / "logs"), *more]
    finish(f"train-{save.name}", command, HF_HUB_OFFLINE="1")


def finish(name: str, command: list[str], **environment: str) -> None:
    """Runs a command to its end; raises DemoFailed with the end of what it printed."""
    log = FOLDER / f"{name}.log"
    with log.open("wb") as output:
        code = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        ).returncode
    if code:
        lines = log.read_text(errors="replace").splitlines()[-25:]
        raise DemoFailed("\n".join([*lines, f"{name} ended with code {code}; all of it is in {log}"]))


def newest_checkpoint(save: Path) -> Path:
    return max((path for path in save.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


def acceptance(model: Path, drafter: Path) -> list[float]:
    """For each position of a draft, how often the engine accepted it."""
    name = "trained" if drafter.name.isdigit() else drafter.name
    report = FOLDER / f"accepted-{name}.json"
    program = [sys.executable, str(ROOT / "deploy/acceptance.py"), str(model), str(drafter)]
    finish(f"serve-{name}", [*program, str(UNSEEN), str(ANSWER_TOKENS), str(report)])
    found = json.loads(report.read_text())
    return [count / max(1, found["drafts"]) for count in found["accepted"]]


def losses() -> list[float]:
    logged = [json.loads(line) for line in (FOLDER / "drafter.jsonl").read_text().splitlines()]
    return [entry["train"]["loss"] for entry in logged if "train" in entry]


def print_table(accepted: dict[str, list[float]]) -> None:
    positions = range(1, len(accepted["trained"]) + 1)
    heads = ["drafter", *(f"token {position} accepted" for position in positions), "tokens a step"]
    rows = [
        [name, *(f"{share:.1%}" for share in shares), f"{1 + sum(shares):.2f}"] for name, shares in accepted.items()
    ]
    console.print()
    for row in [heads, ["---"] * len(heads), *rows]:
        console.print(f"| {' | '.join(row)} |", markup=False, soft_wrap=True)


def draw(path: Path, loss: list[float], accepted: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    left.plot(loss, linewidth=1)
    left.set(xlabel="step", ylabel="loss", title="Training from the sidecar", yscale="log")
    for offset, (name, shares) in zip((-0.2, 0.2), accepted.items(), strict=True):
        right.bar([position + 1 + offset for position in range(len(shares))], shares, 0.4, label=name)
    right.set(xlabel="token of the draft", ylabel="accepted", title="Served on unseen prompts", ylim=(0, None))
    right.set_xticks(range(1, len(shares) + 1))
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
