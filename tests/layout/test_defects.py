from __future__ import annotations

import pytest

from hsconnector.layout.defects import explain_kv_refusal
from hsconnector.vllm_facts import DEFECTS

MAX_SEQ_LEN = "To serve at least one request with the model's max seq len (131072), (581.48 GiB KV cache is needed"
KIMI = "ValueError: 129.6 GiB KV cache needed"


@pytest.mark.parametrize(("line", "expected"), [(MAX_SEQ_LEN, 24 * 2**30), (KIMI, 54 * 2**27)])
def test_a_budget_many_times_too_large_is_explained(line: str, expected: int) -> None:
    said = explain_kv_refusal(line, expected)
    assert said is not None and "vllm#53243, vllm#56774" in said
    for help_text in ("fewer layers", "smaller --max-model-len", "version"):
        assert help_text in said


@pytest.mark.parametrize("line", [MAX_SEQ_LEN, "Started server process", "5.4 GiB KV cache is needed"])
def test_other_lines_and_honest_budgets_are_not(line: str) -> None:
    assert explain_kv_refusal(line, 400 * 2**30) is None


def test_every_defect_names_reports_and_help() -> None:
    assert all(defect.reports.startswith("vllm") and defect.helps for defect in DEFECTS.values())
