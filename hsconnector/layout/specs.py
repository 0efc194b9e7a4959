"""KV-cache specs of our own: what one layer keeps for a block of tokens.

They mirror the fields that vLLM's grouping rules look at (`vllm/v1/kv_cache_interface.py`) and nothing else, so that
the rules can be run without torch and without vLLM. Dtypes are names ("bfloat16"), sizes are bytes, block sizes tokens.

    Spec
    ├── Attention
    │   ├── FullAttention
    │   │   └── MLA
    │   │       └── HiddenState      a marker: the cache that extract_hidden_states writes
    │   ├── SlidingWindow
    │   │   └── SlidingWindowMLA
    │   └── ChunkedLocal
    ├── Mamba
    ├── Composite                    UniformTypeKVCacheSpecs: one block table, one spec a layer
    └── Other                        a class of vLLM's that the rules do not know
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, prod
from typing import ClassVar, Self

from hsconnector.errors import LayoutError

__all__ = [
    "DTYPE_BYTES",
    "MLA",
    "Attention",
    "ChunkedLocal",
    "Composite",
    "FullAttention",
    "Group",
    "HiddenState",
    "KernelBlocks",
    "Mamba",
    "Other",
    "SlidingWindow",
    "SlidingWindowMLA",
    "Spec",
    "ceil_div",
    "dtype_bytes",
    "layer_specs",
    "round_up",
]

DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; LayoutError for a dtype that is not in the table."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise LayoutError(f"dtype {dtype!r} is unknown here; known are {', '.join(DTYPE_BYTES)}") from None


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def round_up(value: int, to: int) -> int:
    return ceil_div(value, to) * to


@dataclass(frozen=True)
class KernelBlocks:
    """Stride alignment in whole kernel blocks of up to `base` tokens (vLLM's `MultipleOf`)."""

    base: int


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What one layer keeps for `block_size` tokens."""

    kind: ClassVar[str] = "unknown"

    block_size: int
    block_stride_alignment: int | KernelBlocks | None = None

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise LayoutError(f"a {self.kind} spec needs a positive block size, not {self.block_size}")

    @property
    def dense_page_bytes(self) -> int:
        """Bytes of one block without padding."""
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, padding included."""
        return self.dense_page_bytes

    @property
    def tokens_per_row(self) -> int | Fraction:
        """Tokens that one stored row covers; 1 unless the cache compresses tokens."""
        return 1

    @property
    def prefix_cacheable(self) -> bool:
        """Whether blocks of this spec take part in prefix caching."""
        return True

    @property
    def described(self) -> str:
        """The name to print in messages and tables."""
        return self.kind

    def with_block_size(self, block_size: int) -> Self:
        return replace(self, block_size=block_size)

    @property
    def stride_alignment_bytes(self) -> int:
        """Bytes that the stride between physical blocks must be a multiple of."""
        if not isinstance(self.block_stride_alignment, KernelBlocks):
            return self.block_stride_alignment or 1
        kernel_block = gcd(self.block_stride_alignment.base, self.block_size)
        return 1 if kernel_block == self.block_size else self.with_block_size(kernel_block).page_size_bytes


@dataclass(frozen=True, kw_only=True)
class Attention(Spec):
    """Keys and values: `num_kv_heads` heads of `head_size` (+ `head_size_v`) elements a token, on one rank.

    `num_head_slots` and `state_content_bytes` are what a backend that packs its cache publishes in place of the dense
    shape; `tokens_per_state` is above 1 where it keeps one row for several tokens.
    """

    kind: ClassVar[str] = "attention"

    num_kv_heads: int
    head_size: int
    dtype: str
    head_size_v: int | None = None
    quant_mode: str = "none"
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int | Fraction = 1
    dcp_sharded: bool = True
    max_tp_shards: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    def tokens_per_row(self) -> int | Fraction:
        return self.tokens_per_state

    @property
    def state_bytes(self) -> int:
        """Bytes of one (head slot, row) cell."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        return (self.head_size + (self.head_size_v or 0)) * dtype_bytes(self.dtype)

    @property
    def dense_page_bytes(self) -> int:
        heads = self.num_kv_heads if self.num_head_slots is None else self.num_head_slots
        return heads * int(self.block_size // self.tokens_per_state) * self.state_bytes

    @property
    def page_size_bytes(self) -> int:
        return _padded(self, self.page_size_padded)


@dataclass(frozen=True, kw_only=True)
class FullAttention(Attention):
    """Attention over all tokens. The window fields are set where vLLM manages a local layer as a full one."""

    kind: ClassVar[str] = "full attention"

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False


@dataclass(frozen=True, kw_only=True)
class MLA(FullAttention):
    """One latent vector a token, no separate values. `alignment` pads the page (DeepSeek-V4)."""

    kind: ClassVar[str] = "MLA"

    head_size_v: int | None = 0
    cache_dtype: str | None = None
    topk_buffer_width: int | None = None
    """Width of a sparse model's buffer of indices, from 0.33 on; layers of two widths make two groups."""
    alignment: int | None = None
    model_version: str | None = None
    cache_role: str = "sparse"
    is_index_group_leader: bool = False
    non_causal_multi_token_decode: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _pad_to_alignment(self, self.alignment)


@dataclass(frozen=True, kw_only=True)
class HiddenState(MLA):
    """The cache of extract_hidden_states: `num_kv_heads` slots of `head_size` elements a token.

    Hidden rows are replicated over tensor-parallel ranks, so these two are never divided by the TP size. Padding sits
    at the end of the page.
    """

    kind: ClassVar[str] = "hidden states"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows over all slots."""
        return self.num_kv_heads * self.head_size * dtype_bytes(self.dtype)

    @property
    def waste_bytes(self) -> int:
        """Bytes of each page that hold nothing."""
        return self.page_size_bytes - self.block_size * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Attention):
    """Attention over the last `sliding_window` tokens; older blocks are freed."""

    kind: ClassVar[str] = "sliding window"

    sliding_window: int
    extra_retained_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLA(SlidingWindow):
    """Sliding-window attention in the MLA cache format (DeepSeek-V4)."""

    kind: ClassVar[str] = "sliding-window MLA"

    head_size_v: int | None = 0
    cache_dtype: str | None = None
    alignment: int | None = None
    model_version: str | None = None
    bounded_replay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _pad_to_alignment(self, self.alignment)

    @property
    def prefix_cacheable(self) -> bool:
        return not self.bounded_replay


@dataclass(frozen=True, kw_only=True)
class ChunkedLocal(Attention):
    """Attention within chunks of `attention_chunk_size` tokens (Llama 4)."""

    kind: ClassVar[str] = "chunked local attention"

    attention_chunk_size: int


@dataclass(frozen=True, kw_only=True)
class Mamba(Spec):
    """A state of fixed size a block (Mamba, gated delta net, other linear attention).

    `cache_mode` is vLLM's `mamba_cache_mode`: "none", "all" or "align".
    """

    kind: ClassVar[str] = "Mamba"

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    cache_mode: str = "none"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None
    num_heads: int = 1
    tp_replicated: bool = False

    @property
    def tokens_per_row(self) -> int | Fraction:
        return -1

    @property
    def dense_page_bytes(self) -> int:
        return sum(prod(shape) * dtype_bytes(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def page_size_bytes(self) -> int:
        return _padded(self, self.page_size_padded)


@dataclass(frozen=True, kw_only=True)
class Composite(Spec):
    """One block table for layers of one type and several page sizes: `layers` names each layer's own spec.

    vLLM folds the hidden layer in here beside full-attention layers (`UniformTypeKVCacheSpecs`).
    """

    kind: ClassVar[str] = "composite"

    layers: tuple[tuple[str, Spec], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers:
            raise LayoutError("a composite needs at least one layer")

    @property
    def specs(self) -> tuple[Spec, ...]:
        return tuple(spec for _, spec in self.layers)

    @property
    def first(self) -> Spec:
        return self.layers[0][1]

    @property
    def dense_page_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.specs)

    @property
    def prefix_cacheable(self) -> bool:
        return all(spec.prefix_cacheable for spec in self.specs)

    @property
    def described(self) -> str:
        counts: dict[str, int] = {}
        for spec in self.specs:
            counts[spec.described] = counts.get(spec.described, 0) + 1
        return "composite of " + " + ".join(f"{count} {kind}" for kind, count in counts.items())


@dataclass(frozen=True, kw_only=True)
class Other(Spec):
    """A spec class that the rules do not know, by its name in vLLM. Its page is taken as reported."""

    kind: ClassVar[str] = "other"

    class_name: str
    reported_page_bytes: int = 0
    cacheable: bool = True

    @property
    def dense_page_bytes(self) -> int:
        return self.reported_page_bytes

    @property
    def prefix_cacheable(self) -> bool:
        return self.cacheable

    @property
    def described(self) -> str:
        return self.class_name


@dataclass(frozen=True)
class Group:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: Spec

    @property
    def members(self) -> tuple[tuple[str, Spec], ...]:
        """Each layer with its own spec, also inside a composite."""
        if isinstance(self.spec, Composite):
            return self.spec.layers
        return tuple((name, self.spec) for name in self.layer_names)


def layer_specs(spec: Spec) -> Sequence[Spec]:
    """The per-layer specs that a group's spec covers."""
    return spec.specs if isinstance(spec, Composite) else (spec,)


def _padded(spec: Spec, padded: int | None) -> int:
    if padded is None:
        return spec.dense_page_bytes
    if padded < spec.dense_page_bytes:
        raise LayoutError(
            f"a {spec.kind} page of {spec.block_size} tokens holds {spec.dense_page_bytes:,} bytes and cannot be "
            f"padded to {padded:,}"
        )
    return padded


def _pad_to_alignment(spec: MLA | SlidingWindowMLA, alignment: int | None) -> None:
    if alignment is None:
        return
    padded = round_up(spec.dense_page_bytes, alignment)
    if padded != spec.dense_page_bytes:
        object.__setattr__(spec, "page_size_padded", padded)
