"""The class that vLLM loads, built from a real configuration; nobody listens where its sidecar should be."""

from __future__ import annotations

import inspect
import logging
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

import hsconnector.connector
from hsconnector.capture.protocol import CaptureInfo, FailReason
from hsconnector.connector import compat
from hsconnector.connector.connector import HiddenStatesConnector, StepMetadata
from hsconnector.connector.step import Failure, Finish, Step
from hsconnector.errors import LayoutError, SettingsError, UnsupportedError
from tests.connector import sides
from tests.connector.rig import kv_cache_config
from tests.connector.sides import (
    BLOCKS,
    caches,
    finish,
    lost,
    reported,
    request,
    scheduled,
    scheduler_side,
    step_of,
    worker_side,
)

base, config, sending = sides.base, sides.config, sides.sending


class TestClass:
    def test_what_vllm_asks_of_it(self, config: VllmConfig) -> None:
        assert list(inspect.signature(HiddenStatesConnector.__init__).parameters)[1:4] == [
            "vllm_config",
            "role",
            "kv_cache_config",
        ]
        assert issubclass(HiddenStatesConnector, SupportsHMA)
        for connector in (scheduler_side(config), worker_side(config)):
            assert supports_hma(connector)
            assert connector.requires_kv_delivery
            assert connector.get_finished_count() is None
            assert connector.get_num_new_matched_tokens(request(), 0) == (0, False)

    def test_found_by_module_path_and_by_name(self, config: VllmConfig) -> None:
        assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is HiddenStatesConnector
        assert hsconnector.connector.HiddenStatesConnector is HiddenStatesConnector
        hsconnector.connector.register()
        hsconnector.connector.register()
        assert KVConnectorFactory._registry["HiddenStatesConnector"]() is HiddenStatesConnector

    def test_the_package_has_nothing_else(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'Other'"):
            _ = hsconnector.connector.Other

    @pytest.mark.parametrize("module", ["hsconnector", "hsconnector.connector", "hsconnector.connector.tracker"])
    def test_importing_is_light(self, module: str) -> None:
        code = f"import sys, {module}; print([m for m in ('torch', 'vllm', 'numpy', 'httpx') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"

    @pytest.mark.parametrize("role", list(KVConnectorRole))
    def test_refusals_at_the_start(self, config: VllmConfig, role: KVConnectorRole, monkeypatch: Any) -> None:
        groups = kv_cache_config("composite", BLOCKS)[0]
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
        with pytest.raises(UnsupportedError):
            HiddenStatesConnector(config, role, groups)
        monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION")
        monkeypatch.setattr(config.kv_transfer_config, "kv_connector_extra_config", {"rings": 1})
        with pytest.raises(SettingsError, match="did you mean"):
            HiddenStatesConnector(config, role, groups)


class TestScheduler:
    def test_a_request_from_start_to_end(self, config: VllmConfig) -> None:
        connector = scheduler_side(config)
        item = request(sample_id="s")
        step = step_of(connector, scheduled(item))
        (info,) = step.begun
        assert (info.request_id, info.sample_id) == ("r", "s")
        held, params = finish(connector, item)
        assert held
        assert params == {
            "handle": f"http://127.0.0.1:9/v1/captures/{info.capture_id}",
            "capture_id": info.capture_id,
        }
        assert connector.has_pending_block_frees()
        assert step_of(connector).finished[0].reason == "stop"
        connector.update_connector_output(SimpleNamespace(finished_sending={"r"}))
        connector.update_connector_output(SimpleNamespace(finished_sending=None))
        assert not connector.has_pending_block_frees()

    def test_both_entry_points_agree(self, config: VllmConfig) -> None:
        """vllm#42620: a connector that supports hybrids is asked with all groups, another with the only one."""
        answers: list[tuple[Any, ...]] = []
        for ask in ("one", "all"):
            connector = scheduler_side(config)
            whole, half = request("whole"), request("half")
            step_of(connector, scheduled(whole, half))
            half.num_computed_tokens = 3
            for item in (whole, half, request("unknown")):
                item.status = RequestStatus.FINISHED_ABORTED
                if ask == "one":
                    held, params = connector.request_finished(item, [1, 2])
                else:
                    held, params = connector.request_finished_all_groups(item, ([1, 2],))
                answers.append((ask, item.request_id, held, params is not None))
            told = step_of(connector)
            answers.append((ask, [f.request_id for f in told.finished], [f.reason for f in told.failed], None))
        assert [answer[1:] for answer in answers[:4]] == [answer[1:] for answer in answers[4:]]
        assert answers[0][2:] == (True, True)
        assert answers[1][2:] == (False, True)
        assert answers[2][2:] == (False, False)

    def test_the_plain_entry_point_refuses_another_group(self, config: VllmConfig) -> None:
        """By failing the capture: an exception here would end the engine."""
        connector = scheduler_side(config, "hybrid")
        item = request()
        step_of(connector, scheduled(item, groups=3))
        item.status = RequestStatus.FINISHED_STOPPED
        held, params = connector.request_finished(item, [1, 2])
        assert not held
        assert params is not None
        (failure,) = step_of(connector).failed
        assert failure.reason is FailReason.LAYOUT
        assert failure.detail == "hidden states are in group 2, and only 1 groups' blocks were given"

    def test_tokens_that_another_connector_loads(self, config: VllmConfig) -> None:
        connector = scheduler_side(config)
        plain, sync, multi = request("plain"), request("sync"), request("multi")
        assert multi.prefill_stats is not None
        multi.prefill_stats.set(num_prompt_tokens=20, num_local_cached_tokens=0, num_external_cached_tokens=16)
        for item, external in ((plain, 0), (sync, 16), (multi, 0)):
            assert connector.get_num_new_matched_tokens(item, 0) == (0, False)
            connector.update_state_after_alloc(item, KVCacheBlocks(([KVCacheBlock(7), KVCacheBlock(8)],)), external)
        told = step_of(connector, scheduled(plain, sync, multi))
        assert [(f.request_id, f.reason) for f in told.failed] == [
            ("sync", FailReason.EXTERNAL_PREFIX),
            ("multi", FailReason.EXTERNAL_PREFIX),
        ]

    def test_new_weights(self, config: VllmConfig) -> None:
        connector = scheduler_side(config)
        item = request()
        step_of(connector, scheduled(item))
        assert connector.reset_cache() is True
        news = step_of(connector)
        assert news.reset and news.failed[0].reason is FailReason.CACHE_RESET
        assert finish(connector, item)[0] is False

    def test_an_emptied_prefix_cache_is_noticed_whoever_asked_for_it(self, config: VllmConfig) -> None:
        """vLLM's own pool: a reset that fails leaves the cache as it is, though the connector is told to reset."""
        pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
        connector = scheduler_side(config)
        connector.bind_gpu_block_pool(pool)
        assert step_of(connector).emptied
        assert not step_of(connector).emptied
        pool.reset_prefix_cache()
        news = step_of(connector)
        assert (news.emptied, news.reset) == (True, False)
        pool.get_new_blocks(2)
        assert pool.reset_prefix_cache() is False and connector.reset_cache() is True
        news = step_of(connector)
        assert (news.emptied, news.reset) == (False, True)
        assert not step_of(connector).reset

    def test_a_bad_request_is_served(self, config: VllmConfig) -> None:
        connector = scheduler_side(config)
        bad, good = request("bad", tagz=1), request("good")
        told = step_of(connector, scheduled(bad, good))
        assert [(f.request_id, f.reason) for f in told.failed] == [("bad", FailReason.BAD_REQUEST)]
        assert finish(connector, bad)[0] is False
        assert finish(connector, good)[0] is True

    def test_shutdown_twice(self, config: VllmConfig) -> None:
        connector = scheduler_side(config)
        connector.shutdown()
        connector.shutdown()


"""Every hook of ours that a running engine calls, and what it answers when all below it is broken."""


class TestWorker:
    def test_a_rank_that_does_not_send_reports_all_the_same(
        self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every rank reports each held id once: vLLM waits for all of them."""
        monkeypatch.setattr(compat, "is_first_tensor_rank", lambda: False)
        connector = worker_side(config)
        connector.register_kv_caches(caches(config))
        assert connector._worker is None
        news = Step(0, 16, finished=[Finish("a", 4, bytes(32), "stop"), Finish("b", 4, bytes(32), "stop")])
        connector.bind_connector_metadata(StepMetadata(news))
        assert reported(connector) == {"a", "b"}
        assert reported(connector) == set()
        connector.shutdown()

    def test_metadata_survives_the_way_to_the_worker(self, config: VllmConfig, sending: HiddenStatesConnector) -> None:
        connector = scheduler_side(config)
        item = request()
        first = pickle.loads(pickle.dumps(connector.build_connector_meta(scheduled(item))))
        sending.bind_connector_metadata(first)
        sending.clear_connector_metadata()
        assert finish(connector, item)[0]
        sending.bind_connector_metadata(
            pickle.loads(pickle.dumps(connector.build_connector_meta(SchedulerOutput.make_empty())))
        )
        assert reported(sending) == {"r"}
        assert lost(sending, first.step.begun[0].capture_id) is FailReason.SIDECAR_UNREACHABLE

    def test_the_two_sides_see_different_groups(
        self, sending: HiddenStatesConnector, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The scheduler is given flattened groups, the worker is not: a capture fails rather than hold wrong rows."""
        info = CaptureInfo(capture_id="0" * 32, request_id="r", num_prompt_tokens=4, created=0.0)
        for news in (
            Step(1, 8, begun=[info]),
            Step(1, 8, readable=[("r", 4)]),
            Step(1, 8, finished=[Finish("r", 4, bytes(32), "stop")]),
        ):
            sending.bind_connector_metadata(StepMetadata(news))
        assert reported(sending) == {"r"}
        assert lost(sending, info.capture_id) is FailReason.LAYOUT
        assert caplog.text.count("no hidden states are captured: the scheduler found group 1 with 8 tokens") == 1

    def test_failures_of_the_scheduler_reach_the_ledger(self, sending: HiddenStatesConnector) -> None:
        info = CaptureInfo(capture_id="0" * 32, request_id="r", num_prompt_tokens=4, created=0.0)
        news = Step(0, 16, begun=[info], failed=[Failure("r", FailReason.BAD_REQUEST, "tags")])
        sending.bind_connector_metadata(StepMetadata(news))
        assert lost(sending, info.capture_id) is FailReason.BAD_REQUEST

    def test_other_metadata_is_not_ours(self, sending: HiddenStatesConnector) -> None:
        sending.bind_connector_metadata(SimpleNamespace())
        assert reported(sending) == set()

    def test_a_ring_without_room_for_a_row(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(config.model_config), "get_hidden_size", lambda self: 6000)
        extra = {"ring_bytes": 70_000, "sidecar": "http://127.0.0.1:9"}
        monkeypatch.setattr(config.kv_transfer_config, "kv_connector_extra_config", extra)
        connector = worker_side(config)
        with pytest.raises(SettingsError, match="ring_bytes 70000 has no room for a row of 72000 bytes"):
            connector.register_kv_caches(caches(config))

    @pytest.mark.parametrize("names", [[], ["layers.0"], ["cache_only_layers.6", "cache_only_layers.7"]])
    def test_a_cache_without_the_layer(self, config: VllmConfig, names: list[str]) -> None:
        connector = worker_side(config)
        with pytest.raises(LayoutError, match="the hidden-state layer"):
            connector.register_kv_caches({name: torch.zeros(1) for name in names})

    def test_a_stage_without_the_layer(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", 2)
        connector = worker_side(config)
        connector.register_kv_caches({"layers.0": torch.zeros(1)})
        assert connector._worker is None

    def test_shutdown_twice(self, sending: HiddenStatesConnector) -> None:
        sending.shutdown()
        sending.shutdown()

    def test_it_says_that_nobody_is_there(self, config: VllmConfig, caplog: pytest.LogCaptureFixture) -> None:
        connector = worker_side(config)
        with caplog.at_level(logging.WARNING, "vllm.hsconnector"):
            connector.register_kv_caches(caches(config))
        connector.shutdown()
        assert "no hidden states are captured until the sidecar answers" in caplog.text
