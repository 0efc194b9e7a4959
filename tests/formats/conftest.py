from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.sidecar import start_sidecar

if TYPE_CHECKING:
    import torch

    from tests.formats.samples import DataSet

ROWS = 6


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A sidecar that holds a capture of every row of a data set."""

    url: str
    store: Path
    model: Path
    rows: DataSet = field(compare=False, hash=False)
    data: Path
    dtype: torch.dtype


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    import torch

    from tests.formats.samples import feed, make_rows
    from tests.models import tiny_qwen3

    dtype: torch.dtype = getattr(torch, request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_qwen3(folder / "model", dtype=dtype)
    rows = make_rows(ROWS)
    data = rows.write_lines(folder / "data.jsonl")
    sidecar = start_sidecar(folder / "store")
    try:
        feed(sidecar.url, model, enumerate(rows.token_ids), dtype=dtype)
        yield Captured(url=sidecar.url, store=folder / "store", model=model, rows=rows, data=data, dtype=dtype)
    finally:
        sidecar.stop()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import tiny_qwen3

    return tiny_qwen3(tmp_path_factory.mktemp("model") / "qwen3")
