from __future__ import annotations

import pytest

from hsconnector.errors import LayoutError
from hsconnector.layout.granularity import BlockSizes, check_granularity, resolve_block_sizes
from hsconnector.layout.specs import MLA, ChunkedLocal, FullAttention, Group, HiddenState, Mamba, SlidingWindow, Spec

FULL = FullAttention(block_size=544, num_kv_heads=1, head_size=64, dtype="bfloat16")
MAMBA = Mamba(block_size=544, shapes=((8,),), dtypes=("bfloat16",), cache_mode="align")
WINDOW = SlidingWindow(block_size=544, num_kv_heads=1, head_size=64, dtype="bfloat16", sliding_window=128)
CHUNKED = ChunkedLocal(block_size=544, num_kv_heads=1, head_size=64, dtype="bfloat16", attention_chunk_size=256)
HIDDEN = HiddenState(block_size=136, num_kv_heads=3, head_size=1024, dtype="bfloat16")


def groups(*specs: Spec) -> list[Group]:
    return [Group((f"layer.{index}",), spec) for index, spec in enumerate(specs)]


class TestHits:
    def test_a_single_group_has_one_size_for_everything(self) -> None:
        for caching in (True, False):
            assert resolve_block_sizes(groups(FULL), prefix_caching=caching) == BlockSizes(544, 544, 544)

    def test_an_aligned_state_lets_hits_land_on_hashes(self) -> None:
        assert resolve_block_sizes(groups(MAMBA, HIDDEN), prefix_caching=True) == BlockSizes(544, 136, 136)

    def test_without_a_state_or_without_caching_they_land_on_the_schedulers_blocks(self) -> None:
        assert resolve_block_sizes(groups(FULL, HIDDEN), prefix_caching=True) == BlockSizes(544, 136, 544)
        assert resolve_block_sizes(groups(MAMBA, HIDDEN), prefix_caching=False) == BlockSizes(544, 136, 544)

    @pytest.mark.parametrize("local", [WINDOW, CHUNKED])
    def test_local_attention_with_larger_blocks_looks_up_whole_ones(self, local: Spec) -> None:
        assert resolve_block_sizes(groups(MAMBA, local, HIDDEN), prefix_caching=True) == BlockSizes(544, 136, 544)
        small = local.with_block_size(136)
        assert resolve_block_sizes(groups(MAMBA, small, HIDDEN), prefix_caching=True) == BlockSizes(544, 136, 136)


class TestCompression:
    """A cache that keeps one row for several tokens must be cut where the hits are (`resolve_kv_cache_block_sizes`)."""

    def compressed(self, tokens: int) -> Spec:
        return MLA(block_size=544, num_kv_heads=1, head_size=64, dtype="bfloat16", tokens_per_state=tokens)

    def test_what_divides_the_schedulers_block_is_fine(self) -> None:
        assert resolve_block_sizes(groups(self.compressed(272), HIDDEN), prefix_caching=True).hit == 544

    def test_what_does_not_is_refused_with_the_numbers(self) -> None:
        with pytest.raises(LayoutError, match=r"hashes of 136 tokens .* one row for 272 tokens"):
            resolve_block_sizes(groups(self.compressed(272), MAMBA, HIDDEN), prefix_caching=True)
        with pytest.raises(LayoutError, match=r"hashes of 136 tokens .* one row for 5 tokens"):
            resolve_block_sizes(groups(self.compressed(5), HIDDEN), prefix_caching=True)


class TestRefusal:
    """vllm#51108."""

    def test_one_model_group_is_enough_to_refuse(self) -> None:
        bad = groups(FULL, HIDDEN.with_block_size(181))
        with pytest.raises(LayoutError, match=r"blocks of 544, 181 tokens; the hidden group's 181 .* 98,464"):
            check_granularity(bad, resolve_block_sizes(bad, prefix_caching=True), prefix_caching=True)
        check_granularity(bad, resolve_block_sizes(bad, prefix_caching=False), prefix_caching=False)

    def test_one_model_group_that_fits_starts(self) -> None:
        for size in (136, 544, 1088):
            good = groups(FULL, HIDDEN.with_block_size(size))
            check_granularity(good, resolve_block_sizes(good, prefix_caching=True), prefix_caching=True)

    def test_a_hash_that_divides_no_block_of_one_model_group_is_refused(self) -> None:
        with pytest.raises(LayoutError, match="hashes cover 100, which does not divide 544"):
            check_granularity(groups(FULL, HIDDEN), BlockSizes(544, 100, 544), prefix_caching=True)

    def test_a_single_group_is_never_refused(self) -> None:
        check_granularity(groups(HIDDEN), BlockSizes(136, 100, 136), prefix_caching=True)
