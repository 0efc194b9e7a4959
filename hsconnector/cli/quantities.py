"""Durations, sizes and counts as people type them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hsconnector.errors import SettingsError

__all__ = ["parse_bytes", "parse_count", "parse_duration", "parse_memory"]

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{letter}{end}": 1000**power for letter, power in _POWERS.items() for end in ("", "b")}
_BYTES |= {f"{letter}ib": 1024**power for letter, power in _POWERS.items()}
_WITH_UNIT = {unit: size for unit, size in _BYTES.items() if size > 1}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)\Z", re.ASCII)


def parse_duration(option: str, text: str) -> float:
    """Seconds of `90`, `90s`, `30m`, `12h`, `7d` or `2w`; raises SettingsError."""
    return _parse(option, text, _SECONDS, "duration such as 90s, 30m, 12h or 7d")


def parse_bytes(option: str, text: str) -> int:
    """Bytes of `500GB`, `1.5 TiB` or `1000000`; raises SettingsError."""
    return int(_parse(option, text, _BYTES, "size such as 500GB or 1.5TiB"))


def parse_memory(option: str, text: str) -> int:
    """Bytes of `40GiB` or `512 MiB`, no fewer than 1 and never without a unit; raises SettingsError."""
    return int(_parse(option, text, _WITH_UNIT, "size with its unit, such as 40GiB or 512MiB", 1))


def parse_count(option: str, text: str) -> int:
    """`250000`, `100M` or `1.5B`, no fewer than 1; raises SettingsError."""
    return int(_parse(option, text, _COUNTS, "count such as 250000, 100M or 1.5B", 1))


def _parse(option: str, text: str, units: Mapping[str, float], kind: str, least: int = 0) -> float:
    found = _QUANTITY.match(text.strip().lower())
    if found is None or found[2] not in units or float(found[1]) * units[found[2]] < least:
        raise SettingsError(f"{option} {text!r} is no {kind}")
    return float(found[1]) * units[found[2]]
