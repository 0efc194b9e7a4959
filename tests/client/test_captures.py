from __future__ import annotations

import http.server
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from hsconnector.capture.protocol import CaptureState, FailReason, new_capture_id
from hsconnector.client import Client
from hsconnector.errors import (
    CaptureExpired,
    CaptureFailed,
    CaptureNotFound,
    CapturePending,
    CaptureQuarantined,
    SettingsError,
    ShardError,
    SidecarRefused,
    SidecarUnreachable,
)
from tests.feeding import Feeder
from tests.proxy import Proxy
from tests.shards import overwrite
from tests.sidecar import SidecarThread, start_sidecar

LAYERS = (0, 2, 5)
TOKENS = [21, 22, 23, 24, 25]


def states(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """`[5, 3, 16]`."""
    return torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def feeder(sidecar: SidecarThread) -> Iterator[Feeder]:
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=16) as feeder:
        yield feeder


@pytest.fixture(params=[True, False], ids=["file", "http"])
def client(sidecar: SidecarThread, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(sidecar.url, local=request.param) as client:
        yield client


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_capture_arrives_as_it_was_sent(sidecar: SidecarThread, client: Client, dtype: torch.dtype) -> None:
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=16, dtype=dtype) as feeder:
        capture_id = feeder.capture(states(dtype), TOKENS, sample_id="s1", tags={"split": "train"})
    record = client.record(capture_id)
    for handle in (capture_id, record.handle, record):
        capture = client.fetch(handle)
        assert capture.hidden_states.dtype is dtype and torch.equal(capture.hidden_states, states(dtype))
        assert capture.token_ids.tolist() == TOKENS and capture.token_ids.dtype is torch.int64
        assert (capture.layer_ids, capture.capture_id) == (LAYERS, capture_id)
        assert (capture.metadata["sample_id"], capture.metadata["model"]) == ("s1", "tiny")
        assert capture.verdict is not None and capture.verdict.sound
        assert (capture.path is None) is not client.local
    assert (record.num_rows, record.hidden_size, record.tags) == (5, 16, {"split": "train"})
    assert Path(record.path or "").stat().st_size == record.size


def test_views_are_cut_from_the_capture(client: Client, feeder: Feeder) -> None:
    capture_id = feeder.capture(states(), TOKENS)
    view = client.fetch(capture_id, layers=[5, 0], rows=(1, 4))
    assert torch.equal(view.hidden_states, states()[1:4, [0, 2]])
    assert (view.token_ids.tolist(), view.layer_ids, view.first_row) == (TOKENS[1:4], (0, 5), 1)
    assert torch.equal(client.fetch(capture_id, rows=slice(-2, None)).hidden_states, states()[-2:])
    assert torch.equal(client.fetch(capture_id, layers=[2]).layer(2), states()[:, 1])
    with pytest.raises(SettingsError, match=r"layers \[3\] are not among the captured \[0, 2, 5\]"):
        client.fetch(capture_id, layers=[3, 5])
    with pytest.raises(SettingsError, match="rows 2:6 is no range within the 5 rows"):
        client.fetch(capture_id, rows=(2, 6))


def test_numpy_and_widening(sidecar: SidecarThread, client: Client) -> None:
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=16, dtype=torch.bfloat16) as feeder:
        capture_id = feeder.capture(states(torch.bfloat16), TOKENS)
    with pytest.raises(SettingsError, match='dtype="float32"'):
        client.fetch(capture_id, framework="numpy")
    capture = client.fetch(capture_id, framework="numpy", dtype="float32")
    assert isinstance(capture.token_ids, np.ndarray)
    assert np.array_equal(capture.hidden_states, states(torch.bfloat16).float().numpy())


def test_a_capture_not_heard_of_yet_is_waited_for(client: Client, feeder: Feeder) -> None:
    capture_id = new_capture_id()
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(client.fetch, capture_id, wait=60)
        feeder.capture(states(), TOKENS)
        feeder.capture(states(), TOKENS, capture_id=capture_id)
        assert torch.equal(coming.result().hidden_states, states())


