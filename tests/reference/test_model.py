from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hsconnector.errors import SettingsError, UnsupportedError
from hsconnector.reference.model import ReferenceModel
from tests.hugging_face import final_norm, reference_states
from tests.models import NUM_LAYERS, random_token_ids, tiny_gpt_oss, tiny_qwen3


@pytest.mark.parametrize("build", [tiny_qwen3, tiny_gpt_oss])
def test_every_layer_and_the_norm_are_hugging_faces(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    path, token_ids = build(tmp_path), random_token_ids(90)
    every = range(NUM_LAYERS + 1)
    expected = reference_states(path, token_ids, every)
    model = ReferenceModel(path)
    states = model.states(token_ids, every)
    assert model.num_layers == NUM_LAYERS and states.shape == expected.shape
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.normed(states[:, -1]), final_norm(path, expected[:, -1]), rtol=0, atol=1e-5)
    apart = (states[:, :, None] - states[:, None]).abs().amax(dim=(0, 3))
    assert float((apart + torch.eye(NUM_LAYERS + 1)).min()) > 1e-2
    assert torch.equal(model.states(token_ids, [6, 0]), states[:, [6, 0]])
    assert model.is_routed is (build is tiny_gpt_oss)
    rounded = model.in_dtype("bfloat16")
    assert rounded is model.in_dtype("bfloat16") and rounded.states(token_ids, [1]).dtype == torch.bfloat16
    assert model.in_dtype("float32") is model


def test_layers_and_checkpoints_that_are_not_there_are_named(tmp_path: Path) -> None:
    model = ReferenceModel(tiny_qwen3(tmp_path / "model"))
    with pytest.raises(SettingsError, match="layer 7 is outside the 0 to 6 of"):
        model.states([1, 2], [0, 7])
    with pytest.raises(SettingsError, match="cannot load"):
        ReferenceModel(tmp_path)


def test_a_decoder_without_a_final_norm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsconnector.reference.model.NORM_NAMES", ("no_such_norm",))
    with pytest.raises(UnsupportedError, match="Qwen3Model, which has none of no_such_norm"):
        ReferenceModel(tiny_qwen3(tmp_path))
