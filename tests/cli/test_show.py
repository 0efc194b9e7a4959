from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hsconnector.capture.protocol import FailReason
from hsconnector.cli import main
from hsconnector.cli.show import plain, readable_bytes
from hsconnector.client import Client
from tests.feeding import Feeder
from tests.shards import write_shard
from tests.sidecar import start_sidecar

LAYERS = (0, 2, 5)
UNKNOWN = "01a22ebf1b7db4484d6f48c935c63c3a"
STATES = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def feeder(tmp_path: Path) -> Iterator[Feeder]:
    running = start_sidecar(tmp_path / "store")
    with Feeder(running.url, layer_ids=LAYERS, hidden_size=16) as feeder:
        yield feeder
    running.stop()


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["show", *map(str, arguments)])
    assert not caught.value.code
    return capsys.readouterr().out


def fields(text: str) -> dict[str, str]:
    """Name and value of each line."""
    return {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in text.splitlines())}


def test_one_capture_with_what_each_slot_holds(capsys: pytest.CaptureFixture[str], feeder: Feeder) -> None:
    capture_id = feeder.capture(STATES, [1, 2, 3, 4], dataset="d", sample_id="s", tags={"a": "b"})
    with Client(feeder.url) as client:
        record = client.record(capture_id)
    for what in (capture_id, record.handle, "job", "chatcmpl-job-0badcafe"):
        found = fields(shown(capsys, what, "--sidecar", feeder.url))
        assert found["capture"] == capture_id and found["state"] == "ready" and found["verdict"] == "sound"
        assert found["hidden_states"] == "[4, 3, 16] float32"
        assert found["slot 0"].startswith("layer 0 (embed), mean norm ")
        assert found["slot 1"].startswith("layer 2 (after_layer_1), mean norm ")
        assert found["slot 2"].startswith("layer 5 (after_layer_4, before the final norm), mean norm ")
        assert (found["dataset"], found["sample"], found["tags"]) == ("d", "s", '{"a": "b"}')
        assert found["file"] == record.path and Path(found["file"]).exists()


def test_several_captures_of_a_request_and_the_latest_are_lists(
    capsys: pytest.CaptureFixture[str], feeder: Feeder
) -> None:
    first = feeder.capture(STATES, [1, 2, 3, 4])
    second = feeder.capture(STATES, [1, 2, 3, 4])
    failed = feeder.open(9, request_id="chatcmpl-other-0badcafe")
    feeder.fail(failed, FailReason.STALLED)

    def listed(*arguments: str) -> list[str]:
        return [line.split()[0] for line in shown(capsys, *arguments, "--sidecar", feeder.url).splitlines()[1:]]

    assert listed("job") == [second, first]
    assert listed() == [failed, second, first]
    assert listed("--limit", "2") == [failed, second]
    rows = [json.loads(line) for line in shown(capsys, "--json", "--sidecar", feeder.url).splitlines()]
    assert [(row["capture_id"], row["state"], row["reason"]) for row in rows] == [
        (failed, "failed", "stalled"),
        (second, "ready", None),
        (first, "ready", None),
    ]


def test_unsound_and_failed_captures_say_why(capsys: pytest.CaptureFixture[str], feeder: Feeder) -> None:
    zeros = STATES.clone()
    zeros[1] = 0
    unsound = feeder.capture(zeros, [1, 2, 3, 4])
    assert fields(shown(capsys, unsound, "--sidecar", feeder.url))["verdict"] == "unsound: zero_rows in rows [1]"
    failed = feeder.open(9)
    feeder.fail(failed, FailReason.ABORTED, "gone")
    assert fields(shown(capsys, failed, "--sidecar", feeder.url))["state"] == "failed: aborted gone"


def test_texts_of_clients_do_not_reach_the_terminal_raw(capsys: pytest.CaptureFixture[str], feeder: Feeder) -> None:
    hostile = "\x1b[2J[red]x\n\u202e"
    capture_id = feeder.capture(STATES, [1, 2, 3, 4], sample_id=hostile)
    for arguments in ([capture_id], []):
        text = shown(capsys, *arguments, "--sidecar", feeder.url)
        assert "\x1b" not in text and "\u202e" not in text
    assert r"\x1b[2J[red]x\n\u202e" in shown(capsys, capture_id, "--sidecar", feeder.url)
    assert plain("grüße 漢字") == "grüße 漢字"


def test_a_shard_file_needs_no_sidecar(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_shard(tmp_path, STATES, [1, 2, 3, 4], LAYERS, num_layers="5", model="m", sample_id="s\x1b")
    found = fields(shown(capsys, path))
    assert found["hidden_states"] == "[4, 3, 16] float32" and found["model"] == "m"
    assert found["slot 2"] == "layer 5 (after_layer_4, before the final norm)"
    assert found["sample_id"] == r"s\x1b"
    told = json.loads(shown(capsys, path, "--json"))
    assert (told["shape"], told["capture_id"], told["bytes"]) == ([4, 3, 16], path.stem, path.stat().st_size)


@pytest.mark.parametrize(
    ("what", "code", "says"),
    [
        (UNKNOWN, 1, "no capture"),
        ("no-such-request", 1, "no capture of the request 'no-such-request' is known at http"),
        ("http://10.1.2.3/v1/captures/" + UNKNOWN, 2, "the handle is at http://10.1.2.3:80"),
        ("nowhere.safetensors", 1, "No such file"),
    ],
)
def test_what_is_not_there(capsys: pytest.CaptureFixture[str], feeder: Feeder, what: str, code: int, says: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["show", what, "--sidecar", feeder.url])
    assert caught.value.code == code
    assert says in capsys.readouterr().err


def test_bytes_are_readable() -> None:
    assert [readable_bytes(n) for n in (0, 999, 1500, 2_000_000, 3_400_000_000, 50_000_000_000_000)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2 MB",
        "3.4 GB",
        "50 TB",
    ]
