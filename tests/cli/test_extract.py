"""`hsconnector extract` as people run it: exit codes, the lines it prints, Ctrl-C, SIGKILL and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hsconnector.capture.protocol import CaptureState
from hsconnector.capture.record import CaptureRecord
from hsconnector.cli import main
from hsconnector.client import Client
from hsconnector.extraction.lock import only_run
from hsconnector.prompts.chat import load_tokenizer
from hsconnector.prompts.files import open_rows
from tests.extraction.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.models import tiny_tokenizer
from tests.sidecar import SidecarThread, start_sidecar

COMMAND = [sys.executable, "-c", "from hsconnector.cli import main; main()", "extract"]


@pytest.fixture
def engine(sidecar: SidecarThread, tmp_path: Path) -> Iterator[FakeEngine]:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    running = FakeEngine(sidecar.url, model=str(tmp_path / "model"))
    yield running
    running.stop()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [i, i + 1, 5]}) + "\n" for i in range(30)))
    return path


def extract(*words: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["extract", *map(str, words)])
    return int(caught.value.code or 0)


def options(engine: FakeEngine, sidecar: SidecarThread) -> list[str]:
    return ["--engine-url", engine.url, "--sidecar", sidecar.url]


def captures(sidecar: SidecarThread, dataset: str) -> list[CaptureRecord]:
    with Client(sidecar.url) as client:
        return client.find(dataset=dataset)


def test_all_is_captured_and_the_second_time_nothing_is_asked(
    engine: FakeEngine, sidecar: SidecarThread, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extract(data, *options(engine, sidecar)) == 0
    assert capsys.readouterr().out == "30 rows, 30 captured (90 tokens), 0 were there\n"
    assert extract(data, *options(engine, sidecar), "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["complete"], summary["captured"], summary["stored"]) == (True, 0, 30)
    assert len(engine.asked) == 30
    assert {record.dataset for record in captures(sidecar, "talks")} == {"talks"}


def test_rows_that_have_no_capture_are_listed_and_the_exit_code_is_1(
    engine: FakeEngine, sidecar: SidecarThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    rows: list[object] = [
        {"id": "a", "conversations": talk},
        {"id": "b", "messages": []},
        {"id": "c", "input_ids": [1] * MAX_MODEL_LEN},
        {"id": "d", "input_ids": [2000]},
        {"id": "e", "messages": [{"role": "user", "content": "\x1b[31mred"}, {"role": "villain", "content": ""}]},
        {"id": "f", "input_ids": [4, 5], "loss_mask": [1]},
    ]
    data = tmp_path / "mixed.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"id": "g", ')
    failures = tmp_path / "failures.jsonl"
    code = extract(
        data, *options(engine, sidecar), "--id-field", "id", "--failures", failures, "--dataset", "mixed set"
    )
    out, err = capsys.readouterr()
    assert code == 1
    counts = "7 rows, 1 captured (6 tokens), 0 were there, 5 refused, 1 failed"
    assert out == f"{counts}, 1 not compared with the engine's rendering\n"
    lines = err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "row 1 (b)",
        "row 2 (c)",
        "row 3 (d)",
        "row 4 (e)",
        "row 5 (f)",
        "row 6",
    ]
    assert "Token id 2000 is out of vocabulary" in lines[2]
    assert "message 1 of the role 'villain'" in lines[3]
    assert [json.loads(line)["sample_id"] for line in failures.read_text().splitlines()] == [
        "b",
        "c",
        "d",
        "e",
        "f",
        "6",
    ]
    (record,) = captures(sidecar, "mixed set")
    assert (record.sample_id, record.tags) == ("a", {"row": "0"})


def test_what_is_stored_is_saved_with_its_masks(engine: FakeEngine, sidecar: SidecarThread, tmp_path: Path) -> None:
    engine.fault = lambda number, sample: "refused" if sample == "1" else ""
    data, folder = tmp_path / "talk.jsonl", tmp_path / "tokens"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    data.write_text("".join(json.dumps({"messages": talk[: 1 + i % 2]}) + "\n" for i in range(3)))
    words = ["--min-trained-tokens", 0, "--save-dataset", folder, "--save-format", "arrow"]
    for _ in range(2):
        assert extract(data, *options(engine, sidecar), *words) == 1
    rows = list(open_rows(folder).read())
    assert [row["row"] for row in rows] == [0, 2]  # type: ignore[index]
    assert rows[0]["input_ids"] == engine.bodies[0]["prompt"]  # type: ignore[index]
    assert json.loads((folder / "hsconnector-dataset.json").read_text())["layer_ids"] == [0, 2, 4]


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]


def test_what_is_not_wanted_is_dropped_and_counted_apart(
    engine: FakeEngine, sidecar: SidecarThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "d.jsonl"
    rows = [
        {"input_ids": [1, 2, 3]},
        {"input_ids": [4, 5, 6, 7]},
        {"input_ids": [6, 5], "loss_mask": [0, 0]},
        {"input_ids": [8, 9], "loss_mask": [0, 1]},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--max-tokens", 3, "--too-long", "drop", "--min-trained-tokens", 2]
    assert extract(data, *options(engine, sidecar), *words) == 0
    out = capsys.readouterr().out
    assert out == "4 rows, 1 captured (3 tokens), 0 were there, 3 dropped (1 too long, 2 untrained)\n"
    assert extract(data, *options(engine, sidecar), *words, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["dropped"], summary["dropped_for"]) == (3, {"too_long": 1, "untrained": 2})
    assert extract(data, *options(engine, sidecar), "--limit", 2, "--max-tokens", 3, "--too-long", "truncate") == 0
    assert engine.bodies[-1]["prompt"] == [4, 5, 6]


def renders(folder: Path, start: str = "") -> Callable[[dict[str, Any]], list[int] | str]:
    """An engine's `/tokenize`; its template writes `start` first."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = start + tokenizer.chat_template

    def render(body: dict[str, Any]) -> list[int] | str:
        if body["messages"][-1]["content"] == "unspeakable":
            return "made up: unspeakable"
        assert not body["add_generation_prompt"] or len(body["messages"]) == 1
        text = tokenizer.apply_chat_template(
            body["messages"], chat_template=template, tokenize=False, **body.get("chat_template_kwargs", {})
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return render


def test_conversations_have_the_ids_that_the_engine_makes_of_them(
    engine: FakeEngine, sidecar: SidecarThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.render = renders(tmp_path / "model")
    data = tmp_path / "d.jsonl"
    rows = [{"messages": talk("a", f"b{row}")} for row in range(3)] + [{"messages": talk("a", "unspeakable")}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert extract(data, *options(engine, sidecar), "--max-tokens", 6, "--too-long", "truncate") == 1
    out, err = capsys.readouterr()
    assert out == "4 rows, 3 captured (18 tokens), 0 were there, 1 failed\n"
    assert "row 3: the engine does not render its conversation (400): made up: unspeakable" in err
    assert len(engine.asked) == 3
    before = engine.rendered
    assert extract(data, *options(engine, sidecar), "--limit", 3, "--max-tokens", 6, "--too-long", "truncate") == 0
    assert engine.rendered == before, "what is stored was compared when it was asked for"


def test_a_conversation_that_the_engine_renders_otherwise_is_refused_before_it_is_asked_for(
    engine: FakeEngine, sidecar: SidecarThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.render = renders(tmp_path / "model", "{{ strange or 'S' }}")
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"messages": talk("a", "b")}) + "\n")
    assert extract(data, *options(engine, sidecar)) == 1
    out, err = capsys.readouterr()
    assert "row 0: is rendered otherwise by the engine, from token 0 on: " in err
    assert "before the first message; give --tokenizer the engine's own, or --template-kwargs" in err
    assert out == "1 rows, 0 captured (0 tokens), 0 were there, 1 refused\n"
    assert engine.asked == []
    data.write_text("".join(json.dumps({"messages": talk("a", f"b{row}")}) + "\n" for row in range(100)))
    assert extract(data, *options(engine, sidecar), "--concurrency", 2) == 1
    assert "stopped after 10 rows failed one after the other, the last one: is rendered otherwise" in (
        capsys.readouterr().err
    )
    assert engine.asked == []


@pytest.mark.parametrize("status", [404, 501, 401, 403, 400])
def test_an_engine_that_renders_nothing_is_said_once(
    engine: FakeEngine, sidecar: SidecarThread, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """Its route is off, a gateway lets nobody through to it, or the model has no template: 400 to all messages."""
    engine.render, engine.without = None if status != 400 else lambda body: "made up: no template", status
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"messages": talk("a", f"b{row}")}) + "\n" for row in range(5)))
    assert extract(data, *options(engine, sidecar), "--concurrency", 1) == 0
    out, _ = capsys.readouterr()
    assert out.endswith(" were there, 5 not compared with the engine's rendering\n")
    assert engine.rendered == 2


