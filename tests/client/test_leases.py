from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hsconnector.client import Client
from hsconnector.client.leases import Holding, LeaseFilters, LeaseRequest, Leases
from hsconnector.errors import SidecarRefused, SidecarUnreachable
from tests.feeding import Feeder
from tests.proxy import Proxy
from tests.sidecar import SidecarThread, start_sidecar


@pytest.fixture
def leases(sidecar: SidecarThread) -> Iterator[Leases]:
    leases = Leases(sidecar.url)
    yield leases
    leases.close()


@pytest.fixture
def captures(sidecar: SidecarThread) -> list[str]:
    with Feeder(sidecar.url, layer_ids=(0, 2), hidden_size=8) as feeder:
        return [feeder.capture(torch.randn(3, 2, 8), [1, 2, 3], dataset=dataset) for dataset in "aab"]


def test_a_lease_from_taking_to_acknowledging(leases: Leases, captures: list[str]) -> None:
    lease = leases.take(LeaseRequest(consumer="me", count=2))
    assert [record.capture_id for record in lease.captures] == captures[:2] and lease.lease_id
    assert leases.holdings() == [Holding("", "me", 2)]
    assert leases.acknowledge(lease.lease_id, captures[:1]) == {captures[0]: "acked"}
    assert leases.acknowledge(lease.lease_id, captures[:1]) == {captures[0]: "already_acked"}
    assert leases.renew(lease.lease_id, 500) > time.time() + 300
    assert leases.release(lease.lease_id, captures[:2]) == [captures[1]]
    assert leases.holdings() == [Holding("", "me", 0)]


def test_only_what_was_asked_for_is_lent(leases: Leases, captures: list[str]) -> None:
    def lent(**filters: object) -> list[str]:
        wanted = LeaseRequest(consumer="me", queue=str(filters), count=9, filters=LeaseFilters(**filters))  # type: ignore[arg-type]
        return [record.capture_id for record in leases.take(wanted).captures]

    assert lent(dataset="b") == captures[2:]
    assert lent(layer_ids=(2,)) == lent(model="tiny") == captures
    assert lent(layer_ids=(2, 3)) == lent(model="other") == []
    assert leases.take(LeaseRequest(consumer="me", max_bytes=0, count=9)).captures[0].capture_id == captures[0]


def test_where_nothing_is_free_the_lease_is_empty(leases: Leases) -> None:
    lease = leases.take(LeaseRequest(consumer="me"), wait=0.01)
    assert (lease.captures, lease.lease_id) == ([], None)


def test_refusals_name_their_reason(leases: Leases) -> None:
    with pytest.raises(SidecarRefused, match="answered 404") as caught:
        leases.renew("f" * 32, 10)
    assert caught.value.kind == "lease_unknown"
    with pytest.raises(SidecarRefused, match="answered 400: consumer") as caught:
        leases.take(LeaseRequest(consumer=""))
    assert caught.value.kind == "bad_request"


def test_a_lost_call_is_not_made_again(sidecar: SidecarThread) -> None:
    with Proxy(sidecar.url, drop=1) as proxy:
        leases = Leases(proxy.url)
        with pytest.raises(SidecarUnreachable, match=f"no sidecar answers at {proxy.url}"):
            leases.holdings()
        assert proxy.accepted == 1 and leases.holdings() == []
        leases.close()


def test_the_key_travels_and_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start_sidecar(tmp_path / "store", api_key="secret")
    monkeypatch.delenv("HSC_API_KEY", raising=False)
    try:
        with pytest.raises(SidecarRefused) as caught:
            Leases(running.url).holdings()
        assert caught.value.kind == "invalid_api_key"
        assert pickle.loads(pickle.dumps(Leases(running.url, api_key="secret"))).holdings() == []
        monkeypatch.setenv("HSC_API_KEY", "secret")
        assert Leases(running.url).holdings() == []
    finally:
        running.stop()


def test_what_leaves_a_store_is_said_before_it_goes(sidecar: SidecarThread, captures: list[str]) -> None:
    with Client(sidecar.url) as client:
        found = client.collect({"dataset": "a"})
        assert [leaving.capture_id for leaving in found.data] == captures[:2] and found.count == 2
        assert client.collect({"dataset": "a"}, dry_run=False).count == 2
        assert [record.capture_id for record in client.find(state="ready")] == captures[2:]
        assert client.collect(max_bytes=0, evict="oldest").count == 1
        with pytest.raises(SidecarRefused, match="name at least one"):
            client.collect({}, dry_run=False)
        assert len(client.find(state="ready")) == 1
