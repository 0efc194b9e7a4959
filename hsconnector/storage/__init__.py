"""Where finished captures lie: an index in SQLite, and a folder of shards. For whoever reads them, beside a sidecar or not.

`hsconnector.storage.folder` needs nothing beyond the base install; the rest needs SQLAlchemy and Alembic, which come with
`hsconnector[serve]`.
"""
