"""The tokens at which a model stops: those its configuration names, and those its template writes after a turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hsconnector.prompts.conversation import read_conversation
from hsconnector.prompts.template import Template, TemplateSaysNo

__all__ = ["Stops", "find_stops"]

_SAID = "\U00031340\U00031340"
"""A text that no template looks for."""
_ASKED = {"role": "user", "content": "\U00031341"}
_ANSWER = {"role": "assistant", "content": _SAID}
_CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": _SAID}}]}

Ids = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Stops:
    """Token ids after which nothing more is said."""

    engine: frozenset[int]
    """The engine ends a request at these."""
    written: frozenset[int]
    """The template ends an assistant's turn with these, where it puts another than the engine's: Harmony's end marker
    of an earlier turn is not the one at which the last turn returns (huggingface/trl#5988)."""

    def __contains__(self, token: int) -> bool:
        return token in self.engine or token in self.written


def find_stops(
    engine: Iterable[int], added: Iterable[int], template: Template, ids: Ids, text: Callable[[int], str]
) -> Stops:
    """The stop tokens of a model.

    `engine` are those of its generation config and tokenizer, `added` the tokens outside the tokenizer's own
    vocabulary, of which a marker must be one; `ids` encodes a text and `text` names a token.
    """
    known, markers = frozenset(engine), frozenset(added)

    def marks(after: str | None) -> list[int]:
        return [token for token in ids(after or "") if token in markers]

    written = set(_after_an_answer(known, marks, template))
    called = marks(_after(template, [_ASKED, _CALL]))
    if called and not (known | written) & set(called) and not text(called[-1]).startswith(("</", "[/")):
        written.add(called[-1])
    return Stops(known, frozenset(written) - known)


def _after_an_answer(known: frozenset[int], marks: Callable[[str | None], list[int]], template: Template) -> list[int]:
    last = marks(_after(template, [_ASKED, _ANSWER]))
    earlier = marks(_after(template, [_ASKED, _ANSWER, _ASKED]))
    asked = marks(_after(template, [_ASKED, _ANSWER, _ASKED], _ASKED["content"]))
    if not last or not earlier:
        return []
    if earlier[0] == last[0]:
        return [last[0]]
    # Another marker than the last turn's ends this one, if it also ends the user's: else it begins the next turn.
    return [earlier[0]] if last[0] in known and asked[:1] == earlier[:1] else []


def _after(template: Template, turns: Sequence[Any], said: str = _SAID) -> str | None:
    try:
        text = template.render(read_conversation(turns).messages, None)
    except TemplateSaysNo:
        return None
    _, found, after = text.rpartition(said)
    return after if found else None
