from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hsconnector.errors import SettingsError
from hsconnector.reference.model import ReferenceModel
from hsconnector.reference.passes import Claim
from tests.models import NUM_LAYERS, random_token_ids, tiny_gpt_oss, tiny_qwen3
from tests.reference.faults import FAULTS, Fault, Right
from tests.reference.kernels import KERNELS, quantised_cache

TOKENS = random_token_ids(40)
LAYER_IDS = (0, 1, 3, 6)
BUILD = {"qwen3": tiny_qwen3, "gpt-oss": tiny_gpt_oss}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def reference_of(folder: Path, name: str, seed: int = 0) -> ReferenceModel:
    return ReferenceModel(BUILD[name](folder / f"{name}-{seed}", seed=seed), device="cpu")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BUILD)
def test_what_other_kernels_compute_is_right(folder: Path, name: str, dtype: str, kernels: str) -> None:
    reference = reference_of(folder, name)
    for seed in range(4):
        tokens = random_token_ids(12 + 9 * seed, seed=seed)
        states = KERNELS[kernels](Path(reference.name), tokens, LAYER_IDS, DTYPES[dtype])
        judged = Claim(tokens, LAYER_IDS).judge(states, reference)
        assert judged.difference.ok and not judged.diagnosis, judged


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantised_kv_cache_is_told_from_rounding(folder: Path, dtype: str) -> None:
    reference = reference_of(folder, "qwen3")
    states = quantised_cache(Path(reference.name), TOKENS, LAYER_IDS, DTYPES[dtype])
    judged = Claim(TOKENS, LAYER_IDS).judge(states, reference)
    assert not judged.difference.ok and "a quantised KV cache or slightly other weights" in judged.diagnosis, judged


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BUILD)
def test_each_fault_is_found_and_named(folder: Path, name: str, dtype: str, fault: Fault) -> None:
    reference = reference_of(folder, name)
    states = KERNELS["eager"](Path(reference.name), TOKENS, LAYER_IDS, DTYPES[dtype])
    right, spoilt = Right(states, TOKENS, LAYER_IDS, reference, reference_of(folder, name, seed=1)), states.clone()
    if not fault.shows_in(right):
        return
    fault.spoil(right, spoilt)
    judged = Claim(TOKENS, LAYER_IDS).judge(spoilt, reference)
    assert not judged.difference.ok and fault.says in judged.diagnosis, judged


def test_a_last_layer_after_the_norm_is_compared_after_it(folder: Path) -> None:
    reference = reference_of(folder, "qwen3")
    states = KERNELS["eager"](Path(reference.name), TOKENS, LAYER_IDS, torch.bfloat16)
    claim = Claim(TOKENS, LAYER_IDS, last_is_normed=True)
    judged = claim.judge(states, reference)
    assert (
        judged.diagnosis
        == "holds the last layer 6 before the final norm instead of the last layer 6 after the final norm"
    )
    states[:, 3] = reference.in_dtype("bfloat16").normed(states[:, 3])
    assert claim.judge(states, reference).difference.ok


class Counted(ReferenceModel):
    """A model that notes its passes, of which those in `off` go wrong."""

    off: tuple[int, ...] = ()

    def states(self, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
        self.asked = [*getattr(self, "asked", ()), list(layer_ids)]
        states: torch.Tensor = super().states(token_ids, layer_ids).clone()
        return states * 1.5 if len(self.asked) in self.off else states


@pytest.fixture
def model(folder: Path) -> Counted:
    return Counted(reference_of(folder, "qwen3").name, device="cpu")


def test_a_first_pass_that_matches_is_the_only_one(model: Counted) -> None:
    right = ReferenceModel(model.name, device="cpu").states(TOKENS, (3, 1, 6))
    assert Claim(TOKENS, (3, 1, 6)).judge(right, model).difference.ok
    assert model.asked == [[0, 1, 2, 3, 4, 5, 6]]
    assert Claim(TOKENS, (0, 6)).judge(model.states(TOKENS, (0, 6)), model).difference.ok
    assert model.asked[-1] == [0, 1, 5, 6]


def test_the_second_pass_decides(model: Counted) -> None:
    right = ReferenceModel(model.name, device="cpu").states(TOKENS, (0, 3))
    model.off = (1,)
    judged = Claim(TOKENS, (0, 3)).judge(right, model)
    assert judged.difference.ok and "Hugging Face's first pass was off by 0.3 in rows 0 to 39" in judged.diagnosis
    assert model.asked == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]]


def test_what_differs_twice_differs_and_unknown_layers_are_refused(model: Counted) -> None:
    states = model.states(TOKENS, (2, 6))
    judged = Claim(TOKENS, (1, 6)).judge(states, model)
    assert judged.difference.first == (0, 0) and judged.diagnosis == "holds layer 2 instead of layer 1"
    with pytest.raises(SettingsError, match=f"layer 9 is outside the 0 to {NUM_LAYERS}"):
        Claim(TOKENS, (1, 9)).judge(states, model)
