"""What is SQLite's own: its dialect, how the file of an index is opened, what its errors mean."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import dialect, insert
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler

from hsconnector.errors import BrokenIndex, IndexFault

__all__ = [
    "DIALECT",
    "connect",
    "engine",
    "fault_of",
    "insert",
    "move_aside",
    "read_through",
    "set_user_version",
    "telling",
    "user_version",
    "writing",
]

BUSY_S = 10.0
"""How long another process's lock is waited for."""
_HELD = "another process holds it: let that end"
_DENIED = "let the user of the sidecar write it and its folder"
_WAYS_OUT = {
    sqlite3.SQLITE_BUSY: _HELD,
    sqlite3.SQLITE_LOCKED: _HELD,
    sqlite3.SQLITE_FULL: "make room on its disk",
    sqlite3.SQLITE_IOERR: "make room on its disk or mend it",
    sqlite3.SQLITE_READONLY: _DENIED,
    sqlite3.SQLITE_CANTOPEN: _DENIED,
    sqlite3.SQLITE_PERM: _DENIED,
}


class _Compiler(SQLiteCompiler):
    """Writes out what SQLAlchemy's own leaves away or gives as parameters: hints, and values that are always the same.

    A partial index serves only a query that holds the words of its condition.
    """

    def get_from_hint_text(self, table: Any, text: str | None) -> str | None:
        return text

    def visit_bindparam(self, bindparam: Any, *places: Any, **options: Any) -> Any:
        if bindparam.value is not None:
            options["literal_binds"] = True
        return super().visit_bindparam(bindparam, *places, **options)  # type: ignore[no-untyped-call]


DIALECT: sa.Dialect = dialect()
DIALECT.statement_compiler = _Compiler


def connect(path: Path, *, durable: bool) -> sqlite3.Connection:
    """An open index, made where there is none; raises `sqlite3.Error`."""
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def engine(path: Path) -> sa.Engine:
    """SQLAlchemy's, for migrations: it opens the file for each use, and closes it."""
    return sa.create_engine("sqlite://", creator=functools.partial(connect, path, durable=True), poolclass=sa.NullPool)


@contextlib.contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """One transaction, in which tables are made and changed as well: sqlite3 by itself begins none for those."""
    with engine.begin() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield connection


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Raises SQLite's errors as `IndexFault`, and as `ValueError` where the values are at fault."""
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.DataError) as error:
        raise ValueError(str(error)) from error
    except sqlite3.Error as error:
        raise fault_of(error) from error
    except sa.exc.DBAPIError as error:
        raise (fault_of(error.orig) if isinstance(error.orig, sqlite3.Error) else error) from error


def fault_of(error: sqlite3.Error) -> IndexFault:
    """An error of SQLite: broken where only a new index helps, else with the way out."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return BrokenIndex(str(error))
    return IndexFault(str(error), _WAYS_OUT.get(code, "see to that"))


def user_version(connection: sa.Connection) -> int:
    """The number that tells versions without revisions; 0 in a new file."""
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def set_user_version(connection: sa.Connection, version: int) -> None:
    """Sets it, within the transaction."""
    connection.exec_driver_sql(f"PRAGMA user_version = {version}")


def read_through(connection: sqlite3.Connection) -> None:
    """Reads every page once, those of the leases too: damage must end no later start, and no lease at night."""
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise BrokenIndex(" ".join(found.split()))


def move_aside(path: Path) -> Path:
    """Gives an index, and the log beside it, another name; returns that.

    The index itself goes last: a new one must never find the log of an old one beside it.
    """
    aside = path.with_name(f"{path.name}.broken-{time.time_ns()}")
    for suffix in ("-journal", "-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside
