"""Conversations -> token ids and a loss mask over what the model says, by its own chat template."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from hsconnector.errors import SettingsError, UnsupportedError
from hsconnector.prompts.conversation import Conversation, Message, engine_messages, read_conversation, read_tools
from hsconnector.prompts.encoded import Encoded, Place
from hsconnector.prompts.preparation import Preparation
from hsconnector.prompts.proof import Proof
from hsconnector.prompts.row import RowRefused
from hsconnector.prompts.said import Said, Speech
from hsconnector.prompts.stops import Stops, find_stops
from hsconnector.prompts.tags import Rendering, place
from hsconnector.prompts.template import Template
from hsconnector.prompts.tokens import Tokens

__all__ = ["ChatTokenizer", "as_given", "load_tokenizer"]


def load_tokenizer(
    name: str, *, trust_remote_code: bool = False, preparation: Preparation | None = None
) -> ChatTokenizer:
    """The tokenizer of a checkpoint, with its chat template; raises SettingsError or UnsupportedError."""
    try:
        from transformers import AutoTokenizer, GenerationConfig
    except ImportError as error:
        raise UnsupportedError(
            "conversations are encoded with transformers, which is not installed: "
            "pip install 'hsconnector[verify]', or give rows with input_ids"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"no tokenizer can be loaded from {name!r}: {_first_line(error)}") from error
    try:
        stops = GenerationConfig.from_pretrained(name).eos_token_id
    except (OSError, ValueError):  # many checkpoints have none
        stops = None
    return ChatTokenizer(tokenizer, name, preparation, _ids(stops))


def _ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or ())


@dataclass(frozen=True, slots=True)
class _Model:
    """A template, and at which tokens the model stops under it."""

    template: Template
    stops: Stops


class ChatTokenizer:
    """Encodes conversations with a Hugging Face tokenizer that has a chat template and knows offsets.

    `stop_ids` are those at which the engine ends a request, beside the tokenizer's own. Raises SettingsError.
    """

    def __init__(
        self, tokenizer: Any, name: str, preparation: Preparation | None = None, stop_ids: Iterable[int] = ()
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise SettingsError(f"the tokenizer of {name!r} has no chat template: give another with --tokenizer")
        if not getattr(tokenizer, "is_fast", False):
            raise SettingsError(
                f"the tokenizer of {name!r} is a slow one and knows no offsets, which the loss mask is made from: "
                "give rows with input_ids and loss_mask"
            )
        self.preparation = preparation or Preparation()
        self._tokenizer = tokenizer
        self._stop_ids = frozenset([*stop_ids, *_ids(tokenizer.eos_token_id)])
        self._models: dict[str, _Model] = {}
        self._model(None)

    def encode(self, conversation: Any, tools: Any = None) -> Encoded:
        """Token ids and the mask of equal length: 1 on what the model says, the token it stops at included.

        Raises `RowRefused` where that cannot be proved.
        """
        read = read_conversation(conversation, self.preparation.roles)
        given_tools = read_tools(tools)
        model = self._model(given_tools)
        messages = as_given(read.messages, model.template)
        encoded = _Row(self, model, read, messages, given_tools).encoded()
        day = self.preparation.date if model.template.shows_date(messages, given_tools) else None
        return replace(encoded, request=self._request(read, given_tools), day=day)

    def tokens(self, text: str) -> Tokens:
        """A rendered text as the engine tokenises it: nothing is added to what the template wrote."""
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise RowRefused("has a conversation with half a surrogate pair, which is no text")
        coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return Tokens.of(coded["input_ids"], coded["offset_mapping"])

    def _request(self, read: Conversation, tools: Any) -> bytes:
        asked = {
            "messages": engine_messages(read),
            "tools": tools,
            "chat_template_kwargs": self.preparation.template_kwargs or None,
            "add_generation_prompt": False,
        }
        try:
            return msgspec.json.encode({name: value for name, value in asked.items() if value is not None})
        except (TypeError, ValueError) as error:
            raise RowRefused(f"has a conversation that is no JSON: {_first_line(error)}") from error

    def _model(self, tools: Any) -> _Model:
        try:
            text = self._tokenizer.get_chat_template(None, tools)
        except ValueError as error:
            raise SettingsError(f"the tokenizer names no chat template to use: {_first_line(error)}") from error
        if text not in self._models:
            values = {**self._tokenizer.special_tokens_map, **self.preparation.template_kwargs}
            template = Template(text, values, self.preparation.date)
            stops = find_stops(
                self._stop_ids,
                self._tokenizer.added_tokens_decoder,
                template,
                lambda text: list(self.tokens(text).ids),
                self._tokenizer.convert_ids_to_tokens,
            )
            self._models[text] = _Model(template, stops)
        return self._models[text]


class _Row:
    """One conversation on its way to token ids."""

    def __init__(
        self, chat: ChatTokenizer, model: _Model, read: Conversation, messages: list[Message], tools: Any
    ) -> None:
        self._chat = chat
        self._model = model
        self._read = read
        self._messages = messages
        self._tools = tools
        self._merged = len(read.messages) - len(messages)
        """Messages at the front that the template is given as one."""

    def encoded(self) -> Encoded:
        trained = self._trained()
        if not trained:
            tokens = self._chat.tokens(self._model.template.render(self._messages, self._tools))
            return Encoded(list(tokens.ids), [0] * len(tokens.ids))
        rendering = place(self._model.template, self._messages, self._tools, self._told)
        tokens = self._chat.tokens(rendering.text)
        said, left_out = self._proved(rendering, tokens, trained)
        self._check_ids_said(said, tokens, rendering.text)
        return Encoded(list(tokens.ids), _mask(said, len(tokens.ids)), left_out, self._places(rendering, tokens))

    def _trained(self) -> list[int]:
        spoken = [turn for turn, message in enumerate(self._messages) if message["role"] == "assistant"]
        chosen = spoken[-1:] if self._chat.preparation.train_on == "last" else spoken
        return [turn for turn in chosen if self._read.trained[turn + self._merged]]

    def _told(self, turn: int) -> str:
        return f"turn {turn + self._merged} ({self._messages[turn]['role']})"

    def _proved(self, rendering: Rendering, tokens: Tokens, trained: list[int]) -> tuple[list[Said], int]:
        """What is said and how many thoughts were left out: by the generation prompts, else by the template's marks."""
        open_end = self._chat.preparation.open_end == "train"
        model = self._model
        speech = Speech(rendering, tokens, model.template, self._tools, model.stops, self._told, open_end=open_end)
        proof = Proof(rendering, tokens, model.stops, self._told, open_end=open_end)

        def proved(of_turn: Callable[[int], list[Said]]) -> tuple[list[Said], int]:
            said = [each for turn in trained for each in of_turn(turn)]
            last = max(turn for turn, message in enumerate(self._messages) if message["role"] == "assistant")
            return said, proof.check(said, trained, last)

        if not model.template.marks_turns:
            return proved(speech.of_turn)
        if speech.is_asked_for(trained[0]):
            with suppress(RowRefused):
                return proved(speech.of_turn)
        marked = model.template.render(self._messages, self._tools, marked=True)
        return proved(lambda turn: speech.by_marks(turn, marked))

    def _check_ids_said(self, said: list[Said], tokens: Tokens, text: str) -> None:
        for each in said if self._read.made_ids else ():
            start, end = tokens.characters(each.first, each.last)
            if any(made in text[start:end] for made in self._read.made_ids):
                raise RowRefused(
                    f"has a conversation whose {self._told(each.turn)} calls without an id, which the chat template "
                    "writes: give each call its id as the model says it"
                )

    def _places(self, rendering: Rendering, tokens: Tokens) -> tuple[Place, ...]:
        found = {
            tokens.reaching(start): f"{self._told(placed.text.turn)}, {placed.text.key}"
            for placed in reversed(rendering.placed)
            for start, _ in placed.copies[:1]
        }
        return tuple(Place(first, found[first]) for first in sorted(found))


def _mask(said: Collection[Said], length: int) -> list[int]:
    mask = [0] * length
    for each in said:
        mask[each.first : each.last + 1] = [1] * (each.last + 1 - each.first)
    return mask


def as_given(messages: list[Message], template: Template) -> list[Message]:
    """The messages as vLLM 0.32 hands them to a template, by what the template knows (`vllm/renderers/hf.py`)."""
    given = messages
    if any(message["role"] == "developer" for message in messages) and not template.knows("developer"):
        given = _as_one_system(messages)
    if template.takes_parts:
        given = [
            message if message["role"] == "tool" else {**message, "content": _parts(message["content"])}
            for message in given
        ]
    if template.knows("thinking") and not template.knows("reasoning") and not template.knows("reasoning_content"):
        # Harmony's own name for it; under the others the thought would be lost without a word.
        given = [{**each, "thinking": each["reasoning"]} if "reasoning" in each else each for each in given]
    return given


def _as_one_system(messages: Sequence[Message]) -> list[Message]:
    first = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(text for text in first if text)}, *rest]


def _parts(content: str) -> list[Mapping[str, str]]:
    return [{"type": "text", "text": content}]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
