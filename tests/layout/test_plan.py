from __future__ import annotations

from typing import Any

import pytest

from hsconnector.capture.layers import choose_layers
from hsconnector.errors import LayoutError, SettingsError
from hsconnector.layout.models import AttentionLayer, LatentLayer, StateLayer, read_model
from hsconnector.layout.plan import Plan, make_plan
from hsconnector.layout.serving import Serving, cache_specs, pipeline_stages
from hsconnector.layout.specs import Composite
from hsconnector.vllm_facts import DEFECTS
from tests.layout import configs

GIB = 2**30


def planned(config: dict[str, Any], layers: str = "eagle3", memory: int | None = None, **serving: Any) -> Plan:
    version = serving.pop("version", "0.32.0")
    dtype = serving.pop("dtype", None)
    model = read_model("a model", config, dtype=dtype)
    choice = choose_layers(layers, model.num_layers)
    return make_plan(model, Serving(**serving), choice, kv_memory=memory, tokens=100_000_000, version=version)


def shape(plan: Plan) -> list[tuple[str, int, int, int]]:
    assert plan.refused is None
    return [(group.kind, group.layers, group.block_size, group.page_bytes) for group in plan.groups]


def test_a_dense_8b_folds_the_hidden_layer_into_one_composite() -> None:
    plan = planned(configs.DENSE_8B, memory=40 * GIB)
    page = 36 * 65_536 + 16 * 4 * 4_096 * 2
    assert shape(plan) == [("composite of 36 full attention + 1 hidden states", 37, 16, page)]
    assert plan.layers.layer_ids == (2, 18, 33, 36)
    assert plan.without is not None and plan.with_extraction is not None
    assert (plan.without.bytes_per_token, plan.with_extraction.bytes_per_token) == (147_456, 147_456 + 32_768)
    assert plan.with_extraction.num_blocks == 40 * GIB // page
    assert plan.share_lost == pytest.approx(32_768 / (147_456 + 32_768))
    assert plan.inflation == 1
    assert plan.storage.wire == 32_768
    assert plan.defects == ()


def test_a_70b_at_tp_8_keeps_its_rows_whole() -> None:
    plan = planned(configs.DENSE_70B, tp=8)
    page = 80 * 16 * 1 * 256 * 2 + 16 * 4 * 8_192 * 2
    assert shape(plan) == [("composite of 80 full attention + 1 hidden states", 81, 16, page)]
    assert plan.share_lost == pytest.approx(65_536 / (40_960 + 65_536))


