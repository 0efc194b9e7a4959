"""The index: what a listing by content or sample costs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from server.catalog import Catalog, Filter, _where


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (Filter(content_hash="a" * 64), "captures_content"),
        (Filter(sample_id="17"), "captures_sample_only"),
        (Filter(request_id="cmpl-1"), "captures_request"),
        (Filter(dataset="mine", sample_id="17"), "captures_sample"),
    ],
)
def test_a_listing_uses_its_index(tmp_path: Path, wanted: Filter, index: str) -> None:
    """Partial indexes serve only a query that repeats their condition."""
    path = tmp_path / "index.sqlite"
    Catalog(path).close()
    clauses, values = _where(wanted)
    with sqlite3.connect(path) as database:
        query = f"EXPLAIN QUERY PLAN SELECT record FROM captures WHERE {' AND '.join(clauses)}"
        plan = " ".join(row[3] for row in database.execute(query, values))
    database.close()
    assert index in plan
