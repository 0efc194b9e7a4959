"""`--check`: every slot against Hugging Face; each way an export can be wrong is shown to fail."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hsconnector.capture.shard import Capture, open_shard
from hsconnector.formats import FORMATS, find_format
from hsconnector.formats.check import CheckedFile, ExportCheck
from hsconnector.formats.manifest import file_hash, read_manifest
from hsconnector.formats.norm import load_norm
from hsconnector.formats.sample import Sample
from hsconnector.reference.comparison import MEDIAN_ROWS, ROW_LIMIT
from hsconnector.reference.model import ReferenceModel
from tests.formats.conftest import ROWS, Captured
from tests.formats.running import export
from tests.formats.samples import LAYERS, captured_states
from tests.hugging_face import final_norm, reference_states
from tests.models import NUM_LAYERS

ROW = 4
"""The row whose file is spoilt."""


@pytest.mark.parametrize("format", FORMATS)
def test_a_right_export_passes_and_says_how_close(format: str, captured: Captured, tmp_path: Path) -> None:
    code, said = export(captured.url, "-f", format, "-o", tmp_path, "--data", captured.data, "--check")
    assert code == 0, said
    assert f"{ROWS} of {ROWS} files equal Hugging Face's pass" in said


@pytest.mark.parametrize("format", FORMATS)
def test_every_slot_equals_the_independent_reference(format: str, captured: Captured) -> None:
    """Not through the product's own comparison: relative error under 1e-5 in float32, 2 % in bfloat16."""
    folder = exported_once(format, captured)
    description, entries = read_manifest(folder)
    tolerance = 1e-5 if captured.dtype == torch.float32 else 2e-2
    for entry, token_ids in zip(entries.values(), captured.rows.token_ids, strict=True):
        exported = find_format(format).read(folder / entry.file)
        expected = reference_states(captured.model, token_ids, LAYERS)
        assert exported.token_ids.tolist() == token_ids
        assert relative(exported.aux.unflatten(1, (3, -1)), expected[:, :3]) < tolerance
        normed = final_norm(captured.model, expected[:, 3])
        if description.last_layer_norm == "pre":
            assert relative(exported.last, expected[:, 3]) < tolerance
            assert relative(load_norm(captured.model)(exported.last), normed) < tolerance
        if description.last_layer_norm == "post":
            assert relative(exported.last, normed) < tolerance


Spoil = Callable[[Capture, Captured], Capture]


def wrong_layer(capture: Capture, captured: Captured) -> Capture:
    states = captured_states(captured.model, capture.token_ids.tolist(), [1, 2, 5, NUM_LAYERS], captured.dtype)
    return replaced(capture, hidden_states=states)


def shifted(capture: Capture, _captured: Captured) -> Capture:
    return replaced(capture, hidden_states=capture.hidden_states.roll(1, 0))


def post_norm(capture: Capture, captured: Captured) -> Capture:
    states = capture.hidden_states.clone()
    states[:, -1] = load_norm(captured.model)(states[:, -1])
    return replaced(capture, hidden_states=states)


def truncated(capture: Capture, _captured: Captured) -> Capture:
    return replaced(capture, hidden_states=capture.hidden_states[:-1], token_ids=capture.token_ids[:-1])


def zeroed(capture: Capture, _captured: Captured) -> Capture:
    states = capture.hidden_states.clone()
    states[2:, 0] = 0
    return replaced(capture, hidden_states=states)


def other_tokens(capture: Capture, _captured: Captured) -> Capture:
    return replaced(capture, token_ids=capture.token_ids.roll(1))


def one_value(capture: Capture, _captured: Captured) -> Capture:
    states = capture.hidden_states.clone()
    states[3, 1, 7] += states[3, 1].norm() / 4
    return replaced(capture, hidden_states=states)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (wrong_layer, "row 0, layer 3, in 33 of 33 rows: the slot holds layer 2 instead of layer 3"),
        (shifted, "holds rows 1 earlier than it should"),
        (truncated, "holds 32 tokens of the 33 of its sample"),
        (zeroed, "row 2, layer 1, in 31 of 33 rows: the slot is all zero"),
        (other_tokens, "holds other tokens than its sample"),
        (one_value, "row 3, layer 3, in 1 of 33 rows"),
    ],
)
def test_a_spoilt_file_fails_by_name(format: str, spoil: Spoil, words: str, captured: Captured, tmp_path: Path) -> None:
    wrong = spoilt(format, spoil, captured, tmp_path)
    assert words in wrong.problem, wrong


