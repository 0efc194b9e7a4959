"""Whose weights: ids that are equal for equal weights, and for no others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hsconnector.connector.weights import loaded_weights, model_folder
from tests.connector.checkpoints import engine_config, tensors, write, write_sharded

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def id_of(model: object, *args: Any, **fields: Any) -> str:
    return loaded_weights(engine_config(model, *args, **fields), "0.32.0").id


def into_hub_cache(cache: Path, folder: Path, commit: str = COMMIT) -> Path:
    """As the hub's client lays a download out: blobs, and links to them in a folder named by the commit."""
    repo = cache / "models--org--tiny"
    snapshot = repo / "snapshots" / commit
    for path in (repo / "blobs", repo / "refs", snapshot):
        path.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for number, file in enumerate(folder.iterdir()):
        shutil.copy(file, repo / "blobs" / f"{number:064}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064}")
    return snapshot


def test_an_id_is_64_hex_digits_and_says_where_it_comes_from(tmp_path: Path) -> None:
    weights = loaded_weights(engine_config(write(tmp_path / "a")))
    assert len(weights.id) == 64 and int(weights.id, 16) >= 0
    assert weights.source == f"1 file in {tmp_path / 'a'}"


def test_a_copy_in_another_folder_has_the_same_id(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    b = shutil.copytree(a, tmp_path / "another name")
    assert id_of(a) == id_of(b) == id_of(write_sharded(tmp_path / "c", tensors()))


def test_other_weights_in_the_same_folder_have_another_id(tmp_path: Path) -> None:
    """What a training run does to the folder that it saves to (vllm#57810)."""
    before = id_of(write(tmp_path / "a", tensors(0)))
    shutil.rmtree(tmp_path / "a")
    assert id_of(write(tmp_path / "a", tensors(1))) != before


def test_names_dtypes_and_what_the_sampler_reads_do_not_count(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    other: dict[str, Any] = {
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "transformers_version": "9",
        "eos_token_id": 7,
    }
    b = write(tmp_path / "b", **other, _name_or_path="x", text_config={"torch_dtype": "float16"})
    c = write(tmp_path / "c", text_config={})
    assert id_of(a) != id_of(b) == id_of(c)


@pytest.mark.parametrize("change", [{"rope_theta": 5e5}, {"architectures": ["LlamaForCausalLM"]}, {"extra": None}])
def test_another_network_on_the_same_weights_has_another_id(tmp_path: Path, change: dict[str, Any]) -> None:
    assert id_of(write(tmp_path / "a")) != id_of(write(tmp_path / "b", **change))


def test_overrides_count_as_if_the_file_said_so(tmp_path: Path) -> None:
    a = write(tmp_path / "a", rope={"type": "yarn", "factor": 2})
    b = write(tmp_path / "b", rope={"type": "yarn", "factor": 4}, rope_theta=5e5)
    assert id_of(a) != id_of(a, hf_overrides={"rope": {"factor": 4}, "rope_theta": 5e5}) == id_of(b)


def override(config: Any) -> Any:
    return config


def test_a_function_that_overrides_counts_by_its_name(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    assert id_of(a) != id_of(a, hf_overrides=override) == id_of(a, hf_overrides=override)


def test_quantisation_on_load_counts_and_a_kernels_name_does_not(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    fp8 = id_of(a, quantization="fp8")
    assert len({id_of(a), fp8, id_of(a, quantization="fp8", quantization_config={"linear": "x"})}) == 3
    quantised = write(tmp_path / "b", quantization_config={"quant_method": "awq", "dtype": "int4"})
    assert id_of(quantised, quantization="awq") == id_of(quantised, quantization="awq_marlin")
    other = write(tmp_path / "c", quantization_config={"quant_method": "awq", "dtype": "int8"})
    assert id_of(quantised) != id_of(other)


def test_a_file_that_says_how_weights_are_quantised_counts(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    before = id_of(a)
    (a / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert id_of(a) != before


def test_a_sliding_window_that_is_off_counts(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    assert id_of(a) != id_of(a, disable_sliding_window=True)


def test_a_configuration_elsewhere_counts_instead_of_the_models(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", rope_theta=5e5)
    assert id_of(a, hf_config_path=str(b)) == id_of(b)


def test_without_a_configuration_file_the_engines_own_counts(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    (b / "config.json").unlink()
    assert id_of(a) == id_of(b)
    (b / "config.json").write_text("[]")
    assert id_of(a) == id_of(b)


def test_dummy_weights_are_never_those_of_the_folder(tmp_path: Path) -> None:
    """They are drawn by the engine's own code: a seed, a version or a rank more, and they are others."""
    a = write(tmp_path / "a")
    b = shutil.copytree(a, tmp_path / "b")
    dummy = id_of(a, "dummy")
    other_version = loaded_weights(engine_config(a, "dummy"), "0.33.0").id
    assert dummy == id_of(b, "dummy")
    assert len({id_of(a), dummy, id_of(a, "dummy", seed=1), other_version}) == 4


def test_weights_fetched_from_elsewhere_by_a_loader_count_with_its_settings(tmp_path: Path) -> None:
    """How vLLM's own formats read does not matter; another's settings may name other weights."""
    a = write(tmp_path / "a")
    assert id_of(a) == id_of(a, "safetensors", {"num_threads": 4})
    assert len({id_of(a), id_of(a, "plugged", {"uri": "x"}), id_of(a, "plugged", {"uri": "y"})}) == 3


def test_a_pattern_for_sharded_states_is_followed(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "model.safetensors").rename(folder / "own-0-7.safetensors")
    config = engine_config(folder, "sharded_state", {"pattern": "own-{rank}-{part}.safetensors"})
    assert loaded_weights(config).source == f"1 file in {folder}"


# ---- where the files are


def test_a_snapshot_in_the_hubs_cache_has_the_id_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = write(tmp_path / "a")
    snapshot = into_hub_cache(tmp_path / "hub", a)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache = str(tmp_path / "hub")
    assert model_folder("org/tiny", COMMIT, cache) == model_folder("org/tiny", None, cache) == snapshot
    config = engine_config("org/tiny", revision=COMMIT)
    config.load_config.download_dir = cache
    assert loaded_weights(config).id == id_of(a)


def test_a_single_file_is_found_by_its_quantisation(tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "tiny-Q4_K_M.gguf").write_bytes(os.urandom(1000))
    (folder / "tiny-Q8_0.gguf").write_bytes(os.urandom(1000))
    into_hub_cache(tmp_path / "hub", folder)
    found = []
    for name in ("org/tiny:Q4_K_M", "org/tiny:Q8_0"):
        config = engine_config(name, "gguf")
        config.load_config.download_dir = str(tmp_path / "hub")
        found.append(loaded_weights(config).id)
    assert found == [id_of(folder / "tiny-Q4_K_M.gguf", "gguf"), id_of(folder / "tiny-Q8_0.gguf", "gguf")]


def test_where_no_file_is_here_a_commit_stands_in(tmp_path: Path) -> None:
    weights = loaded_weights(engine_config("org/gone", revision=COMMIT))
    assert weights.id == id_of("org/gone", revision=COMMIT) != id_of("org/other", revision=COMMIT)
    assert f"the hub's commit {COMMIT}" in weights.source and "'org/gone' is no folder here" in weights.source


@pytest.mark.parametrize("revision", [None, "main", "v1.0"])
def test_a_name_that_may_move_is_no_id_so_every_start_has_its_own(revision: str | None) -> None:
    config = engine_config("org/gone", revision=revision)
    first, second = loaded_weights(config), loaded_weights(config)
    assert first.id != second.id
    assert "an id for this start only" in first.source


def test_weights_in_an_object_store_are_not_those_of_the_folder_beside_them(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    assert id_of(a, model_weights="s3://bucket/model", revision=COMMIT) != id_of(a, revision=COMMIT)


@pytest.mark.parametrize("damage", ["gone", "damaged", "closed"])
def test_files_that_cannot_be_read_are_told_and_end_nothing(tmp_path: Path, damage: str) -> None:
    a = write(tmp_path / "a")
    file = a / "model.safetensors"
    if damage == "gone":
        file.unlink()
    elif damage == "damaged":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
        file.symlink_to("model.safetensors")
    weights = loaded_weights(engine_config(a))
    assert "an id for this start only" in weights.source
    assert loaded_weights(engine_config(a, revision=COMMIT)).source.startswith("the hub's commit")


def test_the_configuration_of_a_real_engine_is_read(tmp_path: Path) -> None:
    """vLLM's own objects, not ones that look like them."""
    arguments = pytest.importorskip("vllm.engine.arg_utils")
    from tests.models import tiny_qwen3

    a = tiny_qwen3(tmp_path / "a")
    b = shutil.copytree(a, tmp_path / "b")
    configs = [
        arguments.EngineArgs(model=str(path), enforce_eager=True, **more).create_engine_config()
        for path, more in ((a, {}), (b, {"dtype": "bfloat16"}), (a, {"hf_overrides": {"rope_theta": 5e5}}))
    ]
    first, copied, overridden = (loaded_weights(config) for config in configs)
    assert first.id == copied.id != overridden.id
    assert first.source == f"1 file in {a}"
