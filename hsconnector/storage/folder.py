"""The folder of a store: where a shard lies, by its capture's id and state.

<store>/.lock
<store>/catalog.sqlite
<store>/captures/<last two hex digits of the id>/<capture_id>.safetensors
<store>/quarantine/<two hex>/<capture_id>.safetensors     whole but unsound
<store>/damaged/<...>                                     found at start and not whole
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hsconnector.capture.protocol import CaptureState
from hsconnector.errors import SettingsError

__all__ = ["SUFFIX", "Folder", "two_hex"]

SUFFIX = ".safetensors"


class Folder:
    """The paths of a store; nothing is opened, made or locked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.captures = root / "captures"
        self.quarantine = root / "quarantine"
        self.damaged = root / "damaged"

    @classmethod
    def existing(cls, root: Path) -> Folder:
        """A store that is there; raises `SettingsError` for a folder that is none."""
        found = cls(root)
        if not found.captures.is_dir():
            raise SettingsError(f"{root} is not a store: it has no folder captures")
        return found

    @property
    def index_path(self) -> Path:
        """The index."""
        return self.root / "catalog.sqlite"

    def area(self, state: CaptureState) -> Path:
        """Where shards of this state lie."""
        return self.quarantine if state is CaptureState.QUARANTINED else self.captures

    def folder(self, capture_id: str, state: CaptureState = CaptureState.READY) -> Path:
        """The folder of a capture's shard."""
        return self.area(state) / capture_id[-2:]

    def shard(self, capture_id: str, state: CaptureState = CaptureState.READY) -> Path:
        """The path of a capture's shard."""
        return self.folder(capture_id, state) / f"{capture_id}{SUFFIX}"

    def shards(self, state: CaptureState = CaptureState.READY) -> Iterator[Path]:
        """Every file with a shard's name in one of the two-digit folders, one folder after the other."""
        for name in two_hex():
            yield from sorted((self.area(state) / name).glob(f"*{SUFFIX}"))


def two_hex() -> Iterator[str]:
    """Every two-digit folder name."""
    return (f"{number:02x}" for number in range(256))