def test_what_cannot_be_given_says_why(client: Client, feeder: Feeder) -> None:
    nowhere = new_capture_id()
    with pytest.raises(CaptureNotFound) as caught:
        client.fetch(nowhere, wait=0.1)
    assert caught.value.capture_id == nowhere
    pending = feeder.open(5)
    with pytest.raises(CapturePending, match=r"still receiving after 0[.]1 s"):
        client.fetch(pending, wait=0.1)
    assert client.record(pending).state is CaptureState.RECEIVING
    feeder.fail(pending, FailReason.ABORTED, "the client went away")
    with pytest.raises(CaptureFailed, match=r"failed: aborted \(the client went away\)") as failed:
        client.fetch(pending)
    assert (failed.value.capture_id, failed.value.reason) == (pending, "aborted")


def test_deleted_captures_are_expired_and_deleting_again_is_harmless(client: Client, feeder: Feeder) -> None:
    capture_id = feeder.capture(states(), TOKENS)
    before = client.record(capture_id)
    client.delete(capture_id)
    client.delete(before.handle)
    with pytest.raises(CaptureExpired) as caught:
        client.fetch(capture_id)
    assert caught.value.capture_id == capture_id
    with pytest.raises(CaptureExpired):
        client.fetch(before)


def test_unsound_captures_are_given_only_when_asked_for(client: Client, feeder: Feeder) -> None:
    unsound = states()
    unsound[2:4] = 0
    capture_id = feeder.capture(unsound, TOKENS)
    with pytest.raises(CaptureQuarantined, match=r"unsound: zero_rows in rows \[2, 3\]") as caught:
        client.fetch(capture_id)
    assert caught.value.reason == "zero_rows"
    capture = client.fetch(capture_id, quarantined=True, rows=(1, 3))
    assert torch.equal(capture.hidden_states, unsound[1:3])
    assert capture.verdict is not None and not capture.verdict.sound
    stale = replace(client.record(capture_id), state=CaptureState.READY, path=None)
    with pytest.raises(CaptureQuarantined, match="zero_rows"):
        client.fetch(stale)


def test_damage_is_found_by_the_checksum(client: Client, feeder: Feeder) -> None:
    capture_id = feeder.capture(states(), TOKENS)
    path = Path(client.record(capture_id).path or "")
    body = bytearray(path.read_bytes())
    body[-100] ^= 1
    overwrite(path, body)
    with pytest.raises(ShardError, match="is damaged"):
        client.fetch(capture_id)
    assert len(client.fetch(capture_id, verify=False).token_ids) == 5


def test_a_file_of_another_capture_is_not_taken_for_this_one(client: Client, feeder: Feeder) -> None:
    first, second = feeder.capture(states(), TOKENS), feeder.capture(states(seed=1), TOKENS)
    path = Path(client.record(first).path or "")
    path.write_bytes(Path(client.record(second).path or "").read_bytes())
    with pytest.raises(ShardError, match=f"asked for capture {first}, the sidecar sent '{second}'"):
        client.fetch(first)


def test_a_file_that_is_not_here_is_read_over_http(feeder: Feeder, sidecar: SidecarThread) -> None:
    capture_id = feeder.capture(states(), TOKENS)
    with Client(sidecar.url) as client:
        record = client.record(capture_id)
        path = Path(record.path or "")
        elsewhere = path.with_name("elsewhere")
        for replacement in ("/nowhere/" + path.name, str(elsewhere), str(path.parent)):
            moved = replace(record, path=replacement)
            capture = client.fetch(moved)
            assert capture.path is None and torch.equal(capture.hidden_states, states())


