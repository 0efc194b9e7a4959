"""The one writer of the index, which tells of every capture, failures and tombstones included.

One thread writes, in one transaction a batch; any thread reads. What was put but could not be committed (a full disk)
is still given by `get` and tried again.

Only an index that is damaged, or older than any that can be brought up to date, is moved aside for a new one: leases,
failures and tombstones lie nowhere else. Whatever passes (a lock, a full disk, a missing permission) is an error that
leaves it as it is, and so is a version that is newer than this one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import sqlalchemy as sa

from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.record import CaptureRecord, client_ids, kept
from hsconnector.errors import BrokenIndex, IndexFault
from hsconnector.storage import queries, schema, sqlite
from hsconnector.storage.connection import Connection
from hsconnector.storage.index import Index
from hsconnector.storage.migrations import prepare
from hsconnector.storage.statement import Statement, param, upsert

__all__ = ["Catalog", "refusal"]

log = logging.getLogger("hsconnector.server.catalog")

_UNFIT = (ValueError, OverflowError, TypeError)
"""What one record's own contents can raise."""
_LEFT = (CaptureState.FAILED, CaptureState.EXPIRED)
_encode = msgspec.msgpack.Encoder().encode
_CHANGING = ("state", "content_hash", "size", "record", "ended", "reason")
"""The other columns of a capture stay as it began."""
_PUT = upsert(schema.captures, ["capture_id"], lambda new: {name: new[name] for name in _CHANGING})
_PUT_NAME = upsert(schema.client_ids, ["client_id", "capture_id"])
_DELETE = Statement(sa.delete(schema.captures).where(schema.captures.c.capture_id == param("capture_id")))
_name = schema.client_ids.c
_DELETE_NAME = Statement(
    sa.delete(schema.client_ids).where(_name.client_id == param("client_id"), _name.capture_id == param("capture_id"))
)


def refusal(path: Path, fault: IndexFault) -> IndexFault:
    """Why an index cannot be used now, as a sentence with the way out; it is left as it is."""
    return IndexFault(f"the index {path} cannot be used: {fault}; {fault.way_out} and start again", fault.way_out)


class Catalog(Index):
    """The captures of one store. Raises `IndexFault` where its index cannot be opened now."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._durable = durable
        self._pending: dict[str, CaptureRecord] = {}
        self.path = path
        try:
            self._open()
        except BrokenIndex as fault:
            self._move_aside(fault)
            self._open()
        except IndexFault as fault:
            raise refusal(path, fault) from fault

    def close(self) -> None:
        """Commits and closes; what cannot be committed is logged and lost (shards are found again at start)."""
        self.flush()
        self._close()

    def start_anew(self, fault: BrokenIndex) -> None:
        """Moves a broken index aside and begins an empty one; nothing may be reading."""
        self._pending.clear()
        self._close()
        self._move_aside(fault)
        self._open()

    def put(self, record: CaptureRecord) -> None:
        """Sets a capture; visible to `get` at once, kept by the next `flush`."""
        self._pending[record.capture_id] = kept(record)

    def flush(self) -> str:
        """Commits what was put; on failure keeps it for the next time and says why."""
        waiting = len(self._pending)
        try:
            self.commit()
        except IndexFault as fault:
            log.error("the index cannot be written, %d captures wait for it: %s", waiting, fault)
            return f"the index cannot be written: {fault}"
        return ""

    def commit(self) -> None:
        """Commits what was put, all of it or nothing; raises `IndexFault`."""
        batch = list(self._pending.values())
        if not batch:
            return
        try:
            self._write(batch)
        except _UNFIT:
            batch = [record for record in batch if self._fits(record)]
        for record in batch:
            if self._pending.get(record.capture_id) is record:
                del self._pending[record.capture_id]

    def forget(self, before: float, limit: int) -> int:
        """Drops up to `limit` captures that failed or expired before a time, with their client ids; how many.

        The newest stays whatever it is: a queue tells what it has lent by a capture's number, and the next capture's
        number is one more than the largest.
        """
        try:
            with self._writer.transaction():
                found = self._writer.rows(queries.ENDED_BEFORE, before=before, limit=limit)
                self._writer.run(_DELETE_NAME, *(name for each in found for name in _names(*each)))
                self._writer.run(_DELETE, *({"capture_id": capture_id} for capture_id, _ in found))
        except IndexFault as fault:
            log.error("the index cannot be written, what has ended long ago stays in it: %s", fault)
            return 0
        return len(found)

    def get(self, capture_id: str) -> CaptureRecord | None:
        """One capture, or None."""
        return self._pending.get(capture_id) or super().get(capture_id)

    def with_content(self, hashes: Sequence[str]) -> list[CaptureRecord]:
        """The captures of these content hashes, oldest first, whatever their state."""
        records = {record.capture_id: record for record in super().with_content(hashes)}
        wanted = frozenset(hashes)
        for record in list(self._pending.values()):
            if record.content_hash in wanted:
                records[record.capture_id] = record
        return [records[capture_id] for capture_id in sorted(records)]

    def ids(self, state: CaptureState) -> Iterator[str]:
        """The ids of the captures in a state, oldest first; on the writer's thread."""
        return (capture_id for (capture_id,) in self._writer.each(queries.IDS, state=state))

    def _write(self, batch: Sequence[CaptureRecord]) -> None:
        with self._writer.transaction():
            self._writer.run(_PUT, *map(_row, batch))
            names = (name for record in batch for name in _names(record.capture_id, record.request_id))
            self._writer.run(_PUT_NAME, *names)

    def _fits(self, record: CaptureRecord) -> bool:
        """Writes one record of a batch that failed; a record that can never be written is not tried again."""
        try:
            self._write([record])
        except _UNFIT as error:
            log.error("capture %s: the index cannot hold it, it is dropped: %r", record.capture_id, error)
            self._pending.pop(record.capture_id, None)
            return False
        return True

    def _open(self) -> None:
        self._writer = Connection(self.path, durable=self._durable)
        try:
            self._writer.read_through()
            prepare(self.path)
            super().__init__(self.path, durable=self._durable)
        except BaseException:
            self._writer.close()
            raise

    def _close(self) -> None:
        super().close()
        self._writer.close()

    def _move_aside(self, fault: BrokenIndex) -> None:
        aside = sqlite.move_aside(self.path)
        log.error(
            "the index %s is damaged or of another version (%s): moved to %s, captures are listed anew from their "
            "shards; leases, acknowledgements, failures and deletions, which only the index held, are lost",
            self.path,
            fault,
            aside.name,
        )


def _row(record: CaptureRecord) -> dict[str, object]:
    return {
        "capture_id": record.capture_id,
        "folder": record.capture_id[-2:],
        "request_id": record.request_id,
        "dataset": record.dataset,
        "sample_id": record.sample_id,
        "state": record.state,
        "content_hash": record.content_hash,
        "model": record.model,
        "created": record.created,
        "size": record.size,
        "record": _encode(record),
        "ended": (record.finished or record.created) if record.state in _LEFT else None,
        "reason": record.reason or "",
        "weights_id": record.weights_id,
    }


def _names(capture_id: str, request_id: str) -> Iterator[dict[str, object]]:
    for name, rank in client_ids(request_id).items():
        yield {"client_id": name, "capture_id": capture_id, "rank": rank}
