"""Where shards lie, for whoever has no sidecar."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hsconnector.capture.protocol import CaptureState
from hsconnector.errors import SettingsError
from hsconnector.storage.folder import Folder
from tests.storage.version_2 import OldStore


def test_the_import_is_light() -> None:
    script = "import sys, hsconnector.storage.folder; print({'sqlalchemy', 'alembic', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_shards_are_found_by_state_and_by_id(tmp_path: Path) -> None:
    old = OldStore(tmp_path)
    ready, unsound = [old.whole() for _ in range(3)], old.whole("quarantined")
    old.close()
    (tmp_path / "captures" / "loose.safetensors").write_bytes(b"")
    (old.shard(ready[0]).parent / f".{ready[0]}.part").write_bytes(b"")
    folder = Folder.existing(tmp_path)
    assert sorted(folder.shards()) == sorted(old.shard(name) for name in ready)
    assert list(folder.shards(CaptureState.QUARANTINED)) == [old.shard(unsound, "quarantined")]
    assert folder.shard(ready[0]) == old.shard(ready[0])
    assert folder.index_path == tmp_path / "catalog.sqlite"


def test_a_folder_that_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not a store: it has no folder captures"):
        Folder.existing(tmp_path)
    assert list(Folder(tmp_path).shards()) == []
