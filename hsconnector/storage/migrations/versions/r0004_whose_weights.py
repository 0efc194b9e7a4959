"""Captures say whose weights they are of; those that were there before do not know."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """From revision 0003."""
    op.execute("ALTER TABLE captures ADD COLUMN weights_id TEXT NOT NULL DEFAULT ''")
    op.execute("CREATE INDEX captures_weights ON captures (weights_id, capture_id) WHERE weights_id != ''")
