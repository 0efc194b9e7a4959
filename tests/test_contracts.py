"""The import contracts of pyproject.toml name every room, and each fails where somebody imports what it forbids."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS: dict[str, dict[str, Any]] = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
ROOMS = {
    f"hsconnector.{path.stem}"
    for path in (ROOT / "hsconnector").iterdir()
    if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")
}
UPWARD = {
    "hsconnector.capture": "hsconnector.storage",
    "hsconnector.storage": "hsconnector.client",
    "hsconnector.layout": "hsconnector.prompts",
    "hsconnector.client": "hsconnector.dataset",
    "hsconnector.extraction": "hsconnector.formats",
    "hsconnector.dataset": "hsconnector.cli",
}
"""Imports that run upward, or between two rooms on one floor."""
FORBIDDEN = [
    (name, importer, imported)
    for name, contract in CONTRACTS.items()
    if contract["type"] == "forbidden"
    for importer in contract["source_modules"]
    for imported in contract["forbidden_modules"]
] + [("order", importer, imported) for importer, imported in UPWARD.items()]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the linter says of each contract on a copy of the packages in which every forbidden import is made."""
    copy = tmp_path_factory.mktemp("copy")
    for package in ("hsconnector", "server"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "hsconnector" / "attic").mkdir()
    (copy / "hsconnector" / "attic" / "__init__.py").touch()
    for _, importer, imported in FORBIDDEN:
        with source_of(copy, importer).open("a") as file:
            file.write(f"import {imported}\n")
    return dict(sections(lint(copy)))


def source_of(root: Path, module: str) -> Path:
    folder = root.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def lint(folder: Path) -> str:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "500"}
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def sections(report: str) -> Iterator[tuple[str, str]]:
    """Contract by contract, what is said below its name among the broken ones."""
    _, _, broken = report.partition("Broken contracts")
    for name, contract in CONTRACTS.items():
        yield name, broken.partition(f"{contract['name']}\n---")[2].partition("\n---")[0]


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_forbidden_import_breaks_its_contract(name: str, said: dict[str, str]) -> None:
    for contract, importer, imported in FORBIDDEN:
        if contract == name:
            assert re.search(rf"{re.escape(importer)} -> {re.escape(imported)}\b", said[name]), (importer, imported)


def test_a_new_room_has_no_place_until_it_is_given_one(said: dict[str, str]) -> None:
    assert "hsconnector.attic" in said["order"]


@pytest.mark.parametrize(
    ("name", "field", "allowed"),
    [
        ("server", "forbidden_modules", {"server", "hsconnector.capture", "hsconnector.storage", "hsconnector.errors"}),
        ("vllm", "source_modules", {"hsconnector.connector"}),
        ("speculators", "source_modules", {"hsconnector.integrations"}),
    ],
)
def test_all_rooms_but_the_allowed_are_named(name: str, field: str, allowed: set[str]) -> None:
    assert set(CONTRACTS[name][field]) == (ROOMS | {"server"}) - allowed


HEAVY = ("torch", "transformers", "vllm", "speculators", "hs_connectors")
LIGHT = ("hsconnector.errors", "hsconnector.vllm_facts", "hsconnector.capture", "hsconnector.storage", "server")
IMPORT_ALL = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({HEAVY!r}))  # None there: their import raises ModuleNotFoundError
for name in {LIGHT!r}:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
        if ".migrations." not in found.name:  # Alembic's scripts run only inside Alembic
            importlib.import_module(found.name)
"""


def test_the_light_rooms_are_imported_without_a_framework() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", IMPORT_ALL], check=True, cwd=ROOT)
