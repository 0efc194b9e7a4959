"""Trainers' file formats: one module per trainer, and what they share.

A new format is a class like those in `specforge` (what it must have: `sample.Format`), named in `FORMATS` below; every
test of tests/formats/test_check.py then runs on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hsconnector.errors import SettingsError
from hsconnector.formats.sample import Format
from hsconnector.formats.specforge import DFlash, DSpark, Eagle3
from hsconnector.formats.speculators import Speculators

__all__ = ["FORMATS", "find_format"]

FORMATS: Mapping[str, Format] = {format.name: format for format in (Speculators(), Eagle3(), DFlash(), DSpark())}
"""By the name that `hsconnector export --format` takes."""


def find_format(name: str) -> Format:
    """A format by name; raises SettingsError."""
    if name not in FORMATS:
        raise SettingsError(f"--format {name!r} is none of {', '.join(FORMATS)}")
    return FORMATS[name]
