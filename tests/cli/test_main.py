"""The command line as a whole: what a wrong one says, and what each help says."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import pytest
import typer

from hsconnector.cli import COMMANDS, _keep_as_written, build_command, main
from server.settings import Settings

OWN_HELP = sorted(COMMANDS.keys() - {"train"})
"""The help of `train` is that of speculators."""


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("line", "offender", "way_out"),
    [
        ("nothing", "'nothing'", "hsconnector --help"),
        ("--nothing", "--nothing", "hsconnector --help"),
        ("extract", "Missing argument", "hsconnector extract --help"),
        ("plan", "Missing argument", "hsconnector plan --help"),
        ("ls --nothing", "--nothing", "hsconnector ls --help"),
        ("show a b", "(b)", "hsconnector show --help"),
        ("gc --evict all", "'--evict'", "hsconnector gc --help"),
        ("verify --n 0", "'--n'", "hsconnector verify --help"),
        ("export --format", "'--format'", "hsconnector export --help"),
        ("export --link rope", "'--link'", "hsconnector export --help"),
        ("launch", "Missing argument", "hsconnector launch --help"),
        ("serve --nothing", "--nothing", "hsconnector serve --help"),
        ("serve --port x", "port = 'x'", ""),
        ("reindex", "'--store'", "hsconnector reindex --help"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    line: str, offender: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("hsconnector: ")) == ("", 1, True)
    assert offender in err
    assert way_out in err


def test_without_a_command_the_help_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    shown = capsys.readouterr().out
    assert all(summary in shown for summary in COMMANDS.values())


@pytest.mark.parametrize("name", OWN_HELP)
def test_nothing_of_a_help_is_lost_and_defaults_are_shown(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert run(name, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    command = build_command(name).commands[name]
    for text in [command.help, *(option.help for option in command.params)]:
        assert " ".join(text.replace("\\[", "[").split()) in shown
    for option in command.params:
        if option.default not in (None, "", False) and not option.required:
            words = option.opts[-1].lstrip("-") if option.default is True else str(option.default)
            assert f"[default: {words}]" in shown or words in option.help


def test_brackets_and_paragraphs_of_a_help_stay(capsys: pytest.CaptureFixture[str]) -> None:
    def command(size: Annotated[int, typer.Option(help="Rows [a:b] of [bold]each[/bold].")] = 1) -> None:
        """Takes [x].

        One [y]
        line.
        """

    app = typer.Typer(add_completion=False)
    app.command()(command)
    built = typer.main.get_command(app)
    _keep_as_written(built)
    with pytest.raises(SystemExit):
        built(["--help"])
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("Takes [x].", "One [y] line.", "Rows [a:b] of [bold]each[/bold]."))


def test_each_setting_of_the_sidecar_is_an_option_with_a_sentence() -> None:
    options = {option.name: option for option in build_command("serve").commands["serve"].params}
    assert options.keys() == {*Settings.model_fields, "config"}
    assert all(option.help.endswith(".") for option in options.values())
    assert all(option.opts[0] == "--" + name.replace("_", "-") for name, option in options.items())


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("pydantic_settings", ["serve", "--help"]),
        ("uvicorn", ["serve", "--port=0"]),
        ("prometheus_client", ["reindex", "--store=/none"]),
    ],
)
def test_without_the_serve_extra_one_line_says_what_to_install(library: str, words: list[str]) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; from hsconnector.cli import main; main({words})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"hsconnector: {library} is missing: pip install 'hsconnector[serve]'\n"


def test_the_help_imports_no_command() -> None:
    code = (
        "import sys; from hsconnector.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'torch', 'pydantic', 'fastapi', 'httpx', 'numpy', 'server'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]")
