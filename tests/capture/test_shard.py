from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from hsconnector.capture.header import open_header
from hsconnector.capture.shard import Framework, open_shard, parse_shard
from hsconnector.errors import HSConnectorError, SettingsError, ShardError, StoreError
from tests.shards import shard_bytes, write_shard

LAYERS = (0, 2, 5)
TOKENS = [11, 12, 13, 14, 15, 16, 17]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def states(dtype: torch.dtype = torch.float32, rows: int = 7) -> torch.Tensor:
    """`[rows, 3, 8]`, every element its own value."""
    return (torch.arange(rows * 3 * 8).reshape(rows, 3, 8) / 8).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_and_its_bytes_give_what_was_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    path = write_shard(tmp_path, states(dtype), TOKENS, LAYERS)
    for capture in (open_shard(path), open_shard(path, verify=True), parse_shard(path.read_bytes())):
        assert capture.hidden_states.dtype is dtype and torch.equal(capture.hidden_states, states(dtype))
        assert capture.token_ids.dtype is torch.int64 and capture.token_ids.tolist() == TOKENS
        assert capture.layer_ids == LAYERS and capture.first_row == 0
        assert capture.capture_id == path.stem == capture.metadata["capture_id"]
        assert torch.equal(capture.layer(2), states(dtype)[:, 1])
    assert open_shard(path).path == path


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_views_are_slices_of_the_whole(tmp_path: Path, verify: bool, framework: Framework) -> None:
    path = write_shard(tmp_path, states(), TOKENS, LAYERS)
    capture = open_shard(path, layers=[5, 0], rows=(2, 6), verify=verify, framework=framework)
    assert np.array_equal(np.asarray(capture.hidden_states), states()[2:6, [0, 2]].numpy())
    assert np.asarray(capture.token_ids).tolist() == TOKENS[2:6]
    assert (capture.layer_ids, capture.first_row) == ((0, 5), 2)
    assert open_shard(path, rows=slice(-2, None)).first_row == 5


@pytest.mark.parametrize("rows", [(0, 8), (3, 3), (5, 2), slice(0, 6, 2), slice(9, None)])
def test_rows_outside_the_capture_are_refused(tmp_path: Path, rows: slice | tuple[int, int]) -> None:
    path = write_shard(tmp_path, states(), TOKENS, LAYERS)
    with pytest.raises(SettingsError, match=r"rows .* within the 7 rows"):
        open_shard(path, rows=rows)


@pytest.mark.parametrize("layers", [[1], [0, 6], []])
def test_layers_that_were_not_captured_are_refused(tmp_path: Path, layers: list[int]) -> None:
    path = write_shard(tmp_path, states(), TOKENS, LAYERS)
    with pytest.raises(SettingsError, match=r"not among the captured \[0, 2, 5\]"):
        open_shard(path, layers=layers)
    with pytest.raises(SettingsError, match="layer 3 is not among"):
        open_shard(path).layer(3)


def test_numpy_has_no_bfloat16_and_is_told_what_to_do(tmp_path: Path) -> None:
    path = write_shard(tmp_path, states(torch.bfloat16), TOKENS, LAYERS)
    with pytest.raises(SettingsError, match='dtype="float32"'):
        open_shard(path, framework="numpy")
    widened = open_shard(path, framework="numpy", dtype="float32").hidden_states
    assert widened.dtype == np.float32 and np.array_equal(widened, states(torch.bfloat16).float().numpy())
    half = write_shard(tmp_path, states(torch.float16), TOKENS, LAYERS)
    assert open_shard(half, framework="numpy").hidden_states.dtype == np.float16
    assert open_shard(half, framework="numpy", dtype="float32").hidden_states.dtype == np.float32
    assert open_shard(half, dtype="float32").hidden_states.dtype is torch.float32


