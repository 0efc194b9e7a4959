"""`hsconnector export`: selection, resume, bad samples, another model's export."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from hsconnector.capture.header import open_header
from hsconnector.capture.protocol import FailReason
from hsconnector.formats.manifest import Description, Manifest, read_manifest
from tests.feeding import Feeder
from tests.formats.conftest import ROWS, Captured
from tests.formats.running import export
from tests.formats.samples import LAYERS, feed, make_rows
from tests.models import NUM_LAYERS, random_token_ids
from tests.shards import overwrite, write_shard
from tests.sidecar import SidecarThread


def files(out: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of each exported file, and of the manifest."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()}


def manifest(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return found


def test_the_manifest_says_what_every_file_holds(captured: Captured, tmp_path: Path) -> None:
    """Each slot has a name that no convention of counting can mistake (BaldEagle#18)."""
    code, said = export(captured.url, "-f", "specforge-eagle3", "-o", tmp_path, "--data", captured.data)
    assert code == 0
    about, entries = manifest(tmp_path)["description"], manifest(tmp_path)["files"]
    assert about["model"] == str(captured.model) and about["format"] == "specforge-eagle3"
    assert about["layer_ids"] == list(LAYERS) and about["last_layer_norm"] == "post"
    assert about["slots"] == ["after_layer_0", "after_layer_2", "after_layer_4", "after_layer_5"]
    assert about["norm"] == {"kind": "rms", "eps": 1e-06, "tensor": "model.norm.weight"}
    assert [entry["row"] for entry in entries] == list(range(ROWS))
    assert all(entry["content_hash"] and entry["data_hash"] and entry["sample_id"] for entry in entries)
    assert "model.aux_hidden_state_layer_ids: [0, 2, 4]" in said and "1 (after_layer_0)" in said


@pytest.mark.parametrize("format", ["speculators", "specforge-dspark"])
def test_a_second_run_rewrites_nothing(format: str, captured: Captured, tmp_path: Path) -> None:
    command = (captured.url, "-f", format, "-o", tmp_path, "--data", captured.data)
    export(*command)
    before = files(tmp_path)
    code, said = export(*command)
    assert code == 0 and f"0 files written (0 B), {ROWS} were there" in said
    assert files(tmp_path) == before


def test_what_is_missing_or_cut_short_is_written_and_nothing_else(captured: Captured, tmp_path: Path) -> None:
    command = (captured.url, "-f", "specforge-dflash", "-o", tmp_path, "--data", captured.data)
    export(*command)
    before = files(tmp_path)
    (tmp_path / "row_00000001.ckpt").unlink()
    os.truncate(tmp_path / "row_00000003.ckpt", 100)
    assert "2 files written" in export(*command)[1]
    after = files(tmp_path)
    changed = {name for name in before if before[name] != after[name]} - {"manifest.json"}
    assert changed == {"row_00000001.ckpt", "row_00000003.ckpt"}
    assert torch.load(tmp_path / "row_00000003.ckpt")["input_ids"].tolist() == captured.rows.token_ids[3]


def test_after_kill_9_exactly_the_missing_files_are_written(tmp_path: Path) -> None:
    count, store, out = 400, tmp_path / "store", tmp_path / "out"
    (store / "captures").mkdir(parents=True)
    for row in range(count):
        states = torch.randn(64, 4, 64)
        about = {
            "model": "m",
            "num_layers": "6",
            "sample_id": str(row),
            "content_hash": hashlib.sha256(b"%d" % row).hexdigest(),
        }
        write_shard(store / "captures", states, random_token_ids(64, seed=row), LAYERS, **about)
    command = ["export", str(store), "-f", "specforge-dflash", "-o", str(out), "--workers", "2"]
    process = subprocess.Popen([sys.executable, "-c", f"from hsconnector.cli import main; main({command!r})"])
    while len(list(out.glob("row_*.ckpt"))) < 20 and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    before = {name: value for name, value in files(out).items() if name.endswith(".ckpt") and name[0] != "."}
    assert 20 <= len(before) < count
    code, said = export(*command[1:])
    assert code == 0, said
    assert f"{count - len(before)} files written" in said and f"{len(before)} were there" in said
    after = files(out)
    assert {name: after[name] for name in before} == before
    assert len(after) == count + 1 and len(manifest(out)["files"]) == count


def test_a_link_to_a_shard_that_is_gone_is_its_own_and_made_anew(
    model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    """One link breaks and its row is captured again, one breaks for good."""
    rows = make_rows(3)
    feed(sidecar.url, model, enumerate(rows.token_ids))
    command = (sidecar.url, "-f", "speculators", "-o", tmp_path / "out", "--link", "symlink")
    assert export(*command)[0] == 0
    for entry in manifest(tmp_path / "out")["files"][:2]:
        httpx.delete(f"{sidecar.url}/v1/captures/{entry['capture_id']}").raise_for_status()
    feed(sidecar.url, model, [(0, rows.token_ids[0])])
    code, said = export(*command)
    assert "1 files written" in said and "1 were there" in said
    assert code == 1 and "sample 1: capture" in said and "is expired" in said
    links = {path.name: path.exists() for path in (tmp_path / "out").glob("hs_*")}
    assert links == {"hs_0.safetensors": True, "hs_1.safetensors": False, "hs_2.safetensors": True}


def test_another_models_export_is_refused_field_by_field(captured: Captured, tmp_path: Path) -> None:
    export(captured.url, "-f", "speculators", "-o", tmp_path, "--layers", f"3,{NUM_LAYERS}")
    before = files(tmp_path)
    code, said = export(captured.url, "-f", "speculators", "-o", tmp_path)
    assert code == 2 and "holds another export" in said
    assert "layer_ids [3, 6] there, [1, 3, 5, 6] now" in said and "--out" in said
    code, said = export(captured.url, "-f", "specforge-eagle3", "-o", tmp_path)
    assert code == 2 and "format 'speculators' there, 'specforge-eagle3' now" in said
    assert files(tmp_path) == before


def test_other_models_and_revisions_are_named(tmp_path: Path) -> None:
    about: dict[str, Any] = {
        "num_layers": 6,
        "hidden_size": 8,
        "dtype": "float32",
        "layer_ids": (6,),
        "slots": ("after_layer_5",),
    }
    here = Description(format="speculators", model="org/a", last_layer_norm="pre", **about)
    there = Description(format="speculators", model="org/b", model_revision="r2", last_layer_norm="pre", **about)
    Manifest(tmp_path, here, ".safetensors").close()
    with pytest.raises(ValueError, match=r"model 'org/a' there, 'org/b' now; model_revision '' there, 'r2' now"):
        Manifest(tmp_path, there, ".safetensors")
    with Manifest(tmp_path, here, ".safetensors"), pytest.raises(ValueError, match="another export is writing"):
        Manifest(tmp_path, here, ".safetensors")


def test_a_folder_with_files_of_someone_else_is_refused(captured: Captured, tmp_path: Path) -> None:
    (tmp_path / "data_0.ckpt").touch()
    code, said = export(captured.url, "-f", "specforge-dflash", "-o", tmp_path)
    assert code == 2 and "holds 1 .ckpt files that no export of this command wrote (the first is data_0.ckpt)" in said


def test_bad_samples_are_named_and_the_rest_goes_on(model: Path, sidecar: SidecarThread, tmp_path: Path) -> None:
    rows = make_rows(8)
    feed(sidecar.url, model, [(row, rows.token_ids[row]) for row in range(5)])
    states = torch.randn(9, 4, 256)
    states[4, 2, 7] = float("nan")
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=256, model=str(model)) as feeder:
        feeder.capture(states, rows.token_ids[5][:9], dataset="chats", sample_id="5")
        failed = feeder.open(8, dataset="chats", sample_id="6")
        feeder.fail(failed, FailReason.ABORTED)
    shards = (sidecar.store / "captures").rglob("*.safetensors")
    damaged = next(path for path in shards if open_header(path).metadata["sample_id"] == "0")
    body = bytearray(damaged.read_bytes())
    body[-1000:-900] = bytes(100)
    overwrite(damaged, body)
    code, said = export(
        sidecar.url, "-f", "speculators", "-o", tmp_path / "out", "--data", rows.write_lines(tmp_path / "d.jsonl")
    )
    assert code == 1
    assert "4 files written" in said and "4 samples could not be exported" in said
    assert "row 0: " in said and "is damaged" in said
    assert "row 5: has no ready capture (capture" in said and "is unsound: non_finite" in said
    assert f"row 6: has no ready capture (capture {failed} failed: aborted" in said
    assert "row 7: has no capture: extract it first" in said
    assert sorted(path.name for path in (tmp_path / "out").glob("hs_*")) == [
        f"hs_{row}.safetensors" for row in range(1, 5)
    ]


def test_bad_rows_of_the_data_set_are_named(captured: Captured, tmp_path: Path) -> None:
    lines = captured.data.read_text().splitlines()
    lines[1] = json.dumps({"input_ids": captured.rows.token_ids[1], "loss_mask": [1, 1]})
    lines[2] = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    lines[3] = json.dumps({"input_ids": [*captured.rows.token_ids[3], 7]})
    lines[4] = json.dumps({"input_ids": captured.rows.token_ids[4], "loss_mask": [1, 0] * 16 + [1]})
    data = tmp_path / "bad.jsonl"
    data.write_text("\n".join(lines))
    code, said = export(captured.url, "-f", "specforge-dflash", "-o", tmp_path / "out", "--data", data)
    assert code == 1 and "2 files written" in said
    assert "row 1: has" in said
    assert "row 2: is a conversation: export reads input_ids and loss_mask" in said
    assert "row 3: capture" in said and "of other tokens than the data set has there (26 and 27)" in said
    assert "row 4: its loss mask has no two tokens in a row" in said


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_masks_come_from_any_kind_of_data_set(kind: str, captured: Captured, tmp_path: Path) -> None:
    table = {"input_ids": captured.rows.token_ids, "loss_mask": captured.rows.masks}
    data = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        captured.rows.write_lines(data)
    elif kind == "parquet":
        pq.write_table(pa.table(table), data)
    else:
        Dataset.from_dict(table).save_to_disk(data)
    code, said = export(captured.store, "-f", "specforge-eagle3", "-o", tmp_path / "out", "--data", data)
    assert code == 0 and "every token counts" not in said
    for row, mask in enumerate(captured.rows.masks):
        assert torch.load(tmp_path / "out" / f"row_{row:08d}.ckpt")["loss_mask"].tolist() == mask


def test_rows_are_found_by_content_where_the_sample_ids_say_nothing(
    model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    """A shuffled data set, a repeated row, and captures of live traffic without sample ids."""
    rows = make_rows(4)
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=256, model=str(model)) as feeder:
        for token_ids in rows.token_ids:
            feeder.capture(torch.randn(len(token_ids), 4, 256), token_ids)
    shuffled = [rows.token_ids[row] for row in (2, 0, 3, 0)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in shuffled))
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "out", "--data", data)
    assert code == 0 and "1 captures belong to no row" in said
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "other")
    assert code == 1 and said.count("has no sample id, from which no row index can be told") == 4
    assert export(sidecar.url, "-f", "specforge-dflash", "-o", tmp_path / "forge")[0] == 0
    assert len(list((tmp_path / "forge").glob("capture_*.ckpt"))) == 4


