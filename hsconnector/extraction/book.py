"""What has to be known of each row until a run ends, in a private file that goes with the process.

A run of a million rows takes no memory for each: SQLite keeps a few megabytes of it at hand, a bit says which rows have
a capture.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from hsconnector.prompts.prompt import Missing, Prompt

__all__ = ["Book", "MissingRows", "Noted", "RowSet"]

_TABLES = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -2048;
CREATE TABLE rows (
    digest BLOB PRIMARY KEY, row INTEGER, sample_id TEXT, tokens INTEGER, fate TEXT, used_up TEXT
) WITHOUT ROWID;
CREATE TABLE repeats (row INTEGER PRIMARY KEY, sample_id TEXT, first INTEGER);
CREATE TABLE missing (row INTEGER PRIMARY KEY, sample_id BLOB, reason BLOB);
"""


@dataclass(frozen=True, slots=True)
class Noted:
    """A row whose capture is there, as the last look at the sidecar needs it."""

    digest: str
    row: int
    sample_id: str
    tokens: int
    fate: str
    used_up: frozenset[str]
    """Its captures that were acknowledged and let go before this run, which say nothing of this one."""


class RowSet:
    """Numbers of rows, a bit for each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, row: int) -> None:
        """Takes a number."""
        if row >> 3 >= len(self._bits):
            self._bits.extend(bytes((row >> 3) + 1024 - len(self._bits)))
        self._bits[row >> 3] |= 1 << (row & 7)

    def discard(self, row: int) -> None:
        """Lets a number go."""
        if row in self:
            self._bits[row >> 3] &= ~(1 << (row & 7))

    def __contains__(self, row: object) -> bool:
        return isinstance(row, int) and row >> 3 < len(self._bits) and bool(self._bits[row >> 3] >> (row & 7) & 1)


class Book:
    """The rows of one run by their content hash (SHA-256, in hex), those that repeat an earlier one, those missing."""

    def __init__(self) -> None:
        self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._file.executescript(_TABLES)
        self.missing = MissingRows(self._file)
        weakref.finalize(self, self._file.close)

    def meet(self, digest: str, row: int) -> int:
        """The row in which a content was met first, which may be this one."""
        key = bytes.fromhex(digest)
        if self._file.execute("INSERT OR IGNORE INTO rows (digest, row) VALUES (?, ?)", (key, row)).rowcount:
            return row
        return int(self._file.execute("SELECT row FROM rows WHERE digest = ?", (key,)).fetchone()[0])

    def repeat(self, prompt: Prompt, first: int) -> None:
        """Takes a row that has the content of an earlier one."""
        self._file.execute("INSERT OR REPLACE INTO repeats VALUES (?, ?, ?)", (prompt.row, prompt.sample_id, first))

    def repeats(self) -> Iterator[tuple[int, str, int]]:
        """Row, sample id and the earlier row of each."""
        yield from self._file.execute("SELECT row, sample_id, first FROM repeats ORDER BY row")

    def note(self, noted: Noted) -> None:
        """Takes that a row which was met has its capture."""
        values = (noted.sample_id, noted.tokens, noted.fate, " ".join(noted.used_up), bytes.fromhex(noted.digest))
        self._file.execute("UPDATE rows SET sample_id = ?, tokens = ?, fate = ?, used_up = ? WHERE digest = ?", values)

    def noted(self, count: int) -> Iterator[dict[str, Noted]]:
        """The rows with a capture by content hash, so many at a time."""
        last = b""
        while True:
            found = self._file.execute(
                "SELECT digest, row, sample_id, tokens, fate, used_up FROM rows "
                "WHERE fate IS NOT NULL AND digest > ? ORDER BY digest LIMIT ?",
                (last, count),
            ).fetchall()
            if not found:
                return
            last = found[-1][0]
            yield {
                key.hex(): Noted(key.hex(), row, sample_id, tokens, fate, frozenset(used_up.split()))
                for key, row, sample_id, tokens, fate, used_up in found
            }


class MissingRows(Sequence[Missing]):
    """The rows without a capture, in their order."""

    def __init__(self, file: sqlite3.Connection) -> None:
        self._file = file

    def add(self, missing: Missing) -> None:
        """Takes one; texts may hold half a surrogate pair."""
        texts = (each.encode("utf-8", "surrogatepass") for each in (missing.sample_id, missing.reason))
        self._file.execute("INSERT OR REPLACE INTO missing VALUES (?, ?, ?)", (missing.row, *texts))

    def __len__(self) -> int:
        return int(self._file.execute("SELECT count(*) FROM missing").fetchone()[0])

    def __bool__(self) -> bool:
        return self._file.execute("SELECT 1 FROM missing LIMIT 1").fetchone() is not None

    def __iter__(self) -> Iterator[Missing]:
        return self._read("SELECT * FROM missing ORDER BY row", ())

    @overload
    def __getitem__(self, index: int) -> Missing: ...

    @overload
    def __getitem__(self, index: slice) -> list[Missing]: ...

    def __getitem__(self, index: int | slice) -> Missing | list[Missing]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        found = next(self._read("SELECT * FROM missing ORDER BY row LIMIT 1 OFFSET ?", (at,)), None)
        if found is None:
            raise IndexError(index)
        return found

    def _read(self, query: str, values: tuple[int, ...]) -> Iterator[Missing]:
        for row, *texts in self._file.execute(query, values):
            sample_id, reason = (each.decode("utf-8", "surrogatepass") for each in texts)
            yield Missing(row, sample_id, reason)
