"""A model's `config.json` as the layers that keep a cache, the way vLLM 0.32.0 builds them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsconnector.errors import SettingsError
from hsconnector.layout.specs import ceil_div
from hsconnector.vllm_facts import WITH_HIDDEN_STATES, WITHOUT_HIDDEN_STATES

__all__ = [
    "LAYER_COUNT_KEYS",
    "AttentionLayer",
    "LatentLayer",
    "Layer",
    "Model",
    "StateLayer",
    "read_config",
    "read_model",
    "text_config",
]

TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
KV_HEAD_KEYS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
NOT_MODELLED = ("deepseek_v4", "deepseek_v41", "glm5_next", "hy_v4", "minimax_m3", "qwen4_exp", "inkling")


@dataclass(frozen=True)
class AttentionLayer:
    """Keys and values of `kv_heads` heads over all ranks; `window` or `chunk` where the layer is local."""

    kv_heads: int
    head_size: int
    value_size: int
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class LatentLayer:
    """MLA: one vector of `head_size` a token; `indexer_bytes` where a sparse indexer keeps its own cache."""

    head_size: int
    indexer_bytes: int | None = None


@dataclass(frozen=True)
class StateLayer:
    """A state of fixed size: a convolution over `conv_fixed + groups * group_width`, and `heads` matrices."""

    kind: str
    conv_fixed: int
    kernel: int
    heads: int
    state: tuple[int, int]
    state_dtype: str
    groups: int = 0
    group_width: int = 0

    def shapes(self, tp: int, speculative_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Convolution and recurrent state of one rank. Groups that do not divide are kept by every rank."""
        extra = 0 if self.groups % tp == 0 else tp - self.groups
        conv = self.conv_fixed + (self.groups + extra) * self.group_width
        return (self.kernel - 1 + speculative_tokens, conv // tp), (self.heads // tp, *self.state)


Layer = AttentionLayer | LatentLayer | StateLayer | None
"""None where a decoder layer keeps no cache (a plain MLP or expert layer)."""


@dataclass(frozen=True)
class Model:
    """What the engine's cache depends on. `layers` has one entry a decoder layer, in order."""

    name: str
    architecture: str
    model_type: str
    hidden_size: int
    num_attention_heads: int
    dtype: str
    max_model_len: int
    layers: tuple[Layer, ...]
    assumptions: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hands_out_hidden_states(self) -> bool:
        return self.architecture in WITH_HIDDEN_STATES

    def of(self, kind: type[AttentionLayer | LatentLayer | StateLayer]) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, kind)]

    @property
    def is_hybrid(self) -> bool:
        """Whether state layers stand beside attention layers, so that the engine aligns their pages."""
        return bool(self.of(StateLayer)) and len(self.of(StateLayer)) < len([x for x in self.layers if x is not None])


def read_config(path: str | Path) -> tuple[str, dict[str, Any]]:
    """The JSON object of MODEL, a directory or a `config.json`, and a name for it. SettingsError if it is not there."""
    place = Path(path)
    file = place / "config.json" if place.is_dir() else place
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{file} does not exist; MODEL is a model's directory or its config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SettingsError(f"{file} cannot be read as JSON: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{file} holds a JSON {type(config).__name__} where a model's config is an object")
    return str(path), config


