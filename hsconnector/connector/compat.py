"""What vLLM's objects say, in our words. What differs between versions is here, in `vllm_specs` and in `vllm_facts`.

The objects are read by attribute, so that this module can be imported without vLLM.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hsconnector import vllm_facts
from hsconnector.capture.protocol import FailReason, Producer
from hsconnector.connector.tracker import Arrival, Ended, Progress, Scheduled, Wish
from hsconnector.connector.vllm_specs import groups_from_vllm
from hsconnector.errors import LayoutError, SettingsError, UnsupportedError
from hsconnector.layout.locate import check_view_block_size
from hsconnector.layout.started import StartReport, check_started

__all__ = [
    "block_major",
    "check_start",
    "ended",
    "external_tokens",
    "hidden_cache",
    "inexact_outputs",
    "is_first_tensor_rank",
    "layer_ids",
    "prefix_cache",
    "producer",
    "refuse_config",
    "scheduled",
    "table_of",
    "untested",
    "vllm_version",
]

WishOf = Callable[[Any, str], Wish]
AdapterOf = Callable[[Any], str]
"""From a `LoRARequest` to the weights id of its adapter."""


def vllm_version() -> str:
    """The version of the engine that runs us, also of one that no distribution brought."""
    found = vllm_facts.installed()
    if found is not None:
        return found[1]
    import vllm

    return str(vllm.__version__)


def untested() -> str | None:
    """One line about a version that no test of ours ran on; raises `UnsupportedError` for one known to be too old."""
    version = vllm_version()
    reason = vllm_facts.too_old(version)
    if reason is not None:
        raise UnsupportedError(reason)
    return vllm_facts.untested(version)


# ---- configuration


def refuse_config(vllm_config: Any) -> None:
    """Raises `UnsupportedError`, with one line, for what extraction cannot serve exactly."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "extract_hidden_states":
        method = "none" if speculative is None else repr(speculative.method)
        raise UnsupportedError(
            f"the speculative method is {method}; hidden states need "
            """--speculative-config '{"method": "extract_hidden_states", ...}' (see `hsconnector launch --dry-run`)"""
        )
    parallel = vllm_config.parallel_config
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, field, 1) > 1:
            raise UnsupportedError(
                f"{field} is {getattr(parallel, field)}: rows would be spread over ranks; set it to 1"
            )
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        raise UnsupportedError("kv_sharing_fast_prefill skips prompt tokens in the upper layers; start without it")
    if os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("", "0"):
        raise UnsupportedError(
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set: a request sent again under a held id stops the engine; "
            "unset it"
        )


def inexact_outputs(vllm_config: Any) -> str | None:
    """Why output rows cannot be trusted on this engine, in one line; None where they can.

    The V1 model runner counts one token where `extract_hidden_states` had its draft accepted, and under asynchronous
    scheduling nothing puts that right: positions slip, answers repeat tokens, output rows are of other tokens
    (vllm#56417). Prompt rows are not concerned, nor the V2 runner, nor synchronous scheduling.
    """
    asynchronous = bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))
    if not asynchronous or getattr(vllm_config, "use_v2_model_runner", False):
        return None
    return (
        "the V1 model runner with asynchronous scheduling loses count of accepted drafts (vllm#56417): answers may "
        "repeat tokens and output rows would be wrong; start the engine with --no-async-scheduling"
    )


def layer_ids(vllm_config: Any) -> tuple[int, ...]:
    """The layer ids that the engine captures, ascending, as its slots are."""
    config = vllm_config.speculative_config.draft_model_config.hf_config
    ids = getattr(config, "eagle_aux_hidden_state_layer_ids", None) or ()
    if not ids:
        raise SettingsError("speculative_config names no eagle_aux_hidden_state_layer_ids, so no layer is captured")
    if len(set(ids)) != len(ids):
        raise SettingsError(f"eagle_aux_hidden_state_layer_ids {list(ids)} names a layer twice")
    return tuple(sorted(int(layer) for layer in ids))


def num_layers(vllm_config: Any) -> int:
    """Decoder layers of the whole model."""
    return int(vllm_config.model_config.hf_text_config.num_hidden_layers)


