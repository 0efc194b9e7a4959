"""Every label that can occur is there from the start, at zero: an alert on it works before it first happens."""

from __future__ import annotations

import enum

import pytest

from hsconnector.capture.protocol import FailReason
from hsconnector.capture.record import FindingKind
from server.lease import LeaseEvent
from server.leaving import Why
from server.metrics import Metrics


@pytest.mark.parametrize(
    ("name", "label", "values", "others"),
    [
        ("captures", "reason", FailReason, {"state": "failed"}),
        ("findings", "reason", FindingKind, {}),
        ("lent_captures", "outcome", LeaseEvent, {}),
        ("removed_captures", "why", Why, {}),
    ],
)
def test_every_label_is_there_at_zero(
    name: str, label: str, values: type[enum.StrEnum], others: dict[str, str]
) -> None:
    registry = Metrics().registry
    found = [registry.get_sample_value(f"hsconnector_{name}_total", {label: each, **others}) for each in values]
    assert found == [0.0] * len(values)
