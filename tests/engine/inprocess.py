"""A real vLLM engine in this process, stepped by hand, so that a test decides what happens between two steps."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.runners import require_runner

__all__ = ["Engine", "Result", "started", "tokens"]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Result:
    """What a client got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    params: dict[str, Any] | None = None


@dataclass
class Engine:
    """One engine; `step` is one turn of its core."""

    llm: LLMEngine
    preemptions: int = 0
    results: dict[str, Result] = field(default_factory=dict)
    counter: int = 0

    @property
    def scheduler(self) -> Any:
        return self.llm.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def worker(self) -> Any:
        """The connector's worker side."""
        return get_kv_transfer_group()._worker

    def wait_for_sidecar(self) -> None:
        """Returns when the connector has a stream: until then captures fail as `sidecar_unreachable`."""
        for _ in range(600):
            if self.worker.sender.stream is not None:
                return
            time.sleep(0.05)
        raise AssertionError("the connector found no sidecar")

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, prompt: list[int], request_id: str | None = None, **sampling: Any) -> str:
        """Sends token ids; `hidden_states` becomes the request's `kv_transfer_params`."""
        ours = sampling.pop("hidden_states", None)
        if ours is not None:
            sampling["extra_args"] = {"kv_transfer_params": {"hidden_states": ours}}
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **sampling})
        request_id = request_id or f"test-{self.counter}"
        self.counter += 1
        self.llm.add_request(request_id, {"prompt_token_ids": prompt}, params)
        self.results[request_id] = Result()
        return request_id

    def step(self) -> None:
        for output in self.llm.step():
            result = self.results[output.request_id]
            completion = output.outputs[0]
            result.token_ids = list(completion.token_ids)
            result.text = completion.text
            result.finish_reason = completion.finish_reason
            result.params = output.kv_transfer_params or result.params

    def run(self) -> None:
        """Steps until every request is answered, then until every held block is back."""
        while self.llm.has_unfinished_requests():
            self.step()
        self.settle()

    def settle(self, most: int = 100_000) -> None:
        """An in-process engine steps only when it is called: this gives held blocks their steps."""
        core = self.llm.engine_core.engine_core
        for _ in range(most):
            if not core.scheduler.has_requests() and not core.batch_queue:
                return
            core.step_fn()
        raise AssertionError(f"{len(core.scheduler.requests)} requests are still held")

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[Result]:
        """Everything at once, as `LLM.generate` does."""
        ids = [self.add(prompt, **sampling) for prompt in prompts]
        self.run()
        return [self.results[request_id] for request_id in ids]

    def abort(self, request_id: str) -> None:
        self.llm.abort_request([request_id])


def _count_preemptions(engine: Engine) -> None:
    scheduler = engine.scheduler
    preempt: Callable[..., None] = scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> None:
        engine.preemptions += 1
        preempt(*args, **kwargs)

    scheduler._preempt_request = counted


@contextmanager
def started(model: Path, *, asynchronous: bool = False, extract: bool = True, **options: Any) -> Iterator[Engine]:
    """A running engine. The CPU platform switches asynchronous scheduling off; here it can be switched on again."""
    extra = options.pop("connector", {})
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "disable_log_stats": True,
    }
    if extract:
        arguments |= extraction(options.pop("layer_ids", (0, 1, 3, 6)), extra)
    check = current_platform.check_and_update_config

    def keep_asynchronous(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = asynchronous

    with (
        mock.patch.dict(os.environ, ENVIRONMENT),
        mock.patch.object(type(current_platform), "check_and_update_config", staticmethod(keep_asynchronous)),
    ):
        engine = Engine(LLMEngine.from_engine_args(EngineArgs(**(arguments | options))))
        require_runner(engine.llm.vllm_config)
        _count_preemptions(engine)
        try:
            yield engine
        finally:
            _stop(engine)


def extraction(layer_ids: tuple[int, ...], connector: dict[str, Any]) -> dict[str, Any]:
    """The two configurations that switch extraction on."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "hsconnector.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": connector,
        },
    }


def _stop(engine: Engine) -> None:
    engine.llm.engine_core.shutdown()
    ensure_kv_transfer_shutdown()
    del engine.llm
    cleanup_dist_env_and_memory()
    gc.collect()


def tokens(count: int, seed: int, vocabulary: int = 500) -> list[int]:
    """A prompt of so many token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (count,), generator=generator).tolist()