def test_selection_by_data_set_and_by_id(model: Path, sidecar: SidecarThread, tmp_path: Path) -> None:
    rows = make_rows(3)
    ids = feed(sidecar.url, model, enumerate(rows.token_ids), dataset="a")
    feed(sidecar.url, model, enumerate(make_rows(3, seed=1).token_ids), dataset="b")
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "all")
    assert code == 2 and "data sets 'a' and 'b' share row 0: choose with --dataset" in said
    for source in (sidecar.url, sidecar.store):
        out = tmp_path / ("of-url" if source == sidecar.url else "of-store")
        assert export(source, "-f", "speculators", "-o", out, "--dataset", "a")[0] == 0
        assert {entry["capture_id"] for entry in manifest(out)["files"]} == set(ids)
        code, said = export(source, "-f", "speculators", "-o", out / "one", "--id", ids[2], "--id", "no-such")
        assert code == 1 and "no-such: is not known in" in said
        assert [entry["row"] for entry in manifest(out / "one")["files"]] == [2]


def test_the_latest_of_several_captures_of_a_sample_is_taken(
    model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    rows = make_rows(1)
    feed(sidecar.url, model, enumerate(rows.token_ids))
    (latest,) = feed(sidecar.url, model, enumerate(rows.token_ids))
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "out")
    assert code == 0 and "1 captures are left out: a later one holds the same sample" in said
    assert [entry["capture_id"] for entry in manifest(tmp_path / "out")["files"]] == [latest]


