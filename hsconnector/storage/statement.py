"""SQL, written with SQLAlchemy and compiled once.

SQLAlchemy's own way of running a statement takes three times as long as SQLite needs to find a row (97 and 24 us), so
the driver is given the compiled text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from hsconnector.storage.sqlite import DIALECT, insert

__all__ = ["Statement", "param", "upsert"]

Change = Callable[[Any], Mapping[str, object]]
"""From the columns of the row that could not be inserted to what is set in the row that is there."""


class Statement:
    """A statement's text, and the values that are always the same."""

    def __init__(self, statement: sa.ClauseElement) -> None:
        compiled = statement.compile(dialect=DIALECT, compile_kwargs={"render_postcompile": True})
        self.text = str(compiled)
        found = ((name, value) for name, value in compiled.params.items() if value is not None)
        self._constants = {name: str(value) if isinstance(value, str) else value for name, value in found}

    def with_constants(self, values: Mapping[str, object]) -> dict[str, object]:
        """All parameters."""
        return {**self._constants, **values}


def param(name: str) -> sa.BindParameter[object]:
    """A value that is given when the statement runs."""
    return sa.bindparam(name, required=False)


def upsert(table: sa.Table, key: Sequence[str], change: Change | None = None, **constants: object) -> Statement:
    """Inserts a row, given all its columns but the `constants` and the one that counts by itself.

    Where a row with its `key` is there, that one is changed, or without `change` left as it is.
    """
    names = [column.name for column in table.columns if column is not table.autoincrement_column]
    inserted = insert(table).values({name: constants.get(name, param(name)) for name in names})
    if change is None:
        return Statement(inserted.on_conflict_do_nothing(index_elements=key))
    return Statement(inserted.on_conflict_do_update(index_elements=key, set_=change(inserted.excluded)))
