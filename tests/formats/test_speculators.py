"""What speculators 0.9.0 itself reads, and that a shard is handed over as it is."""

from __future__ import annotations

import io
import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hs_connectors.transfer import FileTransfer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from speculators.data_generation.offline import check_hidden_states, get_existing_hidden_state_indices
from speculators.train.vocab_mapping import (
    build_vocab_mappings_from_distribution,
    save_token_frequency_distribution,
)

from hsconnector.capture.header import open_header
from hsconnector.capture.shard import open_shard
from hsconnector.errors import SettingsError
from hsconnector.formats.draft_vocab import count_tokens
from hsconnector.formats.speculators import Speculators
from tests import training
from tests.formats.conftest import ROWS, Captured
from tests.formats.running import export
from tests.formats.samples import LAYERS, feed, make_rows
from tests.hugging_face import reference_states
from tests.models import NUM_LAYERS
from tests.sidecar import SidecarThread, start_sidecar

pytestmark = pytest.mark.trainer


def test_speculators_accepts_twenty_shards_unmodified(model: Path, tmp_path: Path) -> None:
    """speculators' own `check_hidden_states` takes our shards, before and after the export."""
    rows = make_rows(20)
    sidecar = start_sidecar(tmp_path / "store")
    try:
        feed(sidecar.url, model, enumerate(rows.token_ids))
        assert export(tmp_path / "store", "-f", "speculators", "-o", tmp_path / "out")[0] == 0
    finally:
        sidecar.stop()
    transfer = FileTransfer(tmp_path / "out")
    assert get_existing_hidden_state_indices(tmp_path / "out") == list(range(20))
    for row, token_ids in enumerate(rows.token_ids):
        loaded = transfer.get_cached(row)
        check_hidden_states(loaded, token_ids)
        assert loaded["token_ids"].dtype == torch.int64
        assert loaded["hidden_states"].shape == (len(token_ids), len(LAYERS), 256)
    for path in (tmp_path / "store" / "captures").rglob("*.safetensors"):
        shard = load_file(path)
        check_hidden_states(shard, shard["token_ids"].tolist())


def test_a_local_store_is_linked_and_not_copied(captured: Captured, tmp_path: Path) -> None:
    export(captured.store, "-f", "speculators", "-o", tmp_path)
    shards = {path.stat().st_ino for path in (captured.store / "captures").rglob("*.safetensors")}
    assert {path.stat().st_ino for path in tmp_path.glob("hs_*.safetensors")} == shards


@pytest.mark.parametrize("link", ["symlink", "copy"])
def test_symbolic_links_and_copies(link: str, captured: Captured, tmp_path: Path) -> None:
    assert export(captured.store, "-f", "speculators", "-o", tmp_path, "--link", link)[0] == 0
    for path in tmp_path.glob("hs_*.safetensors"):
        assert path.is_symlink() == (link == "symlink")
        assert path.resolve().is_relative_to(captured.store) == (link == "symlink")
        check_hidden_states(load_file(path), open_shard(path, verify=True).token_ids.tolist())


def test_over_http_the_same_bytes_arrive(captured: Captured, tmp_path: Path) -> None:
    """Where the store is not on this host; the checksum still holds, and another user can read the file."""
    assert export(captured.url, "-f", "speculators", "-o", tmp_path, "--no-local")[0] == 0
    shards = {open_shard(path).capture_id: path for path in (captured.store / "captures").rglob("*.safetensors")}
    for path in tmp_path.glob("hs_*.safetensors"):
        ours, theirs = open_shard(path, verify=True), shards[open_shard(path).capture_id]
        assert path.stat().st_ino != theirs.stat().st_ino
        assert open_header(path).data_hash == open_header(theirs).data_hash
        assert torch.equal(ours.hidden_states, open_shard(theirs).hidden_states)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()


def test_fewer_layers_make_new_shards(captured: Captured, tmp_path: Path) -> None:
    code, said = export(captured.store, "-f", "speculators", "-o", tmp_path, "--layers", f"3,{NUM_LAYERS}")
    assert code == 0 and "--target-layer-ids 3 " in said
    assert len(list(tmp_path.glob("hs_*.safetensors"))) == ROWS
    for row, token_ids in enumerate(captured.rows.token_ids):
        shard = open_shard(tmp_path / f"hs_{row}.safetensors", verify=True)
        assert shard.layer_ids == (3, NUM_LAYERS) and shard.hidden_states.dtype == captured.dtype
        check_hidden_states({"hidden_states": shard.hidden_states, "token_ids": shard.token_ids}, token_ids)