def test_captures_of_two_models_are_not_mixed(model: Path, sidecar: SidecarThread, tmp_path: Path) -> None:
    rows = make_rows(2)
    feed(sidecar.url, model, [(0, rows.token_ids[0])])
    with Feeder(sidecar.url, layer_ids=LAYERS, hidden_size=256, model="org/other", num_layers=NUM_LAYERS) as feeder:
        feeder.capture(torch.randn(len(rows.token_ids[1]), 4, 256), rows.token_ids[1], sample_id="1")
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "out")
    assert code == 2 and "not of one model" in said and "'org/other'" in said


def test_captures_with_other_layers_are_named_when_layers_are_chosen(
    model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    rows = make_rows(2)
    feed(sidecar.url, model, [(0, rows.token_ids[0])])
    feed(sidecar.url, model, [(1, rows.token_ids[1])], layer_ids=(2, NUM_LAYERS))
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "out")
    assert code == 2 and "the captures hold different layers" in said and "--layers" in said
    code, said = export(sidecar.url, "-f", "speculators", "-o", tmp_path / "out", "--layers", f"3,{NUM_LAYERS}")
    assert code == 1 and "1 files written" in said and "row 1: " in said and "[3]" in said


@pytest.mark.parametrize(
    ("format", "layers", "words"),
    [
        ("speculators", "1,3,5", "needs layer 6"),
        ("specforge-eagle3", "1,3,6", "needs three layers besides the last, 6, and there are 2"),
        ("specforge-dspark", "3", "needs layer 6"),
        ("specforge-dflash", "6", "needs layers besides the last"),
        ("specforge-dflash", "0,3,6", "cannot name the embeddings"),
        ("specforge-dflash", "3,9", "layer 9 is outside"),
        ("parquet", "3", "--format 'parquet' is none of speculators, specforge-eagle3"),
    ],
)
def test_layers_that_a_format_does_not_take(
    format: str, layers: str, words: str, captured: Captured, tmp_path: Path
) -> None:
    code, said = export(captured.url, "-f", format, "-o", tmp_path / "out", "--layers", layers)
    assert code == 2 and words in said and not (tmp_path / "out").exists()


