"""Durations and sizes as people type them."""

from __future__ import annotations

import re

from hsconnector.errors import SettingsError

__all__ = ["parse_bytes", "parse_duration"]

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{letter}{end}": 1000**power for letter, power in _POWERS.items() for end in ("", "b")}
_BYTES |= {f"{letter}ib": 1024**power for letter, power in _POWERS.items()}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)\Z", re.ASCII)


def parse_duration(option: str, text: str) -> float:
    """Seconds of `90`, `90s`, `30m`, `12h`, `7d` or `2w`; raises SettingsError."""
    found = _QUANTITY.match(text.strip().lower())
    if found is None or found[2] not in _SECONDS:
        raise SettingsError(f"{option} {text!r} is no duration such as 90s, 30m, 12h or 7d")
    return float(found[1]) * _SECONDS[found[2]]


def parse_bytes(option: str, text: str) -> int:
    """Bytes of `500GB`, `1.5 TiB` or `1000000`; raises SettingsError."""
    found = _QUANTITY.match(text.strip().lower())
    if found is None or found[2] not in _BYTES:
        raise SettingsError(f"{option} {text!r} is no size such as 500GB or 1.5TiB")
    return int(float(found[1]) * _BYTES[found[2]])
