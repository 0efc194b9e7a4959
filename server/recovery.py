"""What a store holds when the sidecar starts: finish what a crash left open, list only shards that are whole.

Only files that the index does not know, or that have changed since, are read; the rest costs one `stat` each.

Only what was read and is no whole shard is moved aside. What cannot be read now (a missing permission, a failing or an
unmounted disk) stays where it is, and is ready again at the first start that reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hsconnector.capture.header import ShardHeader, data_hasher
from hsconnector.capture.protocol import CaptureState, FailReason, is_capture_id
from hsconnector.capture.record import CaptureRecord, Verdict, record_of_header
from hsconnector.errors import BrokenIndex, IndexFault, ShardError, StoreError
from hsconnector.storage.folder import SUFFIX, two_hex
from server.catalog import Catalog, refusal
from server.metrics import Metrics
from server.shard_files import ShardFile
from server.shards import PIECE_BYTES, is_regular
from server.store import Store
from server.verdict import Judge

__all__ = ["inspect_shard", "record_of_shard", "recover", "reindex_store"]

log = logging.getLogger("hsconnector.server.recovery")

_LOCK_SUFFIX = f"{SUFFIX}.lock"
"""What the connector's `file_backend` holds beside a shard that is still to come."""


MANY = 10
"""From so many ready captures on, a store without a single one of their shards is taken for a disk that is away."""


def recover(store: Store, catalog: Catalog, metrics: Metrics, *, read_all: bool = False) -> int:
    """Makes index and shards agree, fails what was being received when the last sidecar ended; counts whole shards.

    An index that turns out to be damaged is begun anew. With `read_all` every shard is read, also those that have not
    changed. Without it, raises `StoreError` where the disk of the shards seems to be missing. Raises `IndexFault` where
    the index cannot be used now.
    """
    try:
        try:
            return _recovered(store, catalog, metrics, read_all)
        except BrokenIndex as fault:
            catalog.start_anew(fault)
            return _recovered(store, catalog, metrics, read_all)
    except IndexFault as fault:
        raise refusal(catalog.path, fault) from fault


def _recovered(store: Store, catalog: Catalog, metrics: Metrics, read_all: bool) -> int:
    if not read_all:
        _check_mounted(store, catalog)
    _move_strangers(store, metrics)
    total = size = 0
    trouble = ""
    for folder in two_hex():
        known = catalog.live(folder)
        scan = Scan(store, catalog, metrics, folder, known, {} if read_all else known)
        whole = scan.area(CaptureState.READY) | scan.area(CaptureState.QUARANTINED)
        for capture_id, record in known.items():
            if capture_id not in whole:
                _without_shard(record, catalog, metrics)
        total, size = total + len(whole), size + sum(whole.values())
        trouble = trouble or _keep(catalog)
    store.used = size
    metrics.store_bytes.set(size)
    return total


def _check_mounted(store: Store, catalog: Catalog) -> None:
    known = 0
    for capture_id in catalog.ids(CaptureState.READY):
        if os.path.lexists(store.shard(capture_id)):
            return
        known += 1
    if known >= MANY:
        raise StoreError(
            f"the index knows {known} ready captures and {store.captures} holds none of their shards: mount its disk "
            f"and start again, or, if they are gone for good, run `hsconnector reindex --store {store.root}`"
        )


def _move_strangers(store: Store, metrics: Metrics) -> None:
    for area in (store.captures, store.quarantine):
        for path in area.iterdir():
            if not path.is_dir() or path.is_symlink():
                _damaged(store, path, "shards lie in two-digit folders", metrics)


def _keep(catalog: Catalog) -> str:
    """Commits what was found. A failure, such as a full disk, ends no start: only a running sidecar makes room."""
    try:
        catalog.commit()
    except BrokenIndex:
        raise
    except IndexFault as fault:
        log.error("the index cannot be written, what the start has found waits for it: %s", fault)
        return str(fault)
    return ""


def reindex_store(root: Path) -> tuple[int, int]:
    """Reads every shard of a store that no sidecar uses; whole shards and damaged files. Raises `StoreError`."""
    store = Store(root)
    metrics = Metrics()
    try:
        with contextlib.closing(Catalog(store.index_path)) as catalog:
            whole = recover(store, catalog, metrics, read_all=True)
    except (OSError, IndexFault) as error:
        raise StoreError(f"the store {root} cannot be reindexed: {error}") from error
    finally:
        store.close()
    return whole, int(metrics.registry.get_sample_value("hsconnector_damaged_files_total") or 0)


