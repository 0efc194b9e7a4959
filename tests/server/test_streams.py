"""What a producer must say of itself and of a capture."""

from __future__ import annotations

from typing import Any

import pytest

from hsconnector.capture.protocol import MAX_TEXT_BYTES, CaptureInfo, new_capture_id
from server.streams import MAX_NAME_BYTES, check_info


def wrong(**facts: Any) -> str:
    given = {"capture_id": new_capture_id(), "request_id": "r", "num_prompt_tokens": 1, "created": 0.0, **facts}
    return check_info(CaptureInfo(**given))


@pytest.mark.parametrize(
    ("name", "text", "most"),
    [
        ("dataset", "dataset", MAX_TEXT_BYTES),
        ("sample_id", "sample_id", MAX_TEXT_BYTES),
        ("lora", "lora", MAX_NAME_BYTES),
        ("tags", "tag 'lora'", MAX_TEXT_BYTES),
    ],
)
def test_the_limit_named_is_the_limit_held(name: str, text: str, most: int) -> None:
    """An adapter's name may be a path; everything else that a client gives is short."""

    def given(size: int) -> Any:
        return {"lora": "x" * size} if name == "tags" else "x" * size

    assert wrong(**{name: given(most)}) == ""
    assert wrong(**{name: given(most + 1)}) == f"{text} has {most + 1} bytes, the most is {most}"
