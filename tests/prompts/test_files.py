"""Data sets on disk are read as rows; what is written next to the captures is read again."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from hsconnector.errors import SettingsError
from hsconnector.prompts.files import open_rows
from hsconnector.prompts.preparation import Preparation
from hsconnector.prompts.prompt import Prompt, PromptReader, RowRefused
from hsconnector.prompts.saved import SavedDataset

ROWS = [{"input_ids": [i, i + 1], "loss_mask": [0, 1], "id": f"s{i}"} for i in range(300)]


def write(path: Path) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.parquet", "folder"])
def test_every_kind_of_data_set_gives_the_same_rows_each_time_it_is_read(tmp_path: Path, name: str) -> None:
    rows = open_rows(write(tmp_path / name))
    assert rows.count == 300
    assert list(rows.read()) == ROWS
    assert list(rows.read()) == ROWS


def test_an_arrow_file_and_a_data_set_in_torch_format(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.set_format("torch")
    dataset.save_to_disk(str(tmp_path / "torch"))
    assert list(open_rows(tmp_path / "torch").read()) == ROWS
    (file,) = (tmp_path / "torch").glob("*.arrow")
    assert list(open_rows(file).read()) == ROWS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_folder_of_parts_is_read_in_the_order_of_names(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"b{suffix}")
    write(tmp_path / f"a{suffix}")
    rows = open_rows(tmp_path)
    assert rows.count == 600
    assert list(rows.read()) == [*ROWS, *ROWS]


def test_a_line_that_is_no_json_is_one_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"input_ids": [1]}\n\n{"input_ids": [1\n\xff\xfe\n{"input_ids": [2]}')
    rows = open_rows(path)
    read = list(rows.read())
    assert (rows.count, len(read)) == (4, 4)
    lines = [str(PromptReader().read(row, index)) for index, row in enumerate(read)]
    assert lines[1].startswith("row 1: (line 3) is no JSON")
    assert lines[2].startswith("row 2: (line 4) is no JSON")
    assert [isinstance(row, RowRefused) for row in read] == [False, True, True, False]


def test_what_is_no_data_set_is_refused_with_the_way_out(tmp_path: Path) -> None:
    def refused(name: str, content: bytes = b"") -> str:
        path = tmp_path / name
        if content:
            path.write_bytes(content)
        with pytest.raises(SettingsError) as caught:
            open_rows(path)
        return str(caught.value)

    assert "no data set at" in refused("absent.jsonl")
    assert "d.txt: a data set is one of .jsonl" in refused("d.txt", b"x")
    assert "is no Parquet file" in refused("d.parquet", b"x")
    assert "is no JSON" in refused("d.json", b"x")
    assert "holds no list of rows; one object a line belongs in a .jsonl file" in refused("e.json", b"{}")
    assert "is no Arrow data set" in refused("d.arrow", b"x")
    (tmp_path / "empty").mkdir()
    assert "neither an Arrow data set nor a folder" in refused("empty")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "several"))
    assert f"name one: {tmp_path / 'several' / 'train'}" in refused("several")


def test_a_list_too_large_for_memory_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "d.json")
    monkeypatch.setattr("hsconnector.prompts.files.LARGEST_LIST", path.stat().st_size)
    assert list(open_rows(path).read()) == ROWS
    monkeypatch.setattr("hsconnector.prompts.files.LARGEST_LIST", path.stat().st_size - 1)
    with pytest.raises(SettingsError, match=r"jq -c '\.\[\]' d\.json > d\.jsonl"):
        open_rows(path)


@pytest.mark.parametrize(("name", "library"), [("d.parquet", "pyarrow"), ("folder", "datasets")])
def test_without_its_library_a_data_set_names_the_extra(tmp_path: Path, name: str, library: str) -> None:
    path = write(tmp_path / name)
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from pathlib import Path\n"
        "from hsconnector.errors import UnsupportedError\n"
        "from hsconnector.prompts.files import open_rows\n"
        f"try:\n    open_rows(Path({str(path)!r}))\n"
        "except UnsupportedError as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"{library}, which is not installed: pip install 'hsconnector[data]'" in told


PROMPTS = [Prompt(row, f"s{row}", (row, 7), (0, 1)) for row in range(5)]


def test_what_is_saved_as_arrow_gives_the_trainer_tensors(tmp_path: Path) -> None:
    """`speculators train` joins columns with torch, as `load_from_disk` hands them out."""
    with SavedDataset(tmp_path / "out", "arrow") as saved:
        saved.add(PROMPTS[3])
        saved.publish({3}, {})
    row = datasets.load_from_disk(str(tmp_path / "out"))[0]
    assert torch.equal(row["input_ids"], torch.tensor([3, 7])) and row["loss_mask"].dtype == torch.int64


@pytest.mark.parametrize("kind", ["jsonl", "arrow"])
def test_what_is_saved_holds_the_rows_that_are_stored_in_order(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "out"
    for kept_rows in ({0, 1, 2, 3, 4}, {0, 2, 4}):
        with SavedDataset(folder, kind) as saved:  # type: ignore[arg-type]
            for prompt in PROMPTS:
                saved.add(prompt)
            assert saved.publish(kept_rows, {"model": "tiny"}) == len(kept_rows)
        rows = list(open_rows(folder).read())
        kept = [prompt for prompt in PROMPTS if prompt.row in kept_rows]
        assert [PromptReader(id_field="sample_id").read(row, row["row"]) for row in rows] == kept  # type: ignore[index]
        assert [row["seq_len"] for row in rows] == [2] * len(kept)  # type: ignore[index]
        about = json.loads((folder / "hsconnector-dataset.json").read_text())
        assert about == {"rows": len(kept), "format": kind, "model": "tiny", "complete": True, "preparation": None}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_nothing_appears_where_a_run_broke_off(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), SavedDataset(tmp_path / "out", "jsonl") as saved:
        saved.add(PROMPTS[0])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_decided_is_kept_for_the_next_one(tmp_path: Path) -> None:
    decided = {"max_tokens": 9, "date": date(2026, 7, 26)}
    with SavedDataset(tmp_path / "out", "jsonl") as saved:
        first = saved.decide(decided)
        saved.begin()
    again = SavedDataset(tmp_path / "out", "jsonl")
    assert again.decide({}) == again.decide({"max_tokens": 9}) == first == Preparation(**decided)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="is prepared with max_tokens=9, asked for is 8: leave the option away"):
        again.decide({"max_tokens": 8})
    (tmp_path / "out" / "hsconnector-dataset.json").write_text("{")
    with pytest.raises(SettingsError, match=r"hsconnector-dataset\.json cannot be read"):
        SavedDataset(tmp_path / "out", "jsonl")


def test_a_run_that_broke_off_leaves_what_is_whole_and_never_fewer_rows(tmp_path: Path) -> None:
    for kept, count in (({0, 1}, 2), ({0}, None), ({0, 1, 2}, 3)):
        with SavedDataset(tmp_path / "out", "jsonl") as saved:
            for prompt in PROMPTS:
                saved.add(prompt)
            assert saved.publish(kept, {}, complete=False) == count
        assert [row["row"] for row in open_rows(tmp_path / "out").read()] == list(range(count or 2))  # type: ignore[index]


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(SettingsError, match="exists and is no data set of this command"):
        SavedDataset(tmp_path, "jsonl")
    assert (tmp_path / "precious.txt").read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SettingsError, match="exists and is no data set of this command"):
        SavedDataset(tmp_path / "link", "jsonl")
