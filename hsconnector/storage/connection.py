"""A connection to an index."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from hsconnector.storage import sqlite
from hsconnector.storage.statement import Statement

__all__ = ["Connection", "SharedConnection"]

Row = tuple[Any, ...]


class Connection:
    """For one thread at a time. Everything raises `IndexFault`; `run` and `transaction` also `ValueError`, for values
    that the index cannot hold."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        with sqlite.telling():
            self._driver = sqlite.connect(path, durable=durable)

    def rows(self, statement: Statement, **values: object) -> list[Row]:
        """All rows of a query."""
        try:
            return self._driver.execute(statement.text, statement.values(values)).fetchall()
        except sqlite3.Error as error:
            raise sqlite.fault_of(error) from error

    def first(self, statement: Statement, **values: object) -> Row | None:
        """The first row of a query; None where it has none."""
        try:
            row: Row | None = self._driver.execute(statement.text, statement.values(values)).fetchone()
        except sqlite3.Error as error:
            raise sqlite.fault_of(error) from error
        return row

    def each(self, statement: Statement, **values: object) -> Generator[Row, None, None]:
        """The rows of a query, as they are asked for."""
        with (
            sqlite.telling(),
            contextlib.closing(self._driver.execute(statement.text, statement.values(values))) as rows,
        ):
            yield from rows

    def run(self, statement: Statement, *given: Mapping[str, object]) -> None:
        """Changes something, once for each mapping of values; within a transaction."""
        with sqlite.telling():
            self._driver.executemany(statement.text, map(statement.values, given))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """What `run` changes within is kept as a whole, or not at all."""
        with sqlite.telling(), self._driver:
            yield

    def read_through(self) -> None:
        """Reads every page of the index; raises `BrokenIndex` where one is damaged."""
        with sqlite.telling():
            sqlite.read_through(self._driver)

    def close(self) -> None:
        """Lets the index go."""
        self._driver.close()


class SharedConnection(Connection):
    """For any thread: one query at a time, the others wait. It only reads."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        super().__init__(path, durable=durable)
        self._lock = threading.Lock()

    def rows(self, statement: Statement, **values: object) -> list[Row]:
        with self._lock:
            return super().rows(statement, **values)

    def first(self, statement: Statement, **values: object) -> Row | None:
        with self._lock:
            return super().first(statement, **values)

    def close(self) -> None:
        """Waits for the query that runs."""
        with self._lock:
            super().close()
