from __future__ import annotations

import errno
import json
import mmap
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from hsconnector.capture.protocol import CaptureState, FailReason
from server.ranges import Unsatisfiable, matches, parse_range
from tests.server.engine import LAYERS, Engine, opening, rows_of
from tests.sidecar import SidecarThread

ROWS = 40


@pytest.fixture
def name(engine: Engine) -> str:
    return engine.capture(ROWS)


@pytest.fixture
def whole(http: httpx.Client, name: str) -> bytes:
    return http.get(f"/v1/captures/{name}/tensors").content


def get(http: httpx.Client, name: str, query: str = "", **headers: str) -> httpx.Response:
    return http.get(f"/v1/captures/{name}/tensors{query}", headers=headers)


def unpack(body: bytes) -> tuple[dict[str, str], dict[str, np.ndarray[Any, Any]], bytes]:
    """Metadata, tensors, data section."""
    length = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + length])["__metadata__"], load(body), body[8 + length :]


def test_the_whole_file(http: httpx.Client, sidecar: SidecarThread, name: str) -> None:
    answer = get(http, name)
    about = http.get(f"/v1/captures/{name}").json()
    assert answer.content == Path(about["path"]).read_bytes()
    assert answer.headers["etag"] == f'"{about["data_hash"]}"'
    assert answer.headers["content-length"] == str(about["size"]) == str(len(answer.content))
    assert answer.headers["accept-ranges"] == "bytes"
    assert about["data_hash"] == xxhash.xxh3_128_hexdigest(unpack(answer.content)[2])
    assert about["tensors"] == f"{about['handle']}/tensors" == f"{sidecar.url}/v1/captures/{name}/tensors"


def test_head_has_the_headers_and_no_body(http: httpx.Client, name: str, whole: bytes) -> None:
    answer = http.head(f"/v1/captures/{name}/tensors")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str(len(whole))
    view = http.head(f"/v1/captures/{name}/tensors?rows=0:3")
    assert int(view.headers["content-length"]) == len(get(http, name, "?rows=0:3").content)


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-", 10, None),
        ("bytes=-16", -16, None),
        ("bytes=5-99999999", 5, None),
        ("bytes=7-9", 7, 10),
    ],
)
def test_one_range(http: httpx.Client, name: str, whole: bytes, asked: str, start: int, stop: int | None) -> None:
    answer = get(http, name, range=asked)
    assert answer.status_code == 206
    assert answer.content == whole[start:stop]
    first = start % len(whole)
    assert answer.headers["content-range"] == f"bytes {first}-{first + len(answer.content) - 1}/{len(whole)}"


@pytest.mark.parametrize(
    "asked", ["bytes=0-1,4-5", "bytes=5-3", "lines=0-1", "bytes=", "bytes=-", "bytes=a-b", "bytes=٣-٥"]
)
def test_what_is_no_single_range_gets_the_whole(http: httpx.Client, name: str, whole: bytes, asked: str) -> None:
    answer = http.get(f"/v1/captures/{name}/tensors", headers={b"range": asked.encode()})
    assert (answer.status_code, answer.content) == (200, whole)


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=-0"])
def test_a_range_beyond_the_file(http: httpx.Client, name: str, whole: bytes, asked: str) -> None:
    answer = get(http, name, range=asked)
    assert (answer.status_code, answer.content) == (416, b"")
    assert answer.headers["content-range"] == f"bytes */{len(whole)}"


@given(size=st.integers(1, 50), first=st.none() | st.integers(0, 60), last=st.none() | st.integers(0, 60))
def test_ranges_agree_with_slices(size: int, first: int | None, last: int | None) -> None:
    header = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    data = list(range(size))
    expected = data[first : None if last is None else last + 1]
    if first is None:
        expected = data[-last:] if last else []
    if (first is None and last is None) or (first is not None and last is not None and last < first):
        assert parse_range(header, size) is None
    elif not expected:
        with pytest.raises(Unsatisfiable):
            parse_range(header, size)
    else:
        assert parse_range(header, size) == (expected[0], expected[-1] + 1)


def test_tags(http: httpx.Client, name: str, whole: bytes) -> None:
    tag = get(http, name).headers["etag"]
    for header in (tag, f'"x", {tag}', f"W/{tag}", "*"):
        answer = get(http, name, **{"if-none-match": header})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    assert get(http, name, **{"if-none-match": '"x"'}).status_code == 200
    assert get(http, name, range="bytes=0-3", **{"if-range": tag}).content == whole[:4]
    assert get(http, name, range="bytes=0-3", **{"if-range": '"x"'}).content == whole
    assert not matches(f"W/{tag}", tag, weak=False)


