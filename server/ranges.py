"""Which bytes of a file a request asks for: its `Range`, and the tags it compares (RFC 9110, 8.8.3, 13.1 and 14.2)."""

from __future__ import annotations

import re

__all__ = ["ByteRange", "Unsatisfiable", "matches", "parse_range"]

ByteRange = tuple[int, int]
"""First byte and the one after the last."""

_RANGE = re.compile(r"bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*\Z", re.ASCII)


class Unsatisfiable(Exception):
    """A range that begins beyond the file."""


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """The one range asked for; None for none, for several and for what is no range (the whole is sent then)."""
    found = _RANGE.match(header.strip()) if header else None
    if found is None or found.groups() == ("", "") or max(map(len, found.groups())) > 18:
        return None
    first, last = found.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    elif last and int(last) < int(first):
        return None
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    if start >= stop:
        raise Unsatisfiable
    return start, stop


def matches(header: str | None, tag: str, *, weak: bool) -> bool:
    """Whether a list of tags names this one; weak comparison for `If-None-Match`, strong for `If-Range`."""
    if header is None:
        return False
    tags = [part.strip() for part in header.split(",")]
    if weak:
        return tags == ["*"] or tag in [part.removeprefix("W/") for part in tags]
    return tags == [tag]
