"""Checkpoints told from their files: what changes the digest, what does not, and how much is read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hsconnector.connector import checkpoint
from hsconnector.connector.checkpoint import checkpoint_digest, weight_files
from hsconnector.errors import CheckpointError
from tests.connector.checkpoints import tensors, write, write_sharded


def digest(folder: Path, load_format: str = "auto", pattern: str | None = None) -> str:
    return checkpoint_digest(weight_files(folder, load_format, pattern))


def names(folder: Path, load_format: str = "auto", pattern: str | None = None) -> list[str]:
    return [path.name for path in weight_files(folder, load_format, pattern)]


def touch(folder: Path, *files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for file in files:
        (folder / file).write_bytes(b"")
    return folder


def test_a_copy_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    b = shutil.copytree(a, tmp_path / "b" / "of another name")
    (b / "model.safetensors").rename(b / "weights.safetensors")
    assert digest(a) == digest(b)


def test_a_resharded_copy_has_the_same_digest(tmp_path: Path) -> None:
    content = tensors()
    backwards = dict(reversed(content.items()))
    assert digest(write(tmp_path / "a", content)) == digest(write_sharded(tmp_path / "b", backwards))


def test_other_weights_of_the_same_shapes_have_another_digest(tmp_path: Path) -> None:
    assert digest(write(tmp_path / "a", tensors(0))) != digest(write(tmp_path / "b", tensors(1)))


@pytest.mark.parametrize("name", list(tensors()))
def test_a_change_of_one_tensor_is_seen_whichever_it_is(tmp_path: Path, name: str) -> None:
    content = tensors()
    other = {**content, name: content[name] * 1.001}
    assert digest(write(tmp_path / "a", content)) != digest(write(tmp_path / "b", other))


def test_one_byte_of_a_small_tensor_is_seen(tmp_path: Path) -> None:
    content = tensors()
    content["norm"].view(torch.uint8)[17] ^= 1
    assert digest(write(tmp_path / "a")) != digest(write(tmp_path / "b", content))


def test_equal_bytes_of_another_name_shape_or_dtype_are_other_tensors(tmp_path: Path) -> None:
    content = tensors()
    renamed = {("nrm" if name == "norm" else name): tensor for name, tensor in content.items()}
    reshaped = {**content, "norm": content["norm"].view(8, 8)}
    recast = {**content, "norm": content["norm"].view(torch.int32)}
    found = [digest(write(tmp_path / str(n), c)) for n, c in enumerate((content, renamed, reshaped, recast))]
    assert len(set(found)) == 4


def test_two_tensors_that_change_places_are_other_weights(tmp_path: Path) -> None:
    a, b = torch.rand(300), torch.rand(300)
    assert digest(write(tmp_path / "a", {"x": a, "y": b})) != digest(write(tmp_path / "b", {"x": b, "y": a}))


def test_a_large_tensor_is_sampled_in_many_places_and_a_change_between_them_is_missed(tmp_path: Path) -> None:
    """What the module's text promises, and what it says that it cannot."""
    big = torch.zeros(1 << 22, dtype=torch.uint8)
    a = digest(write(tmp_path / "a", {"big": big}))
    seen = 0
    for index in range(64):
        part = big.clone()
        part[index * (1 << 16) : (index + 1) * (1 << 16)] = 1
        seen += digest(write(tmp_path / f"part {index}", {"big": part})) != a
    assert seen == 64
    offsets = {
        digest(write(tmp_path / f"byte {i}", {"big": big.index_fill(0, torch.tensor(i * 999), 1)})) for i in range(9)
    }
    assert a in offsets


