"""What a run keeps of each row takes no memory that counts; a million rows are nothing to it."""

from __future__ import annotations

import hashlib
import subprocess
import sys

from hsconnector.extraction.book import Book, Noted, RowSet
from hsconnector.extraction.ledger import Fate, Ledger
from hsconnector.prompts.prompt import Missing

ROWS = 80_000
MOST_BYTES = 50
SCRIPT = """
import hashlib, sys
from pathlib import Path
from hsconnector.extraction.book import Noted
from hsconnector.extraction.ledger import Fate, Ledger
from hsconnector.prompts.prompt import Missing, Prompt

def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096

rows = int(sys.argv[1])
ledger, at_start = Ledger(rows), 0
for row in range(rows):
    digest = hashlib.sha256(str(row // 2 if row % 10 == 9 else row).encode()).hexdigest()
    prompt = Prompt(row, f"sample-{row}", (1, 2, 3), (1, 1, 1))
    first = ledger.book.meet(digest, row)
    if first != row:
        ledger.book.repeat(prompt, first)
    elif row % 10 == 3:
        ledger.failed(Missing(row, prompt.sample_id, f"row {row} fails for a reason of some length"))
    else:
        ledger.captured(prompt)
        ledger.book.note(Noted(digest, row, prompt.sample_id, 3, Fate.CAPTURED, frozenset()))
    if row == rows // 5:
        at_start = resident()
seen = sum(len(piece) for piece in ledger.book.noted(500))
for row, sample_id, first in ledger.book.repeats():
    ledger.repeated(row)
print(seen, ledger.done, len(ledger.missing), (resident() - at_start) / (rows - rows // 5))
"""


def test_rows_take_no_memory_that_counts() -> None:
    words = [sys.executable, "-c", SCRIPT, str(ROWS)]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    seen, done, missing, each = int(out[0]), int(out[1]), int(out[2]), float(out[3])
    assert (done, missing) == (ROWS, ROWS // 10)
    assert seen > ROWS // 2
    assert each < MOST_BYTES


def test_rows_are_found_again_by_what_they_hold() -> None:
    book = Book()
    digests = [hashlib.sha256(bytes([row])).hexdigest() for row in range(7)]
    assert [book.meet(digest, row) for row, digest in enumerate([*digests, digests[2]])] == [*range(7), 2]
    for row in (1, 4, 5):
        book.note(Noted(digests[row], row, f"s{row}", row, Fate.STORED, frozenset({"a", "b"} if row == 4 else ())))
    pieces = list(book.noted(2))
    assert [len(piece) for piece in pieces] == [2, 1]
    found = {noted.row: noted for piece in pieces for noted in piece.values()}
    assert found[4] == Noted(digests[4], 4, "s4", 4, "stored", frozenset({"a", "b"}))
    assert set(found) == {1, 4, 5} and found[1].used_up == frozenset()


def test_missing_rows_come_in_their_order_whatever_their_texts() -> None:
    ledger = Ledger(9)
    for row in (5, 2, 7):
        ledger.failed(Missing(row, f"s{row}", "half a pair \ud800"))
    assert [missing.row for missing in ledger.missing] == [2, 5, 7]
    assert (ledger.missing[-1].row, ledger.missing[0].reason) == (7, "half a pair \ud800")
    assert [missing.row for missing in ledger.missing[1:]] == [5, 7]
    assert not Ledger(1).missing and ledger.missing


def test_a_set_of_rows_is_a_set() -> None:
    rows = RowSet()
    for row in (0, 7, 8, 100_000):
        rows.add(row)
    rows.discard(7)
    rows.discard(3_000_000)
    assert [row for row in (0, 1, 7, 8, 99_999, 100_000, 3_000_000) if row in rows] == [0, 8, 100_000]