def test_a_capture_of_other_ids_than_the_engine_rendered_fails_its_row(
    engine: FakeEngine, sidecar: SidecarThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.render = renders(tmp_path / "model")
    engine.fault = lambda number, sample: "shifted" if sample == "1" else ""
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"messages": talk("a", f"b{row}")}) + "\n" for row in range(3)))
    assert extract(data, *options(engine, sidecar)) == 1
    out, err = capsys.readouterr()
    assert ", 1 failed" in out and "2 captured" in out
    assert "row 1: its capture" in err and "its token ids are others than were sent" in err
    states = {record.sample_id: record.state for record in captures(sidecar, "d")}
    assert states == {"0": CaptureState.READY, "1": CaptureState.QUARANTINED, "2": CaptureState.READY}


def test_what_shows_another_day_than_today_is_not_compared_and_that_is_said(
    engine: FakeEngine, sidecar: SidecarThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine writes its own today; a conversation that shows no date is compared whatever day it is."""
    tokenizer = tiny_tokenizer()
    day = "{% if messages[0].role != 'system' %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    tokenizer.chat_template = day + (tokenizer.chat_template or "")
    tokenizer.save_pretrained(tmp_path / "model")
    engine.render = renders(tmp_path / "model")
    data = tmp_path / "d.jsonl"
    rows = [talk("a", "b"), [{"role": "system", "content": "c"}, *talk("a", "b")]]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    assert extract(data, *options(engine, sidecar), "--date", "2001-02-03", "--dataset", "past") == 0
    assert engine.rendered == 1
    out, _ = capsys.readouterr()
    assert out.endswith(" were there, 1 not compared with the engine's rendering, which is of another day\n")
    assert extract(data, *options(engine, sidecar), "--dataset", "now") == 0
    assert engine.rendered == 2, "today's differs from what is stored, the other row is there"
    assert "not compared" not in capsys.readouterr().out


def test_many_conversations_are_encoded_in_another_process_in_their_order(
    engine: FakeEngine, sidecar: SidecarThread, tmp_path: Path
) -> None:
    data, folder = tmp_path / "d.jsonl", tmp_path / "tokens"
    rows = [{"messages": talk("a", f"b{row % 40}")} for row in range(400)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert extract(data, *options(engine, sidecar), "--workers", 1, "--save-dataset", folder) == 0
    saved = list(open_rows(folder).read())
    assert [row["row"] for row in saved] == list(range(400))  # type: ignore[index]
    chats = load_tokenizer(str(tmp_path / "model"))
    assert saved[390]["input_ids"] == chats.encode(rows[390]["messages"]).token_ids  # type: ignore[index]


def test_a_part_takes_each_nth_row(engine: FakeEngine, sidecar: SidecarThread, data: Path) -> None:
    assert extract(data, *options(engine, sidecar), "--shard", "2/4") == 0
    assert sorted(map(int, engine.asked)) == [1, 5, 9, 13, 17, 21, 25, 29]
    for part in (1, 3, 4):
        assert extract(data, *options(engine, sidecar), "--shard", f"{part}/4") == 0
    assert sorted(map(int, engine.asked)) == list(range(30))


def test_a_second_run_on_the_same_rows_is_noticed(
    engine: FakeEngine, sidecar: SidecarThread, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with only_run(sidecar.url, "talks", (0, 1)):
        assert extract(data, *options(engine, sidecar)) == 2
        assert "another run extracts data set 'talks'" in capsys.readouterr().err
        assert extract(data, *options(engine, sidecar), "--shard", "1/3") == 2
        assert extract(data, *options(engine, sidecar), "--dataset", "other", "--limit", 1) == 0
    with only_run(sidecar.url, "talks", (1, 3)):
        assert extract(data, *options(engine, sidecar)) == 2
        assert extract(data, *options(engine, sidecar), "--shard", "2/3") == 2
        assert extract(data, *options(engine, sidecar), "--shard", "1/3") == 0
    assert len(engine.asked) == 10  # the row of the other data set has the same tokens
    assert extract(data, *options(engine, sidecar)) == 0


def test_a_restart_prepares_as_the_run_before_and_asks_for_nothing_again(
    engine: FakeEngine, sidecar: SidecarThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also on another day: the template writes the date."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d%m%Y') }}" + (tokenizer.chat_template or "")
    tokenizer.save_pretrained(tmp_path / "dated")
    data, folder = tmp_path / "d.jsonl", tmp_path / "tokens"
    rows = [{"messages": [{**turn, "role": turn["role"].replace("user", "boss")} for turn in talk("a", "b", "c", "d")]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*options(engine, sidecar), "--tokenizer", tmp_path / "dated", "--save-dataset", folder]
    first = ["--date", "2001-02-03", "--role", "boss=user", "--train-on", "last", "--template-kwargs", '{"x": 1}']
    assert extract(data, *words, *first) == 0
    assert extract(data, *words) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 rows, 0 captured (0 tokens), 1 were there")
    assert len(engine.asked) == 1
    (row,) = open_rows(folder).read()
    kept = json.loads((folder / "hsconnector-dataset.json").read_text())
    assert kept["preparation"]["date"] == "2001-02-03"
    assert kept["counts"]["stored"] == 1
    assert extract(data, *words, "--date", "2001-02-04") == 2
    assert "is prepared with date=2001-02-03, asked for is 2001-02-04" in capsys.readouterr().err
    assert extract(data, *words[:-1], tmp_path / "other", *first[:-4]) == 0
    (whole,) = open_rows(tmp_path / "other").read()
    assert whole["input_ids"] == row["input_ids"] and sum(whole["loss_mask"]) > sum(row["loss_mask"])  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--template-kwargs", "{"], "--template-kwargs '{' is no JSON"),
        (["--template-kwargs", "[]"], "is no JSON object, but a list"),
        (["--date", "yesterday"], "--date 'yesterday' is no day as YYYY-MM-DD"),
        (["--shard", "5/4"], "--shard '5/4' is not I/N with I from 1 to N"),
        (["--role", "boss"], "--role 'boss' is not NAME=ROLE"),
        (["--role", "boss=king"], "role 'boss'='king' is not NAME=ROLE with one of system"),
    ],
)
def test_options_of_the_preparation_that_make_no_sense_are_refused(
    engine: FakeEngine,
    sidecar: SidecarThread,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    line: str,
) -> None:
    assert extract(data, *options(engine, sidecar), *words) == 2
    assert line in " ".join(capsys.readouterr().err.split())
    assert engine.asked == []


def test_the_limit_takes_rows_from_the_start(engine: FakeEngine, sidecar: SidecarThread, data: Path) -> None:
    assert extract(data, *options(engine, sidecar), "--limit", 7, "--tag", "split=a") == 0
    assert {record.sample_id for record in captures(sidecar, "talks")} == {str(row) for row in range(7)}


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--layers", "0,1,4"], 2, "captures layers [0, 2, 4], asked for are [0, 1, 4]"),
        (["--model", "other"], 2, "serves served, adapter, not 'other'"),
        (["--tag", "split"], 2, "--tag 'split' is not NAME=VALUE"),
        (["--dataset", "x" * 257], 2, "--dataset has 257 bytes"),
        (["--engine-url", "ftp://x"], 2, "an address is http://"),
        (["--engine-url", "http://127.0.0.1:9"], 3, "no engine answers at http://127.0.0.1:9"),
        (["--tokenizer", "/nowhere"], 0, ""),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_asked(
    engine: FakeEngine,
    sidecar: SidecarThread,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    line: str,
) -> None:
    assert extract(data, *options(engine, sidecar), *words) == code
    assert line in capsys.readouterr().err
    assert len(engine.asked) == (30 if code == 0 else 0)


def test_an_engine_that_sends_elsewhere_is_said_before_anything_is_asked(
    engine: FakeEngine,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hsconnector.cli.extract._SEEN_WITHIN_S", 0.1)
    other = start_sidecar(tmp_path / "other")
    try:
        assert extract(data, "--engine-url", engine.url, "--sidecar", other.url) == 3
    finally:
        other.stop()
    assert f"which hears from no engine at all: start the engine with `hsconnector launch {tmp_path}" in (
        capsys.readouterr().err
    )
    assert engine.asked == []


def test_two_engines_of_one_model_with_other_layers_need_to_be_told_apart(
    engine: FakeEngine, sidecar: SidecarThread, data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = FakeEngine(sidecar.url, model=str(tmp_path / "model"), layer_ids=(1, 3))
    try:
        assert extract(data, *options(engine, sidecar)) == 2
        assert "say which with --layers" in capsys.readouterr().err
        assert extract(data, *options(engine, sidecar), "--layers", "0,2,4") == 0
        assert extract(data, *options(other, sidecar), "--layers", "0,2,4", "--dataset", "wrong", "--limit", 1) == 0
        data.write_text('{"input_ids": [77]}\n')
        assert extract(data, *options(other, sidecar), "--layers", "0,2,4", "--dataset", "wrong") == 1
    finally:
        other.stop()
    assert "row 0: its capture" in (err := capsys.readouterr().err)
    assert "is of something else: layers [1, 3] instead of [0, 2, 4]" in err


def test_an_adapter_is_content_of_its_own(engine: FakeEngine, sidecar: SidecarThread, data: Path) -> None:
    assert extract(data, *options(engine, sidecar), "--limit", 1) == 0
    assert extract(data, *options(engine, sidecar), "--limit", 1, "--model", "adapter") == 1
    assert engine.bodies[-1]["model"] == "adapter"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ended_by_a_signal_and_started_again_each_row_is_captured_once(
    engine: FakeEngine, sidecar: SidecarThread, data: Path, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    folder = tmp_path / "tokens"
    command = [*COMMAND, str(data), *options(engine, sidecar), "--concurrency", "3", "--save-dataset", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)

    turn = threading.Lock()

    def point() -> None:
        if len(engine.asked) >= 12 and turn.acquire(blocking=False):
            engine.cut()
            process.send_signal(number)
            process.wait()

    engine.point = point
    out, err = process.communicate()
    assert process.returncode == code, err
    if number == signal.SIGINT:
        assert "30 rows, " in out and "not reached" in out
        assert "interrupted" in err
        assert "Traceback" not in err
    engine.point = lambda: None
    engine.rest()
    assert 0 < len(captures(sidecar, "talks")) < 30
    kept = json.loads((folder / "hsconnector-dataset.json").read_text())
    assert not kept["complete"] and kept["preparation"]["date"]
    if number == signal.SIGINT:
        saved = [str(row["row"]) for row in open_rows(folder).read()]  # type: ignore[index]
        stored = {r.sample_id for r in captures(sidecar, "talks") if r.state is CaptureState.READY}
        assert saved and len(saved) == kept["rows"] and set(saved) <= stored
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    found = captures(sidecar, "talks")
    assert Counter(r.sample_id for r in found if r.state is CaptureState.READY) == {str(i): 1 for i in range(30)}
    assert len(list(open_rows(folder).read())) == 30
