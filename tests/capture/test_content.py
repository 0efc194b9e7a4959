"""The content hash: the same for equal content, whoever computes it, in every release."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import pytest
from msgspec import structs

from hsconnector.capture.content import Content, WeightsHeld, choose_weights, content_of
from hsconnector.capture.protocol import CaptureInfo, CaptureState, Producer, pack_token_ids
from hsconnector.capture.record import CaptureRecord, record_of
from hsconnector.errors import SettingsError

CONTENT = Content("org/Modèle", "abc", (2, 18, 36), "adapter", ("h1", "h2"))


def test_the_hashed_bytes() -> None:
    head = '["hsconnector/1","org/Modèle","abc",[2,18,36],"adapter",["h1","h2"]]\n'.encode()
    expected = hashlib.sha256(head + struct.pack("<3q", 1, -1, 151643)).hexdigest()
    assert CONTENT.hash_of(pack_token_ids([1, -1, 151643])) == expected


def test_golden_hash() -> None:
    """Stores hold such hashes: a changed one finds nothing of what was captured before."""
    assert (
        Content("m", "", (1,)).hash_of(pack_token_ids([7]))
        == "433c8f579dfb6475bb7b8944d1b382c5583777795b054ac2bd91e56621f0476a"
    )


@pytest.mark.parametrize(
    "other",
    [
        Content("org/Other", "abc", (2, 18, 36), "adapter", ("h1", "h2")),
        Content("org/Modèle", "abd", (2, 18, 36), "adapter", ("h1", "h2")),
        Content("org/Modèle", "abc", (2, 18), "adapter", ("h1", "h2")),
        Content("org/Modèle", "abc", (2, 18, 36), "", ("h1", "h2")),
        Content("org/Modèle", "abc", (2, 18, 36), "adapter", ("h2", "h1")),
    ],
)
def test_everything_counts(other: Content) -> None:
    assert other.hash_of(b"") != CONTENT.hash_of(b"")


W, A = "a" * 64, "b" * 64
KNOWN = Content("org/Modèle", "abc", (2, 18), "adapter", ("h1",), W, "bfloat16", "fp8_e4m3", A)


def test_the_hashed_bytes_of_version_2() -> None:
    """No name and no folder is in it (vllm#57810)."""
    head = f'["hsconnector/2","{W}","bfloat16","fp8_e4m3",[2,18],"{A}",["h1"]]\n'.encode()
    expected = hashlib.sha256(head + struct.pack("<2q", 1, 151643)).hexdigest()
    assert KNOWN.hash_of(pack_token_ids([1, 151643])) == expected
    golden = "40672f34690c313dc4c1b541e3efd8ef4d8b1b0a99ac0b84c669c3d8daa0dbc0"
    assert Content("m", "", (1,), weights_id=W, dtype="float32").hash_of(pack_token_ids([7])) == golden


@pytest.mark.parametrize(
    "same",
    [replace(KNOWN, model="/a/copy"), replace(KNOWN, model_revision="other"), replace(KNOWN, lora="a copy of it")],
)
def test_names_and_folders_do_not_count_where_the_weights_are_known(same: Content) -> None:
    assert same.hash_of(b"") == KNOWN.hash_of(b"")
    assert same.version_1(b"") != KNOWN.version_1(b"")


@pytest.mark.parametrize(
    "other",
    [
        replace(KNOWN, weights_id="c" * 64),
        replace(KNOWN, dtype="float16"),
        replace(KNOWN, kv_cache_dtype=""),
        replace(KNOWN, layer_ids=(2, 19)),
        replace(KNOWN, lora_weights_id=""),
        replace(KNOWN, mm_hashes=("h2",)),
    ],
)
def test_everything_else_counts(other: Content) -> None:
    assert other.hash_of(b"") != KNOWN.hash_of(b"")


def test_captures_of_unknown_weights_are_found_by_names_only_where_that_is_asked() -> None:
    unknown = replace(KNOWN, weights_id="")
    assert unknown.hash_of(b"") == unknown.version_1(b"") == KNOWN.version_1(b"") != KNOWN.hash_of(b"")


W_AB, W_AC = "ab" + "0" * 62, "ac" + "0" * 62
HELD = [WeightsHeld("", 3, "0" * 32), WeightsHeld(W_AB, 2, "1" * 32), WeightsHeld(W_AC, 1, "2" * 32)]


@pytest.mark.parametrize(("wanted", "chosen"), [("ab", HELD[1]), ("ac00", HELD[2]), ("", HELD[0])])
def test_weights_are_chosen_by_their_first_digits(wanted: str, chosen: WeightsHeld) -> None:
    assert choose_weights(HELD, wanted) == chosen.weights_id


@pytest.mark.parametrize(("wanted", "words"), [("a", "begins 2"), ("d", "begins 0"), (None, "captures of 3 weights")])
def test_weights_that_are_not_one_are_refused_and_listed(wanted: str | None, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as refused:
        choose_weights(HELD, wanted)
    assert "3 of weights unknown, 2 of weights ab0000000000" in str(refused.value)


def test_the_only_weights_need_not_be_chosen() -> None:
    assert choose_weights(HELD[1:2], None) == HELD[1].weights_id
    assert choose_weights([], None) == ""


def test_whoever_asks_means_the_same() -> None:
    """The sidecar hashes what a producer sends, extraction what it asks for, a trainer what the index names."""
    producer = Producer(
        engine_id="e", model="m", model_revision="r", vllm_version="0", layer_ids=(1, 2), num_layers=2, hidden_size=4,
        dtype="float32",
    )  # fmt: skip
    info = CaptureInfo(capture_id="0" * 32, request_id="r", num_prompt_tokens=2, created=0.0, lora="l")
    content = content_of(producer, info)
    assert content == Content("m", "r", (1, 2), "l", dtype="float32") == record_of(producer, info).content
    pictured = CaptureInfo(capture_id="0" * 32, request_id="r", num_prompt_tokens=2, created=0.0, mm_hashes=("h",))
    assert content_of(producer, pictured).mm_hashes == ("h",)
    assert CaptureRecord(capture_id="0" * 32, state=CaptureState.READY).content == Content("", "", ())


def test_a_capture_is_of_the_producers_weights_until_they_change() -> None:
    producer = Producer(
        engine_id="e", model="m", vllm_version="0", layer_ids=(1,), num_layers=2, hidden_size=4, dtype="float32",
        weights_id=W, kv_cache_dtype="fp8_e5m2",
    )  # fmt: skip
    info = CaptureInfo(
        capture_id="0" * 32, request_id="r", num_prompt_tokens=2, created=0.0, lora="l", lora_weights_id=A
    )
    content = content_of(producer, info)
    assert (content.weights_id, content.kv_cache_dtype, content.lora_weights_id) == (W, "fp8_e5m2", A)
    assert content == record_of(producer, info).content
    changed = content_of(producer, structs.replace(info, weights_id="d" * 64))
    assert changed.weights_id == "d" * 64