def test_an_existing_file_of_other_tokens_is_not_replaced(captured: Captured, tmp_path: Path) -> None:
    export(captured.url, "-f", "specforge-dflash", "-o", tmp_path, "--data", captured.data)
    before = files(tmp_path)
    lines = captured.data.read_text().splitlines()
    data = tmp_path.parent / f"{tmp_path.name}-swapped.jsonl"
    data.write_text("\n".join([lines[1], lines[0], *lines[2:]]))
    code, said = export(captured.url, "-f", "specforge-dflash", "-o", tmp_path, "--data", data)
    assert code == 1 and "row 0: row_00000000.ckpt is already there, from other tokens" in said.replace(
        " (sample 1)", ""
    )
    code, said = export(captured.url, "-f", "specforge-dflash", "-o", tmp_path)
    assert code == 1 and "is already there with another loss mask" in said
    assert files(tmp_path) == before


@pytest.mark.parametrize("format", ["speculators", "specforge-dflash"])
def test_a_changed_file_is_written_anew_and_named(format: str, captured: Captured, tmp_path: Path) -> None:
    """A flipped bit leaves the size as it was; a file that was only touched stays."""
    command = (captured.url, "-f", format, "-o", tmp_path, "--data", captured.data, "--link", "copy")
    export(*command)
    names = [entry["file"] for entry in manifest(tmp_path)["files"]]
    whole = (tmp_path / names[2]).read_bytes()
    (tmp_path / names[2]).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    os.utime(tmp_path / names[4], (1, 1))
    code, said = export(*command)
    assert code == 0 and "1 files written" in said and f"{ROWS - 1} were there" in said
    assert f"1 of them had been changed since they were written before:\n{names[2]}" in said
    assert (tmp_path / names[2]).read_bytes() == whole
    assert "had been changed" not in export(*command)[1]


