"""SpecForge 0.2.0 itself reads what is exported for it."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from specforge.data.preprocessing import generate_vocab_mapping_file, process_token_dict_to_mappings
from specforge.runtime.data_plane.offline_reader import list_feature_files
from specforge.training.vocab_mapping import count_effective_feature_tokens

from hsconnector.formats import find_format
from hsconnector.formats.draft_vocab import count_tokens
from tests.formats.conftest import Captured
from tests.formats.running import export
from tests.formats.samples import LAYERS, captured_states, feed, make_rows
from tests.formats.specforge_reading import read_by_specforge
from tests.hugging_face import final_norm, reference_states
from tests.models import NUM_LAYERS, VOCAB_SIZE
from tests.sidecar import SidecarThread, start_sidecar

pytestmark = pytest.mark.trainer

STRATEGIES = ("eagle3", "dflash", "dspark")
ROW_LENGTH = 33
"""Of the rows that are compared with the reference."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_specforge_reads_every_sample_in_the_data_sets_order(strategy: str, captured: Captured, tmp_path: Path) -> None:
    code, said = export(captured.url, "--format", f"specforge-{strategy}", "--out", tmp_path, "--data", captured.data)
    assert code == 0, said
    batches = read_by_specforge(strategy, tmp_path, batch_size=1)
    assert [batch.tensors["input_ids"][0].tolist() for batch in batches] == captured.rows.token_ids
    for batch, mask in zip(batches, captured.rows.masks, strict=True):
        last = 0 if strategy == "eagle3" else mask[-1]  # its normaliser itself takes the last token out
        assert batch.tensors["loss_mask"][0].tolist() == [*mask[:-1], last]
    (padded,) = read_by_specforge(strategy, tmp_path, batch_size=len(batches))
    assert padded.tensors["input_ids"].shape == (len(batches), max(map(len, captured.rows.token_ids)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_tensor_lies_under_its_name_by_value(strategy: str, captured: Captured, tmp_path: Path) -> None:
    """Its key names are nearly speculators': the concatenated layers and the last one are not taken for each other."""
    export(captured.url, "--format", f"specforge-{strategy}", "--out", tmp_path, "--data", captured.data)
    aux_name, last_name = {
        "eagle3": ("hidden_state", "target"),
        "dflash": ("hidden_states", None),
        "dspark": ("hidden_states", "target_last_hidden_states"),
    }[strategy]
    tolerance = 1e-5 if captured.dtype == torch.float32 else 2e-2
    for batch, token_ids in zip(
        read_by_specforge(strategy, tmp_path, batch_size=1), captured.rows.token_ids, strict=True
    ):
        expected = reference_states(captured.model, token_ids, LAYERS)
        aux = batch.tensors[aux_name]
        assert aux.dtype == captured.dtype and aux.shape == (1, len(token_ids), 3 * 256)
        assert relative(aux[0].unflatten(1, (3, 256)), expected[:, :3]) < tolerance
        if last_name:
            last = batch.tensors[last_name]
            assert last.dtype == captured.dtype and last.shape == (1, len(token_ids), 256)
            assert relative(last[0], final_norm(captured.model, expected[:, 3])) < tolerance


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_specforge_truncates_without_a_complaint(strategy: str, captured: Captured, tmp_path: Path) -> None:
    export(captured.url, "--format", f"specforge-{strategy}", "--out", tmp_path, "--data", captured.data)
    (batch,) = read_by_specforge(strategy, tmp_path, batch_size=10, max_len=16)
    assert batch.tensors["input_ids"].shape[1] == 16


def test_file_names_order_as_rows_do_beyond_nine(model: Path, tmp_path: Path) -> None:
    rows = make_rows(120)
    sidecar = start_sidecar(tmp_path / "store")
    try:
        sent = [9, 100, 2, 11, 0]
        feed(sidecar.url, model, [(row, rows.token_ids[row]) for row in sent])
        assert export(sidecar.url, "-f", "specforge-dflash", "-o", tmp_path / "out")[0] == 0
    finally:
        sidecar.stop()
    tokens = [torch.load(path)["input_ids"].tolist() for path in list_feature_files(str(tmp_path / "out"))]
    assert tokens == [rows.token_ids[row] for row in sorted(sent)]


def test_files_hold_no_more_than_their_tensors(captured: Captured, tmp_path: Path) -> None:
    """torch saves the storage behind a view: one slot must not drag the whole capture along."""
    export(captured.url, "--format", "specforge-dflash", "--out", tmp_path, "--layers", f"3,{NUM_LAYERS}")
    for path in tmp_path.glob("*.ckpt"):
        tensors = torch.load(path)
        assert set(tensors) == {"input_ids", "loss_mask", "hidden_states"}
        assert path.stat().st_size < sum(tensor.nbytes for tensor in tensors.values()) + 4096


def test_rows_are_neither_shifted_nor_padded(captured: Captured, tmp_path: Path) -> None:
    export(captured.url, "--format", "specforge-eagle3", "--out", tmp_path)
    for row, token_ids in enumerate(captured.rows.token_ids):
        states = captured_states(captured.model, token_ids, LAYERS, captured.dtype)
        tensors = torch.load(tmp_path / f"row_{row:08d}.ckpt")
        assert torch.equal(tensors["aux_hidden_state"][0], states[:, :3].flatten(1))
        assert tensors["loss_mask"].tolist() == [1] * len(token_ids)


Rows = list[list[tuple[int, bool]]]


def mapping_of(rows: Rows, size: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """What the product makes of rows of (token id, whether it is trained on)."""
    pairs = [(np.array([token for token, _ in row]), np.array([int(counts) for _, counts in row])) for row in rows]
    (data,) = find_format("specforge-eagle3").vocabulary(count_tokens(pairs, vocab_size), size).values()
    found: dict[str, torch.Tensor] = torch.load(io.BytesIO(data))
    return found


@given(st.data())
def test_the_tables_are_those_of_its_own_tool(data: st.DataObject) -> None:
    """Over many ties, sizes around the number of tokens that occur, and ids above the size."""
    vocab_size = data.draw(st.sampled_from([8, 40, 3000]))
    token = st.tuples(st.integers(0, vocab_size - 1), st.booleans())
    rows = [[(0, True)], *data.draw(st.lists(st.lists(token, min_size=1, max_size=30), max_size=6))]
    size = data.draw(st.integers(1, vocab_size))
    dataset = {
        "input_ids": [torch.tensor([token for token, _ in row]) for row in rows],
        "loss_mask": [torch.tensor([int(counts) for _, counts in row]) for row in rows],
    }
    with tempfile.TemporaryDirectory() as cache, contextlib.redirect_stdout(None):
        theirs = torch.load(generate_vocab_mapping_file(dataset, vocab_size, size, cache_dir=cache))
    ours = mapping_of(rows, size, vocab_size)
    assert set(ours) == set(theirs)
    for name, table in theirs.items():
        assert ours[name].dtype == table.dtype and torch.equal(ours[name], table), name


def test_of_equally_frequent_tokens_the_first_are_taken() -> None:
    ours = mapping_of([[(7, True)], [(3, True)], [(5, True), (5, True)]], 2, 10)
    assert ours["d2t"].tolist() == [5, 7 - 1]
    with contextlib.redirect_stdout(None):
        assert process_token_dict_to_mappings(Counter([7, 3, 5, 5]), 2, 10)[0].tolist() == ours["d2t"].tolist()


def test_missing_tokens_come_in_the_order_of_its_set() -> None:
    """Few are missing below the size and more occur above it, so which of them fill the table is the set's order."""
    occurring = [*(token for token in range(3000) if token % 500 != 77), 3001, 3002]
    rows = [[(token, True) for token in occurring]]
    with contextlib.redirect_stdout(None):
        d2t, t2d = process_token_dict_to_mappings(Counter(occurring), 3000, 3100)
    ours = mapping_of(rows, 3000, 3100)
    assert torch.equal(ours["d2t"], d2t) and torch.equal(ours["t2d"], t2d)
    missing = [token for token in range(3000) if token % 500 == 77]
    assert [bool(t2d[token]) for token in missing] != sorted((bool(t2d[token]) for token in missing), reverse=True)


def test_ten_steps_with_the_tables_that_it_would_make_of_the_files(
    model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    """Its counting reads the exported files; its EAGLE-3 then trains on them with our file."""
    rows, out = make_rows(6), tmp_path / "out"
    feed(sidecar.url, model, enumerate(rows.token_ids))
    data = rows.write_lines(tmp_path / "data.jsonl")
    code, said = export(sidecar.url, "-f", "specforge-eagle3", "-o", out, "--data", data, "--draft-vocab", "48")
    assert code == 0, said
    counts = count_effective_feature_tokens(str(out), target_vocab_size=VOCAB_SIZE)
    with contextlib.redirect_stdout(None):
        d2t, t2d = process_token_dict_to_mappings(counts, 48, VOCAB_SIZE)
    ours = torch.load(out / "vocab_mapping-48.pt")
    assert torch.equal(ours["d2t"], d2t) and torch.equal(ours["t2d"], t2d)
    target = tmp_path / "model"
    shutil.copytree(model, target)
    index = {"weight_map": dict.fromkeys(load_file(target / "model.safetensors"), "model.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    program = ("-m", "tests.specforge_cpu", out, out / "vocab_mapping-48.pt", target)
    done = subprocess.run([sys.executable, *map(str, program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = json.loads(done.stdout.splitlines()[-1])
    assert len(losses) == 10 and all(0 < loss < 100 for loss in losses) and losses[-1] < losses[0]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row and slot."""
    return float(((found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
