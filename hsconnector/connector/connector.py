"""The class that vLLM loads: a thin facade over the tracker (scheduler side) and the worker (worker side).

Every hook catches what it raises: an exception here would end the engine, and hidden states are never worth that.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from hsconnector.capture.protocol import FailReason, RowsKind
from hsconnector.connector import compat
from hsconnector.connector.gather import gather_for, pin
from hsconnector.connector.lockfiles import LockFiles, shard_path
from hsconnector.connector.ring import ALIGNMENT, Ring
from hsconnector.connector.sender import Sender
from hsconnector.connector.settings import parse_settings, parse_wish
from hsconnector.connector.step import Step
from hsconnector.connector.tracker import Ending, Tracker, Wish
from hsconnector.connector.transport import HttpTransport
from hsconnector.connector.worker import Worker
from hsconnector.errors import SettingsError
from hsconnector.layout.started import StartReport

__all__ = ["HiddenStatesConnector"]

log = logging.getLogger("vllm.hsconnector")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """vLLM's envelope around one step's news."""

    step: Step


def _nothing_reset() -> bool | None:
    return True


def _nothing_finished() -> tuple[set[str] | None, set[str] | None]:
    return None, None


def guarded(
    otherwise: Callable[[], R],
) -> Callable[[Callable[Concatenate[HiddenStatesConnector, P], R]], Callable[Concatenate[HiddenStatesConnector, P], R]]:
    """A hook that never raises: the failure is logged, open captures fail, and the engine gets `otherwise()`."""

    def wrap(
        hook: Callable[Concatenate[HiddenStatesConnector, P], R],
    ) -> Callable[Concatenate[HiddenStatesConnector, P], R]:
        @functools.wraps(hook)
        def call(self: HiddenStatesConnector, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                log.exception("%s failed; open captures fail, the engine goes on", hook.__name__)
                self.fail_open_captures(f"{hook.__name__}: {type(error).__name__}: {error}")
                return otherwise()

        return call

    return wrap


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Streams hidden states out of the engine while requests run.

    Load it with `kv_connector="HiddenStatesConnector"`, `kv_connector_module_path="hsconnector.connector"` and
    `kv_role="kv_producer"`, beside the speculative method `extract_hidden_states`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = parse_settings(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        compat.refuse_config(vllm_config)
        report = compat.check_start(kv_cache_config, vllm_config)
        self._inexact_outputs = compat.inexact_outputs(vllm_config)
        self._group = report.hidden
        self._worker: Worker | None = None
        self._reported: set[str] = set()
        self._mismatch = ""
        self.tracker: Tracker | None = None
        if role == KVConnectorRole.SCHEDULER:
            sizes = report.block_sizes
            hit_size = sizes.scheduler if sizes is not None else None
            self.tracker = Tracker(self._group.index, self._group.block_size, hit_size=hit_size)
            self._say_started(report)

    def _say_started(self, report: StartReport) -> None:
        for line in (compat.untested(), self._inexact_outputs):
            if line is not None:
                log.warning(line)
        ids = list(compat.layer_ids(self._vllm_config))
        log.info("%s; layers %s, captures %s to %s", report.line, ids, self._settings.capture, self._settings.sidecar)

    # ---- both sides

    @property
    def requires_kv_delivery(self) -> bool:
        """True whatever the role, or a request could finish while preempted, without blocks."""
        return True

    def fail_open_captures(self, detail: str) -> None:
        """After a bug of ours: every open capture fails, nothing is held."""
        try:
            if self.tracker is not None:
                self.tracker.fail_all(FailReason.INTERNAL_ERROR, detail)
            if self._worker is not None:
                self._worker.fail_all(FailReason.INTERNAL_ERROR, detail)
        except Exception:
            log.exception("failing the open captures failed as well")

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """Ships what is staged for up to `stall_timeout_s`, then lets everything go; harmless when called twice."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(self._settings.stall_timeout_s)

    # ---- scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever loaded; what the engine has itself tells later what another connector has brought."""
        if self.tracker is not None:
            self.tracker.external.offered(request.request_id, num_computed_tokens)
        return 0, False

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Rows that another connector brings were not computed here."""
        external = compat.external_tokens(request, num_external_tokens)
        if external > 0 and self.tracker is not None:
            table = compat.table_of(blocks, self._group.index)
            detail = self.tracker.external.loaded(request.request_id, external, table)
            self.tracker.fail(request.request_id, FailReason.EXTERNAL_PREFIX, detail)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's news for the workers."""
        return StepMetadata(self._build_step(scheduler_output))

    def _build_step(self, scheduler_output: Any) -> Step:
        tracker = self.tracker
        if tracker is None:
            return Step(self._group.index, self._group.block_size)
        try:
            return tracker.step(compat.scheduled(scheduler_output, self._group.index, self._wish))
        except Exception as error:
            log.exception("building the step failed; open captures fail, the engine goes on")
            tracker.fail_all(FailReason.INTERNAL_ERROR, f"{type(error).__name__}: {error}")
            return tracker.salvage()

    def _wish(self, params: Any, request_id: str) -> Wish:
        wish = parse_wish(params, self._settings, request_id)
        if wish.rows is RowsKind.PROMPT_AND_OUTPUT and self._inexact_outputs is not None:
            return dataclasses.replace(wish, problem=(FailReason.UNSUPPORTED_REQUEST, self._inexact_outputs))
        return wish

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """For an engine with one group: where the hidden states are in another one, the capture fails."""
        if self._group.index != 0 and self.tracker is not None:
            detail = f"hidden states are in group {self._group.index}, and only the blocks of group 0 were given"
            self.tracker.fail(request.request_id, FailReason.LAYOUT, detail)
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks stay for the rows that are still to be read, and the handle for the client."""
        ending = self._end(request, block_ids)
        if ending.capture_id is None:
            return ending.hold, None
        return ending.hold, self._answer(ending.capture_id)

    def _answer(self, capture_id: str) -> dict[str, Any]:
        """The response's `kv_transfer_params`."""
        answer = {"handle": f"{self._settings.handle_base}/v1/captures/{capture_id}", "capture_id": capture_id}
        if self._settings.file_backend:
            answer["hidden_states_path"] = shard_path(self._settings.store_dir, capture_id)
        return answer

    def _end(self, request: Any, block_ids: Sequence[Sequence[int]]) -> Ending:
        tracker = self.tracker
        if tracker is None:
            return Ending(False, None)
        try:
            table = block_ids[self._group.index] if self._group.index < len(block_ids) else ()
            return tracker.finish(compat.ended(request), table)
        except Exception as error:
            log.exception("request %.80r: finishing its capture failed", request.request_id)
            tracker.abandon(request.request_id, f"{type(error).__name__}: {error}")
            return Ending(False, None)

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """The engine frees what every rank has reported."""
        if self.tracker is not None and connector_output.finished_sending:
            self.tracker.reported(connector_output.finished_sending)

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will come free by themselves, so that preempting another request can wait."""
        return self.tracker is not None and self.tracker.holds_blocks

    @guarded(_nothing_reset)
    def reset_cache(self) -> bool | None:
        """New weights: what is open would mix two models."""
        if self.tracker is not None:
            self.tracker.fail_all(FailReason.CACHE_RESET, "the engine's caches were reset while the capture was open")
        return True

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Finds the hidden-state cache; on the rank that sends, checks its shape and starts the sender."""
        pipeline_parallel = self._vllm_config.parallel_config.pipeline_parallel_size > 1
        cache = compat.hidden_cache(kv_caches, self._group.layer_name, pipeline_parallel=pipeline_parallel)
        if cache is None or not compat.is_first_tensor_rank():
            return
        ids = compat.layer_ids(self._vllm_config)
        hidden_size = self._vllm_config.model_config.get_hidden_size()
        view = compat.block_major(cache, len(ids), hidden_size, self._group.block_size)
        patience_s = max(1.0, self._settings.stall_timeout_s)
        producer = compat.producer(self._vllm_config, view, self._group.block_size, patience_s)
        if producer.row_bytes > self._settings.ring_bytes // ALIGNMENT * ALIGNMENT:
            raise SettingsError(
                f"ring_bytes {self._settings.ring_bytes} has no room for a row of {producer.row_bytes} bytes; raise it"
            )
        transport = HttpTransport(self._settings.sidecar, self._settings.api_key, patience_s)
        on_ring = functools.partial(_pin_ring, view.device) if view.device.type == "cuda" else _leave_ring
        locks = LockFiles(self._settings.store_dir) if self._settings.file_backend else None
        sender = Sender(producer, self._settings, transport, locks=locks)
        gather = gather_for(view, self._group.block_size)
        self._worker = Worker(gather, sender, on_ring)
        sender.start()
        self._worker.follow_stream()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's news arrives before its forward: nothing else is early enough in both model runners."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._take_step(connector_metadata.step)

    @guarded(lambda: None)
    def _take_step(self, step: Step) -> None:
        if self._worker is None:
            self._reported.update(finish.request_id for finish in step.finished if finish.held)
            return
        if (step.group, step.block_size) != (self._group.index, self._group.block_size):
            step = self._refuse(step)
        self._worker.step(step)

    def _refuse(self, step: Step) -> Step:
        """The two sides found different groups: no row would be right, so every capture fails."""
        detail = (
            f"the scheduler found group {step.group} with {step.block_size} tokens a block, "
            f"this worker group {self._group.index} with {self._group.block_size}"
        )
        if detail != self._mismatch:
            self._mismatch = detail
            log.error("no hidden states are captured: %s", detail)
        return step.refused(detail)

    @guarded(_nothing_finished)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Held requests whose rows have left the cache on this rank."""
        released, self._reported = self._reported, set()
        if self._worker is not None:
            released |= self._worker.take_released()
        return released or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Rows are read from the cache a step later."""

    def wait_for_save(self) -> None:
        """Rows are read from the cache a step later."""


def _pin_ring(device: torch.device, ring: Ring) -> None:
    try:
        ring.before_unmap(pin(ring.memory, ring.size, device))
    except Exception:
        log.exception("staging memory could not be page-locked: copies from the GPU will wait")


def _leave_ring(ring: Ring) -> None:
    return