WHOLE = shard_bytes(states(), TOKENS, LAYERS)
DATA_AT = 8 + int.from_bytes(WHOLE[:8], "little")
HOSTILE = {
    "empty": b"",
    "four bytes": WHOLE[:4],
    "header only": WHOLE[:DATA_AT],
    "half a header": WHOLE[: DATA_AT // 2],
    "last byte cut": WHOLE[:-1],
    "one byte more": WHOLE + b"\0",
    "huge header": struct.pack("<Q", 100_000_001) + WHOLE[8:],
    "header beyond any memory": struct.pack("<Q", 2**63) + WHOLE[8:],
    "garbage": b"\x10\0\0\0\0\0\0\0" + b"not json at all!" + WHOLE[DATA_AT:],
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_files_that_are_no_whole_shards(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(body)
    for read in (lambda: open_shard(path), lambda: open_header(path), lambda: parse_shard(body)):
        with pytest.raises(ShardError):
            read()


def test_zeros_behind_a_true_header_are_found_by_the_checksum(tmp_path: Path) -> None:
    path = tmp_path / "zeros.safetensors"
    path.write_bytes(WHOLE[:DATA_AT] + bytes(len(WHOLE) - DATA_AT))
    assert not open_shard(path).hidden_states.any()
    for read in (lambda: open_shard(path, verify=True), lambda: parse_shard(path.read_bytes())):
        with pytest.raises(ShardError, match="is damaged: its data hash to"):
            read()


def test_a_file_of_another_program_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no shard of hsconnector"):
        parse_shard(save({"hidden_states": states(), "token_ids": torch.tensor(TOKENS)}))
    with pytest.raises(ShardError, match=r"3 slots for the layer ids \[0, 2\]"):
        parse_shard(shard_bytes(states(), TOKENS, [0, 2]))
    with pytest.raises(ShardError, match="do not agree"):
        parse_shard(shard_bytes(states(), TOKENS[:-1], LAYERS))
    with pytest.raises(ShardError, match="F64"):
        parse_shard(shard_bytes(states(torch.float64), TOKENS, LAYERS))
    with pytest.raises(ShardError, match="no data_hash"):
        parse_shard(shard_bytes(states(), TOKENS, LAYERS, data_hash=""))
    with pytest.raises(StoreError, match="No such file"):
        open_shard(tmp_path / "nowhere.safetensors")


def with_offsets(states_at: tuple[int, int], tokens_at: tuple[int, int], extra: str = "") -> bytes:
    """A shard whose header names these offsets; `hidden_states` `[1, 1, 2]` takes 8 bytes, `token_ids` `[1]` 8 more."""
    header = (
        f'{{"__metadata__":{{"layer_ids":"[0]"}},{extra}'
        f'"hidden_states":{{"dtype":"F32","shape":[1,1,2],"data_offsets":{list(states_at)}}},'
        f'"token_ids":{{"dtype":"I64","shape":[1],"data_offsets":{list(tokens_at)}}}}}'
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


@pytest.mark.parametrize(
    ("states_at", "tokens_at"),
    [
        ((0, 8), (0, 16)),
        ((0, 8), (4, 16)),
        ((0, 8), (12, 16)),
        ((8, 8), (8, 16)),
        ((-8, 0), (0, 16)),
        ((8, 0), (8, 16)),
    ],
)
def test_tensors_that_overlap_or_leave_gaps_are_refused(states_at: tuple[int, int], tokens_at: tuple[int, int]) -> None:
    assert parse_shard(with_offsets((0, 8), (8, 16)), verify=False).token_ids.tolist() == [0]
    assert parse_shard(with_offsets((8, 16), (0, 8)), verify=False).token_ids.tolist() == [0]
    with pytest.raises(ShardError, match="a tensor of 8 bytes lies at"):
        parse_shard(with_offsets(states_at, tokens_at), verify=False)


def test_a_third_tensor_is_refused() -> None:
    extra = '"more":{"dtype":"I64","shape":[1],"data_offsets":[16,24]},'
    with pytest.raises(ShardError, match="`more`"):
        parse_shard(with_offsets((0, 8), (8, 16), extra), verify=False)


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_any_shape_reads_as_safetensors_reads_it(
    rows: int, slots: int, hidden: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    body = shard_bytes(torch.randn(rows, slots, hidden).to(dtype), range(rows), range(slots))
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    expected, capture = load(body), parse_shard(body, rows=(first, last))
    assert torch.equal(capture.hidden_states, expected["hidden_states"][first:last])
    assert torch.equal(capture.token_ids, expected["token_ids"][first:last])


@settings(deadline=None)
@given(st.data())
def test_a_changed_byte_never_changes_a_value_unnoticed(data: st.DataObject) -> None:
    body = bytearray(WHOLE)
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] ^= data.draw(st.integers(1, 255))
    try:
        capture = parse_shard(body)
    except HSConnectorError:
        return
    assert position < DATA_AT
    assert len(capture.token_ids) == 7 and capture.hidden_states.shape[0] == 7


def test_views_read_only_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shard(tmp_path, states(rows=7), TOKENS, LAYERS)
    read: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        read.append(preadv(fd, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    open_shard(path, rows=(1, 3))
    assert sorted(read) == [2 * 8, 2 * 3 * 8 * 4]
