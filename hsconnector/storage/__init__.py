"""Where finished captures lie: an index, and a folder of shards. For whoever reads them, with a sidecar or without.

`hsconnector.storage.folder` needs nothing beyond the base install; the rest needs SQLAlchemy and Alembic, which come
with `hsconnector[serve]`.
"""
