"""The header of a shard: its bytes, and which files are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsconnector.capture.header import (
    build_header,
    check_written_by_sidecar,
    header_room,
    open_header,
    parse_header,
    read_header,
)
from hsconnector.errors import ShardError
from tests.examples import examples

METADATA = {"format": "hsconnector/1", "layer_ids": "[2,5]", "sample_id": 'ä"\\\n'}
GOLDEN = (
    b"\x08\x01\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"format":"hsconnector/1","layer_ids":"[2,5]","sample_id":"\xc3\xa4\\"\\\\\\n"},'
    b'"hidden_states":{"dtype":"BF16","shape":[3,2,4],"data_offsets":[0,48]},'
    b'"token_ids":{"dtype":"I64","shape":[3],"data_offsets":[48,72]}}' + b" " * 44
)
"""A header of 264 bytes, 44 of them padding, behind its length: as shards have held it from the first one on."""


def parsed(fields: object, data_bytes: int = 64) -> None:
    text = json.dumps(fields).encode()
    body = len(text).to_bytes(8, "little") + text
    check_written_by_sidecar(parse_header(memoryview(body), len(body) + data_bytes, "x"))


def test_golden_bytes() -> None:
    assert build_header(METADATA, "bfloat16", (3, 2, 4), len(GOLDEN)) == GOLDEN
    tight = build_header(METADATA, "bfloat16", (3, 2, 4))
    assert tight == b"\xe0\x00\x00\x00\x00\x00\x00\x00" + GOLDEN[8:-40]


def test_what_the_golden_bytes_say(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(GOLDEN + bytes(72))
    header = open_header(path)
    assert (header.metadata, header.layer_ids, header.dtype, header.shape) == (METADATA, (2, 5), "bfloat16", (3, 2, 4))
    assert (header.row_bytes, header.data_bytes, header.file_bytes) == (16, 72, len(GOLDEN) + 72)
    assert (header.data_at, header.states_at, header.tokens_at, header.data_hash) == (len(GOLDEN), 0, 48, "")
    assert check_written_by_sidecar(header) is header


@given(st.integers(1, 10**15), st.text(st.characters(exclude_categories=["Cs"]), max_size=64))
def test_the_room_fits_whatever_the_capture_becomes(rows: int, reason: str) -> None:
    room = header_room({**METADATA, "finish_reason": ""}, "float32", 2, 4096)
    final = {**METADATA, "finish_reason": reason, "content_hash": "c" * 64, "data_hash": "d" * 32}
    assert len(build_header(final, "float32", (rows, 2, 4096), room)) == room
    assert room % 64 == 0


def test_a_header_that_outgrows_its_room_is_an_error_not_a_broken_file() -> None:
    with pytest.raises(ShardError, match="does not fit"):
        build_header({"a": "b" * 100}, "float32", (1, 1, 1), 64)


def good_fields() -> dict[str, Any]:
    return {
        "__metadata__": {"format": "hsconnector/1", "layer_ids": "[0,1]"},
        "hidden_states": {"dtype": "F32", "shape": [2, 2, 3], "data_offsets": [0, 48]},
        "token_ids": {"dtype": "I64", "shape": [2], "data_offsets": [48, 64]},
    }


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("__metadata__", "format"), "other/1", "format is 'other/1', not 'hsconnector/1'"),
        (("__metadata__", "layer_ids"), "[0]", r"2 slots for the layer ids \[0\]"),
        (("__metadata__", "layer_ids"), '["a","b"]', "Expected `int`"),
        (("__metadata__", "layer_ids"), "", "no shard of hsconnector"),
        (("__metadata__", "x"), 1, "Expected `str`"),
        (("hidden_states", "dtype"), "F64", "F64"),
        (("hidden_states", "dtype"), ["F32"], "Expected `str`"),
        (("hidden_states", "shape"), [2, 2], "do not agree"),
        (("hidden_states", "shape"), [-2, 2, 3], "do not agree"),
        (("hidden_states", "shape"), [1e400, 2, 3], "no shard of hsconnector"),
        (("hidden_states", "data_offsets"), [0, 47], "a tensor of 48 bytes lies at 0 to 47"),
        (("token_ids", "dtype"), "I32", "I32"),
        (("token_ids", "data_offsets"), [0, 16], "lies at"),
        (("token_ids", "shape"), [3], "do not agree"),
        (("more",), {}, "`more`"),
    ],
)
def test_headers_that_lie_are_refused(path: tuple[str, ...], value: object, words: str) -> None:
    fields = good_fields()
    parsed(fields)
    *folders, last = path
    place = fields
    for name in folders:
        place = place[name]
    place[last] = value
    with pytest.raises(ShardError, match=words):
        parsed(fields)


def test_what_a_sidecar_does_not_write_is_told_apart() -> None:
    """A reader takes the tensors in either order, and none; a store lists only what a sidecar wrote."""
    turned = good_fields()
    turned["hidden_states"]["data_offsets"], turned["token_ids"]["data_offsets"] = [16, 64], [0, 16]
    with pytest.raises(ShardError, match="token_ids lie before hidden_states"):
        parsed(turned)
    empty = good_fields()
    empty["hidden_states"] |= {"shape": [0, 2, 3], "data_offsets": [0, 0]}
    empty["token_ids"] |= {"shape": [0], "data_offsets": [0, 0]}
    with pytest.raises(ShardError, match="every size must be 1 or more"):
        parsed(empty, 0)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.binary(max_size=300)
    | st.builds(lambda n, t: n.to_bytes(8, "little") + t, st.integers(0, 400), st.binary(max_size=300))
)
def test_garbage_is_refused_and_nothing_else(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("garbage") / "x"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(ShardError):
            read_header(fd)
    finally:
        os.close(fd)
