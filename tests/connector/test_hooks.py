"""No hook of the connector raises into the engine, whatever breaks below it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.request import Request

from hsconnector.capture.protocol import CaptureInfo, FailReason
from hsconnector.connector import compat
from hsconnector.connector.connector import HiddenStatesConnector, StepMetadata
from hsconnector.connector.step import Finish, Step
from tests.connector import sides
from tests.connector.sides import (
    finish,
    reported,
    request,
    scheduled,
    scheduler_side,
    step_of,
    worker_side,
)

base, config, sending = sides.base, sides.config, sides.sending
Call = Callable[[HiddenStatesConnector], object]

BOOM = ZeroDivisionError("boom")


def broken(*args: Any, **kwargs: Any) -> Any:
    raise BOOM


class Explosive:
    """Stands where a part should be: whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise BOOM


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
