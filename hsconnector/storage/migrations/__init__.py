"""Brings the tables of an index up to date.

Revisions lie in `versions`, as Alembic reads them. What they start from is version 2, which was told by SQLite's
`user_version` alone.
"""

from __future__ import annotations

import logging
from pathlib import Path

import sqlalchemy as sa

from hsconnector.errors import BrokenIndex, IndexFault
from hsconnector.storage import sqlite
from hsconnector.storage.schema import REVISION, USER_VERSION, metadata, versions

__all__ = ["prepare"]

log = logging.getLogger("hsconnector.storage.migrations")


def prepare(path: Path) -> None:
    """Makes the tables of a new index, or brings an older one up to date, all of it or nothing.

    Writes nothing where that was done before. Raises `BrokenIndex` for a version that nothing leads on from, and
    `IndexFault` for one that is newer than what is known here, which stays as it is.
    """
    engine = sqlite.engine(path)
    with sqlite.telling():
        with engine.connect() as connection:
            if _revision(connection) == REVISION:
                return
        with sqlite.writing(engine) as connection:
            _bring_up_to_date(connection, path)


def _bring_up_to_date(connection: sa.Connection, path: Path) -> None:
    revision, version = _revision(connection), sqlite.user_version(connection)
    if version > USER_VERSION:
        raise _newer(f"version {version}", f"versions up to {USER_VERSION}")
    if revision is None and version == 0:
        metadata.create_all(connection)
        connection.execute(sa.insert(versions).values(version_num=REVISION))
    elif revision is None and version != USER_VERSION:
        raise BrokenIndex(f"it is of version {version}, from which nothing leads to {USER_VERSION}")
    else:
        log.info("the index %s is brought from revision %s to %s", path, revision or f"version {version}", REVISION)
        _upgrade(connection)
    sqlite.set_user_version(connection, USER_VERSION)


def _revision(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table(versions.name):
        return None
    return connection.scalar(sa.select(versions.c.version_num))


def _upgrade(connection: sa.Connection) -> None:
    from alembic.operations import Operations  # half a second, once in the life of an index
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(Path(__file__).parent))
    context = MigrationContext.configure(connection)
    revision = context.get_current_revision()
    if revision is not None and revision not in {each.revision for each in scripts.walk_revisions()}:
        raise _newer(f"revision {revision}", f"revisions up to {REVISION}")
    steps = list(scripts.iterate_revisions("head", revision or "base"))
    with Operations.context(context):
        for step in reversed(steps):
            step.module.upgrade()
    context.stamp(scripts, "head")


def _newer(found: str, known: str) -> IndexFault:
    return IndexFault(
        f"it is of {found}, this hsconnector knows {known}", "install the hsconnector that wrote it, or a newer one,"
    )
