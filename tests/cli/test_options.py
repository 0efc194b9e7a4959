"""The sidecar has one name in every command, and the names of earlier versions still work without being shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsconnector.cli import main

NOBODY = "http://127.0.0.1:9"
OTHER = "http://127.0.0.1:10"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("HSC_SIDECAR", "HSC_URL", "HSC_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code, and all that the command said."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out + said.err


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("--sidecar", NOBODY), {"HSC_SIDECAR": OTHER}),
        (("--url", NOBODY), {"HSC_SIDECAR": OTHER}),
        ((f"--url={NOBODY}",), {}),
        ((), {"HSC_SIDECAR": NOBODY, "HSC_URL": OTHER}),
        ((), {"HSC_URL": NOBODY}),
    ],
)
@pytest.mark.parametrize("command", ["ls", "gc"])
def test_the_sidecar_is_named_by_option_or_variable(
    command: str,
    words: tuple[str, ...],
    variables: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, said = run(capsys, command, *words)
    assert code == 1 and f"no sidecar answers at {NOBODY}:" in said


@pytest.mark.parametrize("name", ["--sidecar", "--url"])
@pytest.mark.parametrize("command", ["show", "verify"])
def test_commands_that_look_at_captures(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, command, name, NOBODY)
    assert code == 1 and f"no sidecar answers at {NOBODY}:" in said


@pytest.mark.parametrize("name", ["--sidecar", "--url"])
def test_extract(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"input_ids": [1, 2]}\n')
    code, said = run(capsys, "extract", str(data), "--engine-url", NOBODY, name, "no address")
    assert code == 2 and "not 'no address'" in said


@pytest.mark.parametrize("variable", ["HSC_SIDECAR", "HSC_URL"])
def test_export_takes_it_in_the_place_of_its_source(
    variable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, NOBODY)
    code, said = run(capsys, "export", "-f", "speculators", "-o", str(tmp_path))
    assert code == 1 and f"no sidecar answers at {NOBODY}:" in said


@pytest.mark.parametrize("command", ["show", "ls", "verify", "gc", "extract", "export"])
def test_help_shows_the_one_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, command, "--help")
    assert code == 0 and "HSC_SIDECAR" in said
    assert "HSC_URL" not in said and "--url" not in said
