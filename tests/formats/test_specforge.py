"""SpecForge 0.2.0 itself reads what is exported for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from specforge.algorithms.builtin import builtin_algorithm_registry
from specforge.algorithms.contracts import FeatureMode
from specforge.runtime.contracts import TrainBatch
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader, list_feature_files

from tests.formats.conftest import Captured
from tests.formats.running import export
from tests.formats.samples import LAYERS, captured_states, feed, make_rows
from tests.hugging_face import final_norm, reference_states
from tests.models import NUM_LAYERS
from tests.sidecar import start_sidecar

pytestmark = pytest.mark.trainer

STRATEGIES = ("eagle3", "dflash", "dspark")
MAX_LEN = 64
ROW_LENGTH = 33
"""Of the rows that are compared with the reference."""


def read_by_specforge(strategy: str, folder: Path, *, batch_size: int, max_len: int = MAX_LEN) -> list[TrainBatch]:
    """Every batch, through its reader (opening each file), store, normaliser and collator."""
    registration = builtin_algorithm_registry().resolve(strategy)
    provider = registration.providers.offline_for("text")
    contract = registration.spec.feature_contract(FeatureMode.OFFLINE, "text")
    built = provider.build_reader(str(folder), run_id="run", ttt_length=7, max_len=max_len)
    reader = OfflineManifestReader(
        str(folder),
        strategy=strategy,
        feature_keys=built.feature_keys,
        target_repr=built.target_repr,
        max_len=max_len,
        validate_files=True,
    )
    assert set(reader.feature_keys) == contract.storage.required_tensors
    loader = FeatureDataLoader(
        LocalFeatureStore("store"),
        refs=reader.read(),
        batch_size=batch_size,
        drop_last=False,
        strategy=strategy,
        per_sample_transform=provider.build_normalizer(max_len),
        collate_fn=provider.build_collator(),
    )
    batches = list(loader)
    for batch in batches:
        assert set(batch.tensors) == contract.required_tensors
    return batches


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


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row and slot."""
    return float(((found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
