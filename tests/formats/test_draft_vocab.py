"""`hsconnector export --draft-vocab N`: what it writes, what it says, what it refuses. The trainers' own tools are
compared in their formats' tests."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hsconnector.errors import SettingsError
from hsconnector.formats.draft_vocab import count_tokens, mappings
from hsconnector.prompts.labels import read_rows, read_tokens
from tests.formats.running import export
from tests.formats.samples import LAYERS, DataSet, make_rows
from tests.models import VOCAB_SIZE
from tests.shards import write_shard

SIZE = 64
FILES = {
    "speculators": {"token_freq.pt", f"d2t-{SIZE}.npy", f"t2d-{SIZE}.npy"},
    "specforge-eagle3": {f"vocab_mapping-{SIZE}.pt"},
}

Export = Callable[..., tuple[int, str]]


@pytest.fixture
def rows() -> DataSet:
    return make_rows(6)


@pytest.fixture
def run(model: Path, rows: DataSet, tmp_path: Path) -> Export:
    """Exports the captures of `rows` to tmp_path/out; options can be given a second time."""
    store = tmp_path / "store"
    write_captures(store, rows.token_ids, model)
    data = rows.write_lines(tmp_path / "data.jsonl")

    def exporting(*options: str | Path, format: str = "speculators", data: Path | None = data) -> tuple[int, str]:
        given = ("--data", data) if data else ()
        return export(store, "-f", format, "-o", tmp_path / "out", *given, *options)

    return exporting


def write_captures(store: Path, token_ids: Sequence[Sequence[int]], model: Path, *, first: int = 0) -> None:
    (store / "captures").mkdir(parents=True, exist_ok=True)
    for row, ids in enumerate(token_ids, start=first):
        states = torch.randn(len(ids), len(LAYERS), 256)
        content_hash = hashlib.sha256(b"%d" % row).hexdigest()
        about = {"model": str(model), "num_layers": "6", "sample_id": str(row), "content_hash": content_hash}
        write_shard(store / "captures", states, ids, LAYERS, **about)


def trained(rows: DataSet) -> Counter[int]:
    pairs = zip(rows.token_ids, rows.masks, strict=True)
    return Counter(token for ids, mask in pairs for token, counts in zip(ids, mask, strict=True) if counts)


def vocabularies(out: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((out / "manifest.json").read_text())["draft_vocabularies"]
    return found


@pytest.mark.parametrize("format", FILES)
def test_the_manifest_says_what_was_counted_and_hashes_the_files(
    format: str, run: Export, rows: DataSet, tmp_path: Path
) -> None:
    code, said = run("--draft-vocab", str(SIZE), format=format)
    assert code == 0, said
    counts, out = trained(rows), tmp_path / "out"
    covered = sum(count for _, count in counts.most_common(SIZE))
    (about,) = vocabularies(out)
    assert about == {
        "size": SIZE,
        "vocab_size": VOCAB_SIZE,
        "rows": 6,
        "trained_tokens": counts.total(),
        "covered_tokens": covered,
        "filled": 0,
        "files": {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in FILES[format]},
    }
    assert f"{SIZE} of 512 tokens, which are {covered / counts.total():.2%} of the {counts.total()} trained" in said
    assert all(str(out / name) in said for name in FILES[format] - {"token_freq.pt"})


def test_both_tables_name_the_same_tokens(run: Export, rows: DataSet, tmp_path: Path) -> None:
    run("--draft-vocab", str(SIZE))
    d2t, t2d = (np.load(tmp_path / "out" / f"{name}-{SIZE}.npy") for name in ("d2t", "t2d"))
    assert d2t.dtype == np.int64 and t2d.dtype == np.bool_ and t2d.shape == (VOCAB_SIZE,)
    chosen = (np.arange(SIZE) + d2t).tolist()
    assert chosen == np.flatnonzero(t2d).tolist()
    counts = trained(rows)
    assert min(counts[token] for token in chosen) >= max(counts[token] for token in set(counts) - set(chosen))


@pytest.mark.parametrize("format", FILES)
def test_a_second_run_rewrites_nothing(format: str, run: Export, tmp_path: Path) -> None:
    def files() -> dict[str, tuple[int, int]]:
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir()}

    run("--draft-vocab", str(SIZE), format=format)
    before = files()
    code, said = run("--draft-vocab", str(SIZE), format=format)
    assert code == 0 and "it is another" not in said and files() == before
    assert run(format=format)[0] == 0 and files() == before


def test_more_tokens_than_occur_are_filled_up_and_said(run: Export, rows: DataSet, tmp_path: Path) -> None:
    code, said = run("--draft-vocab", "400")
    filled = 400 - len(trained(rows))
    assert code == 0 and filled > 0 and f"; {filled} of them never occur and fill it up" in said
    assert "100.00% of" in said and vocabularies(tmp_path / "out")[0]["filled"] == filled


def test_every_size_is_made_anew_when_rows_come(run: Export, model: Path, tmp_path: Path) -> None:
    """A trainer would go on with tables of fewer rows and say nothing."""
    run("--draft-vocab", str(SIZE))
    assert [each["size"] for each in vocabularies(tmp_path / "out")] == [SIZE]
    more = make_rows(9)
    write_captures(tmp_path / "store", more.token_ids[6:], model, first=6)
    data = more.write_lines(tmp_path / "more.jsonl")
    code, said = run(data=data)
    assert code == 0 and f"of {SIZE} tokens was counted over 6 files, and there are 9" in said
    code, said = run("--draft-vocab", "32", data=data)
    assert code == 0 and said.count("it is another than the one that was there") == 1
    assert [(each["size"], each["rows"]) for each in vocabularies(tmp_path / "out")] == [(32, 9), (SIZE, 9)]


@pytest.mark.parametrize(
    ("format", "size", "words"),
    [
        ("speculators", "513", "--draft-vocab 513 is more than the 512 tokens of"),
        ("specforge-eagle3", "513", "--draft-vocab 513 is more than the 512 tokens of"),
        ("specforge-dflash", "64", "drafts of specforge-dflash have the whole vocabulary; it is for speculators, spec"),
        ("specforge-dspark", "64", "drafts of specforge-dspark have the whole vocabulary"),
    ],
)
def test_sizes_and_formats_that_cannot_be(format: str, size: str, words: str, run: Export, tmp_path: Path) -> None:
    code, said = run("--draft-vocab", size, format=format)
    assert code == 2 and words in said and not (tmp_path / "out").exists()


def test_the_whole_vocabulary_is_the_identity(run: Export, tmp_path: Path) -> None:
    assert run("--draft-vocab", "512")[0] == 0
    assert not np.load(tmp_path / "out" / "d2t-512.npy").any() and np.load(tmp_path / "out" / "t2d-512.npy").all()


def test_without_loss_masks_nothing_is_counted(run: Export, rows: DataSet, tmp_path: Path) -> None:
    code, said = run("--draft-vocab", "64", data=None)
    assert code == 2 and "give the data set that has them with --data" in said
    data = tmp_path / "plain.jsonl"
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows.token_ids))
    code, said = run("--draft-vocab", "64", data=data)
    assert code == 2 and f"which loss masks say: {data} has none" in said and not (tmp_path / "out").exists()


def test_masks_that_train_on_nothing(run: Export, rows: DataSet, tmp_path: Path) -> None:
    data = DataSet(rows.token_ids, [[0] * len(ids) for ids in rows.token_ids]).write_lines(tmp_path / "zero.jsonl")
    code, said = run("--draft-vocab", "64", data=data)
    assert code == 2 and "no token of the 6 exported rows counts for the loss" in said
    assert vocabularies(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"model_type": "hypernet9"}, 2, "has none of vocab_size"),
        ({"model_type": "hypernet9", "vocab_size": 100}, 2, "and the model has 100 (0 to 99): is it another model's"),
        ({"model_type": "hypernet9", "text_config": {"vocab_size": 600}}, 0, "64 of 600 tokens"),
        ({"model_type": "qwen3"}, 0, "64 of 151936 tokens"),
    ],
)
def test_the_vocabularys_size_is_the_configs(
    config: dict[str, object], code: int, words: str, run: Export, tmp_path: Path
) -> None:
    """Where the file leaves it out it is what transformers, and so the trainer, takes."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found, said = run("--draft-vocab", "64", "--model", tmp_path / "model")
    assert found == code and words in said


