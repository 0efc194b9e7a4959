from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hsconnector.capture.shard import open_shard
from hsconnector.cli import main
from hsconnector.cli.verify import check, sentence
from hsconnector.reference.model import ReferenceModel
from tests.feeding import Feeder
from tests.hugging_face import final_norm, reference_states
from tests.models import LAYER_IDS, NUM_LAYERS, random_token_ids, tiny_qwen3
from tests.shards import overwrite, write_shard
from tests.sidecar import start_sidecar

TOKENS = random_token_ids(40)
EVERY = range(NUM_LAYERS + 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def states(model: Path) -> torch.Tensor:
    """`[40, 4, 256]`, a faithful capture."""
    return reference_states(model, TOKENS, LAYER_IDS)


def write(folder: Path, checkpoint: Path, states: torch.Tensor, **metadata: str) -> Path:
    about = {"model": str(checkpoint), "num_layers": str(NUM_LAYERS), **metadata}
    return write_shard(folder, states, TOKENS, LAYER_IDS, **about)


def verified(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and reports of `verify --json`."""
    with pytest.raises(SystemExit) as caught:
        main(["verify", *map(str, arguments), "--json"])
    return int(caught.value.code or 0), [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_faithful_captures_are_equal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, states: torch.Tensor
) -> None:
    path = write(tmp_path, model, states, request_id="r1")
    code, (report,) = verified(capsys, path)
    assert code == 0 and report["ok"] and report["capture_id"] == path.stem and report["request_id"] == "r1"
    assert report["rows"] == 40 and report["layer_ids"] == list(LAYER_IDS) and report["dtype"] == "float32"
    assert 0 <= report["largest_relative"] < 1e-5 and 0 <= report["median_scales"] <= report["row_scales"] < 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_precision_sets_the_scale(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, states: torch.Tensor, dtype: torch.dtype
) -> None:
    path = write(tmp_path, model, states.to(dtype))
    assert verified(capsys, path)[0] == 0
    code, (report,) = verified(capsys, write(tmp_path, model, states.to(dtype).float()))
    assert code == 1 and "as rounding explains: noise" in report["diagnosis"]


def another_layer(model: Path, states: torch.Tensor) -> torch.Tensor:
    states[:, 2] = reference_states(model, TOKENS, EVERY)[:, 2]
    return states


def shifted(model: Path, states: torch.Tensor) -> torch.Tensor:
    states[:, 1] = states[:, 1].roll(1, dims=0)
    return states


def normed(model: Path, states: torch.Tensor) -> torch.Tensor:
    states[:, 3] = final_norm(model, states[:, 3])
    return states


def zeroed(model: Path, states: torch.Tensor) -> torch.Tensor:
    states[16:32] = 0
    return states


def one_element(model: Path, states: torch.Tensor) -> torch.Tensor:
    states[39, 3, 255] += 0.1
    return states


@pytest.mark.parametrize(
    ("spoil", "row", "slot", "layer", "says"),
    [
        (another_layer, 0, 2, 3, "holds layer 2 instead of layer 3"),
        (shifted, 0, 1, 1, "holds rows 1 earlier than it should (row t holds row t-1)"),
        (
            normed,
            0,
            3,
            6,
            "holds the last layer 6 after the final norm instead of the last layer 6 before the final norm",
        ),
        (zeroed, 16, 0, 0, "is all zero; it is so in rows 16 to 31, the other 24 rows match"),
        (one_element, 39, 3, 6, "in row 39, the other 39 rows match"),
    ],
)
def test_the_first_difference_is_named_and_explained(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Path,
    states: torch.Tensor,
    spoil: Callable[[Path, torch.Tensor], torch.Tensor],
    row: int,
    slot: int,
    layer: int,
    says: str,
) -> None:
    path = write(tmp_path, model, spoil(model, states.clone()))
    code, (report,) = verified(capsys, path)
    assert code == 1 and not report["ok"]
    assert (report["first_row"], report["first_slot"], report["first_layer"]) == (row, slot, layer)
    assert says in report["diagnosis"]
    with pytest.raises(SystemExit):
        main(["verify", str(path)])
    text = capsys.readouterr().out
    assert f"{path.stem} differs first in row {row}, slot {slot} (layer {layer})" in text and says in text


def test_a_quantised_kv_cache_is_mentioned(tmp_path: Path, model: Path, states: torch.Tensor) -> None:
    away = states + 1e-2 * torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    for kept, says in (("fp8", "; the engine kept its KV cache in fp8, which the reference does not"), ("auto", "")):
        report = check(open_shard(write(tmp_path, model, away, kv_cache_dtype=kept)), ReferenceModel(model))
        assert not report.ok and report.diagnosis.endswith(says) and ("fp8" in report.diagnosis) is bool(says)


class Shaky(ReferenceModel):
    """A model whose first pass goes wrong in three rows of the last slot."""

    passes = 0

    def states(self, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
        self.passes += 1
        states: torch.Tensor = super().states(token_ids, layer_ids).clone()
        if self.passes == 1:
            states[19:22, -1] *= 1.01
        return states


def test_a_pass_that_is_off_by_itself_accuses_no_capture(tmp_path: Path, model: Path, states: torch.Tensor) -> None:
    report = check(open_shard(write(tmp_path, model, states)), Shaky(model))
    assert report.ok and report.first_row is None and report.largest < 1e-4
    assert "matches: Hugging Face's first pass was off by 0.01 in rows 19 to 21, its second was not" in sentence(report)
    report = check(open_shard(write(tmp_path, model, zeroed(model, states))), Shaky(model))
    assert not report.ok and report.first_row == 16 and "is all zero; it is so in rows 16 to 31" in sentence(report)


def test_a_folder_gives_its_latest_and_one_difference_fails_all(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, states: torch.Tensor
) -> None:
    folder = tmp_path / "captures" / "ab"
    folder.mkdir(parents=True)
    paths = [write(folder, model, states, capture_id=f"{number:032x}") for number in range(5)]
    (tmp_path / "quarantine").mkdir()
    write(tmp_path / "quarantine", model, zeroed(model, states.clone()))
    code, reports = verified(capsys, tmp_path)
    assert code == 0 and [report["capture_id"] for report in reports] == [path.stem for path in paths[:0:-1]]
    write(folder, model, zeroed(model, states.clone()), capture_id="f" * 32)
    code, reports = verified(capsys, tmp_path, "--n", "2")
    assert code == 1 and [report["ok"] for report in reports] == [False, True]


def test_a_whole_store_with_a_report_goes_on_where_it_was_stopped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, states: torch.Tensor
) -> None:
    folder, report = tmp_path / "captures" / "ab", tmp_path / "report.jsonl"
    folder.mkdir(parents=True)
    paths = [write(folder, model, states, capture_id=f"{number:032x}") for number in range(1, 8)]
    assert len(verified(capsys, tmp_path, "--every", "1")[1]) == 7
    newest = [path.stem for path in reversed(paths)]
    code, reports = verified(capsys, tmp_path, "--every", "3", "--report", report)
    assert [line["capture_id"] for line in reports] == newest[::3]
    assert code == 0, reports
    with report.open("a") as file:
        file.write('{"capture_id": "half a li')
    overwrite(paths[2], paths[2].read_bytes()[:-1])
    paths[1].unlink()
    write(folder, model, states, capture_id=paths[1].stem, lora="style")
    code, reports = verified(capsys, tmp_path, "--every", "1", "--report", report)
    assert code == 1 and len(reports) == 4
    wrong = {line["source"]: line["diagnosis"] for line in reports if not line["ok"]}
    assert set(wrong) == {paths[1].stem, paths[2].stem} and "the adapter style" in wrong[paths[1].stem]
    assert verified(capsys, tmp_path, "--every", "1", "--report", report) == (1, [])
    assert len(report.read_text().splitlines()) == 7


def test_captures_of_a_sidecar(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, states: torch.Tensor
) -> None:
    running = start_sidecar(tmp_path / "store")
    about: dict[str, Any] = {"layer_ids": LAYER_IDS, "hidden_size": 256, "model": str(model), "num_layers": NUM_LAYERS}
    try:
        with Feeder(running.url, **about) as feeder:
            first, second = feeder.capture(states, TOKENS), feeder.capture(states, TOKENS)
        assert [report["capture_id"] for report in verified(capsys, "--sidecar", running.url)[1]] == [second, first]
        code, (report,) = verified(capsys, first, "--sidecar", running.url)
        assert code == 0 and report["capture_id"] == report["source"] == first
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("metadata", "code", "says"),
    [
        ({"lora": "my\x1bstyle"}, 2, r"ran with the adapter my\x1bstyle"),
        ({"num_layers": "48"}, 2, "is of a model with 48 layers"),
        ({"model": "/nowhere"}, 2, "cannot load /nowhere"),
        ({"model": ""}, 2, "give the checkpoint with --model"),
        ({"data_hash": "f" * 32}, 1, "is damaged"),
    ],
)
def test_what_cannot_be_compared_says_why(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Path,
    states: torch.Tensor,
    metadata: dict[str, str],
    code: int,
    says: str,
) -> None:
    path = write(tmp_path, model, states, **metadata)
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(path)])
    assert caught.value.code == code and says in capsys.readouterr().err


def test_nothing_to_verify_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(tmp_path)])
    assert caught.value.code == 1 and "nothing to verify" in capsys.readouterr().err


def test_the_named_checkpoint_wins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, states: torch.Tensor
) -> None:
    path = write(tmp_path, model, states, model="/nowhere")
    assert verified(capsys, path, "--model", model)[0] == 0
    other = tiny_qwen3(tmp_path / "other", seed=1)
    code, (report,) = verified(capsys, path, "--model", other)
    assert code == 1 and "was another checkpoint captured?" in report["diagnosis"]


def test_captures_of_other_weights_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, states: torch.Tensor
) -> None:
    """The checkpoint has been replaced (vllm#57810): what the old one made is not wrong, it is another's."""
    a, b = "a" * 64, "b" * 64
    (tmp_path / "captures").mkdir()
    old = write(tmp_path / "captures", model, states * 1.5, weights_id=a)
    time.sleep(0.002)  # ids of one millisecond are in no order
    new = write(tmp_path / "captures", model, states, weights_id=b)
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(tmp_path)])
    said = capsys.readouterr()
    assert not caught.value.code and new.stem in said.out and old.stem not in said.out
    assert "captures of other weights are left out: 1 of aaaaaaaaaaaa; --weights-id chooses them" in said.err
    code, (report,) = verified(capsys, tmp_path, "--weights-id", "a")
    assert code == 1 and report["capture_id"] == old.stem