def test_captures_are_found_by_what_is_known_of_them(client: Client, feeder: Feeder) -> None:
    first = feeder.capture(states(), TOKENS, dataset="d1", sample_id="s1")
    second = feeder.capture(states(), TOKENS, dataset="d1", sample_id="s2", request_id="chatcmpl-other-0badcafe")
    failed = feeder.open(3, dataset="d2")
    feeder.fail(failed, FailReason.STALLED)

    def ids(**filters: object) -> list[str]:
        return [record.capture_id for record in client.find(**filters)]  # type: ignore[arg-type]

    assert ids() == [failed, second, first]
    assert ids(dataset="d1") == [second, first]
    assert ids(dataset="d1", sample_id="s1") == [first]
    assert ids(client_id="other") == ids(request_id="chatcmpl-other-0badcafe") == [second]
    assert ids(state=CaptureState.FAILED) == [failed]
    assert ids(content_hash=client.record(first).content_hash) == [second, first]
    assert ids(model="another") == ids(since=4e9) == []


def test_a_listing_goes_over_pages(client: Client, feeder: Feeder) -> None:
    made = [feeder.capture(states(), TOKENS) for _ in range(7)]
    assert [record.capture_id for record in client.captures(page_size=3)] == made[::-1]
    with pytest.raises(SidecarRefused, match="answered 400: limit"):
        list(client.captures(page_size=0))


def test_the_key_is_sent_and_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start_sidecar(tmp_path / "store", api_key="secret")
    try:
        with Feeder(running.url, layer_ids=LAYERS, hidden_size=16, key="secret") as feeder:
            capture_id = feeder.capture(states(), TOKENS)
        with Client(running.url) as client, pytest.raises(SidecarRefused, match="answered 401: send `Authorization"):
            client.fetch(capture_id)
        with Client(running.url, api_key="secret", local=False) as client:
            assert torch.equal(client.fetch(capture_id).hidden_states, states())
        monkeypatch.setenv("HSC_API_KEY", "secret")
        with Client(running.url) as client:
            assert torch.equal(client.fetch(capture_id).hidden_states, states())
    finally:
        running.stop()