def test_files_of_another_run_are_not_left_uncounted(run: Export) -> None:
    assert run("--id", "0")[0] == 0
    code, said = run("--draft-vocab", "64", "--id", "1")
    assert code == 2 and "holds 1 that this run did not write or find as they should be (the first is hs_0." in said
    code, said = run("--draft-vocab", "64")
    assert code == 0 and "in 6 files" in said


def test_a_data_set_that_changes_while_it_is_exported(rows: DataSet, tmp_path: Path) -> None:
    path = rows.write_lines(tmp_path / "data.jsonl")
    known = {row.row: row for row in read_rows(path, lambda _: "")[0]}
    assert [ids.tolist() for ids, _ in read_tokens(path, known)] == rows.token_ids
    rows.masks[3][0] ^= 1
    rows.write_lines(path)
    with pytest.raises(SettingsError, match=r"row 3 of .* is not what it was a moment ago"):
        list(read_tokens(path, known))
    rows.masks[3][0] ^= 1
    DataSet(rows.token_ids[:4], rows.masks[:4]).write_lines(path)
    with pytest.raises(SettingsError, match="has 2 rows less than a moment ago"):
        list(read_tokens(path, known))


def test_counts_are_in_the_order_of_first_occurrence() -> None:
    rows = [([5, 3, 3, 9], [1, 1, 1, 0]), ([9, 1, 5], [1, 1, 1])]
    counts = count_tokens([(np.array(ids), np.array(mask)) for ids, mask in rows], 10)
    assert counts.tokens.tolist() == [3, 5, 1, 9] and counts.counts.tolist() == [2, 2, 1, 1]
    d2t, t2d = mappings([9, 3], 10)
    assert d2t.tolist() == [3, 8] and np.flatnonzero(t2d).tolist() == [3, 9]
