"""The class that vLLM loads: a thin facade over the tracker (scheduler side) and the worker (worker side).

Every hook of a running engine catches what is raised below it: an exception would end the engine, and hidden states are
never worth that. Only the start may be refused: by the constructor, and by `register_kv_caches`.
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
from hsconnector.connector.adapters import Adapters
from hsconnector.connector.current import Current
from hsconnector.connector.gather import gather_for, pin
from hsconnector.connector.lockfiles import LockFiles, shard_path
from hsconnector.connector.ring import ALIGNMENT, Ring
from hsconnector.connector.sender import Sender
from hsconnector.connector.settings import parse_settings, parse_wish
from hsconnector.connector.step import Step
from hsconnector.connector.tracker import Ending, Scheduled, Tracker, Wish
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


Hook = Callable[Concatenate["HiddenStatesConnector", P], R]


def guarded(otherwise: Callable[[HiddenStatesConnector], R]) -> Callable[[Hook[P, R]], Hook[P, R]]:
    """A hook that never raises: the failure is logged, open captures fail, and the engine gets `otherwise(self)`."""

    def wrap(hook: Hook[P, R]) -> Hook[P, R]:
        @functools.wraps(hook)
        def call(self: HiddenStatesConnector, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                log.exception("%s failed; open captures fail, the engine goes on", hook.__name__)
                self.fail_open_captures(f"{hook.__name__}: {type(error).__name__}: {error}")
                return otherwise(self)

        return call

    return wrap


def _none_finished(connector: HiddenStatesConnector) -> tuple[set[str] | None, set[str] | None]:
    return None, None


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
        self._block_pool: Any = None
        self._cached: Any = None
        self._adapters = Adapters()
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
        """True for every `kv_role`: otherwise a request could finish while it is preempted and owns no blocks."""
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

    @guarded(lambda self: None)
    def shutdown(self) -> None:
        """Ships what is staged for up to `stall_timeout_s`, then lets everything go; harmless when called twice."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(self._settings.stall_timeout_s)

    # ---- scheduler side

    @guarded(lambda self: None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """What shows when the prefix cache is emptied, whoever asked for it."""
        self._block_pool = gpu_block_pool

    @guarded(lambda self: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Loads nothing, and notes what the engine has itself: the rest that is found later came from elsewhere."""
        if self.tracker is not None:
            self.tracker.external.offered(request.request_id, num_computed_tokens)
        return 0, False

    @guarded(lambda self: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Fails the capture of a request for which another connector loads rows: they were not computed here."""
        external = compat.external_tokens(request, num_external_tokens)
        if external > 0 and self.tracker is not None:
            table = compat.table_of(blocks, self._group.index)
            detail = self.tracker.external.loaded(request.request_id, external, table)
            self.tracker.fail(request.request_id, FailReason.EXTERNAL_PREFIX, detail)

    @guarded(lambda self: self._salvage())
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's news for the workers."""
        if self.tracker is None:
            return self._no_news()
        cached, self._cached = self._cached, compat.prefix_cache(self._block_pool)
        if cached is not self._cached:
            self.tracker.prefix_cache_emptied()
        return StepMetadata(self.tracker.step(self._scheduled(scheduler_output)))

    def _scheduled(self, scheduler_output: Any) -> Scheduled:
        return compat.scheduled(scheduler_output, self._group.index, self._wish, self._adapters.id_of)

    def _no_news(self) -> KVConnectorMetadata:
        return StepMetadata(Step(self._group.index, self._group.block_size))

    def _salvage(self) -> KVConnectorMetadata:
        """After a step that could not be built: the beginnings and ends that the workers must hear all the same."""
        try:
            return self._no_news() if self.tracker is None else StepMetadata(self.tracker.salvage())
        except Exception:
            log.exception("nothing of the step could be saved")
            return self._no_news()

    def _wish(self, params: Any, request_id: str) -> Wish:
        wish = parse_wish(params, self._settings, request_id)
        if wish.rows is RowsKind.PROMPT_AND_OUTPUT and self._inexact_outputs is not None:
            return dataclasses.replace(wish, problem=(FailReason.UNSUPPORTED_REQUEST, self._inexact_outputs))
        return wish

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """For an engine with one group: where the hidden states are in another one, the capture fails."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks stay for the rows that are still to be read, and the handle for the client.

        Where anything goes wrong the blocks do not stay, and this capture alone fails.
        """
        try:
            ending = self._end(request, block_ids)
            return ending.hold, None if ending.capture_id is None else self._answer(ending.capture_id)
        except Exception as error:
            log.exception("request %.80r: finishing its capture failed", request.request_id)
            self._abandon(request.request_id, f"{type(error).__name__}: {error}")
            return False, None

    def _end(self, request: Any, block_ids: Sequence[Sequence[int]]) -> Ending:
        tracker, index = self.tracker, self._group.index
        if tracker is None:
            return Ending(False, None)
        if index >= len(block_ids):
            detail = f"hidden states are in group {index}, and only {len(block_ids)} groups' blocks were given"
            tracker.fail(request.request_id, FailReason.LAYOUT, detail)
        return tracker.finish(compat.ended(request), block_ids[index] if index < len(block_ids) else ())

    @guarded(lambda self: None)
    def _abandon(self, request_id: str, detail: str) -> None:
        if self.tracker is not None:
            self.tracker.abandon(request_id, detail)

    def _answer(self, capture_id: str) -> dict[str, Any]:
        """The response's `kv_transfer_params`."""
        answer = {"handle": f"{self._settings.handle_base}/v1/captures/{capture_id}", "capture_id": capture_id}
        if self._settings.file_backend:
            answer["hidden_states_path"] = shard_path(self._settings.store_dir, capture_id)
        return answer

    @guarded(lambda self: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """The engine frees what every rank has reported."""
        if self.tracker is not None and connector_output.finished_sending:
            self.tracker.reported(connector_output.finished_sending)

    @guarded(lambda self: False)
    def has_pending_block_frees(self) -> bool:
        """Whether blocks will come free by themselves, so that preempting another request can wait."""
        return self.tracker is not None and self.tracker.holds_blocks

    @guarded(lambda self: True)
    def reset_cache(self) -> bool:
        """New weights, perhaps: what is open would mix two models."""
        if self.tracker is not None:
            self.tracker.caches_reset()
        return True

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Finds the hidden-state cache; on the rank that sends, checks its shape and starts the sender.

        Raises `LayoutError` or `SettingsError` where rows cannot be read or staged: the engine does not start.
        """
        pipeline_parallel = self._vllm_config.parallel_config.pipeline_parallel_size > 1
        cache = compat.hidden_cache(kv_caches, self._group.layer_name, pipeline_parallel=pipeline_parallel)
        if cache is None or not compat.is_first_tensor_rank():
            return
        ids = compat.layer_ids(self._vllm_config)
        hidden_size = self._vllm_config.model_config.get_hidden_size()
        view = compat.block_major(cache, len(ids), hidden_size, self._group.block_size)
        patience_s = max(1.0, self._settings.stall_timeout_s)
        weights = Current.watched(self._vllm_config, compat.vllm_version())
        producer = compat.producer(self._vllm_config, view, self._group.block_size, patience_s, weights.id)
        if producer.row_bytes > self._settings.ring_bytes // ALIGNMENT * ALIGNMENT:
            raise SettingsError(
                f"ring_bytes {self._settings.ring_bytes} has no room for a row of {producer.row_bytes} bytes; raise it"
            )
        transport = HttpTransport(self._settings.sidecar, self._settings.api_key, patience_s)
        on_ring = functools.partial(_pin_ring, view.device) if view.device.type == "cuda" else _leave_ring
        locks = LockFiles(self._settings.store_dir) if self._settings.file_backend else None
        sender = Sender(producer, self._settings, transport, locks=locks)
        gather = gather_for(view, self._group.block_size)
        self._worker = Worker(gather, sender, on_ring, weights)
        sender.start()
        self._worker.follow_stream()

    @guarded(lambda self: None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's news arrives before its forward: nothing else is early enough in both model runners."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._take_step(connector_metadata.step)

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

    @guarded(_none_finished)
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