@pytest.mark.parametrize(
    ("query", "rows", "layers"),
    [
        ("?layers=4", slice(None), [4]),
        ("?layers=4,0", slice(None), [0, 4]),
        ("?rows=3:9", slice(3, 9), [0, 2, 4]),
        ("?rows=:1", slice(0, 1), [0, 2, 4]),
        ("?rows=39:", slice(39, 40), [0, 2, 4]),
        ("?rows=:", slice(None), [0, 2, 4]),
        ("?rows=10:30&layers=2", slice(10, 30), [2]),
    ],
)
def test_views_are_files_of_their_own(
    http: httpx.Client, name: str, whole: bytes, query: str, rows: slice, layers: list[int]
) -> None:
    answer = get(http, name, query)
    metadata, tensors, data = unpack(answer.content)
    source, full, _ = unpack(whole)
    slots = [LAYERS.index(layer) for layer in layers]
    assert (tensors["hidden_states"] == full["hidden_states"][rows][:, slots]).all()
    assert (tensors["token_ids"] == full["token_ids"][rows]).all()
    assert json.loads(metadata["layer_ids"]) == layers
    assert metadata["data_hash"] == xxhash.xxh3_128_hexdigest(data)
    assert metadata["source_data_hash"] == source["data_hash"]
    assert "content_hash" not in metadata
    start, stop, _ = rows.indices(ROWS)
    assert json.loads(metadata["view"]) == {"rows": [start, stop], "layers": layers}
    assert answer.headers["content-length"] == str(len(answer.content))
    again = get(http, name, query, **{"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?layers=1", "layers"),
        ("?layers=0,0", "layers"),
        ("?layers=", "layers"),
        ("?layers=a", "layers"),
        ("?layers=-1", "layers"),
        ("?layers=٣", "layers"),
        ("?rows=1", "rows"),
        ("?rows=3:3", "rows"),
        ("?rows=5:3", "rows"),
        ("?rows=0:41", "rows"),
        ("?rows=-1:2", "rows"),
        ("?rows=0:99999999999999999999", "rows"),
        ("?wait=nan", "wait"),
        ("?wait=-1", "wait"),
        ("?wait=x", "wait"),
    ],
)
def test_bad_parameters_are_named(http: httpx.Client, name: str, query: str, param: str) -> None:
    answer = get(http, name, query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_never_a_body_for_what_is_not_ready(engine: Engine, http: httpx.Client) -> None:
    receiving, failed, deleted = engine.open(), engine.open(), engine.capture(3)
    engine.rows(receiving, rows_of(3))
    engine.fail(failed, FailReason.STALLED)
    assert http.delete(f"/v1/captures/{deleted}").status_code == 204
    for name, status, kind, reason in (
        (receiving, 202, "capture_pending", "receiving"),
        (failed, 424, "capture_failed", "stalled"),
        (deleted, 410, "capture_expired", "expired"),
    ):
        answer = get(http, name)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert (error["type"], error["reason"], error["capture_id"]) == (kind, reason, name)
    assert get(http, receiving).headers["retry-after"] == "1"
    assert get(http, "0" * 32).status_code == 404


def test_quarantined_only_when_asked_for(engine: Engine, http: httpx.Client, sidecar: SidecarThread) -> None:
    values = rows_of(64)
    values[16:32] = 0
    name = engine.capture(values)
    refused = get(http, name)
    assert (refused.status_code, refused.json()["error"]["type"]) == (424, "capture_quarantined")
    assert "zero_rows in rows [16, 17" in refused.json()["error"]["message"]
    given_anyway = get(http, name, "?quarantined=1")
    assert (load(given_anyway.content)["hidden_states"] == values).all()
    about = http.get(f"/v1/captures/{name}").json()
    assert about["state"] == CaptureState.QUARANTINED
    assert about["verdict"]["findings"] == [
        {"reason": "zero_rows", "count": 16, "rows": list(range(16, 32)), "slots": [], "detail": ""}
    ]
    assert about["path"] == str(sidecar.store / "quarantine" / name[-2:] / f"{name}.safetensors")


def test_a_wrong_content_hash_is_quarantined(engine: Engine, http: httpx.Client) -> None:
    name = engine.capture(3, expected_content_hash="a" * 64)
    about = http.get(f"/v1/captures/{name}").json()
    assert (about["state"], about["verdict"]["reasons"]) == ("quarantined", ["wrong_content_hash"])
    assert f"expected {'a' * 64}, the capture has {about['content_hash']}" in about["detail"]


@pytest.mark.parametrize(
    "path", ["..%2f..%2fcatalog.sqlite", "..", "%2e%2e", "x", "A" * 32, "0" * 31, "0" * 33, "%00" * 32]
)
def test_ids_that_are_none(http: httpx.Client, sidecar: SidecarThread, path: str) -> None:
    for answer in (http.get(f"/v1/captures/{path}/tensors?wait=60"), http.delete(f"/v1/captures/{path}")):
        assert answer.status_code in (404, 405)
    assert (sidecar.store / "catalog.sqlite").exists()


def test_delete_is_idempotent(http: httpx.Client, engine: Engine, name: str, sidecar: SidecarThread) -> None:
    for _ in range(3):
        assert http.delete(f"/v1/captures/{name}").status_code == 204
    assert list(sidecar.store.rglob("*.safetensors")) == []
    assert http.get(f"/v1/captures/{name}").json()["state"] == "expired"
    open_one = engine.open()
    refused = http.delete(f"/v1/captures/{open_one}")
    assert (refused.status_code, refused.json()["error"]["type"]) == (409, "capture_receiving")


def test_a_file_that_somebody_removed(http: httpx.Client, sidecar: SidecarThread, name: str) -> None:
    sidecar.app.store.shard(name).unlink()
    assert get(http, name).status_code == 410
    assert http.get(f"/v1/captures/{name}").json()["state"] == "expired"


BIG = rows_of(1000, hidden=8192)


def test_deleting_during_a_read_does_not_disturb_it(sidecar: SidecarThread, http: httpx.Client) -> None:
    """Over a map this could be a SIGBUS (safetensors#562): 96 MB, deleted after the first piece."""
    with Engine(sidecar.url, hidden_size=8192) as engine:
        name = engine.open(num_prompt_tokens=len(BIG))
        for start in range(0, len(BIG), 500):
            engine.rows(name, BIG[start : start + 500], start)
        engine.commit(name, range(len(BIG)))
    with http.stream("GET", f"/v1/captures/{name}/tensors") as answer:
        pieces = answer.iter_bytes()
        body = bytearray(next(pieces))
        assert httpx.delete(f"{sidecar.url}/v1/captures/{name}").status_code == 204
        for piece in pieces:
            body += piece
    assert (load(bytes(body))["hidden_states"] == BIG).all()
    assert get(http, name).status_code == 410


def test_where_mapping_is_not_possible(
    http: httpx.Client, whole: bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FUSE mounts that answer ENODEV to mmap (safetensors#195, #545)."""

    def no_map(*_: object, **__: object) -> None:
        raise OSError(errno.ENODEV, "no such device")

    monkeypatch.setattr(mmap, "mmap", no_map)
    assert get(http, name).content == whole
    assert get(http, name, range="bytes=100-").content == whole[100:]
    assert get(http, name, "?rows=1:2").status_code == 200


def test_readers_who_hang_up_leave_no_file_open(sidecar: SidecarThread, engine: Engine) -> None:
    values = rows_of(50_000)
    name = engine.open(num_prompt_tokens=len(values))
    engine.rows(name, values)
    engine.commit(name, range(len(values)))

    def held() -> int:
        shard = sidecar.app.store.shard(name)
        return sum(1 for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.resolve() == shard)

    for _ in range(5):
        with httpx.stream("GET", f"{sidecar.url}/v1/captures/{name}/tensors") as answer:
            next(answer.iter_bytes())
    for _ in range(200):
        if not held():
            break
        threading.Event().wait(0.05)
    assert held() == 0


def test_readers_polling_while_shards_are_written_see_all_or_nothing(sidecar: SidecarThread) -> None:
    """What vllm#37374 has lock files for: 4 pollers, 60 shards, no partial read."""
    values = rows_of(60)
    opened = [opening(num_prompt_tokens=60) for _ in range(60)]
    names = [message.capture.capture_id for message in opened]
    wrong: list[str] = []
    counted = {200: 0, 202: 0, 404: 0}

    def poll(offset: int) -> None:
        with httpx.Client(base_url=sidecar.url, timeout=60) as client:
            left = names[offset:] + names[:offset]
            while left:
                again = []
                for name in left:
                    answer = client.get(f"/v1/captures/{name}/tensors")
                    counted[answer.status_code] = counted.get(answer.status_code, 0) + 1
                    if answer.status_code != 200:
                        again.append(name)
                    elif not (load(answer.content)["hidden_states"] == values).all():
                        wrong.append(name)
                left = again

    readers = [threading.Thread(target=poll, args=(n * 15,)) for n in range(4)]
    for reader in readers:
        reader.start()
    with Engine(sidecar.url) as engine:
        for message in opened:
            name = message.capture.capture_id
            engine.send(message)
            engine.rows(name, values[:30])
            engine.rows(name, values[30:], 30)
            engine.commit(name, range(60))
    for reader in readers:
        reader.join()
    assert wrong == []
    assert set(counted) == {200, 202, 404}
    assert counted[200] == 240