def check_start(kv_cache_config: Any, vllm_config: Any) -> StartReport:
    """What the engine did with its KV cache, checked; raises `LayoutError` on what gives wrong rows."""
    cache = vllm_config.cache_config
    groups = groups_from_vllm(kv_cache_config.kv_cache_groups) if kv_cache_config is not None else None
    return check_started(
        groups,
        cache_block_size=cache.block_size,
        prefix_caching=bool(cache.enable_prefix_caching),
        hash_block_size=getattr(kv_cache_config, "hash_block_size", None),
        num_slots=len(layer_ids(vllm_config)),
        hidden_size=vllm_config.model_config.get_hidden_size(),
    )


def producer(
    vllm_config: Any, cache: torch.Tensor, block_size: int, patience_s: float, weights_id: str = ""
) -> Producer:
    """What this engine's stream says of itself; `cache` is `[num_blocks, block, L, H]`."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    return Producer(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        model=str(model.model),
        model_revision=str(model.revision or ""),
        vllm_version=vllm_version(),
        layer_ids=layer_ids(vllm_config),
        num_layers=num_layers(vllm_config),
        hidden_size=int(cache.shape[3]),
        dtype=str(cache.dtype).removeprefix("torch."),
        tensor_parallel_size=parallel.tensor_parallel_size,
        data_parallel_rank=getattr(parallel, "data_parallel_index", 0) or parallel.data_parallel_rank,
        block_size=block_size,
        instance=secrets.token_hex(8),
        weights_id=weights_id,
        kv_cache_dtype=kv_cache_dtype(vllm_config),
        patience_s=patience_s,
    )


def kv_cache_dtype(vllm_config: Any) -> str:
    """What keys and values are kept in, such as "fp8_e4m3", also where the checkpoint asks for it.

    Empty where they are in the model's dtype.
    """
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    model = vllm_config.model_config
    resolved = str(resolve_kv_cache_dtype_string(str(vllm_config.cache_config.cache_dtype), model))
    return "" if resolved in ("auto", str(model.dtype).removeprefix("torch.")) else resolved


def is_first_tensor_rank() -> bool:
    """Whether this worker is the one of its tensor-parallel group that sends."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0)


def hidden_cache(
    kv_caches: Mapping[str, torch.Tensor], layer_name: str | None, *, pipeline_parallel: bool
) -> torch.Tensor | None:
    """The registered cache of the hidden layer; None on a pipeline stage that has not got it.

    `layer_name` is None where only a flattened group was seen; then it is known by how vLLM names such layers.
    """
    named = [layer_name] if layer_name else [name for name in kv_caches if vllm_facts.HIDDEN_LAYER in name]
    found = [kv_caches[name] for name in named if name in kv_caches]
    if len(found) == 1:
        return found[0]
    if not pipeline_parallel:
        wanted = layer_name or f"one whose name holds {vllm_facts.HIDDEN_LAYER!r}"
        raise LayoutError(f"the hidden-state layer ({wanted}) is not among {', '.join(kv_caches)[:500]}")
    return None


def block_major(cache: torch.Tensor, num_slots: int, hidden_size: int, spec_block_size: int) -> torch.Tensor:
    """The registered hidden-state cache as `[num_blocks, block, L, H]`, whatever its strides.

    vLLM 0.29 and newer registers `[num_blocks, L, block, H]`, 0.28 `[num_blocks, block, L, H]`. When `L` equals the
    block size the shape cannot tell them apart, so the version decides and the shape must agree (speculators#1072).
    """
    if cache.dim() != 4:
        raise LayoutError(f"the hidden-state cache has {cache.dim()} dimensions {tuple(cache.shape)}, expected 4")
    slots_first = vllm_facts.parse_version(vllm_version()) >= vllm_facts.SLOTS_FIRST
    view = cache.permute(0, 2, 1, 3) if slots_first else cache
    if tuple(view.shape[2:]) != (num_slots, hidden_size):
        order = "[num_blocks, L, block, H]" if slots_first else "[num_blocks, block, L, H]"
        raise LayoutError(
            f"the hidden-state cache has shape {tuple(cache.shape)}; vLLM {vllm_version()} registers {order} with "
            f"L = {num_slots} and H = {hidden_size}"
        )
    if cache.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise LayoutError(
            f"the hidden-state cache holds {cache.dtype}: a quantised hidden group cannot be read exactly"
        )
    check_view_block_size(spec_block_size, int(view.shape[1]))
    return view


