from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hsconnector.cli import main
from hsconnector.cli.quantities import parse_count, parse_memory
from hsconnector.errors import SettingsError
from tests.layout import configs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(configs.DENSE_8B))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["plan", *map(str, arguments)])
    printed = capsys.readouterr()
    return int(left.value.code or 0), printed.out, printed.err


def test_the_report_of_a_dense_8b(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, model, "--kv-memory", "40GiB", "--tokens", "100M")
    assert (code, err) == (0, "")
    for line in (
        "  layers 2, 18, 33, 36 in vLLM's counting (eagle3)",
        "  layers 1, 17, 32, 35 as SGLang, SpecForge, TorchSpec and DFlash count",
        "0 *    composite of 36 full attention + 1 hidden states      37     16  2,883,584       0",
        "block size: 16 tokens (vLLM's default)",
        "scheduler block 16, hash block 16: a prefix is reused in steps of 16 tokens",
        "bytes a token       147,456          180,224",
        "requests of 40,960     7.11             5.82",
        "lost to extraction: 18% of the tokens",
        "bytes a token, wire         32,768  16,400",
        "disk, 100,000,000 tokens    3.3 TB  1.6 TB",
        f"  vllm serve {model} \\",
    ):
        assert line in out.splitlines(), out
    assert max(len(line) for line in out.splitlines() if "--" not in line) <= 100


def test_the_report_as_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, model / "config.json", "--json", "--tp", 2, "--layers", "dflash")
    report = json.loads(out)
    assert code == 0
    assert report["layer_ids"] == [2, 10, 18, 26, 34, 36]
    assert report["groups"][0]["block_size"] == report["scheduler_block_size"] == 16
    assert report["refused"] is None
    assert report["command"][:2] == ["vllm", "serve"]
    assert report["command"][-2:] == ["--tensor-parallel-size", "2"]


def test_what_the_engine_would_refuse_exits_1_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(configs.NO_HIDDEN_STATES))
    code, out, err = run(capsys, file)
    assert code == 1
    assert err.startswith("hsconnector: the engine would refuse to start: Gemma3ForCausalLM hands out no hidden states")
    assert "REFUSED" in out and err.count("\n") == 1


def test_every_option_reaches_the_serve_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tp", 2, "--pp", 2, "--block-size", 32, "--kv-cache-dtype", "fp8", "--dtype", "float16"]
    more = ["--max-model-len", 4096, "--no-prefix-caching", "--disable-hybrid-kv-cache-manager"]
    _, out, _ = run(capsys, model, *options, *more)
    for line in (
        "--tensor-parallel-size 2",
        "--pipeline-parallel-size 2",
        "--block-size 32",
        "--kv-cache-dtype fp8",
        "--dtype float16",
        "--max-model-len 4096",
        "--no-enable-prefix-caching",
        "--disable-hybrid-kv-cache-manager",
    ):
        assert line in out


def test_the_log_of_an_engine_that_asked_for_too_much(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "serve.log"
    line = b"To serve at least one request with the model's max seq len (40960), (%b GiB KV cache is needed, which is"
    log.write_bytes(b"\xff loading\n" + line % b"581.48" + b" larger\n")
    code, out, err = run(capsys, model, "--engine-log", log)
    assert code == 1 and "Serve" in out
    assert "asks for 581.48 GiB of KV cache where 6.88 GiB were expected: vllm#53243" in err and err.count("\n") == 1
    log.write_bytes(line % b"6.9")
    assert run(capsys, model, "--engine-log", log)[0] == 0
    assert run(capsys, model, "--engine-log", tmp_path / "none.log")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "2,37"], "layer 37 is outside this model's 0 to 36"),
        (["--layers", "2,2"], "layer 2 is given twice"),
        (["--tp", "5"], "--tp 5 does not divide the model's 32 attention heads"),
        (["--kv-memory", "40"], "--kv-memory '40' is no size with its unit, such as 40GiB"),
        (["--kv-memory", "40 parsecs"], "is no size with its unit"),
        (["--tokens", "many"], "--tokens 'many' is no count such as 250000, 100M"),
        (["--dtype", "int8"], "--dtype int8 is none of auto"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, model, *arguments)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; MODEL is a model's directory or its config.json"),
        ("{", "cannot be read as JSON"),
        ("[1]", "holds a JSON list where a model's config is an object"),
        (json.dumps({**configs.DENSE_8B, "architectures": ["NewForCausalLM"]}), "NewForCausalLM is unknown"),
    ],
)
def test_bad_files_are_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    code, _, err = run(capsys, tmp_path)
    assert code == 2
    assert message in err and err.count("\n") == 1


def test_an_ill_typed_number_is_usage(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, model, "--tp", "two")[0] == 2


@pytest.mark.parametrize(("text", "value"), [("40GiB", 40 * 2**30), ("1.5 GB", 1_500_000_000), ("512mib", 2**29)])
def test_sizes(text: str, value: int) -> None:
    assert parse_memory("--x", text) == value


@pytest.mark.parametrize(("text", "value"), [("250000", 250_000), ("100M", 100_000_000), ("1.5b", 1_500_000_000)])
def test_counts(text: str, value: int) -> None:
    assert parse_count("--x", text) == value


@pytest.mark.parametrize("text", ["", "0GiB", "-1GiB", "GiB", "1e3GiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_memory("--x", text)


def test_plan_needs_neither_torch_nor_vllm(model: Path) -> None:
    blocked: dict[str, Any] = dict.fromkeys(["torch", "vllm", "numpy", "transformers"])
    code = (
        f"import sys; sys.modules.update({blocked!r}); from hsconnector.cli import main; main(['plan', {str(model)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "vllm serve" in done.stdout
