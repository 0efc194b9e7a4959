"""The tables of the index.

A change here goes with a new revision in `migrations/versions`, and with `REVISION`.
"""

from __future__ import annotations

import sqlalchemy as sa

__all__ = ["REVISION", "USER_VERSION", "captures", "client_ids", "lease_counts", "lease_items", "leases", "metadata"]

REVISION = "0004"
"""The newest of `migrations/versions`: what these tables are."""
USER_VERSION = 2
"""SQLite's `user_version` of an index, by which sidecars that knew no revisions tell what they may write: they could
write these tables too, so a step back to them loses nothing."""

metadata = sa.MetaData()


def _texts(*names: str, key: bool = False) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False, primary_key=key) for name in names]


versions = sa.Table("alembic_version", metadata, sa.Column("version_num", sa.String(32), primary_key=True))

captures = sa.Table(
    "captures",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("capture_id", sa.Text, nullable=False, unique=True),
    *_texts("folder", "request_id", "dataset", "sample_id", "state", "content_hash", "model"),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("record", sa.LargeBinary, nullable=False),
    sa.Column("ended", sa.Double),
    sa.Column("reason", sa.Text, nullable=False, server_default=""),
    sa.Column("weights_id", sa.Text, nullable=False, server_default=""),
)
"""`record` is the capture in msgpack; the other columns serve the filters. `seq` counts captures in the order in which
the index first heard of them."""

client_ids = sa.Table(
    "client_ids",
    metadata,
    *_texts("client_id", "capture_id", key=True),
    sa.Column("rank", sa.Integer, nullable=False),
    sqlite_with_rowid=False,
)
"""The ids by which a client may know a capture's request; see `hsconnector.capture.record.client_ids`."""

leases = sa.Table(
    "leases",
    metadata,
    *_texts("lease_id", key=True),
    *_texts("queue", "consumer"),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("deadline", sa.Double, nullable=False),
    *_texts("captures"),
    sqlite_with_rowid=False,
)
"""`captures` is a JSON list of capture ids."""

lease_items = sa.Table(
    "lease_items",
    metadata,
    *_texts("queue", "capture_id", key=True),
    *_texts("state", "lease_id"),
    sa.Column("deadline", sa.Double, nullable=False),
    sa.Column("deliveries", sa.Integer, nullable=False),
    sa.Column("remove", sa.Integer, nullable=False),
    sqlite_with_rowid=False,
)
"""One capture in one queue, from its first delivery on."""

lease_counts = sa.Table(
    "lease_counts",
    metadata,
    *_texts("queue", "consumer", "outcome", key=True),
    sa.Column("count", sa.Integer, nullable=False),
    sa.Column("last", sa.Double, nullable=False),
    sqlite_with_rowid=False,
)


def _index(name: str, *columns: sa.Column[object], where: sa.ColumnElement[bool] | None = None) -> None:
    sa.Index(name, *columns, sqlite_where=where, postgresql_where=where)


_c, _item = captures.c, lease_items.c
_index("captures_live", _c.created, where=_c.ended.is_(None))
_index("captures_live_folder", _c.folder, where=_c.ended.is_(None))
_index("captures_ended", _c.ended, where=_c.ended.is_not(None))
_index("captures_request", _c.request_id)
_index("captures_sample", _c.dataset, _c.sample_id)
_index("captures_sample_only", _c.sample_id, where=_c.sample_id != "")
_index("captures_state", _c.state, _c.capture_id)
_index("captures_content", _c.content_hash, where=_c.content_hash != "")
_index("captures_created", _c.created)
_index("captures_weights", _c.weights_id, _c.capture_id, where=_c.weights_id != "")
_index("lease_items_capture", _item.capture_id, _item.state)
_index("lease_items_due", _item.state, _item.deadline)
_index("lease_items_lease", _item.lease_id)
_index("lease_items_remove", _item.capture_id, where=_item.remove == 1)
