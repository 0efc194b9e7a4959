"""How a model is served, and the specs that its layers then get: the engine's choices of block size and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hsconnector.errors import LayoutError, SettingsError
from hsconnector.layout.models import AttentionLayer, LatentLayer, Layer, Model, StateLayer
from hsconnector.layout.specs import (
    MLA,
    Attention,
    ChunkedLocal,
    FullAttention,
    HiddenState,
    Mamba,
    SlidingWindow,
    Spec,
    ceil_div,
    dtype_bytes,
)
from hsconnector.vllm_facts import HIDDEN_LAYER

__all__ = ["DEVICES", "KV_DTYPES", "CacheSpecs", "Serving", "cache_specs", "pipeline_stages"]

DEVICES = ("cuda", "cpu")
KV_DTYPES = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "uint8",
    "fp8_e4m3": "uint8",
    "fp8_e5m2": "uint8",
}
KERNEL_BLOCK = {"cuda": 16, "cpu": 32}
"""Tokens: what FlashAttention and the CPU's attention divide a block into."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """vLLM's options that the cache depends on; None means vLLM's own choice."""

    tp: int = 1
    pp: int = 1
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    prefix_caching: bool = True
    hybrid_manager: bool = True
    device: str = "cuda"
    max_batched_tokens: int = 8_192

    @property
    def in_flight_tokens(self) -> int:
        """Tokens scheduled but not settled. Asynchronous scheduling, which a CPU does not do, keeps one batch more."""
        return (self.pp + int(self.device != "cpu")) * self.max_batched_tokens


@dataclass(frozen=True)
class CacheSpecs:
    """Layer name -> spec in the engine's order, and why the block size is what it is."""

    target: dict[str, Spec]
    hidden: HiddenState
    hidden_name: str
    block_size: int
    asked_block_size: int
    why_block_size: str
    max_model_len: int
    assumptions: tuple[str, ...]

    @property
    def extracting(self) -> dict[str, Spec]:
        return {**self.target, self.hidden_name: self.hidden}


def cache_specs(model: Model, serving: Serving, num_slots: int, *, speculative_tokens: int = 1) -> CacheSpecs:
    """The specs that vLLM 0.32.0 makes of `model`, with a hidden-state layer of `num_slots` slots behind them.

    extract_hidden_states counts as one speculative token, which state layers keep room for; without it, give 0.
    SettingsError for options that contradict the model, LayoutError for what the engine refuses.
    """
    _check_parallel(model, serving)
    if serving.kv_cache_dtype not in KV_DTYPES:
        raise SettingsError(f"--kv-cache-dtype {serving.kv_cache_dtype} is none of {', '.join(KV_DTYPES)}")
    kv_dtype = KV_DTYPES[serving.kv_cache_dtype] or model.dtype
    asked, why_asked = _asked_block_size(model, serving)
    block_size, why = _aligned_block_size(model, serving, kv_dtype, asked, speculative_tokens)
    length = serving.max_model_len or model.max_model_len
    maker = _Maker(model, serving, kv_dtype, block_size, length, speculative_tokens)
    target: dict[str, Spec] = {}
    for index, layer in enumerate(model.layers):
        target.update(maker.specs(index, layer))
    return CacheSpecs(
        target=target,
        hidden=HiddenState(
            block_size=block_size,
            num_kv_heads=num_slots,
            head_size=model.hidden_size,
            dtype=_hidden_dtype(model, serving),
        ),
        hidden_name=f"{HIDDEN_LAYER}.{model.num_layers}",
        block_size=block_size,
        asked_block_size=asked,
        why_block_size=why or why_asked,
        max_model_len=length,
        assumptions=model.assumptions + _assumptions(model, serving),
    )


def pipeline_stages(num_layers: int, pp: int) -> list[range]:
    """Decoder layers of each pipeline stage; what an uneven split leaves goes to the middle (`get_pp_indices`)."""
    sizes = [num_layers // pp] * pp
    for index in range(2, num_layers % pp + 2):
        sizes[-index] += 1
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@dataclass(frozen=True)
class _Maker:
    model: Model
    serving: Serving
    kv_dtype: str
    block_size: int
    max_model_len: int
    speculative_tokens: int

    def specs(self, index: int, layer: Layer) -> dict[str, Spec]:
        name = f"model.layers.{index}"
        match layer:
            case AttentionLayer():
                return {f"{name}.attn": self._attention(layer)}
            case LatentLayer():
                return self._latent(name, layer)
            case StateLayer():
                return {f"{name}.state": self._state(layer)}
        return {}

    def _attention(self, layer: AttentionLayer) -> Attention:
        fields: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": _kv_heads(layer, self.serving.tp),
            "head_size": layer.head_size,
            "head_size_v": layer.value_size,
            "dtype": self.kv_dtype,
        }
        if layer.window:
            return SlidingWindow(**fields, sliding_window=layer.window)
        if layer.chunk:
            return ChunkedLocal(**fields, attention_chunk_size=layer.chunk)
        return FullAttention(**fields)

    def _latent(self, name: str, layer: LatentLayer) -> dict[str, Spec]:
        packed = layer.indexer_bytes is not None and self.kv_dtype == "uint8"
        latent = MLA(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=layer.head_size,
            dtype=self.kv_dtype,
            cache_dtype="fp8_ds_mla" if packed else self.serving.kv_cache_dtype,
            state_content_bytes=656 if packed else None,
            is_index_group_leader=layer.indexer_bytes is not None,
        )
        if layer.indexer_bytes is None:
            return {f"{name}.attn": latent}
        indexer = MLA(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=layer.indexer_bytes,
            dtype="uint8",
            cache_role="indexer",
        )
        return {f"{name}.attn": latent, f"{name}.indexer": indexer}

    def _state(self, layer: StateLayer) -> Mamba:
        page = _state_bytes(layer, self.model, self.serving.tp, self.speculative_tokens)
        attention = self.block_size * _attention_row(self.model, self.kv_dtype, self.serving.tp)
        return Mamba(
            block_size=self.block_size if self.serving.prefix_caching else self.max_model_len,
            shapes=layer.shapes(self.serving.tp, self.speculative_tokens),
            dtypes=_state_dtypes(layer, self.model),
            page_size_padded=attention if attention > page and self.model.is_hybrid else None,
            mamba_type=layer.kind,
            cache_mode="align" if self.serving.prefix_caching else "none",
            num_speculative_blocks=self.speculative_tokens,
        )