def test_a_last_layer_after_the_norm_fails_where_it_should_be_before(captured: Captured, tmp_path: Path) -> None:
    wrong = spoilt("speculators", post_norm, captured, tmp_path)
    assert "layer 6" in wrong.problem and "holds the last layer 6 after the final norm" in wrong.problem


@pytest.mark.parametrize("format", ["specforge-eagle3", "specforge-dspark"])
def test_a_last_layer_before_the_norm_or_normed_twice_fails_where_it_should_be_after(
    format: str, captured: Captured, tmp_path: Path
) -> None:
    wrong = spoilt(format, lambda capture, _: capture, captured, tmp_path / "before", norm=lambda states: states)
    assert (
        "holds the last layer 6 before the final norm instead of the last layer 6 after the final norm" in wrong.problem
    )
    wrong = spoilt(format, post_norm, captured, tmp_path / "twice")
    assert "row 0, layer 6" in wrong.problem


WITH_MASK = [name for name, format in FORMATS.items() if format.has_mask]


@pytest.mark.parametrize("format", WITH_MASK)
@pytest.mark.parametrize("hashed", [True, False])
def test_an_inverted_mask_fails(format: str, hashed: bool, captured: Captured, tmp_path: Path) -> None:
    """Also in an export that has no hash of the file."""
    shutil.copytree(exported_once(format, captured), tmp_path, dirs_exist_ok=True)
    path = tmp_path / file_of(tmp_path)
    tensors = torch.load(path)
    tensors["loss_mask"] = 1 - tensors["loss_mask"]
    torch.save(tensors, path)
    if not hashed:
        forget_hashes(tmp_path)
    (wrong,) = check(format, captured, tmp_path)
    assert "holds another loss mask than its sample" in wrong.problem
    assert ("other bytes than were written" in wrong.problem) is hashed


@pytest.mark.parametrize("format", FORMATS)
def test_the_lowest_bit_of_one_value_fails(format: str, captured: Captured, tmp_path: Path) -> None:
    """No forward pass can see it; the hash of the file does, for files that are not compared with the model, too."""
    shutil.copytree(exported_once(format, captured), tmp_path, dirs_exist_ok=True)
    path = tmp_path / file_of(tmp_path)
    data = bytearray(path.read_bytes())
    states = captured_states(captured.model, captured.rows.token_ids[ROW], LAYERS[:1], captured.dtype)
    at = data.find(states[0].flatten()[:16].view(torch.uint8).numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)
    (wrong,) = check(format, captured, tmp_path)
    assert "has other bytes than were written" in wrong.problem or "is damaged: its data hash" in wrong.problem
    code, said = export(
        captured.url, "-f", format, "-o", tmp_path, "--data", captured.data, "--check", "--check-samples", "1"
    )
    assert code == 0 and "1 of them had been changed since they were written before" in said, said


