"""Parameters looked at in memory: every way that a worker has to change them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hsconnector.connector.watch import Watch, running_model


class Packed(torch.nn.Module):
    """As vLLM's linear layers on a CPU: the weight lives in a closure, the parameter is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0))
        self.pack(torch.ones(4, 4))

    def pack(self, weight: torch.Tensor) -> None:
        self.cpu_linear = lambda x: x @ weight


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(64, 64, dtype=dtype) for _ in range(4)]
    return torch.nn.Sequential(torch.nn.Embedding(1000, 64, dtype=dtype), *layers, torch.nn.LayerNorm(64, dtype=dtype))


def parameter(module: torch.nn.Module) -> torch.nn.Parameter:
    return list(module.parameters())[3]


def copied(module: torch.nn.Module) -> None:
    with torch.no_grad():
        parameter(module).copy_(parameter(module) * 1.5)


def copied_behind_the_counter(module: torch.nn.Module) -> None:
    """vLLM's loaders and `reload_weights` write like this; PyTorch counts no change."""
    parameter(module).data.copy_(parameter(module).data * 1.5)


def copied_in_inference_mode(module: torch.nn.Module) -> None:
    with torch.inference_mode():
        parameter(module).data.mul_(1.5)


def rebound(module: torch.nn.Module) -> None:
    parameter(module).data = parameter(module).data * 1.5


def replaced(module: torch.nn.Module) -> None:
    layer = module.get_submodule("2")
    layer.register_parameter("weight", torch.nn.Parameter(torch.zeros(64, 64)))


def trained(module: torch.nn.Module) -> None:
    """A step so small that most elements stay as they are."""
    generator = torch.Generator().manual_seed(1)
    for tensor in module.parameters():
        tensor.data.mul_((torch.rand(tensor.shape, generator=generator) < 0.02).to(tensor.dtype) * 0.1 + 1)


WAYS = [copied, copied_behind_the_counter, copied_in_inference_mode, rebound, replaced, trained]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_way_to_change_weights_is_seen(way: Callable[[torch.nn.Module], None], dtype: torch.dtype) -> None:
    module = model(dtype)
    watch = Watch(module)
    before = watch.fingerprint()
    assert not watch.glance().changed
    way(module)
    glance = watch.glance()
    assert glance.done() and glance.changed
    assert watch.fingerprint() != before
    assert not watch.glance().changed


def test_a_forward_changes_nothing() -> None:
    module = model()
    watch = Watch(module)
    with torch.inference_mode():
        module(torch.arange(10))
    assert not watch.glance().changed


def test_weights_that_were_only_copied_are_the_same() -> None:
    """Moved, or written with the values that they had: worth a second look, which finds nothing."""
    module = model()
    watch = Watch(module)
    before = watch.fingerprint()
    parameter(module).data = parameter(module).data.clone()
    assert watch.glance().changed
    assert watch.fingerprint() == before
    assert not watch.glance().changed


def test_weights_that_come_back_have_their_fingerprint_back() -> None:
    module = model()
    watch = Watch(module)
    before = watch.fingerprint()
    kept = parameter(module).data.clone()
    copied_behind_the_counter(module)
    assert watch.fingerprint() != before
    parameter(module).data.copy_(kept)
    assert watch.fingerprint() == before


def test_replicas_agree() -> None:
    assert Watch(model()).fingerprint() == Watch(model()).fingerprint() != Watch(model(seed=1)).fingerprint()


def test_a_patch_between_the_samples_is_missed_by_a_glance_and_not_by_a_fingerprint() -> None:
    module = model()
    watch = Watch(module)
    before = watch.fingerprint()
    next(module.parameters()).data[17, 3] += 1
    assert not watch.glance().changed
    assert watch.fingerprint() != before


@pytest.mark.parametrize("swap", [slice(0, 64), slice(40, 41)])
def test_a_fingerprint_sees_values_that_change_places(swap: slice) -> None:
    module = model()
    watch = Watch(module)
    before = watch.fingerprint()
    weight = parameter(module).data
    weight[swap] = weight[swap].flip(1).clone()
    assert watch.fingerprint() != before
    weight[swap] = weight[swap].flip(1).clone()
    assert watch.fingerprint() == before
    weight.neg_()
    assert watch.fingerprint() != before