def test_files_that_a_shrunk_data_set_leaves_are_named_and_pruned(captured: Captured, tmp_path: Path) -> None:
    """SpecForge's reader takes every file it finds."""
    command = (captured.url, "-f", "specforge-dflash", "-o", tmp_path / "out", "--data")
    export(*command, captured.data)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(captured.data.read_text().splitlines(keepends=True)[:-2]))
    code, said = export(*command, fewer)
    assert code == 1 and "2 earlier files belong to no row of the data set" in said
    assert "row_00000004.ckpt" in said and "row_00000005.ckpt" in said and "row_00000003.ckpt" not in said
    assert export(*command, captured.data, "--id", "1")[0] == 0
    code, said = export(*command, fewer, "--prune")
    assert code == 0 and "2 files were removed" in said
    assert len(list((tmp_path / "out").glob("*.ckpt"))) == ROWS - 2 == len(manifest(tmp_path / "out")["files"])


def test_a_foreign_file_is_found_in_a_subfolder_and_by_the_check(captured: Captured, tmp_path: Path) -> None:
    """SpecForge's reader walks into subfolders."""
    command = (captured.url, "-f", "specforge-dflash", "-o", tmp_path / "out", "--data", captured.data)
    export(*command)
    (tmp_path / "out" / "old").mkdir()
    shutil.copy(tmp_path / "out" / "row_00000000.ckpt", tmp_path / "out" / "old" / "row_00000000.ckpt")
    code, said = export(*command)
    assert code == 2 and "holds 1 .ckpt files that no export of this command wrote" in said
    assert "old/row_00000000.ckpt" in said


@pytest.mark.parametrize("link", ["auto", "hard", "symlink", "copy"])
def test_the_stores_shards_cannot_be_written_through_an_export(link: str, captured: Captured, tmp_path: Path) -> None:
    """Shards are read-only files, those that an earlier sidecar left writable too; a copy is the user's own."""
    shards = sorted((captured.store / "captures").rglob("*.safetensors"))
    assert all(path.stat().st_mode & 0o777 == 0o444 & ~0o022 for path in shards)
    shards[0].chmod(0o644)
    code, said = export(captured.url, "-f", "speculators", "-o", tmp_path, "--link", link)
    way = {"auto": "hard-linked", "hard": "hard-linked", "symlink": "linked", "copy": "copied"}[link]
    assert code == 0 and f"of the files written are {ROWS} {way}" in said
    modes = {path.stat().st_mode & 0o222 for path in tmp_path.glob("*.safetensors")}
    assert modes == ({0o200} if link == "copy" else {0})
    shards[0].chmod(0o444)


def test_masks_that_changed_in_the_data_set_are_said_where_the_trainer_reads_them(
    captured: Captured, tmp_path: Path
) -> None:
    command = (captured.url, "-f", "speculators", "-o", tmp_path / "out", "--data")
    export(*command, captured.data)
    rows = [json.loads(line) for line in captured.data.read_text().splitlines()]
    rows[3]["loss_mask"] = [1 - each for each in rows[3]["loss_mask"]]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = export(*command, other)
    assert code == 0 and "1 rows of the data set, in which the trainer looks for masks, have others than before" in said
    assert "have others than before" not in export(*command, other)[1]


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    assert export(tmp_path / "none", "-f", "speculators", "-o", tmp_path)[0] == 2
    code, said = export("http://127.0.0.1:9", "-f", "speculators", "-o", tmp_path)
    assert code == 1 and "no sidecar answers" in said
    (tmp_path / "captures").mkdir()
    code, said = export(tmp_path, "-f", "speculators", "-o", tmp_path / "out")
    assert code == 1 and "nothing to export" in said


def test_a_torn_journal_is_read_up_to_the_tear(captured: Captured, tmp_path: Path) -> None:
    export(captured.url, "-f", "specforge-dflash", "-o", tmp_path / "whole")
    torn = tmp_path / "torn"
    shutil.copytree(tmp_path / "whole", torn)
    description, entries = read_manifest(torn)
    lines = [json.dumps(entry) for entry in manifest(torn)["files"]]
    (torn / "manifest.json").write_text(json.dumps({"description": manifest(torn)["description"], "files": []}))
    (torn / "manifest.part").write_text("\n".join([*lines[:3], lines[3][:40]]))
    assert read_manifest(torn) == (description, {name: entries[name] for name in list(entries)[:3]})
