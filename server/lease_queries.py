"""What is asked and changed where captures are lent, as statements."""

from __future__ import annotations

import enum
import functools

import sqlalchemy as sa

from hsconnector.capture.protocol import CaptureState, FailReason
from hsconnector.storage.schema import captures, lease_counts, lease_items, leases
from hsconnector.storage.statement import Statement, param, upsert
from server.lease import LeaseFilter, Unheld

__all__ = ["ItemState", "free", "unheld"]


class ItemState(enum.StrEnum):
    """Where a capture stands in one queue."""

    FREE = "free"
    """It was lent, and nobody holds it."""
    LEASED = "leased"
    ACKED = "acked"
    GONE = "gone"
    """Acknowledged, and its shard is removed."""


_c, _item, _lease, _count = captures.c, lease_items.c, leases.c, lease_counts.c
_has_shard = _c.state.in_([CaptureState.READY, CaptureState.QUARANTINED])
_is_leased = _item.state == ItemState.LEASED
_is_acked = _item.state == ItemState.ACKED
_of_queue = _item.queue == param("of_queue")
_of_capture = _item.capture_id == param("of_capture")
_of_lease = _lease.lease_id == param("of_lease")

NEWEST = Statement(sa.select(sa.func.max(_c.seq)))
LEASE = Statement(
    sa.select(_lease.lease_id, _lease.queue, _lease.consumer, _lease.deadline, _lease.captures).where(_of_lease)
)
ITEM = Statement(sa.select(_item.state, _item.lease_id).where(_of_queue, _of_capture))
HELD_BY = Statement(sa.select(_item.capture_id).where(_item.lease_id == param("of_lease"), _is_leased))
HELD_BY_CONSUMER = Statement(
    sa.select(_item.capture_id)
    .join_from(lease_items, leases, _item.lease_id == _lease.lease_id)
    .where(_is_leased, _of_queue, _lease.consumer == param("of_consumer"))
)
IS_HELD = Statement(sa.select(sa.true()).where(_of_capture, _is_leased, _item.deadline > param("now")))
IS_ACKED = Statement(sa.select(sa.true()).where(_of_capture, _is_acked).limit(1))
HAS_ACKED = Statement(sa.select(sa.true()).where(_is_acked).limit(1))
LEASED = Statement(sa.select(sa.func.count()).select_from(lease_items).where(_is_leased))
LEASED_IN = Statement(sa.select(sa.func.count()).select_from(lease_items).where(_is_leased, _of_queue))
COUNTS = Statement(sa.select(_count.queue, _count.consumer, _count.outcome, _count["count"], _count.last))


def _by_consumer(*conditions: sa.ColumnElement[bool]) -> Statement:
    return Statement(
        sa.select(_lease.queue, _lease.consumer, sa.func.count())
        .join_from(lease_items, leases, _item.lease_id == _lease.lease_id)
        .where(_is_leased, *conditions)
        .group_by(_lease.queue, _lease.consumer)
    )


HOLDERS = _by_consumer()
OVERDUE = _by_consumer(_item.deadline <= param("now"))

BEGIN = upsert(leases, ["lease_id"])
LEND = upsert(
    lease_items,
    ["queue", "capture_id"],
    lambda new: {
        "state": ItemState.LEASED,
        "lease_id": new.lease_id,
        "deadline": new.deadline,
        "deliveries": _item.deliveries + 1,
    },
    state=ItemState.LEASED,
    deliveries=1,
    remove=0,
)
COUNT = upsert(
    lease_counts,
    ["queue", "consumer", "outcome"],
    lambda new: {"count": _count["count"] + new["count"], "last": new["last"]},
)


def _set(state: ItemState, *conditions: sa.ColumnElement[bool], **more: object) -> Statement:
    return Statement(sa.update(lease_items).where(*conditions).values(state=state, **more))


_not_gone = _item.state != ItemState.GONE
ACK = _set(ItemState.ACKED, _of_queue, _of_capture, _not_gone)
ACK_AND_REMOVE = _set(ItemState.ACKED, _of_queue, _of_capture, _not_gone, remove=1)
FREE = _set(ItemState.FREE, _of_queue, _of_capture)
FREE_OVERDUE = _set(ItemState.FREE, _is_leased, _item.deadline <= param("now"))
GONE = _set(ItemState.GONE, _of_capture, _is_acked)
RENEW = Statement(sa.update(leases).where(_of_lease).values(deadline=param("until")))
RENEW_ITEMS = Statement(
    sa.update(lease_items).where(_item.lease_id == param("of_lease"), _is_leased).values(deadline=param("until"))
)
TIDY_LEASES = Statement(sa.delete(leases).where(_lease.deadline < param("before")))
TIDY_COUNTS = Statement(sa.delete(lease_counts).where(_count.last < param("before")))
TIDY_ITEMS = Statement(
    sa.delete(lease_items).where(
        ~_is_leased,
        ~sa.exists().where(
            _c.capture_id == _item.capture_id,
            sa.or_(_c.state == CaptureState.READY, _c.reason == FailReason.STORE_ERROR),
        ),
    )
)
"""What the store lost may come back: it stays acknowledged."""


def free(filters: LeaseFilter) -> tuple[Statement, dict[str, object]]:
    """What may be lent in a queue, now or once it is final, from the capture after number `floor` on; and the values of
    the filters. Gives number, state, state in the queue, deliveries and record."""
    values = {name: getattr(filters, name) for name in ("dataset", "sample_id", "model", "since")}
    given = {name: value for name, value in values.items() if value is not None}
    return _free(tuple(given)), given


@functools.cache
def _free(names: tuple[str, ...]) -> Statement:
    state = sa.func.coalesce(_item.state, ItemState.FREE.value)
    in_queue = captures.outerjoin(lease_items, sa.and_(_of_queue, _item.capture_id == _c.capture_id))
    query = (
        sa.select(_c.seq, _c.state, state, sa.func.coalesce(_item.deliveries, 0), _c.record)
        .select_from(in_queue)
        .with_hint(captures, "NOT INDEXED", "sqlite")
        .where(_c.seq > param("floor"), _c.state.in_([CaptureState.READY, CaptureState.RECEIVING]))
        .where(state.not_in([ItemState.ACKED, ItemState.GONE]))
        .order_by(_c.seq)
    )
    for name in names:
        query = query.where(_c.created >= param("since") if name == "since" else _c[name] == param(name))
    return Statement(query)


@functools.cache
def unheld(kind: Unheld, *, by_age: bool) -> Statement:
    """The records of what no lease holds: of one `state` by id, or by age those created before a time (`before`)."""
    item, held = lease_items.alias("item"), lease_items.alias("held")
    mine = sa.and_(item.c.capture_id == _c.capture_id, item.c.state == ItemState.ACKED)
    query = sa.select(_c.record).where(
        ~sa.exists().where(held.c.capture_id == _c.capture_id, held.c.state == ItemState.LEASED)
    )
    if kind is Unheld.ACKED:
        query = query.where(sa.exists().where(mine))
    if kind is Unheld.ASKED:
        asked = sa.select(_item.capture_id).where(_item.remove == 1)
        query = query.where(_c.capture_id.in_(asked), sa.exists().where(mine, item.c.remove == 1))
    if not by_age:
        return Statement(query.where(_c.state == param("state")).order_by(_c.capture_id))
    query = query.with_hint(captures, "INDEXED BY captures_live", "sqlite")
    return Statement(query.where(_c.ended.is_(None), _c.created < param("before"), _has_shard).order_by(_c.created))
