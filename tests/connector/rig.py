"""vLLM's own scheduler without a model, beside a worker whose rows are codes.

A row's code is a hash of the request's tokens up to that row, so that every row the connector reads can be checked in
milliseconds. The scheduler, the tracker, the reader, the gather, the ring, the sender and the in-memory transport are
the real ones; only the forward pass and the sampler are made up here.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from hsconnector.capture.protocol import CaptureState, Producer, unpack_token_ids
from hsconnector.connector.connector import HiddenStatesConnector, StepMetadata
from hsconnector.connector.gather import gather_for
from hsconnector.connector.memory_transport import InMemoryTransport, StoredCapture
from hsconnector.connector.sender import Sender
from hsconnector.connector.settings import ConnectorSettings
from hsconnector.connector.worker import Worker
from tests.connector.lab import bounded

SLOTS, HIDDEN = 3, 2
VOCAB = 5
LAYERS = (0, 1, 2)


def code(tokens: Sequence[int]) -> torch.Tensor:
    """The row `[SLOTS, HIDDEN]` of the last of these tokens; exact in float32."""
    return _code(bytes(tokens))


@functools.lru_cache(maxsize=1 << 15)
def _code(prefix: bytes) -> torch.Tensor:
    hashed = zlib.crc32(prefix) * 2654435761 + len(prefix)
    return torch.tensor([(hashed >> (7 * part)) & 0xFFFFF for part in range(SLOTS * HIDDEN)], dtype=torch.float32).view(
        SLOTS, HIDDEN
    )


def next_token(tokens: Sequence[int]) -> int:
    """What the made-up model says after these tokens."""
    return zlib.crc32(b"next" + bytes(tokens)) % VOCAB


def engine_config(model: str, asynchronous: bool) -> VllmConfig:
    """The configuration of an engine that extracts hidden states, loaded once for many rigs.

    The CPU platform switches asynchronous scheduling off; the scheduler classes work all the same.
    """
    config = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        block_size=16,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "hsconnector.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"stall_timeout_s": 3600, "transport": "http"},
        },
    ).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    return config


def kv_cache_config(shape: str, num_blocks: int) -> tuple[KVCacheConfig, int, int]:
    """The scheduler's groups, the hidden group's index and its block size.

    `composite` is what a plain model gives: one flattened group. `hybrid` has the hidden group last with blocks of its
    own size, `first` has it in front.
    """
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    if shape == "composite":
        return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layers.0", "cache_only_layers.6"], full)]), 0, 16
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32)
    hidden = HiddenStateCacheSpec(block_size=8, num_kv_heads=SLOTS, head_size=256, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layers.0"], full), KVCacheGroupSpec(["layers.1"], window)]
    own = KVCacheGroupSpec(["cache_only_layers.6"], hidden)
    if shape == "first":
        return KVCacheConfig(num_blocks, [], [own, *groups]), 0, 8
    return KVCacheConfig(num_blocks, [], [*groups, own]), 2, 8


@dataclass
class Row:
    """The worker's own view of a request: the tokens it knows to be right."""

    tokens: list[int]
    table: list[int]


