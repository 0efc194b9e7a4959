"""Which character of a rendered conversation comes from which text of which turn.

The conversation is rendered a second time with every character of a text replaced by one that stands for that text.
Where the two renderings agree but for these, each text's place is known, whatever the template does in between; where
they do not, the template treats texts by what they say, and nothing is assumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hsconnector.prompts.conversation import Message
from hsconnector.prompts.row import RowRefused
from hsconnector.prompts.template import Template

__all__ = ["Placed", "Rendering", "Run", "Tagged", "Text", "last_run", "place"]

_FIRST, _MOST = 0x30000, 0x1348
"""Rare ideographs (CJK extension G): printable, of no case, no space, and escaped by nothing."""
_TAGS = re.compile("([\U00030000-\U00031347])\\1*")
_RESERVED = re.compile("[\U00030000-\U0003134a]")
_THOUGHT_ENDS = "</think>"


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a turn."""

    turn: int
    key: str
    tagged: str
    """Its characters that were replaced, one after the other."""
    is_thought: bool = False
    literals: tuple[str, ...] = ()
    """For a call's name: the call's numbers and constants, which carry no tag, in JSON and in Python."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """A conversation whose texts are tags, and what the tags stand for."""

    messages: list[Message]
    texts: list[Text]
    inserted: set[str]
    """Tags that stand for no text: they show where a turn without one lies."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A text in the rendering; offsets are in characters."""

    text: Text
    copies: tuple[tuple[int, int], ...]
    """Where it stands, each time; empty where the template leaves it out."""


@dataclass(frozen=True, slots=True)
class Run:
    """Characters of one text on end; offsets in the rendering without tags."""

    start: int
    end: int
    text: int
    """Which of the texts."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation rendered, with the place of each text."""

    text: str
    runs: tuple[Run, ...]
    """Ascending."""
    placed: tuple[Placed, ...]
    """One for each text."""
    tagged: Tagged


class Tagger:
    """Writes tags for the texts of one conversation."""

    def __init__(self, keep: frozenset[str]) -> None:
        self._replaced = _replaced(keep)
        self.texts: list[Text] = []
        self.inserted: set[str] = set()
        self.ids: dict[str, str] = {}
        """Ids of calls that spell a function's name, as Kimi's do, and what becomes of them."""

    def tag(self, value: str, turn: int, key: str, **more: Any) -> str:
        """The text with its characters replaced, save spaces, quotes and what the template may look for."""
        sign = self._sign()
        said = self._replaced.findall(value)
        self.texts.append(Text(turn, key, "".join(said), **more))
        return self._replaced.sub(lambda found: sign * len(found[1]) if found[1] else found[0], value)

    def insert(self, turn: int) -> str:
        """A tag for a turn that has no text."""
        sign = self._sign()
        self.texts.append(Text(turn, "content", sign))
        self.inserted.add(sign)
        return sign

    def _sign(self) -> str:
        if len(self.texts) >= _MOST:
            raise RowRefused(f"has a conversation with more than {_MOST} texts: its mask cannot be proved")
        return chr(_FIRST + len(self.texts))


@lru_cache(maxsize=16)
def _replaced(keep: frozenset[str]) -> re.Pattern[str]:
    """Finds the words to keep, and in its group the runs of characters outside them, single spaces within included."""
    words = "|".join(re.escape(word) for word in sorted(keep, key=len, reverse=True)) or "(?!)"
    firsts = re.escape("".join(sorted({word[0] for word in keep})))
    character = rf"""(?:[^\s"\\{firsts}]|(?!{words})[^\s"\\])+"""
    return re.compile(rf"(?:{words})|({character}(?: {character})*)")


def tag_messages(messages: Sequence[Message], keep: frozenset[str]) -> Tagged:
    """The messages with tags for texts; `keep` are words that stay as they are."""
    tagger = Tagger(keep)
    tagged = [_tagged(message, turn, tagger) for turn, message in enumerate(messages)]
    return Tagged(tagged, tagger.texts, tagger.inserted)


def _tagged(message: Message, turn: int, tagger: Tagger) -> Message:
    tagged = dict(message)
    before = len(tagger.texts)
    if message.get("tool_call_id") in tagger.ids:
        tagged["tool_call_id"] = tagger.ids[message["tool_call_id"]]
    if "reasoning" in message:
        thought = tagger.tag(message["reasoning"], turn, "reasoning", is_thought=True)
        tagged.update({key: thought for key in ("reasoning", "reasoning_content", "thinking") if key in message})
    tagged["content"] = _content(message["content"], message["role"], turn, tagger)
    if "tool_calls" in message:
        tagged["tool_calls"] = [_call(call, turn, at, tagger) for at, call in enumerate(message["tool_calls"])]
    if message["role"] == "assistant" and not any(text.tagged for text in tagger.texts[before:]):
        tagged["content"] = _with_more(tagged["content"], tagger.insert(turn))
    return tagged


