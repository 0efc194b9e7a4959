"""One module per resource, no logic: a route asks a part of the sidecar and words the answer.

A new route goes into the module of its resource; the router of a new resource is named here.
"""

from __future__ import annotations

from server.routes import captures, health, ingest, leases, lookup

__all__ = ["ROUTERS"]

ROUTERS = (ingest.router, captures.router, lookup.router, leases.router, health.router)
