"""A model's chat template, rendered as transformers 5 and vLLM render it, but for the date, which is pinned.

Templates are programs of other people: what they raise becomes a refusal of the row, and a loop without end is stopped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hsconnector.errors import SettingsError
from hsconnector.prompts.row import RowRefused

__all__ = ["MARK_END", "MARK_START", "Template", "TemplateSaysNo"]

MARK_START, MARK_END = "\U00031349", "\U0003134a"
"""Written around what `{% generation %}` encloses; no text of a row may hold them."""
_ANOTHER_DAY = timedelta(days=397)
"""So long ago year, month and day of the week were others, whatever day it is."""
_MOST_STEPS = 2_000_000
"""Items that `range` gives in one rendering."""
_MOST_CHARACTERS = 64 << 20


class TemplateSaysNo(RowRefused):
    """The template does not render these messages."""


class Template:
    """One chat template with the values that are the same for every row; raises SettingsError if it is none."""

    def __init__(self, text: str, values: Mapping[str, Any], today: date) -> None:
        self.text = text
        self._values = values
        self._today = today
        try:
            tree = _environment(False).parse(text)
            self._plain, self._marking = _compiled(text, False), _compiled(text, True)
        except jinja2.TemplateError as error:
            raise SettingsError(f"the chat template is none: {_first_line(error)}") from error
        self.marks_turns = any(isinstance(call, nodes.CallBlock) and _is_mark(call) for call in _blocks(tree))
        self.takes_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
        """It loops over a message's content, so vLLM gives it a list of parts instead of a text."""
        self.words = frozenset(_words(tree))
        """The texts with punctuation in them that the template may look for in what it is given."""

    def knows(self, name: str) -> bool:
        """Whether the template mentions a field or a role."""
        return re.search(rf"\b{name}\b", self.text) is not None

    def shows_date(self, messages: Sequence[Any], tools: Any) -> bool:
        """Whether the text of a conversation is another one on another day; raises `TemplateSaysNo`."""
        return self.knows("strftime_now") and self.render(messages, tools) != self.render(
            messages, tools, today=self._today - _ANOTHER_DAY
        )

    def render(
        self,
        messages: Sequence[Any],
        tools: Any,
        *,
        add_generation_prompt: bool = False,
        marked: bool = False,
        today: date | None = None,
    ) -> str:
        """The text of a conversation; raises `TemplateSaysNo`."""
        pieces, size = [], 0
        template = self._marking if marked else self._plain
        given = {**self._values, "messages": messages, "tools": tools, "documents": None, "range": _range()}
        given["strftime_now"] = datetime.combine(today or self._today, time()).strftime
        try:
            for piece in template.generate(given, add_generation_prompt=add_generation_prompt):
                pieces.append(piece)
                size += len(piece)
                if size > _MOST_CHARACTERS:
                    raise TemplateSaysNo(f"has a conversation of which the chat template makes {size} characters")
        except RowRefused:
            raise
        except Exception as error:  # templates raise what they like
            raise TemplateSaysNo(f"has a conversation that the chat template rejects: {_first_line(error)}") from error
        return "".join(pieces)


def _range() -> Any:
    left = _MOST_STEPS

    def counted(*bounds: int) -> range:
        nonlocal left
        items = range(*bounds)
        left -= len(items)
        if left < 0:
            raise TemplateSaysNo(f"has a conversation on which the chat template takes over {_MOST_STEPS} steps")
        return items

    return counted


@lru_cache(maxsize=16)
def _compiled(text: str, marking: bool) -> jinja2.Template:
    return _environment(marking).from_string(text)


@lru_cache(maxsize=2)
def _environment(marking: bool) -> ImmutableSandboxedEnvironment:
    mark = _Marking if marking else _Plain
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[mark, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment


class _Plain(Extension):
    """`{% generation %}` as a block that changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)
    around = ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Any) -> str:
        start, end = self.around
        return f"{start}{caller()}{end}"


class _Marking(_Plain):
    around = (MARK_START, MARK_END)


def _is_mark(block: nodes.CallBlock) -> bool:
    return isinstance(block.call.node, nodes.ExtensionAttribute)


def _blocks(tree: nodes.Template) -> Iterator[nodes.CallBlock]:
    return tree.find_all(nodes.CallBlock)


def _is_content(node: nodes.Node | None) -> bool:
    while isinstance(node, (nodes.Filter, nodes.Test)):
        node = node.node
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return (isinstance(node, nodes.Getattr) and node.attr == "content") or (
        isinstance(node, nodes.Name) and node.name == "content"
    )


def _words(tree: nodes.Template) -> Iterator[str]:
    for constant in tree.find_all(nodes.Const):
        value = constant.value
        if isinstance(value, str) and len(value.strip()) > 2 and not value.strip().isalnum():
            yield value.strip()


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