def _content(content: Any, role: str, turn: int, tagger: Tagger) -> Any:
    if isinstance(content, list):
        return [{**part, "text": _content(part["text"], role, turn, tagger)} for part in content]
    thought, ends, rest = content.rpartition(_THOUGHT_ENDS) if role == "assistant" else ("", "", content)
    if not ends:
        return tagger.tag(content, turn, "content")
    first = tagger.tag(thought + ends, turn, "thought within content", is_thought=True)
    return first + tagger.tag(rest, turn, "content")


def _with_more(content: Any, sign: str) -> Any:
    if not isinstance(content, list):
        return content + sign
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + sign}] if content else content


def _call(call: dict[str, Any], turn: int, at: int, tagger: Tagger) -> dict[str, Any]:
    function, key = call["function"], f"tool_calls[{at}]"
    literals = tuple(_literals(function["arguments"]))
    name = tagger.tag(function["name"], turn, f"{key}.name", literals=literals)
    if function["name"] in call["id"]:
        tagger.ids[call["id"]] = call["id"].replace(function["name"], name)
    arguments = _argument(function["arguments"], turn, f"{key}.arguments", tagger)
    return {
        **call,
        "id": tagger.ids.get(call["id"], call["id"]),
        "function": {**function, "arguments": arguments, "name": name},
    }


def _argument(value: Any, turn: int, key: str, tagger: Tagger) -> Any:
    if isinstance(value, str):
        return tagger.tag(value, turn, key)
    if isinstance(value, list):
        return [_argument(each, turn, f"{key}[{at}]", tagger) for at, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    # Tags ascend, so keys that a template sorts come in the same order as before.
    names = {name: tagger.tag(name, turn, f"the key {name!r:.40} of {key}") for name in sorted(value)}
    if len(set(names.values())) < len(names):
        raise RowRefused(f"has a message {turn} with arguments whose names cannot be told apart: {list(value)!r:.80}")
    return {names[name]: _argument(each, turn, f"{key}.{name:.40}", tagger) for name, each in value.items()}


def _literals(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _literals(each)
    elif isinstance(value, list):
        for each in value:
            yield from _literals(each)
    elif not isinstance(value, str):
        yield json.dumps(value)


def place(template: Template, messages: Sequence[Message], tools: Any, told: Callable[[int], str]) -> Rendering:
    """Renders a conversation and finds its texts; `told` names a turn in a refusal. Raises `RowRefused`."""
    text = template.render(messages, tools)
    if _RESERVED.search(text):
        raise RowRefused("has characters of CJK extension G, which mark texts here: its mask cannot be proved")
    tagged = tag_messages(messages, template.words)
    with_tags = template.render(tagged.messages, tools)
    runs, faulty = _aligned(text, with_tags, tagged.inserted)
    parts: list[list[Run]] = [[] for _ in tagged.texts]
    for run in runs:
        parts[run.text].append(run)
    copies = [_copies(text, part, each) for part, each in zip(parts, tagged.texts, strict=True)]
    wrong = faulty if faulty is not None else next((at for at, found in enumerate(copies) if found is None), None)
    if wrong is not None:
        turn = told(tagged.texts[wrong].turn)
        raise RowRefused(
            f"has a conversation whose {turn} the chat template renders differently within it, by what its "
            f"{tagged.texts[wrong].key} says: give input_ids and loss_mask"
        )
    placed = tuple(Placed(each, found or ()) for each, found in zip(tagged.texts, copies, strict=True))
    return Rendering(text, tuple(runs), placed, tagged)


def last_run(with_tags: str) -> tuple[int, int]:
    """The last tag in a rendering with tags: which text it stands for, and where what follows it begins; -1 and 0."""
    for at in range(len(with_tags) - 1, -1, -1):
        if 0 <= (text := ord(with_tags[at]) - _FIRST) < _MOST:
            return text, at + 1
    return -1, 0


def _aligned(text: str, with_tags: str, inserted: set[str]) -> tuple[list[Run], int | None]:
    """The runs of tags, and the text at the first place where the renderings differ otherwise."""
    runs: list[Run] = []
    behind = done = 0
    for found in _TAGS.finditer(with_tags):
        sign, start = ord(found[1]) - _FIRST, found.start() - behind
        if text[done:start] != with_tags[done + behind : found.start()]:
            return runs, runs[-1].text if runs else 0
        behind += found.end() - found.start() if found[1] in inserted else 0
        done = found.end() - behind
        runs.append(Run(start, done, sign))
    agrees = text[done:] == with_tags[done + behind :]
    return runs, None if agrees else runs[-1].text if runs else 0


def _copies(text: str, runs: list[Run], whole: Text) -> tuple[tuple[int, int], ...] | None:
    """Each place where a text stands whole; None where it stands changed or in part."""
    copies: list[tuple[int, int]] = []
    said, start = "", None
    for run in runs:
        said += text[run.start : run.end]
        start = run.start if start is None else start
        if len(said) >= len(whole.tagged) or run.start == run.end:
            if said not in (whole.tagged, ""):
                return None
            copies.append((start, run.end))
            said, start = "", None
    return tuple(copies) if start is None else None
