"""The index is brought up to date in one piece, and what is newer is left alone."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory

from hsconnector.capture.protocol import CaptureState
from hsconnector.errors import BrokenIndex, IndexFault
from hsconnector.storage import migrations, sqlite
from hsconnector.storage.index import Index
from hsconnector.storage.migrations import prepare
from hsconnector.storage.queries import Filter
from hsconnector.storage.schema import REVISION, metadata
from tests.sidecar import start_sidecar_process
from tests.storage.version_2 import OldStore

REVISIONS = ScriptDirectory(str(Path(migrations.__file__).parent))
AFFINITY = {"DOUBLE": "REAL", "BIGINT": "INTEGER", "VARCHAR(32)": "TEXT"}


@pytest.fixture
def old(tmp_path: Path) -> OldStore:
    """A store of version 2 with two captures of three, the second forgotten again."""
    made = OldStore(tmp_path / "store")
    names = [made.whole() for _ in range(3)]
    made.index.execute("DELETE FROM captures WHERE capture_id = ?", names[1:2])
    made.close()
    return made


def path_of(store: OldStore) -> Path:
    return store.root / "catalog.sqlite"


def shape(path: Path) -> dict[str, Any]:
    """Columns and indexes of every table."""
    found: dict[str, Any] = {}
    with contextlib.closing(sqlite3.connect(path)) as index:
        for (table,) in index.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = index.execute(f"PRAGMA table_info({table})").fetchall()
            found[table] = [(name, AFFINITY.get(kind, kind), needed, key) for _, name, kind, needed, _, key in columns]
            for _, name, unique, _, partial in index.execute(f"PRAGMA index_list({table})").fetchall():
                over = [column for _, _, column in index.execute(f"PRAGMA index_info({name})").fetchall()]
                (text,) = index.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone() or ("",)
                condition = (text or "").upper().partition("WHERE")[2].split()
                found[name] = (table, over, unique, partial, condition)
    return found


def dump(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as index:
        return [*index.iterdump(), str(index.execute("PRAGMA user_version").fetchone())]


def test_an_index_brought_up_to_date_is_as_one_made_anew(old: OldStore, tmp_path: Path) -> None:
    prepare(path_of(old))
    prepare(tmp_path / "new.sqlite")
    assert shape(path_of(old)) == shape(tmp_path / "new.sqlite")
    assert set(metadata.tables) <= set(shape(path_of(old)))


def test_the_tables_are_those_of_the_newest_revision() -> None:
    assert REVISIONS.get_heads() == [REVISION]


def test_captures_keep_their_numbers(old: OldStore) -> None:
    """By them a queue tells what it has lent."""
    prepare(path_of(old))
    with contextlib.closing(sqlite3.connect(path_of(old))) as index:
        assert index.execute("SELECT seq FROM captures ORDER BY seq").fetchall() == [(1,), (3,)]


def test_an_index_of_revision_0003_learns_whose_weights(old: OldStore, tmp_path: Path) -> None:
    """Sidecars wrote such ones before captures said whose weights they are of."""
    prepare(path_of(old))
    with contextlib.closing(sqlite3.connect(path_of(old))) as database:
        database.execute("DROP INDEX captures_weights")
        database.execute("ALTER TABLE captures DROP COLUMN weights_id")
        database.execute("UPDATE alembic_version SET version_num = '0003'")
        database.commit()
    prepare(path_of(old))
    prepare(tmp_path / "new.sqlite")
    assert shape(path_of(old)) == shape(tmp_path / "new.sqlite")
    index = Index(path_of(old))
    assert [each.weights_id for each in index.page(Filter(weights_id=""), limit=9).records] == ["", ""]
    index.close()


def test_doing_it_again_changes_nothing(old: OldStore) -> None:
    prepare(path_of(old))
    before = dump(path_of(old))
    prepare(path_of(old))
    assert dump(path_of(old)) == before


STEPS = {
    "making": (sqlite3.SQLITE_CREATE_TABLE, "counted"),
    "dropping": (sqlite3.SQLITE_DROP_TABLE, "captures"),
    "renaming": (sqlite3.SQLITE_ALTER_TABLE, "counted"),
    "the last index": (sqlite3.SQLITE_CREATE_INDEX, "captures_created"),
    "the revision": (sqlite3.SQLITE_INSERT, "alembic_version"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_in_the_middle_leaves_what_was(old: OldStore, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite itself denies the step."""
    real, before, denied = sqlite.connect, dump(path_of(old)), []

    def connect(path: Path, *, durable: bool) -> sqlite3.Connection:
        connection = real(path, durable=durable)

        def allow(action: int, *about: str | None) -> int:
            if (action, True) != (STEPS[step][0], STEPS[step][1] in about):
                return sqlite3.SQLITE_OK
            denied.append(about)
            return sqlite3.SQLITE_DENY

        connection.set_authorizer(allow)
        return connection

    monkeypatch.setattr(sqlite, "connect", connect)
    with pytest.raises(IndexFault):
        prepare(path_of(old))
    assert denied
    monkeypatch.undo()
    assert dump(path_of(old)) == before
    prepare(path_of(old))
    index = Index(path_of(old))
    assert [each.state for each in index.page(Filter(), limit=9).records] == [CaptureState.READY] * 2
    index.close()


def test_a_process_killed_in_the_middle_leaves_what_was(old: OldStore) -> None:
    before = dump(path_of(old))
    script = (
        "import os, signal, sys; from pathlib import Path; from hsconnector.storage import migrations, sqlite;"
        "sqlite.set_user_version = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
        "migrations.prepare(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path_of(old))], env=dict(os.environ), check=False)
    assert done.returncode == -signal.SIGKILL
    assert dump(path_of(old)) == before


def newer(path: Path, kind: str) -> str:
    """Makes an index that something newer wrote; how that is told."""
    prepare(path)
    with contextlib.closing(sqlite3.connect(path)) as index:
        if kind == "revision":
            index.execute("UPDATE alembic_version SET version_num = '9999'")
            index.commit()
            return f"it is of revision 9999, this hsconnector knows revisions up to {REVISION}"
        index.execute("DROP TABLE alembic_version")
        index.execute("PRAGMA user_version = 3")
        return "it is of version 3, this hsconnector knows versions up to 2"


@pytest.mark.parametrize("kind", ["revision", "version"])
def test_a_newer_index_refuses_the_start_and_is_left_alone(old: OldStore, kind: str) -> None:
    told = newer(path_of(old), kind)
    before = dump(path_of(old))
    running = start_sidecar_process(old.root)
    assert (running.url, running.stop()) == ("", 3)
    assert running.log().splitlines()[-1] == (
        f"hsconnector: the store {old.root} cannot be opened: the index {path_of(old)} cannot be used: {told}; "
        "install the hsconnector that wrote it, or a newer one, and start again"
    )
    assert dump(path_of(old)) == before


def test_a_version_that_nothing_leads_on_from_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as index:
        index.execute("PRAGMA user_version = 1")
    with pytest.raises(BrokenIndex, match="it is of version 1, from which nothing leads to 2"):
        prepare(path)