# ---- the scheduler's output


def scheduled(output: Any, group: int, wish_of: WishOf, adapter_of: AdapterOf = lambda _: "") -> Scheduled:
    """One `SchedulerOutput` in the tracker's words; `group` picks the hidden group's blocks."""
    cached = output.scheduled_cached_reqs
    return Scheduled(
        preempted=tuple(output.preempted_req_ids or ()),
        arrivals=[_arrival_or_problem(request, group, wish_of, adapter_of) for request in output.scheduled_new_reqs],
        progress=[
            Progress(
                request_id,
                cached.new_block_ids[index][group] if cached.new_block_ids[index] else (),
                cached.num_computed_tokens[index],
                request_id in cached.resumed_req_ids,
            )
            for index, request_id in enumerate(cached.req_ids)
        ],
        num_scheduled=output.num_scheduled_tokens,
    )


def _arrival_or_problem(request: Any, group: int, wish_of: WishOf, adapter_of: AdapterOf) -> Arrival:
    """A bug in reading one request is that request's problem alone, and its capture still has an end."""
    try:
        return _arrival(request, group, wish_of, adapter_of)
    except Exception as error:
        problem = (FailReason.INTERNAL_ERROR, f"reading the request: {type(error).__name__}: {error}")
        return Arrival(request.req_id, (), 0, 0, wish=lambda: Wish(problem=problem))


def _arrival(request: Any, group: int, wish_of: WishOf, adapter_of: AdapterOf) -> Arrival:
    problem = _unsupported(request)

    def wish() -> Wish:
        asked = wish_of(transfer_params(request), request.req_id)
        return replace(asked, problem=asked.problem or problem)

    return Arrival(
        request_id=request.req_id,
        blocks=request.block_ids[group],
        num_computed=request.num_computed_tokens,
        num_prompt=len(request.prompt_token_ids or ()),
        lora=request.lora_request.lora_name if request.lora_request is not None else "",
        lora_weights_id=adapter_of(request.lora_request) if request.lora_request is not None else "",
        mm_hashes=tuple(feature.mm_hash or feature.identifier for feature in request.mm_features),
        wish=wish,
    )


def _unsupported(request: Any) -> tuple[FailReason, str] | None:
    if request.pooling_params is not None:
        return FailReason.UNSUPPORTED_REQUEST, "pooling requests are not captured"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return FailReason.UNSUPPORTED_REQUEST, "prompt embeddings have no token ids"
    return None


def transfer_params(request: Any) -> Any:
    """The request's `kv_transfer_params`, as the client sent them."""
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    params = (extra or {}).get("kv_transfer_params")
    return params if isinstance(params, dict) else None


def ended(request: Any) -> Ended:
    """A finished `Request` in the tracker's words."""
    problem = None
    reason = request.get_finished_reason()
    if getattr(request, "streaming_queue", None) is not None:
        problem = (FailReason.UNSUPPORTED_REQUEST, "resumable sessions are not captured")
    return Ended(
        request_id=request.request_id,
        num_prompt=request.num_prompt_tokens,
        token_ids=_token_ids(request),
        num_computed=request.num_computed_tokens,
        reason="unknown" if reason is None else str(reason),
        problem=problem,
    )


def table_of(blocks: Any, group: int) -> Sequence[int]:
    """One group's block ids of `KVCacheBlocks`."""
    ids: Sequence[Sequence[int]] = blocks.get_block_ids()
    return ids[group] if group < len(ids) else ()


def prefix_cache(block_pool: Any) -> object:
    """What maps a block's hash to the block: another object each time that the prefix cache is emptied."""
    return getattr(block_pool, "cached_block_hash_to_block", None)


def external_tokens(request: Any, given: int) -> int:
    """Prompt tokens that another connector brings.

    A `MultiConnector` tells that number to the one that brings them only; the request's own statistics have it too.
    """
    stats = getattr(request, "prefill_stats", None)
    return max(given, int(getattr(stats, "num_external_cached_tokens", 0) or 0))


def _token_ids(request: Any) -> Sequence[int]:
    ids: Sequence[int] = request.all_token_ids
    return ids[:]
