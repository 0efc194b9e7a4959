"""The connector's two sides, built from a real configuration; nobody listens where their sidecar should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from hsconnector.capture.protocol import FailReason
from hsconnector.connector import compat
from hsconnector.connector.connector import HiddenStatesConnector, StepMetadata
from hsconnector.connector.step import Step
from tests.connector.rig import SLOTS, engine_config, kv_cache_config
from tests.models import tiny_qwen3

BLOCKS = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return engine_config(str(tiny_qwen3(tmp_path_factory.mktemp("connector") / "model")), False)


@pytest.fixture
def config(base: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    extra = {"sidecar": "http://127.0.0.1:9", "transport": "http", "stall_timeout_s": 1.0}
    monkeypatch.setattr(base.kv_transfer_config, "kv_connector_extra_config", extra)
    monkeypatch.setattr(compat, "is_first_tensor_rank", lambda: True)
    return base


def scheduler_side(config: VllmConfig, shape: str = "composite") -> HiddenStatesConnector:
    return HiddenStatesConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config(shape, BLOCKS)[0])


def worker_side(config: VllmConfig, shape: str = "composite") -> HiddenStatesConnector:
    return HiddenStatesConnector(config, KVConnectorRole.WORKER, kv_cache_config(shape, BLOCKS)[0])


def caches(config: VllmConfig, block_size: int = 16) -> dict[str, torch.Tensor]:
    hidden = config.model_config.get_hidden_size()
    return {
        "layers.0": torch.zeros(1),
        "cache_only_layers.6": torch.zeros(BLOCKS, SLOTS, block_size, hidden),
    }


@pytest.fixture
def sending(config: VllmConfig) -> Iterator[HiddenStatesConnector]:
    """The rank that sends."""
    connector = worker_side(config)
    connector.register_kv_caches(caches(config))
    yield connector
    connector.shutdown()


def request(name: str = "r", count: int = 20, **hidden_states: Any) -> Request:
    params = {"kv_transfer_params": {"hidden_states": hidden_states}} if hidden_states else None
    made = Request(name, list(range(count)), SamplingParams(max_tokens=4, extra_args=params), None)
    made.num_computed_tokens = count
    made.append_output_token_ids([1])
    return made


def scheduled(*requests: Request, groups: int = 1) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    for index, item in enumerate(requests):
        table = [1 + 2 * index, 2 + 2 * index]
        made.scheduled_new_reqs.append(
            NewRequestData(
                req_id=item.request_id,
                prompt_token_ids=item.prompt_token_ids,
                mm_features=[],
                sampling_params=item.sampling_params,
                pooling_params=None,
                block_ids=tuple(table for _ in range(groups)),
                num_computed_tokens=0,
                lora_request=None,
            )
        )
        made.num_scheduled_tokens[item.request_id] = item.num_prompt_tokens
    return made


def step_of(connector: HiddenStatesConnector, output: SchedulerOutput | None = None) -> Step:
    metadata = connector.build_connector_meta(output or SchedulerOutput.make_empty())
    assert isinstance(metadata, StepMetadata)
    return metadata.step


def finish(connector: HiddenStatesConnector, item: Request) -> tuple[bool, dict[str, Any] | None]:
    item.status = RequestStatus.FINISHED_STOPPED
    return connector.request_finished_all_groups(item, ([1, 2],))


def lost(connector: HiddenStatesConnector, capture_id: str) -> FailReason:
    """Why a capture failed, as the ledger will tell it."""
    assert connector._worker is not None
    return connector._worker.sender._ledger[capture_id].reason


def reported(connector: HiddenStatesConnector) -> set[str]:
    sent, received = connector.get_finished(set())
    assert received is None
    return sent or set()