def sparse_checkpoint(folder: Path, files: int, tensors_a_file: int, tensor_bytes: int) -> Path:
    """Holes of the file system: the size is real, the disk holds the headers only."""
    folder.mkdir()
    for number in range(files):
        header = {
            f"layer.{number}.{index}": {
                "dtype": "BF16",
                "shape": [tensor_bytes // 2],
                "data_offsets": [index * tensor_bytes, (index + 1) * tensor_bytes],
            }
            for index in range(tensors_a_file)
        }
        text = json.dumps(header).encode()
        with open(folder / f"model-{number:05}-of-{files:05}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + tensors_a_file * tensor_bytes)
    return folder


@pytest.mark.parametrize(("files", "tensors_a_file"), [(20, 50), (8, 4000)])
def test_a_hundred_gigabytes_are_read_in_some_thousand_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, tensors_a_file: int
) -> None:
    """Dense models with a thousand tensors, and mixtures of experts with tens of thousands: at least one piece each."""
    folder = sparse_checkpoint(tmp_path / "big", files, tensors_a_file, 100_000_000_000 // (files * tensors_a_file))
    pread, reads = os.pread, []

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        reads.append(length)
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    digest(folder)
    total = files * tensors_a_file
    assert total <= len(reads) - 2 * files <= max(total, checkpoint.SAMPLES)
    assert sum(sorted(reads)[: -2 * files]) < 16 << 20


# ---- which files count


def test_safetensors_win_over_pickles_as_in_vllm(tmp_path: Path) -> None:
    folder = touch(tmp_path, "model.safetensors", "pytorch_model.bin", "old.pt")
    assert names(folder) == ["model.safetensors"]
    assert names(folder, "pt") == ["old.pt"]
    assert names(folder, "npcache") == ["pytorch_model.bin"]


def test_mistral_files_win_over_all_where_the_format_is_auto(tmp_path: Path) -> None:
    folder = touch(tmp_path, "consolidated.safetensors", "model-1-of-1.safetensors")
    assert names(folder) == ["consolidated.safetensors"]
    assert names(folder, "hf") == ["consolidated.safetensors", "model-1-of-1.safetensors"]


def test_a_file_beside_the_index_does_not_count(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "a", tensors())
    before = digest(folder)
    save_file({"stray": torch.ones(3)}, folder / "stray.safetensors")
    assert digest(folder) == before


def test_a_trainers_state_is_no_weights(tmp_path: Path) -> None:
    assert names(touch(tmp_path, "pytorch_model.bin", "training_args.bin", "optimizer.bin")) == ["pytorch_model.bin"]


def test_sharded_states_have_a_pattern(tmp_path: Path) -> None:
    folder = touch(tmp_path, "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors", "x-0.safetensors")
    assert names(folder, "sharded_state") == ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"]
    assert names(folder, "sharded_state", "x-*.safetensors") == ["x-0.safetensors"]


def test_the_choice_is_vllms_own(tmp_path: Path) -> None:
    """`DefaultModelLoader._prepare_weights` itself, over folders with every mixture of files."""
    loading = pytest.importorskip("vllm.config.load")
    loader = pytest.importorskip("vllm.model_executor.model_loader.default_loader")
    kinds = ["model-1.safetensors", "consolidated.safetensors", "pytorch_model.bin", "x.pt", "optimizer.pt"]
    for mixture in range(1, 1 << len(kinds)):
        folder = touch(tmp_path / str(mixture), *(kind for bit, kind in enumerate(kinds) if mixture >> bit & 1))
        for load_format in ("auto", "hf", "safetensors", "mistral", "pt", "npcache"):
            theirs = loader.DefaultModelLoader(loading.LoadConfig(load_format=load_format))
            try:
                expected = sorted(theirs._prepare_weights(str(folder), None, None, True, None)[1])
            except RuntimeError:
                expected = []
            try:
                found = [str(path) for path in weight_files(folder, load_format)]
            except CheckpointError:
                found = []
            assert found == expected, (load_format, os.listdir(folder))


def test_an_empty_folder_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no weight files for load format 'hf' in {tmp_path}"):
        weight_files(tmp_path)


# ---- files that are no safetensors


def test_a_pytorch_file_counts_by_the_checksum_of_each_tensor(tmp_path: Path) -> None:
    """One element in the middle of 40 MB, far from any sample."""
    big = torch.zeros(10_000_000)
    for name, content in (("a", big), ("b", big), ("c", big.index_fill(0, torch.tensor(7_654_321), 1.0))):
        (tmp_path / name).mkdir()
        torch.save({"big": content}, tmp_path / name / "pytorch_model.bin")
    a, b, c = (digest(tmp_path / name) for name in "abc")
    assert a == b != c


def test_a_gguf_file_counts_by_size_and_samples(tmp_path: Path) -> None:
    content = bytearray(os.urandom(3 << 20))
    file = tmp_path / "model.Q4_K_M.gguf"
    file.write_bytes(content)
    before = digest(file)
    file.write_bytes(content + b"\0")
    longer = digest(file)
    content[1 << 20 : (1 << 20) + 4096] = bytes(4096)
    file.write_bytes(content)
    assert len({before, longer, digest(file)}) == 3


# ---- files that are not what they say


def broken(length: int, text: bytes) -> bytes:
    return length.to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        (broken(1 << 60, b"{}"), "a header of 1152921504606846976 bytes"),
        (broken(5, b"[1,2]"), "has no safetensors header"),
        (broken(2, b"{}")[:9], "a header of 2 bytes in a file of 9"),
        (
            broken(63, b'{"a":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}   '),
            "'a' lies at 0 to 4000, beyond",
        ),
        (broken(60, b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[8,4]}}     '), "'a' lies at 8 to 4, beyond"),
        (broken(14, b'{"a":{"x":12}}'), "has no safetensors header"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        digest(tmp_path)


def test_an_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    folder = touch(tmp_path, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="is no index of weights"):
        weight_files(folder)


def test_descriptors_are_closed_whatever_happens(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "a", tensors())
    before = len(os.listdir("/proc/self/fd"))
    digest(folder)
    (folder / "model-00003-of-00004.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        digest(folder)
    assert len(os.listdir("/proc/self/fd")) == before
