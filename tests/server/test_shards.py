from __future__ import annotations

import errno
import itertools
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load

from hsconnector.capture.protocol import CaptureInfo, Producer, RowsKind, pack_token_ids
from server.recovery import inspect_shard
from server.shards import Published, ShardWriter, reserve
from tests.examples import examples
from tests.server.engine import rows_of

ID = "0123456789ab00000000000000000042"


def producer(dtype: str = "float32", layers: tuple[int, ...] = (0, 2, 4), hidden: int = 32) -> Producer:
    return Producer(
        engine_id="engine-1",
        model="org/model",
        model_revision="abc",
        vllm_version="0.32.0",
        layer_ids=layers,
        num_layers=4,
        hidden_size=hidden,
        dtype=dtype,
    )


def about(**more: object) -> CaptureInfo:
    facts = {"capture_id": ID, "request_id": "cmpl-7-0-0123abcd", "num_prompt_tokens": 2, "created": 1000.25, **more}
    return CaptureInfo(**facts)  # type: ignore[arg-type]


def write(
    folder: Path,
    values: np.ndarray,
    *,
    by: Producer | None = None,
    info: CaptureInfo | None = None,
    reason: str = "stop",
) -> Published:
    writer = ShardWriter(folder, by or producer(), info or about(), inspect=lambda _: None, buffer=bytearray())
    data = memoryview(values.tobytes())
    row = len(data) // len(values)
    for first in range(0, len(values), 7):
        count = min(7, len(values) - first)
        writer.append(data[first * row : (first + count) * row], count)
    return writer.publish(
        folder, pack_token_ids(range(len(values))), content_hash="c" * 64, finish_reason=reason, durable=True
    )


def test_golden_bytes(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32).reshape(2, 1, 2)
    info = about(rows=RowsKind.PROMPT, dataset="d", sample_id="7", tags={"ä": '"'}, lora="l")
    published = write(tmp_path, values, by=producer(layers=(4,), hidden=2), info=info)
    header = (
        '{"__metadata__":{"format":"hsconnector/1","capture_id":"0123456789ab00000000000000000042",'
        '"request_id":"cmpl-7-0-0123abcd","engine_id":"engine-1","model":"org/model","model_revision":"abc",'
        '"vllm_version":"0.32.0","dims":"token,layer,hidden","layer_ids":"[4]","num_layers":"4","last_layer_norm":"pre",'
        '"dtype":"float32","rows":"prompt","num_prompt_tokens":"2","content_hash":"' + "c" * 64 + '",'
        '"data_hash":"236113b760002d366365250e77ca9440","dataset":"d","sample_id":"7","tags":"{\\"ä\\":\\"\\\\\\"\\"}",'
        '"lora":"l","finish_reason":"stop","created":"1000.250"},'
        '"hidden_states":{"dtype":"F32","shape":[2,1,2],"data_offsets":[0,16]},'
        '"token_ids":{"dtype":"I64","shape":[2],"data_offsets":[16,32]}}'
    )
    data = bytes.fromhex("00000000 0000803f 00000040 00004040 0000000000000000 0100000000000000")
    text, digest = header.encode(), "236113b760002d366365250e77ca9440"
    whole = published.path.read_bytes()
    room = len(whole) - len(data)
    assert room % 64 == 0
    assert whole == (room - 8).to_bytes(8, "little") + text.ljust(room - 8) + data
    assert published == Published(tmp_path / f"{ID}.safetensors", digest, len(whole), published.path.stat().st_mtime_ns)


