"""The content hash: the same for equal content, whoever computes it, in every release."""

from __future__ import annotations

import hashlib
import struct

import pytest

from hsconnector.capture.content import Content, content_of
from hsconnector.capture.protocol import CaptureInfo, CaptureState, Producer, pack_token_ids
from hsconnector.capture.record import CaptureRecord, record_of

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


def test_whoever_asks_means_the_same() -> None:
    """The sidecar hashes what a producer sends, extraction what it asks for, a trainer what the index names."""
    producer = Producer(
        engine_id="e", model="m", model_revision="r", vllm_version="0", layer_ids=(1, 2), num_layers=2, hidden_size=4,
        dtype="float32",
    )  # fmt: skip
    info = CaptureInfo(capture_id="0" * 32, request_id="r", num_prompt_tokens=2, created=0.0, lora="l")
    content = content_of(producer, info)
    assert content == Content("m", "r", (1, 2), "l") == record_of(producer, info).content
    pictured = CaptureInfo(capture_id="0" * 32, request_id="r", num_prompt_tokens=2, created=0.0, mm_hashes=("h",))
    assert content_of(producer, pictured).mm_hashes == ("h",)
    assert CaptureRecord(capture_id="0" * 32, state=CaptureState.READY).content == Content("", "", ())