def _check_parallel(model: Model, serving: Serving) -> None:
    for name in ("tp", "pp", "block_size", "max_model_len"):
        value = getattr(serving, name)
        if value is not None and value < 1:
            raise SettingsError(f"--{name.replace('_', '-')} {value} is not a positive whole number")
    if model.num_attention_heads % serving.tp:
        raise SettingsError(
            f"--tp {serving.tp} does not divide the model's {model.num_attention_heads} attention heads"
        )
    for layer in model.of(AttentionLayer):
        if layer.kv_heads % serving.tp and serving.tp % layer.kv_heads:
            raise SettingsError(
                f"--tp {serving.tp} neither divides the model's {layer.kv_heads} KV heads nor the reverse"
            )
    for layer in model.of(StateLayer):
        if layer.heads % serving.tp:
            raise SettingsError(f"--tp {serving.tp} does not divide the {layer.heads} heads of {layer.kind} layers")
    if serving.pp > model.num_layers:
        raise SettingsError(f"--pp {serving.pp} is more than the model's {model.num_layers} layers")
    if serving.device not in DEVICES:
        raise SettingsError(f"--device {serving.device} is none of {', '.join(DEVICES)}")


def _hidden_dtype(model: Model, serving: Serving) -> str:
    """The model's dtype when the KV cache is quantised or automatic; the engine asserts that they are equal."""
    kept = serving.kv_cache_dtype
    if kept in ("bfloat16", "float16") and kept != model.dtype:
        raise LayoutError(
            f"--kv-cache-dtype {kept} keeps hidden states in {kept} while the model computes in {model.dtype}, and the "
            "engine stops at the first row; take --kv-cache-dtype auto"
        )
    return model.dtype


def _asked_block_size(model: Model, serving: Serving) -> tuple[int, str]:
    if serving.block_size is not None:
        kernel = KERNEL_BLOCK[serving.device]
        if serving.block_size % kernel and not model.of(LatentLayer):
            raise LayoutError(
                f"--block-size {serving.block_size} is not a multiple of the {kernel} tokens of a kernel block"
            )
        return serving.block_size, "--block-size"
    latent = model.of(LatentLayer)
    if serving.device == "cpu":
        return (16, "the CPU's MLA kernel") if latent else (128, "vLLM's default on a CPU")
    if any(layer.indexer_bytes is not None for layer in latent):
        return 64, "the sparse MLA kernels"
    return 16, "vLLM's default"


def _aligned_block_size(
    model: Model, serving: Serving, kv_dtype: str, asked: int, speculative_tokens: int
) -> tuple[int, str]:
    """Blocks grow until an attention page holds a state page (`_align_hybrid_block_size`)."""
    if not model.is_hybrid:
        return asked, ""
    state = max(_state_bytes(layer, model, serving.tp, speculative_tokens) for layer in model.of(StateLayer))
    row = _attention_row(model, kv_dtype, serving.tp)
    unit = max(KERNEL_BLOCK[serving.device], asked, 128 if model.of(LatentLayer) else 1)
    grown = unit * ceil_div(state, unit * row)
    grown = KERNEL_BLOCK[serving.device] * ceil_div(grown, KERNEL_BLOCK[serving.device])
    if asked >= grown:
        return asked, ""
    return grown, f"an attention page must hold a state of {state:,} bytes, {row:,} bytes a token"


def _attention_row(model: Model, kv_dtype: str, tp: int) -> int:
    """Bytes of one token in one attention layer of one rank."""
    for layer in model.layers:
        if isinstance(layer, LatentLayer):
            return layer.head_size * dtype_bytes(kv_dtype)
        if isinstance(layer, AttentionLayer):
            return _kv_heads(layer, tp) * (layer.head_size + layer.value_size) * dtype_bytes(kv_dtype)
    return 0


def _kv_heads(layer: AttentionLayer, tp: int) -> int:
    return max(1, layer.kv_heads // tp)


def _state_bytes(layer: StateLayer, model: Model, tp: int, speculative_tokens: int) -> int:
    shapes = layer.shapes(tp, speculative_tokens)
    return Mamba(block_size=1, shapes=shapes, dtypes=_state_dtypes(layer, model)).page_size_bytes


def _state_dtypes(layer: StateLayer, model: Model) -> tuple[str, str]:
    return model.dtype, model.dtype if layer.state_dtype == "auto" else layer.state_dtype


def _assumptions(model: Model, serving: Serving) -> tuple[str, ...]:
    notes: Sequence[str] = ()
    if serving.device == "cuda" and serving.block_size is None:
        kernel = "an MLA backend" if model.of(LatentLayer) else "FlashAttention"
        notes = (f"{kernel} with vLLM's default block size; another backend may take another (give --block-size)",)
    scheduling = "synchronous" if serving.device == "cpu" else "asynchronous"
    return (*notes, f"--max-num-batched-tokens {serving.max_batched_tokens:,}, {scheduling} scheduling")
