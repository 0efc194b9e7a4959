"""Sidecars with captures whose values say which they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.sidecar import SidecarThread, start_sidecar

if TYPE_CHECKING:
    import torch

LAYERS = (0, 2, 5)
HIDDEN = 8


def tokens_of(number: int) -> list[int]:
    """The prompt of sample `number`: 3 to 9 tokens."""
    return [100 + number, *range(2 + number % 7)]


def states_of(number: int) -> torch.Tensor:
    """`[T, L, H]`, no two rows alike."""
    import torch

    generator = torch.Generator().manual_seed(number)
    return torch.randn(len(tokens_of(number)), len(LAYERS), HIDDEN, generator=generator)


def feed(url: str, numbers: Sequence[int], *, dataset: str = "d", **producer: Any) -> list[str]:
    """Captures of samples; their ids."""
    from tests.feeding import Feeder  # which needs torch

    with Feeder(url, layer_ids=LAYERS, hidden_size=HIDDEN, **producer) as feeder:
        return [
            feeder.capture(states_of(number), tokens_of(number), dataset=dataset, sample_id=str(number))
            for number in numbers
        ]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarThread]:
    running = start_sidecar(tmp_path / "store", sweep_s=0.05)
    yield running
    running.stop()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[SidecarThread]:
    running = start_sidecar(tmp_path / "other")
    yield running
    running.stop()
