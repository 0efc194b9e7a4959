"""`hsconnector reindex`: the index of a store, rebuilt from its shards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from hsconnector.cli import CouldNotStart
from hsconnector.storage.folder import Folder

try:
    from server.recovery import reindex_store
except ModuleNotFoundError as error:
    raise CouldNotStart.without(error, "serve") from error

__all__ = ["reindex"]


def reindex(
    store: Annotated[Path, typer.Option(help="The folder of the shards; no sidecar may be running on it.")],
) -> None:
    """Reads and hashes every shard of a store and makes the index say what is there.

    Failures and deletions, which have no shard, stay as the index has them.
    """
    Folder.existing(store)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    whole, damaged = reindex_store(store.absolute())
    typer.echo(f"{whole} whole shards, {damaged} damaged files moved aside")
