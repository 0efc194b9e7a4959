from __future__ import annotations

from dataclasses import replace

import pytest

from hsconnector.layout.merging import Unmergeable, composite_of, is_uniform_type, merge
from hsconnector.layout.specs import FullAttention, HiddenState, Mamba, SlidingWindowMLA, Spec

FULL = FullAttention(block_size=16, num_kv_heads=1, head_size=64, dtype="bfloat16")
MAMBA = Mamba(block_size=16, shapes=((8,),), dtypes=("bfloat16",))
HIDDEN = HiddenState(block_size=16, num_kv_heads=3, head_size=64, dtype="bfloat16")
LATENT_WINDOW = SlidingWindowMLA(block_size=16, num_kv_heads=1, head_size=64, dtype="uint8", sliding_window=128)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (MAMBA, replace(MAMBA, tp_replicated=True)),
        (FULL, replace(FULL, dcp_sharded=False)),
        (HIDDEN, replace(FULL, dcp_sharded=False)),
    ],
    ids=["tp_replicated", "dcp_sharded", "dcp_sharded beside hidden states"],
)
def test_layers_that_ranks_share_differently_need_tables_of_their_own(one: Spec, other: Spec) -> None:
    assert is_uniform_type([one, one]) and is_uniform_type([other, other])
    assert not is_uniform_type([one, other]) and not is_uniform_type([other, one])
    assert composite_of({"a": one, "b": other}) is None
    with pytest.raises(Unmergeable):
        merge([other, one])


def test_latent_windows_merge_only_where_they_are_sharded_alike() -> None:
    other = replace(LATENT_WINDOW, dcp_sharded=False)
    assert merge([LATENT_WINDOW, LATENT_WINDOW]) == LATENT_WINDOW
    with pytest.raises(Unmergeable, match="one dtype, window and policy"):
        merge([LATENT_WINDOW, other])