def test_a_fingerprint_sees_two_neighbours_that_change_places_far_from_any_sample() -> None:
    module = torch.nn.Module()
    module.big = torch.nn.Parameter(torch.zeros(100_000))
    module.big.data[5_000] = 1
    watch = Watch(module)
    before = watch.fingerprint()
    module.big.data[5_000:5_002] = torch.tensor([0.0, 1.0])
    assert not watch.glance().changed
    assert watch.fingerprint() != before


def test_a_part_of_a_larger_memory_is_looked_at_where_it_lies() -> None:
    memory = torch.zeros(1000)
    module = torch.nn.Module()
    module.part = torch.nn.Parameter(memory[500:], requires_grad=False)
    watch = Watch(module)
    before = watch.fingerprint()
    memory[:500] = 1
    assert watch.fingerprint() == before
    memory[999] = 1
    assert watch.fingerprint() != before


def test_a_fingerprint_takes_more_than_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsconnector.connector.watch.PIECE", 1000)
    module = model()
    watch = Watch(module)
    before = watch.fingerprint()
    weight = next(module.parameters()).data.view(-1)
    weight[:4000] = weight[:4000].roll(2000)
    assert watch.fingerprint() != before


def test_a_fingerprint_sees_the_bytes_behind_the_last_whole_word() -> None:
    module = torch.nn.Module()
    module.odd = torch.nn.Parameter(torch.zeros(1003, dtype=torch.uint8), requires_grad=False)
    watch = Watch(module)
    before = watch.fingerprint()
    module.odd.data[1002] = 1
    assert watch.fingerprint() != before


def test_a_patch_that_pytorch_counts_is_seen_wherever_it_is() -> None:
    module = model()
    watch = Watch(module)
    with torch.no_grad():
        next(module.parameters())[17, 3] += 1
    assert watch.glance().changed


def test_transposed_shared_and_odd_parameters_are_read() -> None:
    module = torch.nn.Module()
    weight = torch.arange(35, dtype=torch.uint8).view(5, 7)
    module.a = torch.nn.Parameter(weight.t(), requires_grad=False)
    module.b = torch.nn.Parameter(weight.t(), requires_grad=False)
    module.c = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8)[1:], requires_grad=False)
    module.d = torch.nn.Parameter(torch.empty(0))
    module.e = torch.nn.Parameter(torch.empty(4, device="meta"))
    module.register_parameter("f", None)
    watch = Watch(module)
    before = watch.fingerprint()
    weight[4, 6] = 0
    assert watch.glance().changed and watch.fingerprint() != before


def test_a_model_without_parameters_never_changes() -> None:
    watch = Watch(torch.nn.ReLU())
    assert not watch.glance().changed
    assert watch.fingerprint() == watch.fingerprint()


def test_experts_that_the_engine_moves_itself_can_be_left_out() -> None:
    module = model()
    watch = Watch(module, skip="2.weight")
    before = watch.fingerprint()
    parameter(module).data.zero_()
    assert not watch.glance().changed and watch.fingerprint() == before


def test_a_new_packed_copy_counts_as_new_weights() -> None:
    """What is in it cannot be read, so it is taken for others even where it holds the same."""
    module = Packed()
    watch = Watch(module)
    before = watch.fingerprint()
    assert not watch.glance().changed
    module.pack(torch.ones(4, 4))
    assert watch.glance().changed
    after = watch.fingerprint()
    assert after != before and not watch.glance().changed and watch.fingerprint() == after


def test_nothing_replaced_is_kept_alive() -> None:
    module = Packed()
    watch = Watch(module)
    old = watch._copies[0]
    module.pack(torch.ones(4, 4))
    assert old() is None


class Runner:
    def __init__(self, found: object) -> None:
        self.found = found

    def get_model(self) -> object:
        return self.found

    def register(self) -> object:
        return running_model()


def test_the_model_is_found_at_the_runner_that_calls() -> None:
    module = model()
    assert Runner(module).register() is module


def test_where_no_runner_calls_there_is_no_model() -> None:
    assert running_model() is None
    assert Runner("no module").register() is None
