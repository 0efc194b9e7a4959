"""Leases: a state machine against a model of them, then the routes of a real sidecar."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hsconnector.capture.protocol import CaptureState, new_capture_id
from hsconnector.capture.record import CaptureRecord
from server.catalog import Catalog
from server.lease import Ack, Lease, LeaseFilter, Unheld, Wanted
from server.leases import Leases
from server.metrics import Metrics
from server.refusals import Refusal
from tests.examples import examples
from tests.server.engine import Engine, metric
from tests.sidecar import SidecarThread, start_sidecar, start_sidecar_process

CONSUMERS = st.sampled_from(["a", "b", "c"])


def ready(
    catalog: Catalog, *, state: CaptureState = CaptureState.READY, size: int = 10, **facts: str | tuple[int, ...]
) -> str:
    name = new_capture_id()
    catalog.put(
        CaptureRecord(
            capture_id=name,
            request_id="cmpl-x-0-0123abcd",
            state=state,
            size=size,
            created=time.time(),
            finished=time.time(),
            **{"layer_ids": (0, 2, 4), **facts},  # type: ignore[arg-type]
        )
    )
    catalog.flush()
    return name


class Queue(RuleBasedStateMachine):
    """Consumers that crash (never answer), repeat, overlap and finish late; a sidecar that restarts in between."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "catalog.sqlite"
        self.clock = 1000.0
        self.known: dict[str, str] = {}
        """Captures in the order in which they began: receiving, free, leased or acked, as they must be."""
        self.holder: dict[str, tuple[str, float]] = {}
        self.lent: dict[str, tuple[Lease, float]] = {}
        self.deliveries = 0
        self._open()

    def _open(self) -> None:
        self.catalog = Catalog(self.path)
        self.table = Leases(self.path, Metrics(), now=lambda: self.clock)

    def teardown(self) -> None:
        self.table.close()
        self.catalog.close()
        self.folder.cleanup()

    def _pass_deadlines(self) -> None:
        for name, (_, deadline) in list(self.holder.items()):
            if deadline <= self.clock:
                self.known[name] = "free"
                del self.holder[name]

    @rule(count=st.integers(1, 4))
    def captures_arrive(self, count: int) -> None:
        for _ in range(count):
            self.known[ready(self.catalog)] = "free"

    @rule()
    def a_capture_begins(self) -> None:
        self.known[ready(self.catalog, state=CaptureState.RECEIVING, size=0)] = "receiving"

    @precondition(lambda self: "receiving" in self.known.values())
    @rule(data=st.data())
    def a_capture_ends(self, data: st.DataObject) -> None:
        """Perhaps long after captures that began later have been lent and acknowledged."""
        name = data.draw(st.sampled_from([name for name, state in self.known.items() if state == "receiving"]))
        record = self.catalog.get(name)
        assert record is not None
        self.catalog.put(msgspec.structs.replace(record, state=CaptureState.READY, size=10))
        self.catalog.flush()
        self.known[name] = "free"

    @rule(seconds=st.sampled_from([1.0, 7.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock += seconds
        self._pass_deadlines()

    @rule()
    def the_sidecar_restarts(self) -> None:
        self.table.close()
        self.catalog.close()
        self._open()

    @rule(target=leases, consumer=CONSUMERS, count=st.integers(1, 5), deadline_s=st.sampled_from([5.0, 20.0]))
    def take(self, consumer: str, count: int, deadline_s: float) -> object:
        lease = self.table.take(Wanted(consumer=consumer, count=count, deadline_s=deadline_s))
        free = [name for name, state in self.known.items() if state == "free"]
        names = [each.record.capture_id for each in lease.captures]
        assert names == free[:count]
        self.deliveries += len(names)
        for name in names:
            self.known[name] = "leased"
            self.holder[name] = (lease.lease_id, self.clock + deadline_s)
        if not names:
            assert lease.lease_id == ""
            return multiple()
        self.lent[lease.lease_id] = (lease, self.clock + deadline_s)
        return lease

    @rule(lease=leases, data=st.data(), remove=st.booleans())
    def ack(self, lease: Lease, data: st.DataObject, remove: bool) -> None:
        names = [each.record.capture_id for each in lease.captures]
        some = data.draw(st.none() | st.lists(st.sampled_from(names), unique=True, min_size=1))
        answers = self.table.ack(lease.lease_id, some, remove=remove)
        assert set(answers) == set(names if some is None else some)
        late = self.lent[lease.lease_id][1] <= self.clock
        for name, answer in answers.items():
            if self.holder.get(name, ("",))[0] == lease.lease_id:
                assert answer is (Ack.ACKED if self.known[name] == "leased" else Ack.ALREADY_ACKED)
                self.known[name] = "acked"
                self.holder[name] = (lease.lease_id, float("inf"))
            else:
                assert answer is (Ack.LEASE_EXPIRED if late else Ack.RELEASED)

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        names = [each.record.capture_id for each in lease.captures]
        mine = [n for n in names if self.known[n] == "leased" and self.holder[n][0] == lease.lease_id]
        assert self.table.release(lease.lease_id) == mine
        for name in mine:
            self.known[name] = "free"
            del self.holder[name]

    @rule(lease=leases, deadline_s=st.sampled_from([5.0, 20.0]))
    def renew(self, lease: Lease, deadline_s: float) -> None:
        if self.lent[lease.lease_id][1] <= self.clock:
            with pytest.raises(Refusal, match="ended"):
                self.table.renew(lease.lease_id, deadline_s)
            return
        deadline = self.table.renew(lease.lease_id, deadline_s)
        assert deadline == self.clock + deadline_s
        self.lent[lease.lease_id] = (lease, deadline)
        for name, (holder, _) in self.holder.items():
            if holder == lease.lease_id and self.known[name] == "leased":
                self.holder[name] = (holder, deadline)

    @rule(lease=consumes(leases))
    def the_consumer_crashes(self, lease: Lease) -> None:
        """Nobody will ever answer for this lease."""

    @invariant()
    def nothing_is_lost(self) -> None:
        self._pass_deadlines()
        unheld = [record.capture_id for record in self.table.unheld(Unheld.ANY)]
        assert unheld == sorted(name for name, state in self.known.items() if state not in ("leased", "receiving"))
        counts = self.table.counts()
        assert sum(entry["held"] for entry in counts) == sum(state == "leased" for state in self.known.values())
        assert sum(entry["delivered"] + entry["redelivered"] for entry in counts) == self.deliveries
        assert sum(entry["acked"] for entry in counts) == sum(state == "acked" for state in self.known.values())


def test_consumers_that_crash_repeat_overlap_and_finish_late() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        Queue,
        settings=settings(
            max_examples=examples(40), stateful_step_count=30, deadline=None, suppress_health_check=checks
        ),
    )


# ---- one table


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog(tmp_path / "catalog.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def table(catalog: Catalog) -> Iterator[Leases]:
    opened = Leases(catalog.path, Metrics())
    yield opened
    opened.close()


def names(lease: Lease) -> list[str]:
    return [each.record.capture_id for each in lease.captures]


def test_filters(catalog: Catalog, table: Leases) -> None:
    first, other = ready(catalog, dataset="d"), ready(catalog, dataset="e")
    ready(catalog, dataset="d", state=CaptureState.QUARANTINED)
    assert names(table.take(Wanted(consumer="c", count=9, filters=LeaseFilter(dataset="d")))) == [first]
    for filters in (
        LeaseFilter(layer_ids=(0, 3)),
        LeaseFilter(lora="x"),
        LeaseFilter(model="m"),
        LeaseFilter(since=9e9),
    ):
        assert names(table.take(Wanted(consumer="c", count=9, filters=filters))) == []
    assert names(table.take(Wanted(consumer="c", count=9, filters=LeaseFilter(layer_ids=(0, 4))))) == [other]


@pytest.mark.parametrize("revision", ["", "r1", "r2"])
def test_a_revision_is_taken_by_name_only(catalog: Catalog, table: Leases, revision: str) -> None:
    """The empty one too: it is that of a model without revisions, not any."""
    made = {name: ready(catalog, model_revision=name) for name in ("", "r1", "r2")}
    wanted = Wanted(consumer="c", count=9, filters=LeaseFilter(model_revision=revision))
    assert names(table.take(wanted)) == [made[revision]]


@pytest.mark.parametrize(("layers", "fits"), [((0, 2, 4), True), ((0, 2, 4, 5), False), ((2,), True), ((3,), False)])
def test_a_capture_holds_the_layers_that_are_asked_for(
    catalog: Catalog, table: Leases, layers: tuple[int, ...], fits: bool
) -> None:
    """Exactly all of them is enough."""
    name = ready(catalog, layer_ids=(0, 2, 4))
    wanted = Wanted(consumer="c", count=9, filters=LeaseFilter(layer_ids=layers))
    assert names(table.take(wanted)) == ([name] if fits else [])


def test_deliveries_are_counted(catalog: Catalog, table: Leases) -> None:
    ready(catalog)
    counted = []
    for _ in range(4):
        lease = table.take(Wanted(consumer="c"))
        counted += [each.deliveries for each in lease.captures]
        table.release(lease.lease_id)
    assert counted == [1, 2, 3, 4]


def test_a_lease_is_bounded_in_bytes_but_never_empty(catalog: Catalog, table: Leases) -> None:
    sizes = [ready(catalog, size=size) for size in (100, 40, 40, 40)]
    assert names(table.take(Wanted(consumer="c", count=9, max_bytes=50))) == sizes[:1]
    assert names(table.take(Wanted(consumer="c", count=9, max_bytes=80))) == sizes[1:3]


def test_each_queue_lends_every_capture(catalog: Catalog, table: Leases) -> None:
    name = ready(catalog)
    first, second = (table.take(Wanted(consumer="c", queue=queue)) for queue in ("epoch-1", "epoch-2"))
    assert names(first) == names(second) == [name]
    table.ack(first.lease_id, remove=True)
    assert list(table.unheld(Unheld.ASKED)) == []
    table.release(second.lease_id)
    assert [record.capture_id for record in table.unheld(Unheld.ASKED)] == [name]


def test_a_capture_that_ends_after_later_ones_were_done_is_lent(catalog: Catalog, table: Leases) -> None:
    slow, quick = ready(catalog, state=CaptureState.RECEIVING), ready(catalog)
    lease = table.take(Wanted(consumer="c", count=9))
    table.ack(lease.lease_id)
    assert names(lease) == [quick]
    assert names(table.take(Wanted(consumer="c"))) == []
    record = catalog.get(slow)
    assert record is not None
    catalog.put(msgspec.structs.replace(record, state=CaptureState.READY))
    catalog.flush()
    assert names(table.take(Wanted(consumer="c"))) == [slow]


def test_what_nobody_will_ask_about_is_forgotten(catalog: Catalog) -> None:
    clock = time.time()
    table = Leases(catalog.path, Metrics(), now=lambda: clock)
    name = ready(catalog)
    lease = table.take(Wanted(consumer="c", deadline_s=5))
    table.ack(lease.lease_id)
    record = catalog.get(name)
    assert record is not None
    catalog.put(CaptureRecord(capture_id=name, request_id=record.request_id, state=CaptureState.EXPIRED))
    catalog.flush()
    clock += 2 * 86_400
    table.expire()
    assert table._index._driver.execute("SELECT count(*) FROM lease_items").fetchone() == (0,)
    with pytest.raises(Refusal, match="no lease"):
        table.ack(lease.lease_id)
    table.close()


def test_taking_does_not_slow_down_with_what_is_done(catalog: Catalog, table: Leases) -> None:
    """The anti-join walks the indexes: no scan of either table, no sorting."""
    seen: list[str] = []
    table._index._driver.set_trace_callback(seen.append)
    table.take(Wanted(consumer="c", filters=LeaseFilter(dataset="d")))
    table._index._driver.set_trace_callback(None)
    query = next(text for text in seen if "LEFT OUTER JOIN" in text)
    plan = [row[3] for row in table._index._driver.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert not any(step.startswith("SCAN") for step in plan), plan


# ---- HTTP


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SidecarThread]:
    running = start_sidecar(tmp_path / "store", sweep_s=0.05)
    yield running
    running.stop()


def take(http: httpx.Client, **body: object) -> dict[str, object]:
    answer = http.post("/v1/leases", json={"consumer": "c", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def ids(lease: dict[str, object]) -> list[str]:
    captures = lease["captures"]
    assert isinstance(captures, list)
    return [capture["capture_id"] for capture in captures]


def test_a_capture_goes_round(own: SidecarThread) -> None:
    with Engine(own.url) as engine, httpx.Client(base_url=own.url, timeout=60) as http:
        name = engine.capture(5, dataset="d")
        lease = take(http, count=10, filters={"dataset": "d", "layer_ids": [0, 4]})
        assert (ids(lease), lease["lent"], lease["receiving"]) == ([name], 1, 0)
        assert take(http)["lease_id"] is None
        path = f"/v1/leases/{lease['lease_id']}"
        assert http.post(f"{path}/renew", json={"deadline_s": 60}).json()["deadline"] > time.time() + 50
        assert http.post(f"{path}/release").json()["released"] == [name]
        assert http.post(f"{path}/release").json()["released"] == []
        again = take(http)
        assert again["captures"][0]["deliveries"] == 2  # type: ignore[index]
        path = f"/v1/leases/{again['lease_id']}"
        assert http.post(f"{path}/ack", json={"delete": True}).json()["captures"] == {name: "acked"}
        assert http.post(f"{path}/ack", json={"delete": True}).json()["captures"] == {name: "already_acked"}
        gone = http.get(f"/v1/captures/{name}/tensors")
        assert (gone.status_code, gone.json()["error"]["type"]) == (410, "capture_expired")
        assert "with its acknowledgement" in gone.json()["error"]["message"]
        (counts,) = http.get("/v1/leases").json()["data"]
        assert (
            counts | {"consumer": "c", "delivered": 1, "redelivered": 1, "acked": 1, "released": 1, "held": 0} == counts
        )
        assert metric(http, 'hsconnector_lent_captures_total{outcome="acked"}') == 1
        assert 'consumer="' not in http.get("/metrics").text


def test_a_consumer_that_was_restarted_gives_back_all_it_held(own: SidecarThread) -> None:
    """It knows its leases no more; those of others and of other queues stay."""
    with Engine(own.url) as engine, httpx.Client(base_url=own.url, timeout=60) as http:
        names = [engine.capture(5, dataset="d") for _ in range(3)]
        mine = [*ids(take(http)), *ids(take(http))]
        others = ids(take(http, consumer="other"))
        take(http, count=3, queue="q")
        release = {"consumer": "c", "queue": ""}
        assert sorted(http.post("/v1/leases:release", json=release).json()["released"]) == sorted(mine)
        assert http.post("/v1/leases:release", json=release).json()["released"] == []
        held = {(each["queue"], each["consumer"]): each["held"] for each in http.get("/v1/leases").json()["data"]}
        assert held == {("", "c"): 0, ("", "other"): 1, ("q", "c"): 3}
        assert sorted(ids(take(http, count=3)) + others) == sorted(names)
        assert http.post("/v1/leases:release", json={"consumer": ""}).status_code == 400


def test_an_ack_after_the_deadline_is_answered_by_name_and_changes_nothing(own: SidecarThread) -> None:
    with Engine(own.url) as engine, httpx.Client(base_url=own.url, timeout=60) as http:
        name = engine.capture(5)
        late = take(http, deadline_s=0.01)
        time.sleep(0.05)
        taken = take(http, consumer="other")
        assert ids(late) == ids(taken) == [name]
        answer = http.post(f"/v1/leases/{late['lease_id']}/ack", json={"delete": True})
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "lease_expired")
        assert http.post(f"/v1/leases/{late['lease_id']}/renew").json()["error"]["type"] == "lease_expired"
        assert http.get(f"/v1/captures/{name}").json()["state"] == "ready"
        assert http.post(f"/v1/leases/{taken['lease_id']}/ack").json()["acked"] == [name]


def test_a_lease_waits_for_a_capture(own: SidecarThread) -> None:
    with Engine(own.url) as engine, httpx.Client(base_url=own.url, timeout=60) as http:
        found: list[dict[str, object]] = []
        asking = threading.Thread(
            target=lambda: found.append(http.post("/v1/leases?wait=60", json={"consumer": "c"}).json())
        )
        asking.start()
        name = engine.capture(5)
        asking.join()
        assert ids(found[0]) == [name]


def test_a_freed_capture_wakes_who_waits(own: SidecarThread) -> None:
    """The deadline of the first lease passes while the second consumer waits."""
    with Engine(own.url) as engine, httpx.Client(base_url=own.url, timeout=60) as http:
        name = engine.capture(5)
        take(http, deadline_s=0.2)
        assert ids(http.post("/v1/leases?wait=60", json={"consumer": "b"}).json()) == [name]


def test_leases_outlive_a_kill(tmp_path: Path) -> None:
    first = start_sidecar_process(tmp_path / "store")
    with Engine(first.url) as engine, httpx.Client(base_url=first.url, timeout=60) as http:
        done, held = engine.capture(5), engine.capture(5)
        lease = take(http, count=2)
        http.post(f"/v1/leases/{lease['lease_id']}/ack", json={"capture_ids": [done]})
    first.kill()
    second = start_sidecar_process(tmp_path / "store")
    try:
        with httpx.Client(base_url=second.url, timeout=60) as http:
            assert take(http)["lent"] == 1
            assert http.post(f"/v1/leases/{lease['lease_id']}/release").json()["released"] == [held]
            assert ids(take(http, count=9)) == [held]
    finally:
        assert second.stop() == 0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"consumer": ""},
        {"consumer": "x" * 257},
        {"consumer": "c", "count": 0},
        {"consumer": "c", "count": 1001},
        {"consumer": "c", "deadline_s": 0},
        {"consumer": "c", "deadline_s": 1e9},
        {"consumer": "c", "filters": {"state": "ready"}},
        {"consumer": "c", "filters": {"layer_ids": [-1]}},
        {"consumer": "c", "more": 1},
        [],
    ],
)
def test_a_body_that_is_no_lease_is_refused(sidecar: SidecarThread, http: httpx.Client, body: object) -> None:
    answer = http.post("/v1/leases", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "bad_request")


def test_what_is_not_known(sidecar: SidecarThread, http: httpx.Client, engine: Engine) -> None:
    for verb in ("ack", "release", "renew"):
        answer = http.post(f"/v1/leases/{'0' * 32}/{verb}")
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "lease_unknown")
    engine.capture(5)
    lease = take(http, queue=os.urandom(4).hex())
    answer = http.post(f"/v1/leases/{lease['lease_id']}/ack", json={"capture_ids": ["0" * 32]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "not_in_lease")
