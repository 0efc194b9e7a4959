"""What is read from a config against vLLM's own calculators and registry."""

from __future__ import annotations

import ast
import re

import pytest

from hsconnector.layout.models import StateLayer, read_model
from hsconnector.layout.serving import pipeline_stages
from hsconnector.vllm_facts import WITH_HIDDEN_STATES, WITHOUT_HIDDEN_STATES
from tests.layout import configs
from tests.layout.installed_vllm import MambaStateShapeCalculator, get_pp_indices, models_folder


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("speculative", [0, 1])
def test_mamba_2_states(tp: int, speculative: int) -> None:
    layer = read_model("m", configs.MAMBA_HYBRID).of(StateLayer)[0]
    theirs = MambaStateShapeCalculator.mamba2_state_shape(
        intermediate_size=128 * 64,
        tp_world_size=tp,
        n_groups=8,
        num_heads=128,
        head_dim=64,
        state_size=128,
        conv_kernel=4,
        num_spec=speculative,
    )
    assert layer.shapes(tp, speculative) == theirs


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("speculative", [0, 1])
def test_gated_delta_net_states(tp: int, speculative: int) -> None:
    layer = read_model("m", configs.LINEAR_HYBRID).of(StateLayer)[0]
    theirs = MambaStateShapeCalculator.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4, speculative)
    assert layer.shapes(tp, speculative) == theirs


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("layers", [24, 36, 52, 61])
def test_pipeline_stages(layers: int, pp: int) -> None:
    theirs = [range(*get_pp_indices(layers, rank, pp)) for rank in range(pp)]
    assert pipeline_stages(layers, pp) == theirs


def test_architectures_are_those_of_the_registry() -> None:
    registry = _tables()
    bases = _bases()
    known = WITH_HIDDEN_STATES | WITHOUT_HIDDEN_STATES
    assert not WITH_HIDDEN_STATES & WITHOUT_HIDDEN_STATES
    assert {name for name in registry if not name.startswith("Transformers")} == known
    hands_out = {name for name, (_, cls) in registry.items() if name in known and _inherits(cls, bases)}
    assert hands_out == WITH_HIDDEN_STATES


def _tables() -> dict[str, tuple[str, str]]:
    wanted = {"_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"}
    found: dict[str, tuple[str, str]] = {}
    for node in ast.parse((models_folder / "registry.py").read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id in wanted for target in targets):
            found.update(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return found


_CLASS = re.compile(r"^class (\w+)(?:\[[^\]]*\])?(?:\((.*?)\))?:", re.MULTILINE | re.DOTALL)


def _bases() -> dict[str, set[str]]:
    """Classes by name with what they inherit; read as text, for parsing two thousand of them takes seconds."""
    found: dict[str, set[str]] = {}
    for folder in (models_folder, models_folder.parents[1] / "models"):
        for file in folder.rglob("*.py"):
            for name, bases in _CLASS.findall(file.read_text()):
                plain = re.sub(r"\[[^\]]*\]+|#.*|\w+=\w+", "", bases)
                found.setdefault(name, set()).update(base.split(".")[-1] for base in re.findall(r"[\w.]+", plain))
    return found


def _inherits(cls: str, bases: dict[str, set[str]], seen: tuple[str, ...] = ()) -> bool:
    if cls == "SupportsEagle3":
        return True
    return any(_inherits(base, bases, (*seen, cls)) for base in bases.get(cls, ()) if base not in seen)