def read_model(name: str, config: Mapping[str, Any], *, dtype: str | None = None) -> Model:
    """The layers of a config. `dtype` overrides the checkpoint's. SettingsError names what is missing or unknown."""
    architectures = config.get("architectures") or [""]
    architecture = str(architectures[0])
    text = text_config(config)
    reader = _Reader(name, architecture, config, text)
    if architecture not in WITH_HIDDEN_STATES | WITHOUT_HIDDEN_STATES:
        raise SettingsError(reader.unknown())
    if reader.model_type in NOT_MODELLED:
        raise SettingsError(
            f"{architecture} keeps caches that this version cannot plan (compressed or mixed pages); "
            "vllm#53243 and vllm#56774 report hidden-state budgets many times too large there"
        )
    return Model(
        name=name,
        architecture=architecture,
        model_type=reader.model_type,
        hidden_size=reader.number("hidden_size"),
        num_attention_heads=reader.number("num_attention_heads"),
        dtype=dtype or reader.dtype(),
        max_model_len=reader.max_model_len(),
        layers=tuple(reader.layers()),
        assumptions=tuple(reader.assumptions),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the decoder, also of a model that takes more than text."""
    for key in TEXT_KEYS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return text_config(inner)
    return config


class _Reader:
    """One config, its keys read with a sentence for what is missing."""

    def __init__(self, name: str, architecture: str, whole: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        self.name = name
        self.architecture = architecture
        self.whole = whole
        self.text = text
        self.model_type = str(text.get("model_type") or whole.get("model_type") or "")
        self.assumptions: list[str] = []

    def number(self, key: str, *others: str, default: int | None = None) -> int:
        for each in (key, *others):
            value = self.text.get(each)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            if value not in (None, 0):
                raise SettingsError(f"{self.name}: {each} is {value!r} where a positive whole number is needed")
        if default is not None:
            return default
        raise SettingsError(f"{self.name}: {key} is missing, and the cache of {self.architecture} depends on it")

    def unknown(self) -> str:
        needs = "num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads and head_dim"
        return (
            f"{self.name}: architecture {self.architecture or '(none given)'} is unknown. It would be taken as a plain "
            f"decoder of full attention, which needs {needs} in the config and an architecture of vLLM's"
        )

    def dtype(self) -> str:
        found = next((c[key] for c in (self.whole, self.text) for key in ("dtype", "torch_dtype") if c.get(key)), None)
        if found in ("bfloat16", "float16"):
            return str(found)
        why = "--dtype auto serves a float32 checkpoint so" if found == "float32" else f"the config says {found}"
        self.assumptions.append(f"dtype bfloat16 ({why})")
        return "bfloat16"

    def max_model_len(self) -> int:
        found = self.number("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", default=0)
        if found:
            return found
        self.assumptions.append("a context of 2,048 tokens (the config names none)")
        return 2_048

    def layers(self) -> list[Layer]:
        if self.text.get("hybrid_override_pattern") or self.text.get("layers_block_type"):
            return self._patterned()
        count = self.number(*LAYER_COUNT_KEYS)
        if isinstance(self.text.get("linear_attn_config"), Mapping):
            return self._kimi_linear(count)
        if self.text.get("kv_lora_rank") and self.text.get("qk_rope_head_dim"):
            return [self._latent()] * count
        return [self._by_type(kind) for kind in self._layer_types(count)]

    def _layer_types(self, count: int) -> Sequence[str]:
        if self.architecture == "GptOssForCausalLM":
            return ["sliding_attention" if index % 2 == 0 else "full_attention" for index in range(count)]
        types = self.text.get("layer_types")
        if isinstance(types, list):
            if len(types) < count:
                raise SettingsError(f"{self.name}: layer_types names {len(types)} layers of {count}")
            return [str(kind) for kind in types[:count]]
        if self.text.get("linear_num_value_heads"):
            every = self.number("full_attention_interval", default=4)
            return ["full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(count)]
        if self.text.get("attention_chunk_size"):
            return self._chunked_types(count)
        windowed = self.text.get("sliding_window") and self.text.get("use_sliding_window") is not False
        return ["sliding_attention" if windowed else "full_attention"] * count

    def _chunked_types(self, count: int) -> list[str]:
        """Llama 4: every fourth layer has no rope and attends to everything."""
        rope = self.text.get("no_rope_layers") or [int((index + 1) % 4 != 0) for index in range(count)]
        return ["chunked_attention" if uses_rope else "full_attention" for uses_rope in rope[:count]]

    def _by_type(self, kind: str) -> Layer:
        if kind == "linear_attention":
            return self._gated_delta()
        if kind == "mamba":
            return self._mamba2()
        window = self.number("sliding_window") if kind == "sliding_attention" else None
        chunk = self.number("attention_chunk_size") if kind == "chunked_attention" else None
        if window is None and chunk is None and kind != "full_attention":
            self.assumptions.append(f"full attention for layers of type {kind}")
        return self._attention(window, chunk)

    def _attention(self, window: int | None = None, chunk: int | None = None) -> AttentionLayer:
        heads = self.number("num_attention_heads")
        size = self.number("head_dim", "hidden_size_per_head", default=self.number("hidden_size") // heads)
        kv_heads = self.number(*KV_HEAD_KEYS, default=heads)
        return AttentionLayer(kv_heads, size, self._value_size(size), window, chunk)

    def _value_size(self, head_size: int) -> int:
        return self.number("v_head_dim", default=head_size) if self.architecture.startswith("MiMoV2") else head_size

    def _latent(self) -> LatentLayer:
        size = self.number("kv_lora_rank") + self.number("qk_rope_head_dim")
        indexer = self.number("index_head_dim", default=0)
        return LatentLayer(size, indexer + ceil_div(indexer, 128) * 4 if indexer else None)

    def _gated_delta(self) -> StateLayer:
        """Gated delta net of Qwen3-Next and Qwen3.5."""
        heads, value = self.number("linear_num_value_heads"), self.number("linear_value_head_dim")
        key_heads, key = self.number("linear_num_key_heads"), self.number("linear_key_head_dim")
        return StateLayer(
            kind="gated delta net",
            conv_fixed=2 * key_heads * key + heads * value,
            kernel=self.number("linear_conv_kernel_dim", default=4),
            heads=heads,
            state=(value, key),
            state_dtype=str(self.text.get("mamba_ssm_dtype") or "auto"),
        )

    def _mamba2(self) -> StateLayer:
        nemotron = self.architecture.startswith("NemotronH")
        heads = self.number("mamba_num_heads", "mamba_n_heads")
        head = self.number("mamba_head_dim", "mamba_d_head")
        state = self.number("ssm_state_size", "mamba_d_state")
        default = "float32" if nemotron else "auto"
        return StateLayer(
            kind="Mamba 2",
            conv_fixed=heads * head,
            kernel=self.number("conv_kernel", "mamba_d_conv"),
            heads=heads,
            state=(head, state),
            state_dtype=str(self.text.get("mamba_ssm_cache_dtype") or default),
            groups=self.number("n_groups", "mamba_n_groups"),
            group_width=2 * state,
        )

    def _kimi_linear(self, count: int) -> list[Layer]:
        inner = self.text["linear_attn_config"]
        full = set(inner.get("full_attn_layers") or ())
        heads, size = int(inner["num_heads"]), int(inner["head_dim"])
        kda = StateLayer(
            kind="Kimi delta attention",
            conv_fixed=3 * heads * size,
            kernel=int(inner.get("short_conv_kernel_size", 4)),
            heads=heads,
            state=(size, size),
            state_dtype="float32",
        )
        return [self._latent() if index + 1 in full else kda for index in range(count)]

    def _patterned(self) -> list[Layer]:
        """Nemotron-H's "M-M*-": Mamba, MLP, attention, experts; or the same as a list of words."""
        words = self.text.get("layers_block_type")
        pattern = list(words) if isinstance(words, list) else list(str(self.text["hybrid_override_pattern"]))
        layers: list[Layer] = []
        for letter in pattern:
            match letter:
                case "M" | "mamba":
                    layers.append(self._mamba2())
                case "*" | "attention":
                    layers.append(self._attention())
                case "-" | "E" | "mlp" | "moe":
                    layers.append(None)
                case _:
                    raise SettingsError(f"{self.name}: layer kind {letter!r} is unknown; known are M, *, - and E")
        return layers
