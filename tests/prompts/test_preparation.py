"""What a run selects is decided by settings that are kept, and what it leaves out is told from what is refused."""

from __future__ import annotations

from datetime import date
from typing import Any

import msgspec
import pytest

from hsconnector.errors import SettingsError
from hsconnector.prompts.preparation import DropReason, Preparation
from hsconnector.prompts.prompt import Dropped, Missing, Prompt, PromptReader
from tests.prompts.shapes import chat_of
from tests.prompts.talks import TALKS, user


def read(row: dict[str, Any], taken: int = 0, **options: Any) -> Prompt | Missing:
    return PromptReader(max_tokens=taken, preparation=Preparation(**options)).read(row, 7)


ROW = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0]}


def test_what_was_decided_is_read_again_as_it_was() -> None:
    decided = Preparation(
        train_on="last",
        max_tokens=9,
        too_long="truncate",
        roles={"bot": "assistant"},
        template_kwargs={"enable_thinking": False},
        date=date(2026, 7, 26),
    )
    assert msgspec.json.decode(msgspec.json.encode(decided), type=Preparation) == decided
    assert Preparation().date == date.today()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"max_tokens": -1}, "neither is below 0"),
        ({"min_trained_tokens": -1}, "neither is below 0"),
        ({"roles": {"bot": "robot"}}, "role 'bot'='robot' is not NAME=ROLE with one of system, developer, user"),
        ({"template_kwargs": {"messages": []}}, "template_kwargs cannot set messages"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Preparation(**options)
    assert fault in str(caught.value)


def test_a_row_without_a_token_that_counts_is_dropped() -> None:
    """sgl-project/SpecForge#445, allenai/open-instruct#806."""
    dropped = read({"input_ids": [1, 2], "loss_mask": [0, 0]})
    assert dropped == Dropped(7, "7", "has 0 tokens that count, wanted are 1 or more", DropReason.UNTRAINED)
    assert isinstance(read({**ROW}, min_trained_tokens=2), Prompt)
    assert isinstance(read({**ROW}, min_trained_tokens=3), Dropped)
    assert isinstance(read({"input_ids": [1], "loss_mask": [0]}, min_trained_tokens=0), Prompt)


@pytest.mark.parametrize(("wanted", "taken"), [(3, 0), (0, 3), (3, 9), (9, 3)])
def test_a_row_that_is_too_long_is_refused_dropped_or_cut(wanted: int, taken: int) -> None:
    """axolotl-ai-cloud/axolotl#2662."""
    refused = read(ROW, taken, max_tokens=wanted)
    assert type(refused) is Missing and "has 4 tokens" in refused.reason
    assert ("at most 3 are wanted" if wanted == 3 else "the engine takes 3") in refused.reason
    dropped = read(ROW, taken, max_tokens=wanted, too_long="drop")
    assert isinstance(dropped, Dropped) and dropped.why is DropReason.TOO_LONG
    assert read(ROW, taken, max_tokens=wanted, too_long="truncate") == Prompt(7, "7", (1, 2, 3), (0, 1, 1))


def test_what_is_cut_off_counts_no_more() -> None:
    row = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    assert isinstance(read(row, max_tokens=1, too_long="truncate"), Dropped)


def test_a_row_as_long_as_wanted_is_whole() -> None:
    assert isinstance(read(ROW, 4, max_tokens=4), Prompt)


def test_only_questions_are_dropped_and_what_is_wrong_is_refused() -> None:
    chats = chat_of("qwen3")
    reader = PromptReader(chats.encode, preparation=chats.preparation)
    kinds = [type(reader.read({"messages": talk}, 0)) for talk in ([user("a")], [user("a"), user("b")], [])]
    assert kinds == [Dropped, Dropped, Missing]


def test_a_reader_without_settings_takes_every_row() -> None:
    assert isinstance(PromptReader().read({"input_ids": [1], "loss_mask": [0]}, 0), Prompt)


def test_thoughts_left_out_are_told() -> None:
    prompt = PromptReader(chat_of("qwen3").encode).read({"messages": TALKS["thoughts before"]}, 0)
    assert isinstance(prompt, Prompt) and prompt.thoughts_left_out == 2


def test_tools_reach_the_template() -> None:
    chats = chat_of("chatml")
    reader = PromptReader(chats.encode)
    tools = '[{"type": "function", "function": {"name": "add"}}]'
    with_tools = reader.read({"messages": TALKS["plain"], "tools": tools}, 0)
    without = reader.read({"messages": TALKS["plain"]}, 0)
    assert isinstance(with_tools, Prompt) and isinstance(without, Prompt)
    assert len(with_tools.token_ids) > len(without.token_ids)
    assert sum(with_tools.loss_mask) == sum(without.loss_mask)
