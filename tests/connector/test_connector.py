"""The class that vLLM loads, built from a real configuration; nobody listens where its sidecar should be."""

from __future__ import annotations

import inspect
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

import hsconnector.connector
from hsconnector.capture.protocol import CaptureInfo, FailReason
from hsconnector.connector import compat
from hsconnector.connector.connector import HiddenStatesConnector, StepMetadata
from hsconnector.connector.step import Failure, Finish, Step
from hsconnector.errors import LayoutError, SettingsError, UnsupportedError
from tests.connector.rig import SLOTS, engine_config, kv_cache_config
from tests.models import tiny_qwen3

BLOCKS = 12
BOOM = ZeroDivisionError("boom")


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


def broken(*args: Any, **kwargs: Any) -> Any:
    raise BOOM


class Explosive:
    """Stands where a part should be: whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise BOOM


Call = Callable[[HiddenStatesConnector], object]
HOOKS: dict[str, tuple[Call, object]] = {
    "requires_kv_delivery": (lambda c: c.requires_kv_delivery, True),
    "bind_gpu_block_pool": (lambda c: c.bind_gpu_block_pool(SimpleNamespace()), None),
    "get_num_new_matched_tokens": (lambda c: c.get_num_new_matched_tokens(request(), 0), (0, False)),
    "update_state_after_alloc": (lambda c: c.update_state_after_alloc(request(), None, 4), None),
    "build_connector_meta": (lambda c: step_of(c, scheduled(request())), Step(0, 16)),
    "request_finished": (lambda c: c.request_finished(request(), [1, 2]), (False, None)),
    "request_finished_all_groups": (lambda c: c.request_finished_all_groups(request(), ([1, 2],)), (False, None)),
    "update_connector_output": (
        lambda c: c.update_connector_output(SimpleNamespace(finished_sending={"x"})),
        None,
    ),
    "has_pending_block_frees": (lambda c: c.has_pending_block_frees(), False),
    "reset_cache": (lambda c: c.reset_cache(), True),
    "bind_connector_metadata": (lambda c: c.bind_connector_metadata(StepMetadata(Step(0, 16))), None),
    "get_finished": (lambda c: c.get_finished(set()), (None, None)),
    "start_load_kv": (lambda c: c.start_load_kv(None), None),
    "wait_for_layer_load": (lambda c: c.wait_for_layer_load("layers.0"), None),
    "save_kv_layer": (lambda c: c.save_kv_layer("layers.0", torch.zeros(1), None), None),
    "wait_for_save": (lambda c: c.wait_for_save(), None),
    "shutdown": (lambda c: c.shutdown(), None),
}
"""Every hook of ours that a running engine calls, and what it answers when all below it is broken."""
MAY_REFUSE_THE_START = {"register_kv_caches"}
TOUCH_NO_PART = {
    "requires_kv_delivery",
    "bind_gpu_block_pool",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
}


class TestEveryHook:
    def test_the_table_is_complete(self) -> None:
        """What is not in it is vLLM's own, or may end the start."""
        hooks = {name for base in (KVConnectorBase_V1, SupportsHMA) for name in vars(base) if not name.startswith("_")}
        assert set(HOOKS) | MAY_REFUSE_THE_START == hooks & set(vars(HiddenStatesConnector))

    @pytest.mark.parametrize("side", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
    @pytest.mark.parametrize("name", HOOKS)
    def test_it_survives_whatever_breaks_below(
        self, config: VllmConfig, side: KVConnectorRole, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        connector = scheduler_side(config) if side == KVConnectorRole.SCHEDULER else worker_side(config)
        connector.tracker = connector._worker = Explosive()  # type: ignore[assignment]
        call, answer = HOOKS[name]
        assert call(connector) == answer
        assert ("boom" in caplog.text) == (name not in TOUCH_NO_PART)

    def test_a_handle_that_cannot_be_made_holds_no_blocks(
        self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine frees the blocks at once, so no row may be read from them and the request may not be reported."""
        connector = scheduler_side(config)
        item, other = request(), request("other")
        step_of(connector, scheduled(item, other))
        with monkeypatch.context() as patch:
            patch.setattr(connector, "_answer", broken)
            assert finish(connector, item) == (False, None)
        told = step_of(connector)
        assert (told.finished, [f.request_id for f in told.failed]) == ([], ["r"])
        assert not connector.has_pending_block_frees()
        assert finish(connector, other)[0]


class TestNothingEverRaises:
    """An exception in any of these hooks would end the engine."""

    def started(self, config: VllmConfig) -> tuple[HiddenStatesConnector, Request, Request]:
        connector = scheduler_side(config)
        running, held = request("running"), request("held")
        step_of(connector, scheduled(running, held))
        assert finish(connector, held)[0]
        step_of(connector)
        return connector, running, held

    @pytest.mark.parametrize("where", ["step", "_release", "_drain"])
    def test_build_connector_meta(self, config: VllmConfig, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        connector, running, _ = self.started(config)
        tracker = connector.tracker
        assert tracker is not None
        late = request("late")
        with monkeypatch.context() as patch:
            original = getattr(tracker, where)
            calls = iter([broken])
            patch.setattr(tracker, where, lambda *args: next(calls, original)(*args))
            told = step_of(connector, scheduled(late))
        failures = {f.request_id: f.reason for f in told.failed}
        assert failures["running"] == failures["held"] == FailReason.INTERNAL_ERROR
        assert tracker.held == {"held"}
        assert finish(connector, running)[0] is False
        connector.update_connector_output(SimpleNamespace(finished_sending={"held"}))
        assert not connector.has_pending_block_frees()

    def test_an_output_that_cannot_be_read(self, config: VllmConfig) -> None:
        connector, running, _ = self.started(config)
        for _ in range(3):
            told = connector.build_connector_meta(SimpleNamespace())
            assert isinstance(told, StepMetadata)
            assert told.step.begun == []
        assert finish(connector, running)[0] is False

    def test_request_finished(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        connector, running, _ = self.started(config)
        with monkeypatch.context() as patch:
            patch.setattr(compat, "ended", broken)
            assert finish(connector, running) == (False, None)
        told = step_of(connector)
        assert [(f.request_id, f.reason) for f in told.failed] == [("running", FailReason.INTERNAL_ERROR)]
        assert connector.tracker is not None
        assert connector.tracker.held == {"held"}

    def test_too_few_groups(self, config: VllmConfig) -> None:
        connector = scheduler_side(config, "hybrid")
        item = request()
        step_of(connector, scheduled(item, groups=3))
        assert connector.request_finished_all_groups(item, ())[0] is False

    @pytest.mark.parametrize(
        ("method", "call", "answer"),
        [
            ("fail", lambda c: c.update_state_after_alloc(request(), None, 4), None),
            ("reported", lambda c: c.update_connector_output(SimpleNamespace(finished_sending={"x"})), None),
            ("fail_all", lambda c: c.reset_cache(), True),
        ],
    )
    def test_the_other_hooks(
        self,
        config: VllmConfig,
        method: str,
        call: Callable[[HiddenStatesConnector], object],
        answer: object,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        connector, _, _ = self.started(config)
        with monkeypatch.context() as patch:
            patch.setattr(connector.tracker, method, broken)
            assert call(connector) == answer
        assert "boom" in caplog.text

    @pytest.mark.parametrize("where", ["apply", "pending", "complete", "drop_all"])
    def test_bind(self, sending: HiddenStatesConnector, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = sending._worker
        assert worker is not None
        info = CaptureInfo(capture_id="0" * 32, request_id="r", num_prompt_tokens=4, created=0.0)
        news = Step(0, 16, begun=[info], finished=[Finish("held", 4, bytes(32), "stop")])
        with monkeypatch.context() as patch:
            patch.setattr(worker.reader, where, broken)
            sending.bind_connector_metadata(StepMetadata(news))
        assert reported(sending) == {"held"}
        assert reported(sending) == set()

    def test_get_finished_and_shutdown(self, sending: HiddenStatesConnector, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = sending._worker
        assert worker is not None
        with monkeypatch.context() as patch:
            patch.setattr(worker, "take_released", broken)
            assert sending.get_finished(set()) == (None, None)
            patch.setattr(worker, "close", broken)
            sending.shutdown()
        worker.close(0)


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