def test_safetensors_reads_every_dtype(tmp_path: Path) -> None:
    for number, dtype in enumerate(("bfloat16", "float16", "float32")):
        values = torch.from_numpy(rows_of(100)).to(getattr(torch, dtype))
        raw = values.view(torch.uint8).numpy()
        info = about(capture_id=f"{number:032x}")
        path = write(tmp_path, raw, by=producer(dtype), info=info).path
        with safe_open(path, "pt") as file:
            assert torch.equal(file.get_tensor("hidden_states").view(torch.uint8), values.view(torch.uint8))
            assert file.get_tensor("token_ids").tolist() == list(range(100))
            assert file.metadata()["dtype"] == dtype
    assert (load(path.read_bytes())["hidden_states"] == rows_of(100)).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, 40),
    layers=st.integers(1, 4),
    hidden=st.integers(1, 9),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
    reason=st.text(st.characters(exclude_categories=["Cs"]), max_size=90),
)
def test_any_shape_and_any_text_round_trips(
    tmp_path_factory: pytest.TempPathFactory, rows: int, layers: int, hidden: int, dtype: str, text: str, reason: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    by = producer(dtype, tuple(range(layers)), hidden)
    raw = np.random.default_rng(rows).integers(0, 255, (rows, by.row_bytes), np.uint8)
    info = about(request_id=text, dataset=text, tags={text: text}, lora=text)
    path = write(folder, raw, by=by, info=info, reason=reason).path
    header, _ = inspect_shard(path)
    assert (header.shape, header.dtype) == ((rows, layers, hidden), dtype)
    assert header.metadata["request_id"] == header.metadata["lora"] == text
    assert header.metadata["finish_reason"] == reason[:64]
    with safe_open(path, "pt") as file:
        assert bytes(file.get_tensor("hidden_states").view(torch.uint8).flatten().tolist()) == raw.tobytes()
        assert file.metadata() == header.metadata


def test_rows_larger_than_one_write(tmp_path: Path) -> None:
    by = producer(layers=(0, 1, 2), hidden=300_000)
    values = rows_of(3, hidden=300_000)
    path = write(tmp_path, values, by=by).path
    inspect_shard(path)
    assert (load(path.read_bytes())["hidden_states"] == values).all()


def test_no_write_is_larger_than_two_mebibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    write(tmp_path, rows_of(30, hidden=100_000), by=producer(hidden=100_000))
    assert max(sizes) <= 2 << 20


def test_the_partial_file_has_another_name_and_goes_with_abort(tmp_path: Path) -> None:
    folder = tmp_path / "42"
    writer = ShardWriter(folder, producer(), about(), inspect=lambda _: None, buffer=bytearray())
    writer.append(memoryview(rows_of(3).tobytes()), 3)
    assert [path.name for path in folder.iterdir()] == [f".{ID}.part"]
    writer.abort()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("how", ["publish", "abort"])
def test_a_disk_that_is_full_at_close_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """File systems that allot late (NFS, quotas) say ENOSPC at close; then no name is given and nothing stays."""
    writer = ShardWriter(tmp_path, producer(), about(), inspect=lambda _: None, buffer=bytearray())
    writer.append(memoryview(rows_of(3).tobytes()), 3)
    fd, real = writer._fd, os.close

    def close(number: int) -> None:
        real(number)
        if number == fd:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close)
        with pytest.raises(OSError, match="No space left"):
            if how == "abort":
                writer.abort()
            writer.publish(tmp_path, pack_token_ids(range(3)), content_hash="", finish_reason="", durable=False)
    if how == "publish":
        writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_only_what_was_read_back_is_vouched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that changes after the write must not be what is hashed."""
    seen = bytearray()
    values = bytearray(rows_of(3).tobytes())
    expected = bytes(values)
    writer = ShardWriter(tmp_path, producer(), about(), inspect=seen.extend, buffer=bytearray())
    real = os.pwrite

    def pwrite_then_change(fd: int, data: memoryview, offset: int) -> int:
        done = real(fd, data, offset)
        values[:] = bytes(len(values))
        return done

    monkeypatch.setattr(os, "pwrite", pwrite_then_change)
    writer.append(memoryview(values), 3)
    monkeypatch.undo()
    assert seen == expected
    published = writer.publish(tmp_path, pack_token_ids(range(3)), content_hash="", finish_reason="", durable=False)
    assert published.data_hash == xxhash.xxh3_128_hexdigest(expected + pack_token_ids(range(3)))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o444), (0o027, 0o440), (0o077, 0o400)])
def test_the_mode_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        path = write(tmp_path, rows_of(3)).path
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.root
def test_another_user_reads_a_shard(tmp_path: Path) -> None:
    for folder in itertools.takewhile(lambda each: each != Path(tempfile.gettempdir()), (tmp_path, *tmp_path.parents)):
        folder.chmod(0o755)
    before = os.umask(0o022)
    path = write(tmp_path, rows_of(3)).path
    os.umask(before)
    done = subprocess.run(["cat", path], capture_output=True, check=True, user=65534, group=65534, extra_groups=[])
    assert done.stdout == path.read_bytes()


def test_room_is_reserved_without_changing_the_size(tmp_path: Path) -> None:
    path = tmp_path / "x"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    reserve(fd, 0, 1 << 20)
    status = os.fstat(fd)
    os.close(fd)
    assert status.st_size == 0
    assert status.st_blocks * 512 >= 1 << 20


def test_a_file_system_without_reservation_is_fine() -> None:
    read_end, write_end = os.pipe()
    reserve(write_end, 0, 10)
    os.close(read_end)
    os.close(write_end)
    with pytest.raises(OSError) as caught:
        reserve(-1, 0, 10)
    assert caught.value.errno == errno.EBADF