def test_a_sliding_full_mix_at_tp_8_must_scale() -> None:
    plan = planned(configs.SLIDING_FULL_20B, tp=8)
    row, page = 4 * 2_880 * 2, 16 * 128 * 2
    assert shape(plan) == [
        ("sliding window", 12, 96, 6 * page),
        ("full attention", 12, 96, 6 * page),
        ("hidden states", 1, 1, 6 * page),
    ]
    assert row > page and -(-row // page) == 6
    assert "times 6, because one hidden row is larger than a page (vllm#50894)" in plan.block_size_note
    assert plan.inflation == pytest.approx(12 * 6 * page / row)


def test_a_sliding_full_mix_at_tp_1() -> None:
    plan = planned(configs.SLIDING_FULL_20B)
    assert [group[2] for group in shape(plan)] == [16, 16, 1]
    assert plan.block_sizes is not None and (plan.block_sizes.scheduler, plan.block_sizes.hash) == (16, 1)


def test_an_mla_moe_is_a_composite_too() -> None:
    (group,) = planned(configs.MLA_MOE, tp=8).groups
    assert group.page_bytes == 61 * 16 * 576 * 2 + 16 * 4 * 7_168 * 2
    (group,) = planned(configs.SPARSE_MLA, tp=8, kv_cache_dtype="fp8").groups
    assert (group.block_size, group.page_bytes) == (64, 61 * 64 * (656 + 132) + 64 * 4 * 7_168 * 2)


def test_a_mamba_hybrid() -> None:
    plan = planned(configs.MAMBA_HYBRID, layers="2,26,52")
    state = 4 * (8_192 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4
    block = -(-state // (16 * 4_096)) * 16
    groups = shape(plan)
    assert [group[0] for group in groups] == ["Mamba"] * 6 + ["full attention", "hidden states"]
    assert {group[3] for group in groups} == {block * 4_096}
    assert {group[2] for group in groups[:-1]} == {block}
    assert block % groups[-1][2] == 0
    assert plan.groups[0].waste_bytes == block * 4_096 - state
    assert f"16 becomes {block} tokens (an attention page must hold a state of {state:,} bytes" in plan.block_size_note


def test_a_linear_attention_hybrid_gets_the_544_tokens_of_the_report() -> None:
    plan = planned(configs.LINEAR_HYBRID, layers="24,48", memory=40 * GIB, max_model_len=32_768)
    assert shape(plan) == [
        *[("Mamba", 12, 544, 1_114_112)] * 3,
        ("full attention", 12, 544, 1_114_112),
        ("hidden states", 1, 136, 1_114_112),
    ]
    assert plan.block_sizes is not None and (plan.block_sizes.scheduler, plan.block_sizes.hash) == (544, 136)
    assert plan.granularity_note == "a prefix is reused in steps of 136 tokens"
    assert "vllm#53243, vllm#56774" in [defect.reports for defect in plan.defects]


def test_without_prefix_caching_state_blocks_have_the_whole_length() -> None:
    plan = planned(configs.LINEAR_HYBRID, layers="24,48", prefix_caching=False, max_model_len=32_768)
    assert [group[2] for group in shape(plan)] == [32_768] * 3 + [544, 32]
    assert plan.granularity_note == "prefix caching is off: no reuse"


def test_a_vision_model_is_planned_by_its_text() -> None:
    assert shape(planned(configs.VISION)) == shape(planned(configs.DENSE_8B))


def test_chunked_layers() -> None:
    model = read_model("llama 4", configs.CHUNKED)
    kinds = [layer.chunk for layer in model.layers[:4] if isinstance(layer, AttentionLayer)]
    assert kinds == [8_192, 8_192, 8_192, None]
    assert [group.kind for group in planned(configs.CHUNKED, tp=8).groups] == [
        *["chunked local attention"] * 3,
        "full attention",
        "hidden states",
    ]


def test_without_the_hybrid_manager_the_mix_becomes_one_composite() -> None:
    (group,) = planned(configs.SLIDING_FULL_20B, hybrid_manager=False).groups
    assert group.kind == "composite of 24 full attention + 1 hidden states"
    assert planned(configs.LINEAR_HYBRID, hybrid_manager=False).refused is not None


def test_pipeline_stages_and_the_last_ones_memory() -> None:
    assert [len(stage) for stage in pipeline_stages(36, 4)] == [9, 9, 9, 9]
    assert [len(stage) for stage in pipeline_stages(61, 4)] == [15, 15, 16, 15]
    plan = planned(configs.DENSE_8B, pp=2)
    assert plan.with_extraction is not None
    assert plan.with_extraction.bytes_per_block == 18 * 65_536 + 16 * 32_768
    assert [defect.reports for defect in plan.defects] == ["vllm#49811, vllm#53015"]


@pytest.mark.parametrize(
    ("config", "serving", "message"),
    [
        (configs.NO_HIDDEN_STATES, {}, r"Gemma3ForCausalLM hands out no hidden states.*--model-impl transformers"),
        (configs.DENSE_8B, {"version": "0.27.1"}, r"vLLM 0.27.1 is too old for extract_hidden_states.*0.28 or newer"),
        (configs.DENSE_8B, {"kv_cache_dtype": "float16"}, r"the engine stops at the first row"),
        (configs.DENSE_8B, {"block_size": 24}, r"--block-size 24 is not a multiple of the 16 tokens"),
        (configs.DENSE_8B, {"memory": GIB}, r"one request of 40,960 tokens needs 6.88 GiB .* 1.00 GiB are there"),
        (configs.LINEAR_HYBRID, {"hybrid_manager": False}, r"cannot bring these layers to one type"),
    ],
)
def test_where_the_engine_would_refuse(config: dict[str, Any], serving: dict[str, Any], message: str) -> None:
    plan = planned(config, **serving)
    assert plan.refused is not None
    with pytest.raises(LayoutError, match=message):
        raise LayoutError(plan.refused)
    assert "\n" not in plan.refused
    assert plan.storage.wire > 0


def test_a_mamba_page_that_the_engine_leaves_behind_is_refused() -> None:
    """At TP 4 the attention page equals the state page, so the Mamba page carries no padding that could be scaled."""
    wide = {**configs.LINEAR_HYBRID, "hidden_size": 4_096}
    plan = planned(wide, layers=",".join(map(str, range(1, 49))), tp=4, max_model_len=4_096)
    assert plan.refused is not None and "278,528, 557,056 bytes, which its layout cannot express" in plan.refused
    assert "fewer layers, a smaller --tp, or a larger --block-size" in plan.helps


@pytest.mark.parametrize(("version", "count"), [("0.31.0", 5), ("0.32.0", 2), ("0.33.1+cpu", 2)])
def test_defects_bite_by_version(version: str, count: int) -> None:
    plan = planned(configs.LINEAR_HYBRID, layers="24,48", max_model_len=32_768, version=version)
    assert len(plan.defects) == count
    assert all(defect in DEFECTS.values() for defect in plan.defects)


@pytest.mark.parametrize(
    ("config", "serving", "message"),
    [
        (configs.DENSE_8B, {"tp": 3}, r"--tp 3 does not divide the model's 32 attention heads"),
        (configs.DENSE_8B, {"tp": 0}, r"--tp 0 is not a positive whole number"),
        (configs.DENSE_8B, {"pp": 37}, r"--pp 37 is more than the model's 36 layers"),
        (configs.DENSE_8B, {"kv_cache_dtype": "int3"}, r"--kv-cache-dtype int3 is none of auto, "),
        (configs.DENSE_8B, {"device": "tpu"}, r"--device tpu is none of cuda, cpu"),
        (configs.DENSE_8B, {"max_model_len": -1}, r"--max-model-len -1"),
        (
            {**configs.DENSE_8B, "architectures": ["NewForCausalLM"]},
            {},
            r"NewForCausalLM is unknown.*full attention.*needs",
        ),
        ({**configs.DENSE_8B, "architectures": None}, {}, r"\(none given\) is unknown"),
        ({**configs.DENSE_8B, "hidden_size": None}, {}, r"hidden_size is missing"),
        ({**configs.DENSE_8B, "hidden_size": "big"}, {}, r"hidden_size is 'big' where a positive whole number"),
        ({**configs.MLA_MOE, "model_type": "deepseek_v4"}, {}, r"cannot plan.*vllm#53243"),
        ({**configs.MAMBA_HYBRID, "hybrid_override_pattern": "M?"}, {}, r"layer kind '\?' is unknown"),
        ({**configs.DENSE_8B, "layer_types": ["full_attention"]}, {}, r"layer_types names 1 layers of 36"),
    ],
)
def test_bad_input_is_one_sentence(config: dict[str, Any], serving: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        planned(config, **serving)
    assert "\n" not in str(refused.value)


def test_layers_by_kind() -> None:
    assert len(read_model("m", configs.MAMBA_HYBRID).of(StateLayer)) == 24
    assert read_model("m", configs.MAMBA_HYBRID).layers.count(None) == 24
    assert read_model("m", configs.MLA_MOE).layers[0] == LatentLayer(576)
    kimi = {
        **configs.MLA_MOE,
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 32, "head_dim": 128},
    }
    kinds = [type(layer) for layer in read_model("m", kimi).layers]
    assert kinds == [StateLayer, StateLayer, StateLayer, LatentLayer]


def test_a_windowed_model_keeps_windows_everywhere() -> None:
    mistral = {**configs.DENSE_70B, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    assert {layer.window for layer in read_model("m", mistral).of(AttentionLayer)} == {4096}
    assert [group.kind for group in planned(mistral).groups] == ["sliding window", "hidden states"]


def test_dtypes() -> None:
    assert read_model("m", {**configs.DENSE_8B, "torch_dtype": "float32"}).dtype == "bfloat16"
    assert read_model("m", configs.DENSE_8B, dtype="float32").dtype == "float32"
    fp8 = cache_specs(read_model("m", configs.DENSE_8B), Serving(kv_cache_dtype="fp8"), 4)
    assert (fp8.hidden.dtype, fp8.target["model.layers.0.attn"].page_size_bytes) == ("bfloat16", 32_768)


def test_a_composite_is_what_a_worker_locates() -> None:
    plan = planned(configs.DENSE_8B)
    assert plan.hidden is not None and isinstance(plan.engine_groups[0].spec, Composite)
    assert (plan.hidden.index, plan.hidden.layer_name, plan.hidden.block_size) == (0, "cache_only_layers.36", 16)
