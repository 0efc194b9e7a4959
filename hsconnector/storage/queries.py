"""What is asked of the captures in an index, as statements."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from hsconnector.capture.protocol import CaptureState
from hsconnector.storage.schema import captures, client_ids
from hsconnector.storage.statement import Statement, param

__all__ = [
    "ENDED_BEFORE",
    "GET",
    "IDS",
    "IN_STATE",
    "LIVE",
    "MOST_HASHES",
    "OF_CLIENT",
    "OF_REQUEST",
    "Filter",
    "page",
    "weights",
    "with_content",
]

_c = captures.c
MOST_HASHES = 1024
"""Of one statement: databases bound their parameters."""


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which captures a listing shows; None does not restrict."""

    request_id: str | None = None
    client_id: str | None = None
    dataset: str | None = None
    sample_id: str | None = None
    state: CaptureState | None = None
    content_hash: str | None = None
    model: str | None = None
    weights_id: str | None = None
    """Exactly; "" for those of which it is not known."""
    since: float | None = None
    """Seconds since the epoch; compared with `created`."""


GET = Statement(sa.select(_c.record).where(_c.capture_id == param("capture_id")))
LIVE = Statement(sa.select(_c.record).where(_c.folder == param("folder"), _c.ended.is_(None)))
IN_STATE = Statement(sa.select(_c.record).where(_c.state == param("state")))
IDS = Statement(sa.select(_c.capture_id).where(_c.state == param("state")).order_by(_c.capture_id))
OF_REQUEST = Statement(sa.select(_c.record).where(_c.request_id == param("request_id")).order_by(_c.capture_id))
OF_CLIENT = Statement(
    sa.select(client_ids.c.rank, _c.record)
    .join_from(client_ids, captures, client_ids.c.capture_id == _c.capture_id)
    .where(client_ids.c.client_id == param("client_id"))
    .order_by(_c.capture_id)
)
ENDED_BEFORE = Statement(
    sa.select(_c.capture_id, _c.request_id)
    .where(_c.ended < param("before"), _c.seq < sa.select(sa.func.max(_c.seq)).scalar_subquery())
    .order_by(_c.ended)
    .limit(param("limit"))
)
"""Never the newest capture: SQLite gives the next one the number after the largest that is there."""


@functools.cache
def weights(*names: str) -> Statement:
    """Of the captures in a state, narrowed by these columns: each weights id, how many, and the newest."""
    query = sa.select(_c.weights_id, sa.func.count(), sa.func.max(_c.capture_id)).group_by(_c.weights_id)
    return Statement(query.where(*(_c[name] == param(name) for name in ("state", *names))))


def page(wanted: Filter, *, after: bool, oldest_first: bool) -> tuple[Statement, dict[str, object]]:
    """The records of a listing and the values they are asked with; `limit` is given beside them, with `after` also
    the `cursor`."""
    values = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not None}
    return _page(tuple((name, value == "") for name, value in values.items()), after, oldest_first), values


@functools.lru_cache(maxsize=512)
def _page(asked: tuple[tuple[str, bool], ...], after: bool, oldest_first: bool) -> Statement:
    query = sa.select(_c.record).order_by(_c.capture_id if oldest_first else _c.capture_id.desc())
    for name, is_empty in asked:
        query = query.where(_condition(name), *([] if is_empty else _not_empty(name)))
    if after:
        query = query.where(_c.capture_id > param("cursor") if oldest_first else _c.capture_id < param("cursor"))
    return Statement(query.limit(param("limit")))


def _condition(name: str) -> sa.ColumnElement[bool]:
    if name == "since":
        return _c.created >= param("since")
    if name == "client_id":
        theirs = client_ids.c.client_id == param("client_id")
        best = sa.select(sa.func.min(client_ids.c.rank)).where(theirs).scalar_subquery()
        return _c.capture_id.in_(sa.select(client_ids.c.capture_id).where(theirs, client_ids.c.rank == best))
    return _c[name] == param(name)


def _not_empty(name: str) -> list[sa.ColumnElement[bool]]:
    """What the partial index of a column asks to hear."""
    return [_c[name] != ""] if name in ("sample_id", "content_hash", "weights_id") else []


def with_content(hashes: Sequence[str]) -> tuple[Statement, dict[str, object]]:
    """The records of up to `MOST_HASHES` content hashes, and the values they are asked with.

    A few lengths serve all: what is left over of one repeats the first hash.
    """
    length = 1 << (len(hashes) - 1).bit_length()
    padded = [*hashes, *[hashes[0]] * (length - len(hashes))]
    return _with_content(length), {f"hash{number}": each for number, each in enumerate(padded)}


@functools.cache
def _with_content(length: int) -> Statement:
    hashes = [param(f"hash{number}") for number in range(length)]
    return Statement(sa.select(_c.record).where(_c.content_hash != "", _c.content_hash.in_(hashes)))
