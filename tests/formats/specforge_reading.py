"""Exported files through SpecForge's own reader, normaliser and collator."""

from __future__ import annotations

from os import PathLike

from specforge.algorithms.builtin import builtin_algorithm_registry
from specforge.algorithms.contracts import FeatureMode
from specforge.runtime.contracts import TrainBatch
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

MAX_LEN = 64


def read_by_specforge(
    strategy: str, folder: str | PathLike[str], *, batch_size: int, max_len: int = MAX_LEN
) -> list[TrainBatch]:
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
