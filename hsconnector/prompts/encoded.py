"""What becomes of a conversation: token ids, their mask, and what each part of them came from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

from hsconnector.prompts.row import RowRefused

__all__ = ["Encoded", "Place", "check_ids"]


@dataclass(frozen=True, slots=True)
class Place:
    """From which token on a text of the conversation reaches."""

    first: int
    what: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """A conversation as it is asked for."""

    token_ids: list[int]
    loss_mask: list[int]
    """0 or 1 for each token."""
    left_out: int = 0
    """Thoughts of earlier turns that the template does not render."""
    places: tuple[Place, ...] = ()
    """Ascending."""
    request: bytes = b""
    """What asks an engine for the same ids, a JSON object for `/tokenize`; empty for what came as token ids."""
    day: date | None = None
    """The day that the template writes into the conversation as today; None where it writes none."""


def check_ids(engine_ids: Sequence[int], local: Encoded, text: Callable[[int], str] = str) -> None:
    """Refuses a row whose messages the engine renders to other ids than were made here.

    Raises `RowRefused` with the first difference and the text of the conversation that lies there; `text` names a
    token.
    """
    ours = local.token_ids
    if list(engine_ids) == ours:
        return
    pairs = enumerate(zip(engine_ids, ours, strict=False))
    at = next((at for at, (theirs, our) in pairs if theirs != our), min(len(engine_ids), len(ours)))
    theirs, our = (repr(text(ids[at])) if at < len(ids) else "nothing more" for ids in (engine_ids, ours))
    raise RowRefused(
        f"is rendered otherwise by the engine, from token {at} on: {theirs} there, {our} here, {_where(local, at)}; "
        "give --tokenizer the engine's own, or --template-kwargs and the --date that it uses"
    )


def _where(local: Encoded, at: int) -> str:
    place = bisect_right([place.first for place in local.places], at) - 1
    return f"in or after {local.places[place].what}" if place >= 0 else "before the first message"