def test_the_split_that_speculators_makes_is_aux_and_last(captured: Captured, tmp_path: Path) -> None:
    """speculators#705: `[:, :-1]` is `[T, (n-1)*H]` of the asked layers, `[:, -1]` the last before the norm."""
    export(captured.store, "-f", "speculators", "-o", tmp_path)
    for row, token_ids in enumerate(captured.rows.token_ids):
        exported = Speculators().read(tmp_path / f"hs_{row}.safetensors")
        expected = reference_states(captured.model, token_ids, LAYERS)
        rtol, atol = (1e-4, 1e-4) if captured.dtype == torch.float32 else (0.1, 0.2)
        torch.testing.assert_close(exported.aux.float(), expected[:, :-1].flatten(1), rtol=rtol, atol=atol)
        torch.testing.assert_close(exported.last.float(), expected[:, -1], rtol=rtol, atol=atol)


def test_without_the_last_layer_the_missing_id_is_named() -> None:
    with pytest.raises(SettingsError, match=r"needs layer 6, .* not among the layers \[1, 3, 5\]"):
        Speculators().choose((1, 3, 5), 6)


@given(st.data())
def test_the_draft_vocabulary_is_that_of_its_own_tool(data: st.DataObject) -> None:
    """Over many ties, sizes around the number of tokens that occur, and ids above the size."""
    vocab_size = data.draw(st.sampled_from([8, 40, 3000]))
    token = st.tuples(st.integers(0, vocab_size - 1), st.integers(0, 1))
    rows = [[(0, 1)], *data.draw(st.lists(st.lists(token, min_size=1, max_size=30), max_size=6))]
    size = data.draw(st.integers(1, vocab_size))
    pairs = [([token for token, _ in row], [counts for _, counts in row]) for row in rows]
    counts = count_tokens([(np.array(ids), np.array(mask)) for ids, mask in pairs], vocab_size)
    ours = Speculators().vocabulary(counts, size)
    dataset = [{"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask)} for ids, mask in pairs]
    with tempfile.TemporaryDirectory() as folder:
        save_token_frequency_distribution(dataset, Path(folder, "token_freq.pt"))
        frequencies = torch.load(Path(folder, "token_freq.pt"))
    assert torch.load(io.BytesIO(ours["token_freq.pt"])) == frequencies
    tables = build_vocab_mappings_from_distribution(frequencies, size, vocab_size)
    for name, table in zip(("d2t", "t2d"), tables, strict=True):
        found = np.load(io.BytesIO(ours[f"{name}-{size}.npy"]))
        assert found.dtype == table.numpy().dtype and np.array_equal(found, table.numpy()), name


def test_of_equally_frequent_tokens_the_lowest_ids_are_taken() -> None:
    counts = count_tokens([(np.array(ids), np.ones(len(ids), np.int64)) for ids in ([7], [3], [5, 5])], 10)
    d2t = np.load(io.BytesIO(Speculators().vocabulary(counts, 2)["d2t-2.npy"]))
    assert d2t.tolist() == [3, 5 - 1]
    assert build_vocab_mappings_from_distribution({7: 1, 3: 1, 5: 2}, 2, 10)[0].tolist() == d2t.tolist()


@pytest.mark.timeout(1200)
def test_training_with_a_draft_vocabulary_is_the_same_as_with_its_own(
    model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    """It makes its tables of its own count of the data set, then takes ours, step by step."""
    rows = training.make_rows(7)
    data, out, size = training.write_dataset(tmp_path / "data", rows), tmp_path / "out", 96
    feed(sidecar.url, model, enumerate(rows), layer_ids=(*training.TARGETS, NUM_LAYERS))
    code, said = export(sidecar.url, "-f", "speculators", "-o", out, "--data", data, "--draft-vocab", str(size))
    assert code == 0, said
    use = Speculators().vocabulary_use(out, size)
    assert use in said
    save_token_frequency_distribution(Dataset.load_from_disk(data), data / "token_freq.pt")
    offline = ("--vllm-endpoint", training.NOBODY, "--on-missing", "raise", "--hidden-states-path", str(out))
    theirs = training.train(
        tmp_path, "theirs", "speculators", "eagle3", model, data, *offline, "--draft-vocab-size", str(size)
    )
    for name in (f"d2t-{size}.npy", f"t2d-{size}.npy"):
        assert (out / name).read_bytes() == (data / name).read_bytes()
        (data / name).unlink()
    ours = training.train(tmp_path, "ours", "speculators", "eagle3", model, data, *offline, *use.split())
    assert len(ours.steps) in training.STEPS and ours.steps == theirs.steps and ours.error_records == 0


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