def forget_hashes(out: Path) -> None:
    """Makes the manifest one of the time before files had hashes."""
    manifest = json.loads((out / "manifest.json").read_text())
    for entry in manifest["files"]:
        del entry["file_hash"], entry["mtime_ns"]
    (out / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_cut_short_fails(format: str, captured: Captured, tmp_path: Path) -> None:
    shutil.copytree(exported_once(format, captured), tmp_path, dirs_exist_ok=True)
    path = tmp_path / file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    (wrong,) = check(format, captured, tmp_path)
    assert wrong.file == path.name and "whole" in wrong.problem


def test_the_command_names_the_file_and_exits_1(captured: Captured, tmp_path: Path) -> None:
    export(captured.url, "-f", "specforge-dflash", "-o", tmp_path, "--data", captured.data)
    path = tmp_path / file_of(tmp_path)
    tensors = torch.load(path)
    tensors["hidden_states"] = tensors["hidden_states"].roll(1, 1)
    with path.open("wb") as file:
        torch.save(tensors, file)
    about = json.loads((tmp_path / "manifest.json").read_text())
    for entry in about["files"]:
        if entry["file"] == path.name:
            entry |= {"file_hash": file_hash(path), "mtime_ns": path.stat().st_mtime_ns}
    (tmp_path / "manifest.json").write_text(json.dumps(about))
    code, said = export(captured.url, "-f", "specforge-dflash", "-o", tmp_path, "--data", captured.data, "--check")
    assert code == 1 and f"{ROWS - 1} of {ROWS} files equal" in said and f"{path.name}: differs first in row 0" in said


class Shaky(ReferenceModel):
    """A model whose first pass goes wrong."""

    passes = 0

    def states(self, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
        self.passes += 1
        states: torch.Tensor = super().states(token_ids, layer_ids)
        return states * 1.5 if self.passes == 1 else states


@pytest.mark.parametrize("format", FORMATS)
def test_a_pass_that_is_off_by_itself_accuses_no_file(format: str, captured: Captured) -> None:
    folder, reference = exported_once(format, captured), Shaky(captured.model)
    description, entries = read_manifest(folder)
    two = dict([(name, entry) for name, entry in entries.items() if entry.num_tokens >= MEDIAN_ROWS][:2])
    checked = ExportCheck(find_format(format), description, reference).files(folder, two)
    assert [file.problem for file in checked] == ["", ""]
    assert reference.passes == 3


def test_a_sample_of_the_files_can_be_checked(captured: Captured, tmp_path: Path) -> None:
    command = [captured.url, "-f", "speculators", "-o", str(tmp_path), "--check", "--check-samples", "2"]
    assert "2 of 2 files equal" in export(*command)[1]


def spoilt(format: str, spoil: Spoil, captured: Captured, out: Path, norm: Any = None) -> CheckedFile:
    """What the check finds in the one file of an export that was written from a spoilt capture."""
    shutil.copytree(exported_once(format, captured), out, dirs_exist_ok=True)
    chosen = find_format(format)
    row = captured.rows.token_ids[ROW]
    capture = next(c for c in map(open_shard, shards(captured)) if c.token_ids.tolist() == row)
    capture = spoil(capture, captured)
    layers = chosen.choose(LAYERS, NUM_LAYERS)
    states = capture.hidden_states[:, : len(layers.ids)]
    mask = torch.tensor(captured.rows.masks[ROW][: len(capture.token_ids)])
    path = out / file_of(out)
    path.unlink()
    sample = Sample(replaced(capture, hidden_states=states), layers, mask, norm or load_norm(captured.model))
    chosen.write(sample, path)
    (wrong,) = check(format, captured, out)
    assert wrong.file == path.name
    return wrong


@functools.cache
def exported_once(format: str, captured: Captured) -> Path:
    out = captured.store.parent / f"exported-{format}"
    code, said = export(captured.url, "-f", format, "-o", out, "--data", captured.data, "--link", "copy")
    assert code == 0, said
    return out


@functools.cache
def reference_of(model: Path) -> ReferenceModel:
    return ReferenceModel(model)


def check(format: str, captured: Captured, out: Path) -> list[CheckedFile]:
    """The findings that have a problem."""
    description, entries = read_manifest(out)
    entries = {name: entry for name, entry in entries.items() if entry.row in (0, ROW)}
    found = ExportCheck(find_format(format), description, reference_of(captured.model))
    findings = list(found.files(out, entries))
    assert len(findings) == 2
    assert all(finding.scales < ROW_LIMIT for finding in findings if not finding.problem)
    return [finding for finding in findings if finding.problem]


def file_of(out: Path) -> str:
    return next(entry.file for entry in read_manifest(out)[1].values() if entry.row == ROW)


def shards(captured: Captured) -> list[Path]:
    return sorted((captured.store / "captures").rglob("*.safetensors"))


def replaced(capture: Capture, **fields: Any) -> Capture:
    return Capture(
        hidden_states=fields.get("hidden_states", capture.hidden_states),
        token_ids=fields.get("token_ids", capture.token_ids),
        layer_ids=capture.layer_ids,
        metadata=capture.metadata,
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
