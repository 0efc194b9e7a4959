"""Conversations for the corpus of chat templates; the masks that they get are in test_corpus."""

from __future__ import annotations

from typing import Any

LONG = "again and again the same words " * 60
"""About the length of an essay."""


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def says(content: str, thought: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"reasoning": thought} if thought else {}), **more}


def calls(*called: tuple[str, Any], content: str = "", thought: str = "") -> dict[str, Any]:
    made = [
        {"id": f"functions.{name}:{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(called)
    ]
    return says(content, thought, tool_calls=made)


def answers(content: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


SYSTEM = {"role": "system", "content": "Be brief."}
ADD, ADDED = ("add", {"a": 3, "b": 51}), answers("54", "functions.add:0")
TALKS: dict[str, list[Any]] = {
    "plain": [SYSTEM, user("Hello?"), says("Hi.")],
    "no system": [user("Hello?"), says("Hi.")],
    "two turns": [SYSTEM, user("Hello?"), says("Hi."), user("And?"), says("Bye.")],
    "call": [user("3 and 51?"), calls(ADD), ADDED, says("It is 54.")],
    "call and text": [SYSTEM, user("3 and 51?"), calls(ADD, content="I call it."), ADDED, says("It is 54.")],
    "calls": [
        user("Both?"),
        calls(ADD, ("look", {"up": "ice"})),
        ADDED,
        answers("cold", "functions.look:1"),
        says("54, cold."),
    ],
    "call last": [user("3 and 51?"), calls(ADD)],
    "nothing given": [user("When?"), calls(("now", {})), answers("noon", "functions.now:0"), says("At noon.")],
    "deep": [
        user("Do."),
        calls(("set", {"to": {"x": [1, True, "on"]}})),
        answers("ok", "functions.set:0"),
        says("Set."),
    ],
    "as text": [user("3 and 51?"), calls(("add", '{"a": 3, "b": 51}')), ADDED, says("It is 54.")],
    "thoughts": [SYSTEM, user("2+2?"), says("4", "two twos"), user("3+3?"), says("6", "two threes")],
    "last thought": [user("2+2?"), says("4"), user("3+3?"), says("6", "two threes")],
    "first thought": [user("2+2?"), says("4", "two twos"), user("3+3?"), says("6")],
    "thoughtful call": [
        user("3 and 51?"),
        calls(ADD, thought="adding"),
        ADDED,
        says("It is 54.", "added"),
    ],
    "thoughts before": [
        user("3 and 51?"),
        calls(ADD, thought="adding"),
        ADDED,
        says("It is 54.", "added"),
        user("Thanks."),
        says("Welcome.", "polite"),
    ],
    "thought in content": [user("2+2?"), says("<think>\ntwo twos\n</think>\n\n4")],
    "unicode": [user("naïve cafe\u0301 😀?"), says("Ça va\u0301 👩‍👩‍👧 日本"), user("é\u0301"), says("e\u0301")],
    "long": [user(LONG), says(LONG + "end"), user(LONG), says("Done.")],
    "spaces": [user("  Hello?\n"), says("\n Hi. \n"), user("And?"), says("Bye.")],
    "nothing said": [user("Hello?"), says(""), user("And?"), says("Bye.")],
    "the same": [user("Echo."), says("Echo."), user("Echo."), says("Echo.")],
    "flagged": [user("Hello?"), says("Hi.", loss=False), user("And?"), says("Bye.", weight=1)],
    "asked last": [user("Hello?"), says("Hi."), user("And?")],
    "greets first": [SYSTEM, says("Welcome."), user("Hello?"), says("Hi.")],
    "quotes": [user('Say "hi\\n" <b>'), says('"hi\\n" </b> {"a": 1} [x]')],
}
