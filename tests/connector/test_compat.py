from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request, RequestStatus

from hsconnector.capture.protocol import FailReason
from hsconnector.connector import compat
from hsconnector.connector.compat import (
    block_major,
    check_start,
    ended,
    external_tokens,
    layer_ids,
    refuse_config,
    scheduled,
    untested,
)
from hsconnector.connector.tracker import Wish
from hsconnector.connector.vllm_specs import groups_from_vllm, spec_from_vllm
from hsconnector.errors import LayoutError, SettingsError, UnsupportedError
from hsconnector.layout.specs import Composite, FullAttention, HiddenState, Other


def config(**changes: Any) -> SimpleNamespace:
    """As much of an engine's configuration as is looked at; dots name what is changed."""
    aux = SimpleNamespace(eagle_aux_hidden_state_layer_ids=[6, 0, 3])
    made = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="extract_hidden_states", draft_model_config=SimpleNamespace(hf_config=aux)
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False, block_size=16, enable_prefix_caching=True),
        model_config=SimpleNamespace(get_hidden_size=lambda: 8),
    )
    for path, value in changes.items():
        *parents, last = path.split("__")
        target: Any = made
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)
    return made


class TestRefusals:
    def test_what_is_fine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0")
        refuse_config(config())

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"speculative_config": None}, "the speculative method is none"),
            ({"speculative_config__method": "eagle3"}, "the speculative method is 'eagle3'"),
            ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
            ({"parallel_config__prefill_context_parallel_size": 4}, "prefill_context_parallel_size is 4"),
            ({"cache_config__kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ],
    )
    def test_what_is_not(self, changes: dict[str, Any], text: str) -> None:
        with pytest.raises(UnsupportedError) as error:
            refuse_config(config(**changes))
        assert text in str(error.value)
        assert "\n" not in str(error.value)

    def test_request_ids_that_may_repeat(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
        with pytest.raises(UnsupportedError, match="VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set"):
            refuse_config(config())

    def test_layers_in_the_order_of_the_slots(self) -> None:
        assert layer_ids(config()) == (0, 3, 6)

    @pytest.mark.parametrize(("ids", "text"), [(None, "names no"), ([], "names no"), ([1, 1], "names a layer twice")])
    def test_layers_that_say_nothing(self, ids: Any, text: str) -> None:
        aux = SimpleNamespace(eagle_aux_hidden_state_layer_ids=ids)
        with pytest.raises(SettingsError, match=text):
            layer_ids(config(speculative_config__draft_model_config__hf_config=aux))


class TestVersions:
    @pytest.mark.parametrize("text", ["0.28.0", "0.30.1", "0.32.0", "0.32.1.dev3+cpu"])
    def test_tested(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setattr(compat, "vllm_version", lambda: text)
        assert untested() is None

    @pytest.mark.parametrize("text", ["0.29.0", "0.31.0", "0.33.0", "1.0.0"])
    def test_untested_is_one_line(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setattr(compat, "vllm_version", lambda: text)
        line = untested()
        assert line is not None
        assert f"vLLM {text} is untested" in line
        assert "0.28, 0.30, 0.32" in line

    @pytest.mark.parametrize("text", ["0.27.9", "0.22.0"])
    def test_too_old(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setattr(compat, "vllm_version", lambda: text)
        with pytest.raises(UnsupportedError, match=f"vLLM {text} is too old"):
            untested()

    @pytest.mark.parametrize("text", ["dev", "", "main+g123"])
    def test_a_build_without_a_number_counts_as_new(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setattr(compat, "vllm_version", lambda: text)
        assert untested() is None


class TestBlockMajor:
    """speculators#1072: `[blocks, L, block, H]` from 0.29 on, `[blocks, block, L, H]` before."""

    def codes(self, version: str, block: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        """A registered cache whose values are `1000 * slot + layer`, as this version lays it out."""
        monkeypatch.setattr(compat, "vllm_version", lambda: version)
        slot = torch.arange(3 * block).view(3, block, 1, 1)
        layer = torch.arange(slots).view(1, 1, slots, 1)
        rows = (1000.0 * slot + layer).expand(3, block, slots, 8)
        return rows if version.startswith("0.28") else rows.permute(0, 2, 1, 3)

    @pytest.mark.parametrize("version", ["0.28.0", "0.29.0", "0.30.0", "0.32.0"])
    @pytest.mark.parametrize(("block", "slots"), [(16, 5), (5, 5), (16, 16), (1, 1), (5, 16)])
    @pytest.mark.parametrize("contiguous", [True, False])
    def test_rows_by_slot_and_layer(
        self, version: str, block: int, slots: int, contiguous: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = self.codes(version, block, slots, monkeypatch)
        view = block_major(cache.contiguous() if contiguous else cache, slots, 8, block)
        assert view.shape == (3, block, slots, 8)
        assert view[2, block - 1, slots - 1, 0] == 1000 * (3 * block - 1) + slots - 1

    def test_kernel_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = self.codes("0.32.0", 16, 5, monkeypatch)
        assert block_major(cache, 5, 8, 64).shape == (3, 16, 5, 8)
        with pytest.raises(LayoutError, match=r"24.*16|16.*24"):
            block_major(cache, 5, 8, 24)

    @pytest.mark.parametrize(("slots", "hidden"), [(4, 8), (5, 9)])
    def test_another_shape(self, slots: int, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = self.codes("0.32.0", 16, 5, monkeypatch)
        with pytest.raises(LayoutError, match=rf"shape \(3, 5, 16, 8\).*L = {slots} and H = {hidden}"):
            block_major(cache, slots, hidden, 16)

    def test_the_other_versions_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = self.codes("0.28.0", 16, 5, monkeypatch)
        monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.0")
        with pytest.raises(LayoutError, match=r"\[num_blocks, L, block, H\]"):
            block_major(cache, 5, 8, 16)

    def test_three_dimensions(self) -> None:
        with pytest.raises(LayoutError, match="3 dimensions"):
            block_major(torch.zeros(1, 2, 3), 2, 3, 1)

    def test_a_quantised_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = self.codes("0.32.0", 16, 5, monkeypatch).to(torch.uint8)
        with pytest.raises(LayoutError, match=r"uint8.*cannot be read exactly"):
            block_major(cache, 5, 8, 16)


FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
HIDDEN = HiddenStateCacheSpec(block_size=8, num_kv_heads=3, head_size=8, dtype=torch.float32)


class TestGroups:
    @pytest.mark.parametrize("first", [True, False])
    def test_the_hidden_group_is_found_by_its_type(self, first: bool) -> None:
        """vllm#45849: the group's index is not 0 for ever."""
        own, other = KVCacheGroupSpec(["cache_only_layers.6"], HIDDEN), KVCacheGroupSpec(["layers.0"], FULL)
        groups = [own, other] if first else [other, own]
        found = check_start(KVCacheConfig(8, [], groups), config()).hidden
        assert (found.index, found.block_size) == (0 if first else 1, 8)

    def test_without_groups(self) -> None:
        found = check_start(None, config()).hidden
        assert (found.index, found.block_size) == (0, 16)

    def test_a_marker_that_was_lost(self) -> None:
        """vllm-ascend#9763: several groups, none of them hidden: never group 0 by default."""
        groups = [KVCacheGroupSpec(["layers.0"], FULL), KVCacheGroupSpec(["layers.1"], FULL)]
        with pytest.raises(LayoutError):
            check_start(KVCacheConfig(8, [], groups), config())

    def test_specs_are_told_apart(self) -> None:
        assert isinstance(spec_from_vllm(FULL), FullAttention)
        assert isinstance(spec_from_vllm(HIDDEN), HiddenState)
        composite = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": HIDDEN})
        translated = spec_from_vllm(composite)
        assert isinstance(translated, Composite)
        assert [type(spec) for _, spec in translated.layers] == [FullAttention, HiddenState]

    def test_a_spec_nobody_knows(self) -> None:
        strange = SimpleNamespace(block_size=4, page_size_bytes=64)
        (group,) = groups_from_vllm([SimpleNamespace(layer_names=["x"], kv_cache_spec=strange)])
        assert isinstance(group.spec, Other)


def new_request(name: str, prompt: list[int] | None, **changes: Any) -> NewRequestData:
    made = NewRequestData(
        req_id=name,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=SamplingParams(),
        pooling_params=None,
        block_ids=([1, 2], [7]),
        num_computed_tokens=4,
        lora_request=None,
    )
    for field, value in changes.items():
        setattr(made, field, value)
    return made


def wish_all(params: Any, request_id: str) -> Wish:
    return Wish(sample_id="s")


class TestScheduled:
    def output(self, *new: NewRequestData) -> SchedulerOutput:
        made = SchedulerOutput.make_empty()
        made.scheduled_new_reqs = list(new)
        made.num_scheduled_tokens = {"a": 3}
        return made

    def test_arrivals(self) -> None:
        adapter = SimpleNamespace(lora_name="adapter")
        images = [SimpleNamespace(mm_hash="m", identifier="i"), SimpleNamespace(mm_hash=None, identifier="j")]
        seen: list[Any] = []

        def wish(params: Any, request_id: str) -> Wish:
            seen.append((params, request_id))
            return Wish()

        params = SamplingParams(extra_args={"kv_transfer_params": {"hidden_states": {}}})
        request = new_request("a", [1, 2, 3], lora_request=adapter, mm_features=images, sampling_params=params)
        (arrival,) = scheduled(self.output(request), 1, wish).arrivals
        assert (arrival.request_id, arrival.blocks, arrival.num_computed, arrival.num_prompt) == ("a", [7], 4, 3)
        assert (arrival.lora, arrival.mm_hashes) == ("adapter", ("m", "j"))
        assert seen == []
        assert arrival.wish() == Wish()
        assert seen == [({"hidden_states": {}}, "a")]

    def test_one_that_cannot_be_read_is_its_own_problem(self) -> None:
        broken, sound = new_request("a", [1, 2], lora_request=object()), new_request("b", [1, 2])
        first, second = scheduled(self.output(broken, sound), 0, wish_all).arrivals
        assert (second.request_id, second.wish().problem) == ("b", None)
        problem = first.wish().problem
        assert first.request_id == "a" and problem is not None
        assert problem[0] is FailReason.INTERNAL_ERROR and "lora_name" in problem[1]

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"pooling_params": object(), "sampling_params": None}, "pooling"),
            ({"prompt_embeds": object()}, "prompt embeddings"),
            ({"prompt_token_ids": None}, "prompt embeddings"),
        ],
    )
    def test_requests_without_hidden_states(self, changes: dict[str, Any], text: str) -> None:
        (arrival,) = scheduled(self.output(new_request("a", [1], **changes)), 0, wish_all).arrivals
        wish = arrival.wish()
        assert wish.problem is not None
        assert wish.problem[0] is FailReason.UNSUPPORTED_REQUEST
        assert text in wish.problem[1]
        assert wish.sample_id == "s", "whoever waits for the sample learns why it will not come"

    @pytest.mark.parametrize("extra", [None, {}, {"kv_transfer_params": None}, {"kv_transfer_params": "text"}])
    def test_no_parameters(self, extra: Any) -> None:
        request = new_request("a", [1], sampling_params=SamplingParams(extra_args=extra))
        assert compat.transfer_params(request) is None

    def test_progress(self) -> None:
        output = self.output()
        output.preempted_req_ids = {"p"}
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=["a", "b", "c"],
            resumed_req_ids={"b"},
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[([3], [9]), ([1, 2], [4, 5]), None],
            num_computed_tokens=[4, 0, 7],
            num_output_tokens=[0, 0, 1],
        )
        made = scheduled(output, 1, wish_all)
        assert made.preempted == ("p",)
        assert [(p.request_id, tuple(p.new_blocks), p.num_computed, p.resumed) for p in made.progress] == [
            ("a", (9,), 4, False),
            ("b", (4, 5), 0, True),
            ("c", (), 7, False),
        ]
        assert made.num_scheduled == {"a": 3}


class TestEnded:
    def request(self, status: RequestStatus) -> Request:
        request = Request("a", [1, 2, 3], SamplingParams(max_tokens=4), None)
        request.append_output_token_ids([8, 9])
        request.num_computed_tokens = 4
        request.status = status
        return request

    @pytest.mark.parametrize(
        ("status", "reason"),
        [
            (RequestStatus.FINISHED_STOPPED, "stop"),
            (RequestStatus.FINISHED_LENGTH_CAPPED, "length"),
            (RequestStatus.FINISHED_ABORTED, "abort"),
            (RequestStatus.RUNNING, "unknown"),
        ],
    )
    def test_reasons(self, status: RequestStatus, reason: str) -> None:
        assert ended(self.request(status)).reason == reason

    def test_what_it_holds(self) -> None:
        made = ended(self.request(RequestStatus.FINISHED_STOPPED))
        assert (made.request_id, made.num_prompt, made.num_computed, made.problem) == ("a", 3, 4, None)
        assert list(made.token_ids) == [1, 2, 3, 8, 9]

    def test_a_session(self) -> None:
        request = self.request(RequestStatus.FINISHED_ABORTED)
        request.streaming_queue = []
        made = ended(request)
        assert made.problem is not None
        assert made.problem[0] is FailReason.UNSUPPORTED_REQUEST

    def test_tokens_from_outside(self) -> None:
        """A MultiConnector tells the number only to the one that loads; the request's statistics have it too."""
        request = self.request(RequestStatus.RUNNING)
        assert external_tokens(request, 0) == 0
        assert external_tokens(request, 16) == 16
        assert request.prefill_stats is not None
        request.prefill_stats.set(num_prompt_tokens=3, num_local_cached_tokens=0, num_external_cached_tokens=2)
        assert external_tokens(request, 0) == 2
        request.take_prefill_stats()
        assert external_tokens(request, 0) == 0


def test_the_version_that_runs_us() -> None:
    assert untested() is None