@dataclass
class Rig:
    """One engine's worth of scheduling. `step` runs until nothing is left to do."""

    config: VllmConfig
    shape: str
    v2: bool
    seed: int
    num_blocks: int = 40
    ring_rows: int = 40
    settings: ConnectorSettings = field(
        default_factory=lambda: ConnectorSettings(stall_timeout_s=3600, transport="http")
    )
    clock: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        kv_config, self.group, self.block_size = kv_cache_config(self.shape, self.num_blocks)
        self.config.cache_config.num_gpu_blocks = self.num_blocks
        sizes = resolve_kv_cache_block_sizes(kv_config, self.config)
        self.asynchronous = bool(self.config.scheduler_config.async_scheduling)
        kind = AsyncScheduler if self.asynchronous else Scheduler
        manager = StructuredOutputManager(self.config)
        self.scheduler = kind(self.config, kv_config, manager, block_size=sizes[0], hash_block_size=sizes[1])
        self.scheduler.use_v2_model_runner = self.v2
        self.connector._inexact_outputs = None  # the made-up worker counts accepted drafts right
        self.scheduler.needs_kv_cache_zeroing = True
        caching_hash = get_hash_fn_by_name("sha256")
        init_none_hash(caching_hash)
        self.hasher = get_request_block_hasher(sizes[1], caching_hash)
        self.free_at_start = self.free_blocks()
        self.cache = torch.full((self.num_blocks, self.block_size, SLOTS, HIDDEN), -1.0)
        self.transport = InMemoryTransport()
        row_bytes = SLOTS * HIDDEN * 4
        self.settings = _with_ring(self.settings, self.ring_rows * row_bytes)
        producer = Producer(
            engine_id="rig",
            model="rig",
            vllm_version="0",
            layer_ids=LAYERS,
            num_layers=6,
            hidden_size=HIDDEN,
            dtype="float32",
        )
        self.sender = Sender(producer, self.settings, self.transport, now=lambda: self.clock)
        self.worker = Worker(gather_for(self.cache, self.block_size), self.sender)
        self.sender.pump()
        self.rows: dict[str, Row] = {}
        self.requests: dict[str, Request] = {}
        self.ended_by: dict[str, str] = {}
        self.in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.preemptions = 0
        self.reported: list[str] = []
        self.held_back = 0.0

    # ---- what a client does

    def add(self, prompt: list[int], max_tokens: int, with_output: bool = False) -> str:
        request_id = f"request-{len(self.requests)}"
        params = {"kv_transfer_params": {"hidden_states": {"include_output_tokens": with_output}}}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=params)
        request = Request(request_id, prompt, sampling, None, block_hasher=self.hasher)
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # ---- what an engine does

    def step(self) -> None:
        """One turn of the engine core; asynchronous scheduling has one step in flight while the next is scheduled."""
        self.clock += 0.01
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self.in_flight.append((output, self._execute(output)))
        if len(self.in_flight) > (1 if self.asynchronous else 0):
            self._update()

    def _update(self) -> None:
        output, result = self.in_flight.popleft()
        self.scheduler.update_from_output(output, result)
        if not self.asynchronous:
            self.scheduler.update_draft_token_ids(self._drafts(output))

    def drain(self, most: int = 3000) -> None:
        """Steps until every request and every held block is gone."""
        for _ in range(most):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.held_back = 0.0
            self.pump()
            if self.scheduler.has_requests():
                self.step()
            else:
                self._update()
        raise AssertionError(f"still {len(self.scheduler.requests)} requests after {most} steps")

    def pump(self) -> None:
        """Lets the sender work, unless the run withholds memory just now."""
        if self.random.random() >= self.held_back:
            for _ in bounded(lambda: not self.sender.pump() or self.sender.idle):
                pass

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _execute(self, output: Any) -> ModelRunnerOutput:
        for block in output.new_block_ids_to_zero or ():
            self.cache[block] = -2.0
        self._bind(output)
        sampled = self._forward(output)
        released = self.worker.take_released()
        self.reported.extend(released)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=KVConnectorOutput(finished_sending=released or None),
        )

    def _bind(self, output: Any) -> None:
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        self.worker.step(metadata.step)

    def _forward(self, output: Any) -> dict[str, list[int]]:
        starts: dict[str, int] = {}
        for request in output.scheduled_new_reqs:
            known = request.prefill_token_ids if self.v2 else request.prompt_token_ids
            self.rows[request.req_id] = Row(list(known), list(request.block_ids[self.group]))
            starts[request.req_id] = request.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            starts[request_id] = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            row = self.rows[request_id]
            if request_id in cached.resumed_req_ids:
                row.tokens = list(cached.all_token_ids[request_id])
                row.table = []
            if blocks:
                row.table.extend(blocks[self.group])
        return {
            request_id: self._run(
                self.rows[request_id],
                starts[request_id],
                count,
                output.scheduled_spec_decode_tokens.get(request_id, []),
            )
            for request_id, count in output.num_scheduled_tokens.items()
        }

    def _run(self, row: Row, start: int, count: int, drafts: list[int]) -> list[int]:
        """Writes the rows of one request's step and samples; drafts are verified against the made-up model."""
        known = len(row.tokens)
        if start + count - len(drafts) < known:
            self._write(row, row.tokens, start, start + count)
            return []
        start = min(start, known - (count - len(drafts)))
        proposed = [self._propose(row.tokens)] if drafts else []
        tokens = row.tokens + proposed
        self._write(row, tokens, start, len(tokens))
        wanted = next_token(row.tokens)
        sampled = [wanted]
        if proposed and proposed[0] == wanted:
            sampled.append(next_token(tokens))
        row.tokens.extend(sampled)
        return sampled

    def _propose(self, tokens: list[int]) -> int:
        """A draft that is right half of the time."""
        right = next_token(tokens)
        return right if zlib.crc32(bytes([len(tokens) % 251, right])) % 2 else (right + 1) % VOCAB

    def _write(self, row: Row, tokens: list[int], start: int, stop: int) -> None:
        for position in range(start, stop):
            block = row.table[position // self.block_size]
            self.cache[block, position % self.block_size] = code(tokens[: position + 1])

    def _drafts(self, output: Any) -> DraftTokenIds:
        ids = list(output.num_scheduled_tokens)
        return DraftTokenIds(ids, [[self._propose(self.rows[request_id].tokens)] for request_id in ids])

    # ---- what must hold

    def captures_of(self, request_id: str) -> list[StoredCapture]:
        return [c for c in self.transport.captures.values() if c.info.request_id == request_id]

    def check_rows(self) -> int:
        """Every ready capture is exact; gives the number of rows compared."""
        compared = 0
        for capture in self.transport.captures.values():
            assert capture.state is not CaptureState.RECEIVING, f"{capture.info.request_id} never ended"
            if capture.state is not CaptureState.READY:
                continue
            request = self.requests[capture.info.request_id]
            tokens = unpack_token_ids(capture.token_ids)
            wanted = self._wanted(request, capture)
            assert list(tokens) == wanted, f"{request.request_id}: {len(tokens)} ids, {len(wanted)} wanted"
            rows = torch.frombuffer(capture.data, dtype=torch.float32).view(-1, SLOTS, HIDDEN)
            right = torch.stack([code(tokens[: position + 1]) for position in range(len(tokens))])
            wrong = (rows != right).flatten(1).any(1).nonzero().flatten().tolist()
            assert not wrong, f"{request.request_id}: rows {wrong} of {len(tokens)} are wrong"
            compared += len(tokens)
        return compared

    def _wanted(self, request: Request, capture: StoredCapture) -> list[int]:
        everything = list(request.all_token_ids)
        if capture.info.rows == "prompt":
            return everything[: request.num_prompt_tokens]
        return everything[: max(request.num_prompt_tokens, len(everything) - 1)]

    @property
    def connector(self) -> HiddenStatesConnector:
        connector = self.scheduler.connector
        assert isinstance(connector, HiddenStatesConnector)
        return connector


def _with_ring(settings: ConnectorSettings, ring_bytes: int) -> ConnectorSettings:
    import msgspec

    return msgspec.structs.replace(settings, ring_bytes=ring_bytes)
