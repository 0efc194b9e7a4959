"""One run at a time over a data set: two would ask for the same rows."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hsconnector.errors import SettingsError

__all__ = ["only_run"]


@contextlib.contextmanager
def only_run(sidecar: str, dataset: str, shard: tuple[int, int]) -> Iterator[None]:
    """Holds the rows of a data set for this run, `shard` being which part of how many, from 0.

    Runs on other machines are not seen. Raises SettingsError where one on this machine has any of the rows.
    """
    part, parts = shard
    with contextlib.ExitStack() as held:
        _hold(held, [sidecar, dataset], fcntl.LOCK_EX if parts == 1 else fcntl.LOCK_SH)
        _hold(held, [sidecar, dataset, f"{part}/{parts}"], fcntl.LOCK_EX)
        yield


def _hold(held: contextlib.ExitStack, names: list[str], how: int) -> None:
    digest = hashlib.sha256("\n".join(names).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"hsconnector-extract-{os.getuid()}-{digest}.lock")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SettingsError(f"{path}, which tells runs from each other, cannot be opened: {error}") from error
    held.callback(os.close, file)
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingsError(
            f"another run extracts data set {names[1]!r} into {names[0]} now: wait for its end, or give each run "
            "another part with --shard I/N, or a --dataset of its own"
        ) from None