class Listener(http.server.BaseHTTPRequestHandler):
    """Another origin: notes what it is asked, and can send askers on."""

    seen: list[str]
    location = ""

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization", ""))
        self.send_response(302 if self.location else 200)
        self.send_header("Location", self.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, type[Listener]]]:
    handler = type("Handler", (Listener,), {"seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


def test_the_key_goes_to_no_other_origin(sidecar: SidecarThread, elsewhere: tuple[str, type[Listener]]) -> None:
    other, handler = elsewhere
    handle = f"/v1/captures/{new_capture_id()}"
    with Client(sidecar.url, api_key="secret") as client:
        for call in (client.fetch, client.record, client.wait, client.delete):
            with pytest.raises(SettingsError, match=f"{other}, this client was given {sidecar.url}"):
                call(other + handle)
        assert handler.seen == []
    handler.location = sidecar.url + handle
    with Client(other, api_key="secret") as client, pytest.raises(SidecarRefused, match="answered 302"):
        client.fetch(handle.rpartition("/")[2])
    assert handler.seen == ["Bearer secret"]
    with Client(sidecar.url, api_key="secret", origins=[other]) as client, pytest.raises(SidecarRefused):
        client.record(other + handle)


def test_a_public_address_is_trusted_when_named(tmp_path: Path) -> None:
    running = start_sidecar(tmp_path / "store", public_url="https://captures.example/hidden")
    try:
        with Feeder(running.url, layer_ids=LAYERS, hidden_size=16) as feeder:
            capture_id = feeder.capture(states(), TOKENS)
        with Client(running.url, origins=["https://captures.example"]) as client:
            handle = client.record(capture_id).handle
            assert client._capture_url(handle) == handle == f"https://captures.example/hidden/v1/captures/{capture_id}"
        with (
            Client(running.url) as client,
            pytest.raises(SettingsError, match=r"origins=\['https://captures.example:443'\]"),
        ):
            client.fetch(handle)
    finally:
        running.stop()


@pytest.mark.parametrize("text", ["no-id", "../../etc/passwd", "f" * 31, "ftp://127.0.0.1/v1/captures/x", ""])
def test_what_is_no_handle_is_refused_before_anything_is_sent(text: str) -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(SettingsError):
        client.fetch(text)


@pytest.mark.parametrize("url", ["127.0.0.1:8190", "ftp://host", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="an address is http://host:port"):
        Client(url)


def test_a_sidecar_on_a_unix_socket(tmp_path: Path) -> None:
    running = start_sidecar(tmp_path / "store", uds=tmp_path / "s.sock")
    try:
        with Feeder(running.url, layer_ids=LAYERS, hidden_size=16) as feeder:
            capture_id = feeder.capture(states(), TOKENS)
        with Client(f"unix://{tmp_path / 's.sock'}", local=False) as client:
            assert torch.equal(client.fetch(capture_id).hidden_states, states())
    finally:
        running.stop()


def test_a_lost_connection_is_tried_again(sidecar: SidecarThread, feeder: Feeder) -> None:
    capture_id = feeder.capture(states(), TOKENS)
    with Proxy(sidecar.url, drop=2) as proxy, Client(proxy.url, local=False) as client:
        assert torch.equal(client.fetch(capture_id).hidden_states, states())
        assert proxy.accepted >= 3


def test_an_answer_cut_short_is_never_taken_for_whole(sidecar: SidecarThread, feeder: Feeder) -> None:
    capture_id = feeder.capture(states(), TOKENS)
    with Client(sidecar.url) as client:
        record = client.record(capture_id)
    with Proxy(sidecar.url, cut=record.size) as proxy, Client(proxy.url, local=False) as client:
        with pytest.raises(SidecarUnreachable, match=f"no sidecar answers at {proxy.url}"):
            client.fetch(record)
        assert proxy.accepted == 4


def test_nobody_there() -> None:
    with (
        Client("http://127.0.0.1:9") as client,
        pytest.raises(SidecarUnreachable, match=r"at http://127[.]0[.]0[.]1:9"),
    ):
        client.find()


def test_an_address_of_something_else(elsewhere: tuple[str, type[Listener]]) -> None:
    with Client(elsewhere[0]) as client, pytest.raises(SidecarRefused, match="does not answer like a sidecar"):
        client.find()


def test_one_client_serves_several_threads(client: Client, feeder: Feeder) -> None:
    made = {feeder.capture(states(seed=seed), TOKENS): seed for seed in range(12)}
    with ThreadPoolExecutor(6) as pool:
        for capture_id, capture in zip(made, pool.map(client.fetch, made), strict=True):
            assert torch.equal(capture.hidden_states, states(seed=made[capture_id]))


def test_a_client_goes_to_spawned_workers_by_pickle(client: Client, feeder: Feeder) -> None:
    capture_id = feeder.capture(states(), TOKENS)
    client.find()
    with pickle.loads(pickle.dumps(client)) as copy:
        assert (copy.url, copy.local) == (client.url, client.local)
        assert torch.equal(copy.fetch(capture_id).hidden_states, states())


FORKING = """
import os, sys
from hsconnector.client import Client
with Client(sys.argv[1]) as client:
    client.find()
    child = os.fork()
    sample = "child" if child == 0 else "parent"
    for _ in range(100):
        (found,) = client.find(sample_id=sample)
        if found.sample_id != sample:
            sys.exit(f"{sample} was answered {found.sample_id}")
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_worker_does_not_share_its_parents_connections(sidecar: SidecarThread, feeder: Feeder) -> None:
    for sample in ("parent", "child"):
        feeder.capture(states(), TOKENS, sample_id=sample)
    done = subprocess.run([sys.executable, "-c", FORKING, sidecar.url], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_client_imports_no_torch() -> None:
    code = "import sys, hsconnector.client; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