def inspect_shard(path: Path) -> tuple[ShardHeader, Verdict]:
    """Reads a whole shard once: parsed, hashed, judged. Raises `ShardError` where it is not whole."""
    with contextlib.closing(ShardFile(path)) as file:
        header = file.header()
        judge = Judge(header.dtype, header.layer_ids, header.shape[2])
        digest = data_hasher()
        end = header.data_at + header.tokens_at
        step = max(1, PIECE_BYTES // header.row_bytes) * header.row_bytes
        for offset in range(header.data_at, end, step):
            data = file.read(offset, min(step, end - offset))
            digest.update(data)
            judge.take(memoryview(data))
        token_ids = file.read(end, 8 * header.shape[0])
    digest.update(token_ids)
    if digest.hexdigest() != header.data_hash:
        raise ShardError(f"the data hashes to {digest.hexdigest()}, its header says {header.data_hash!r}")
    return header, judge.verdict(token_ids)


def record_of_shard(path: Path, state: CaptureState) -> CaptureRecord:
    """A capture's record from its shard alone; raises `ShardError`."""
    header, verdict = inspect_shard(path)
    record = record_of_header(header, state, complete=True)
    if record.capture_id != path.name.removesuffix(SUFFIX):
        raise ShardError(f"the shard belongs to capture {record.capture_id!r}")
    status = path.stat()
    return msgspec.structs.replace(
        record, finished=status.st_mtime, size=status.st_size, mtime_ns=status.st_mtime_ns, verdict=verdict
    )


@dataclass(frozen=True)
class Scan:
    """One two-digit folder."""

    store: Store
    catalog: Catalog
    metrics: Metrics
    folder: str
    known: dict[str, CaptureRecord]
    trusted: dict[str, CaptureRecord]
    """What of `known` need not be read again."""

    def area(self, state: CaptureState) -> dict[str, int]:
        """The whole shards of ready or quarantined captures: bytes by id. Everything else is moved aside."""
        root = self.store.quarantine if state is CaptureState.QUARANTINED else self.store.captures
        try:
            paths = sorted((root / self.folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            log.error("%s cannot be read, its captures are not listed: %s", root / self.folder, error)
            return {}
        found = (self._whole(path, state) for path in paths)
        return {record.capture_id: record.size for record in found if record is not None}

    def _whole(self, path: Path, state: CaptureState) -> CaptureRecord | None:
        try:
            return self._read(path, state)
        except ShardError as error:
            _damaged(self.store, path, str(error), self.metrics)
        except OSError as error:
            log.error("%s cannot be read now, it stays there and is not listed: %s", path, error)
        return None

    def _read(self, path: Path, state: CaptureState) -> CaptureRecord | None:
        if path.name.startswith(".") and path.name.endswith(".part"):
            path.unlink()
            return None
        if path.name.endswith(_LOCK_SUFFIX) and is_regular(path):
            _remove_orphan(path)
            return None
        capture_id = path.name.removesuffix(SUFFIX)
        record = self.trusted.get(capture_id)
        if record is not None and record.state is state and _unchanged(path, record):
            return record
        known = record or self.known.get(capture_id) or self.catalog.get(capture_id)
        _check_name(path, self.folder, known)
        found = _as_known(record_of_shard(path, state), known)
        if known is not None and known.lost:
            log.info("capture %s: its shard is here again, it is %s", capture_id, state)
        self.catalog.put(found)
        return found


def _as_known(found: CaptureRecord, known: CaptureRecord | None) -> CaptureRecord:
    """With what the index knew and a shard does not say: when it was finished, and the verdict on what was expected."""
    if known is None or known.data_hash != found.data_hash:
        return found
    if known.lost:
        return msgspec.structs.replace(found, verdict=known.verdict or found.verdict)
    return msgspec.structs.replace(found, finished=known.finished, detail=known.detail, verdict=known.verdict)


def _remove_orphan(lock: Path) -> None:
    """Removes a lock file beside no shard, unless an engine holds it: that one is still to write the shard."""
    if lock.with_suffix("").exists():
        return
    with contextlib.suppress(OSError):
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.unlink()
        finally:
            os.close(fd)


def _check_name(path: Path, folder: str, record: CaptureRecord | None) -> None:
    capture_id = path.name.removesuffix(SUFFIX)
    if not path.name.endswith(SUFFIX) or not is_capture_id(capture_id) or capture_id[-2:] != folder:
        raise ShardError("its name is not that of a shard of this folder")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ShardError("it is not a regular file")
    if record is not None and record.state in (CaptureState.FAILED, CaptureState.EXPIRED) and not record.lost:
        raise ShardError(f"the index says that this capture is {record.state}")


def _unchanged(path: Path, record: CaptureRecord) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (record.size, record.mtime_ns)


def _without_shard(record: CaptureRecord, catalog: Catalog, metrics: Metrics) -> None:
    if record.state is CaptureState.RECEIVING:
        state, reason = CaptureState.FAILED, FailReason.SIDECAR_RESTARTED
        detail = "the sidecar ended while this was being received"
        metrics.captures.labels(state, reason).inc()
    elif record.state in (CaptureState.READY, CaptureState.QUARANTINED):
        state, reason = CaptureState.EXPIRED, FailReason.STORE_ERROR
        detail = "its shard was gone, damaged or unreadable when the sidecar started"
        metrics.expired.inc()
    else:
        return
    log.warning("capture %s: %s: %s", record.capture_id, state, detail)
    catalog.put(
        msgspec.structs.replace(record, state=state, reason=reason, detail=detail, size=0, finished=time.time())
    )


def _damaged(store: Store, path: Path, why: str, metrics: Metrics) -> None:
    metrics.damaged.inc()
    try:
        target = store.set_aside(path)
    except OSError as error:
        log.error("%s is not a whole shard (%s); it cannot be moved to %s: %s", path, why, store.damaged, error)
        return
    log.warning("%s is not a whole shard (%s): moved to %s", path, why, target)
