"""A column of its own counts captures in the order in which the index first heard of them.

Version 2 counted by SQLite's hidden row numbers, which VACUUM may change and which no other database has. It made the
tables of leases only when a sidecar first opened them, so they may be missing.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = None

_LEASES = """
CREATE TABLE IF NOT EXISTS leases (
    lease_id TEXT PRIMARY KEY NOT NULL, queue TEXT NOT NULL, consumer TEXT NOT NULL, created DOUBLE NOT NULL,
    deadline DOUBLE NOT NULL, captures TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lease_items (
    queue TEXT NOT NULL, capture_id TEXT NOT NULL, state TEXT NOT NULL, lease_id TEXT NOT NULL,
    deadline DOUBLE NOT NULL, deliveries INTEGER NOT NULL, remove INTEGER NOT NULL,
    PRIMARY KEY (queue, capture_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lease_items_capture ON lease_items (capture_id, state);
CREATE INDEX IF NOT EXISTS lease_items_due ON lease_items (state, deadline);
CREATE INDEX IF NOT EXISTS lease_items_lease ON lease_items (lease_id);
CREATE INDEX IF NOT EXISTS lease_items_remove ON lease_items (capture_id) WHERE remove = 1;
CREATE TABLE IF NOT EXISTS lease_counts (
    queue TEXT NOT NULL, consumer TEXT NOT NULL, outcome TEXT NOT NULL, count INTEGER NOT NULL,
    last DOUBLE NOT NULL, PRIMARY KEY (queue, consumer, outcome)
) WITHOUT ROWID
"""
_CAPTURES = """
CREATE TABLE counted (
    seq INTEGER NOT NULL PRIMARY KEY, capture_id TEXT NOT NULL UNIQUE, folder TEXT NOT NULL,
    request_id TEXT NOT NULL, dataset TEXT NOT NULL, sample_id TEXT NOT NULL, state TEXT NOT NULL,
    content_hash TEXT NOT NULL, model TEXT NOT NULL, created DOUBLE NOT NULL, size BIGINT NOT NULL,
    record BLOB NOT NULL, ended DOUBLE, reason TEXT NOT NULL DEFAULT ''
);
INSERT INTO counted SELECT rowid, capture_id, folder, request_id, dataset, sample_id, state, content_hash, model,
    created, size, record, ended, reason FROM captures;
DROP TABLE captures;
ALTER TABLE counted RENAME TO captures;
CREATE INDEX captures_live ON captures (created) WHERE ended IS NULL;
CREATE INDEX captures_live_folder ON captures (folder) WHERE ended IS NULL;
CREATE INDEX captures_ended ON captures (ended) WHERE ended IS NOT NULL;
CREATE INDEX captures_request ON captures (request_id);
CREATE INDEX captures_sample ON captures (dataset, sample_id);
CREATE INDEX captures_sample_only ON captures (sample_id) WHERE sample_id != '';
CREATE INDEX captures_state ON captures (state, capture_id);
CREATE INDEX captures_content ON captures (content_hash) WHERE content_hash != '';
CREATE INDEX captures_created ON captures (created)
"""


def upgrade() -> None:
    """From version 2."""
    for statement in f"{_LEASES};{_CAPTURES}".split(";"):
        op.execute(statement)
