"""The progress of a run says how fast it is, what failed, who waits for whom, and how long it will take."""

from __future__ import annotations

import re

import pytest

from hsconnector.cli import pace
from hsconnector.extraction.ledger import Ledger
from hsconnector.prompts.prompt import Missing, Prompt


def test_a_line_tells_rows_tokens_what_failed_who_waits_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pace, "_LINE_EVERY_S", -1.0)
    ledger = Ledger(10)
    with pace.show_progress(ledger) as changed:
        changed()
        for row in range(3):
            ledger.captured(Prompt(row, str(row), (1, 2), (1, 1)))
        ledger.failed(Missing(3, "3", "in vain"))
        ledger.refused(Missing(4, "4", "no tokens"))
        ledger.waits = "waiting for http://engine"
        changed()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "0/10 rows, 0.0 rows/s, 0 tokens/s, time left unknown"
    words = r"5/10 rows, \d+\.\d rows/s, \d+ tokens/s, 2 failed, waiting for http://engine, \d+ (s|min) left"
    assert re.fullmatch(words, second)
    assert not second.startswith("5/10 rows, 0.0")
