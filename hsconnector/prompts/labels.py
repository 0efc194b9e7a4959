"""The data set beside an export: which capture belongs to which row, and which of its tokens count.

Only hashes and packed masks are kept, so a data set of a few hundred thousand rows takes a few hundred bytes a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsconnector.capture.protocol import pack_token_ids
from hsconnector.errors import SettingsError
from hsconnector.prompts.encoded import Encoded
from hsconnector.prompts.files import open_rows
from hsconnector.prompts.prompt import Missing, Prompt, PromptReader
from hsconnector.prompts.row import Row, RowRefused

__all__ = ["DataRow", "mask_hash", "read_rows", "read_tokens", "token_hash"]


_Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class DataRow:
    """One row: either `problem` says why it cannot be used, or the rest is set."""

    row: int
    """Its index in the data set, which is the trainer's."""
    sample_id: str
    problem: str = ""
    content_hash: str = ""
    token_hash: str = ""
    num_tokens: int = 0
    packed_mask: bytes = b""

    @property
    def loss_mask(self) -> _Ids:
        """`[T]`, 1 where a token counts."""
        bits = np.unpackbits(np.frombuffer(self.packed_mask, np.uint8), count=self.num_tokens)
        return bits.astype(np.int64)

    @property
    def mask_hash(self) -> str:
        """What `mask_hash` gives of it."""
        return _bits_hash(self.packed_mask)


def read_rows(path: Path, content_hash: Callable[[bytes], str]) -> tuple[list[DataRow], bool]:
    """Every row of a data set, and whether it has loss masks at all; raises SettingsError.

    `content_hash` makes a capture's hash of int64 little-endian token ids. A row without a mask counts every token.
    """
    masked = False

    def noted(rows: Iterator[Row]) -> Iterator[DataRow]:
        nonlocal masked
        for index, row in enumerate(rows):
            masked = masked or (isinstance(row, dict) and row.get("loss_mask") is not None)
            yield _data_row(row, index, content_hash)

    rows = list(noted(open_rows(path).read()))
    if not rows:
        raise SettingsError(f"{path} has no rows")
    return rows, masked


def read_tokens(path: Path, rows: Mapping[int, DataRow]) -> Iterator[tuple[_Ids, _Ids]]:
    """The token ids and the loss mask, `[T]` int64 each, of these rows (by index), in the data set's order.

    Raises SettingsError where a row is not what it was when `rows` was made.
    """
    found = 0
    for index, row in enumerate(open_rows(path).read()):
        known = rows.get(index)
        if known is None:
            continue
        prompt = _read(row, index)
        if isinstance(prompt, Missing) or (_hash(prompt), _packed(prompt)) != (known.token_hash, known.packed_mask):
            raise SettingsError(f"row {index} of {path} is not what it was a moment ago: start again")
        found += 1
        yield np.array(prompt.token_ids, np.int64), known.loss_mask
    if found < len(rows):
        raise SettingsError(f"{path} has {len(rows) - found} rows less than a moment ago: start again")


def token_hash(token_ids: bytes) -> str:
    """SHA-256 (hex) of int64 little-endian token ids."""
    return hashlib.sha256(token_ids).hexdigest()


def mask_hash(loss_mask: Any) -> str:
    """SHA-256 (hex) of a mask `[T]` of 0 and 1, eight tokens to a byte, the first in the highest bit."""
    return _bits_hash(np.packbits(np.asarray(loss_mask, np.uint8)).tobytes())


def _bits_hash(packed_mask: bytes) -> str:
    return hashlib.sha256(packed_mask).hexdigest()


def _data_row(row: Row, index: int, content_hash: Callable[[bytes], str]) -> DataRow:
    prompt = _read(row, index)
    if isinstance(prompt, Missing):
        return DataRow(index, prompt.sample_id, problem=prompt.reason)
    return DataRow(
        row=index,
        sample_id=prompt.sample_id,
        content_hash=content_hash(pack_token_ids(prompt.token_ids)),
        token_hash=_hash(prompt),
        num_tokens=len(prompt.token_ids),
        packed_mask=_packed(prompt),
    )


def _read(row: Row, index: int) -> Prompt | Missing:
    named = isinstance(row, dict) and row.get("sample_id") not in (None, "")
    return PromptReader(_not_encoded, "sample_id" if named else "").read(row, index)


def _hash(prompt: Prompt) -> str:
    return token_hash(pack_token_ids(prompt.token_ids))


def _not_encoded(conversation: Any, tools: Any) -> Encoded:
    raise RowRefused(
        "is a conversation: export reads input_ids and loss_mask, which `hsconnector extract` saves beside it"
    )


def _packed(prompt: Prompt) -> bytes:
    return np.packbits(np.array(prompt.loss_mask, np.uint8)).tobytes()
