"""What each shape of chat template trains on, talk by talk, written down by hand.

A line holds the parts under the mask, parted by `¦`; `$` is the token at which a turn ends, `^` the one at which an
earlier turn ends where that is another. A line that begins with `refused:` holds words of the reason instead.
"""

from __future__ import annotations

LOST = "refused: its reasoning is left out"

TEXTS = {
    "plain": "Hi.$",
    "no system": "Hi.$",
    "two turns": "Hi.$ ¦ Bye.$",
    "first thought": "4$ ¦ 6$",
    "thought in content": "<think>\ntwo twos\n</think>\n\n4$",
    "unicode": "Ça va\u0301 👩‍👩‍👧 日本$ ¦ e\u0301$",
    "long": "LONGend$ ¦ Done.$",
    "spaces": "Hi.$ ¦ Bye.$",
    "nothing said": "$ ¦ Bye.$",
    "the same": "Echo.$ ¦ Echo.$",
    "flagged": "Bye.$",
    "asked last": "Hi.$",
    "greets first": "Welcome.$ ¦ Hi.$",
    "quotes": '"hi\\n" </b> {"a": 1} [x]$',
}
NO_THOUGHTS = {"thoughts": LOST, "last thought": LOST, "thoughtful call": LOST, "thoughts before": LOST}

_JSON = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 51}}\n</tool_call>'
_JSON_CALLS = {
    "call": f"{_JSON}$ ¦ It is 54.$",
    "call and text": f"I call it.\n{_JSON}$ ¦ It is 54.$",
    "calls": f'{_JSON}\n<tool_call>\n{{"name": "look", "arguments": {{"up": "ice"}}}}\n</tool_call>$ ¦ 54, cold.$',
    "call last": f"{_JSON}$",
    "nothing given": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>$ ¦ At noon.$',
    "deep": '<tool_call>\n{"name": "set", "arguments": {"to": {"x": [1, true, "on"]}}}\n</tool_call>$ ¦ Set.$',
    "as text": f"{_JSON}$ ¦ It is 54.$",
}
_COMPOSED = {"unicode": "Ça v\u00e1 👩‍👩‍👧 日本$ ¦ \u00e9$"}
"""Of a tokenizer that makes one character of a letter and its accent."""
# The line end after the role and the one that an answer begins with are one token, which is the prompt's.
_SHARED = {"spaces": " Hi. \n$ ¦ Bye.$"}

_ENGINES_ORDER = '<tool_call>\n{"arguments": {"a": 3, "b": 51}, "name": "add"}\n</tool_call>'
_WORDS = (
    "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n51\n</parameter>\n"
    "</function>\n</tool_call>"
)
_GLM = (
    "<tool_call>add<arg_key>a</arg_key>\n<arg_value>3</arg_value><arg_key>b</arg_key>\n<arg_value>51</arg_value>"
    "</tool_call>"
)
_DEEPSEEK = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 3, "b": 51}<｜tool▁call▁end｜>'
_KIMI = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 3, "b": 51}<|tool_call_end|>'
_FINAL = "<|channel|>final<|message|>"
_THINKS = "<|channel|>analysis<|message|>"
_HARMONY = ' to=functions.add<|channel|>commentary json<|message|>{"a": 3, "b": 51}<|call|>'
_INVOKE = '<invoke name="add">\n<parameter name="a">3</parameter>\n<parameter name="b">51</parameter>\n</invoke>\n'
_MINIMAX = f"<minimax:tool_call>\n{_INVOKE}</minimax:tool_call>"
_MISTRAL = '{"name": "add", "arguments": {"a": 3, "b": 51}, "id": "000000001"}'
_TURNS = "refused: rejects: roles must take turns"
_UNSAID = "refused: turn 1 (assistant) the chat template does not render"

ENDS = {
    "chatml": "<|im_end|>",
    "marked": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "qwen3-coder": "<|im_end|>",
    "glm": "",
    "deepseek": "<｜end▁of▁sentence｜>",
    "kimi": "<|im_end|>",
    "harmony": "<|return|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "minimax": "[e~[",
    "granite": "<|end_of_text|>",
    "phi": "<|end|>",
}
EARLIER_ENDS = {"glm": "<|user|>", "harmony": "<|end|>"}

MASKS: dict[str, dict[str, str]] = {
    "chatml": {**TEXTS, **_SHARED, **_JSON_CALLS, **NO_THOUGHTS},
    "marked": {
        **TEXTS,
        **_SHARED,
        **NO_THOUGHTS,
        "call": f"{_ENGINES_ORDER}$ ¦ It is 54.$",
        "call and text": f"I call it.{_ENGINES_ORDER}$ ¦ It is 54.$",
        "calls": f'{_ENGINES_ORDER}<tool_call>\n{{"arguments": {{"up": "ice"}}, "name": "look"}}\n</tool_call>$ '
        "¦ 54, cold.$",
        "call last": f"{_ENGINES_ORDER}$",
        "nothing given": '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>$ ¦ At noon.$',
        "deep": '<tool_call>\n{"arguments": {"to": {"x": [1, true, "on"]}}, "name": "set"}\n</tool_call>$ ¦ Set.$',
        "as text": f"{_ENGINES_ORDER}$ ¦ It is 54.$",
    },
    "llama3": {
        **TEXTS,
        **NO_THOUGHTS,
        "call": '{"name": "add", "parameters": {"a": 3, "b": 51}}$ ¦ It is 54.$',
        "call and text": "refused: its content is left out",
        "calls": "refused: rejects: one call a turn only",
        "call last": '{"name": "add", "parameters": {"a": 3, "b": 51}}$',
        "nothing given": '{"name": "now", "parameters": {}}$ ¦ At noon.$',
        "deep": '{"name": "set", "parameters": {"to": {"x": [1, true, "on"]}}}$ ¦ Set.$',
        "as text": '{"name": "add", "parameters": {"a": 3, "b": 51}}$ ¦ It is 54.$',
    },
    "qwen3": {
        **TEXTS,
        **_COMPOSED,
        **_SHARED,
        **_JSON_CALLS,
        "thoughts": "4$ ¦ <think>\ntwo threes\n</think>\n\n6$",
        "last thought": "4$ ¦ <think>\ntwo threes\n</think>\n\n6$",
        "thoughtful call": f"<think>\nadding\n</think>\n\n{_JSON}$ ¦ <think>\nadded\n</think>\n\nIt is 54.$",
        "thoughts before": f"{_JSON}$ ¦ It is 54.$ ¦ <think>\npolite\n</think>\n\nWelcome.$",
    },
    "qwen3-coder": {
        **TEXTS,
        **_COMPOSED,
        **NO_THOUGHTS,
        "call": f"{_WORDS}$ ¦ It is 54.$",
        "call and text": f"I call it.\n{_WORDS}$ ¦ It is 54.$",
        "calls": f"{_WORDS}\n<tool_call>\n<function=look>\n<parameter=up>\nice\n</parameter>\n"
        "</function>\n</tool_call>$ ¦ 54, cold.$",
        "call last": f"{_WORDS}$",
        "nothing given": "<tool_call>\n<function=now>\n</function>\n</tool_call>$ ¦ At noon.$",
        "deep": '<tool_call>\n<function=set>\n<parameter=to>\n{"x": [1, true, "on"]}\n</parameter>\n</function>\n'
        "</tool_call>$ ¦ Set.$",
        "as text": f"{_WORDS}$ ¦ It is 54.$",
    },
    # The next turn's role is where the model stops; the last turn has none after it.
    "glm": {
        **TEXTS,
        "two turns": "Hi.^ ¦ Bye.",
        "first thought": "4^ ¦ 6",
        "unicode": "Ça va\u0301 👩‍👩‍👧 日本^ ¦ e\u0301",
        "long": "LONGend^ ¦ Done.",
        "spaces": "Hi.^ ¦ Bye.",
        "nothing said": "^ ¦ Bye.",
        "the same": "Echo.^ ¦ Echo.",
        "asked last": "Hi.^",
        "greets first": "Welcome.^ ¦ Hi.",
        "call": f"{_GLM}<|observation|> ¦ It is 54.",
        "call and text": f"I call it.{_GLM}<|observation|> ¦ It is 54.",
        "calls": f"{_GLM}<tool_call>look<arg_key>up</arg_key>\n<arg_value>ice</arg_value></tool_call><|observation|> "
        "¦ 54, cold.",
        "call last": _GLM,
        "nothing given": "<tool_call>now</tool_call><|observation|> ¦ At noon.",
        "deep": '<tool_call>set<arg_key>to</arg_key>\n<arg_value>{"x": [1, true, "on"]}</arg_value></tool_call>'
        "<|observation|> ¦ Set.",
        "as text": f"{_GLM}<|observation|> ¦ It is 54.",
        "thoughts": "4^ ¦ <think>two threes</think>6",
        "last thought": "4^ ¦ <think>two threes</think>6",
        "thoughtful call": f"<think>adding</think>{_GLM}<|observation|> ¦ <think>added</think>It is 54.",
        "thoughts before": f"{_GLM}<|observation|> ¦ It is 54.^ ¦ <think>polite</think>Welcome.",
    },
    "deepseek": {
        **TEXTS,
        **NO_THOUGHTS,
        "thought in content": "refused: its thought within content is left out",
        "spaces": "\n Hi. \n$ ¦ Bye.$",
        "call": f"<｜tool▁calls▁begin｜>{_DEEPSEEK}<｜tool▁calls▁end｜>$ ¦ It is 54.$",
        "call and text": f"I call it.<｜tool▁calls▁begin｜>{_DEEPSEEK}<｜tool▁calls▁end｜>$ ¦ It is 54.$",
        "calls": f"<｜tool▁calls▁begin｜>{_DEEPSEEK}"
        '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"up": "ice"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>$ ¦ 54, cold.$',
        "call last": f"<｜tool▁calls▁begin｜>{_DEEPSEEK}<｜tool▁calls▁end｜>$",
        "nothing given": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>$ ¦ At noon.$",
        "deep": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>set<｜tool▁sep｜>{"to": {"x": [1, true, "on"]}}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>$ ¦ Set.$",
        "as text": f"<｜tool▁calls▁begin｜>{_DEEPSEEK}<｜tool▁calls▁end｜>$ ¦ It is 54.$",
    },
    "kimi": {
        **TEXTS,
        **NO_THOUGHTS,
        "spaces": "\n Hi. \n$ ¦ Bye.$",
        "call": f"<|tool_calls_section_begin|>{_KIMI}<|tool_calls_section_end|>$ ¦ It is 54.$",
        "call and text": f"I call it.<|tool_calls_section_begin|>{_KIMI}<|tool_calls_section_end|>$ ¦ It is 54.$",
        "calls": f"<|tool_calls_section_begin|>{_KIMI}<|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>"
        '{"up": "ice"}<|tool_call_end|><|tool_calls_section_end|>$ ¦ 54, cold.$',
        "call last": f"<|tool_calls_section_begin|>{_KIMI}<|tool_calls_section_end|>$",
        "nothing given": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>$ ¦ At noon.$",
        "deep": "<|tool_calls_section_begin|><|tool_call_begin|>functions.set:0<|tool_call_argument_begin|>"
        '{"to": {"x": [1, true, "on"]}}<|tool_call_end|><|tool_calls_section_end|>$ ¦ Set.$',
        "as text": f"<|tool_calls_section_begin|>{_KIMI}<|tool_calls_section_end|>$ ¦ It is 54.$",
    },
    "harmony": {
        "plain": f"{_FINAL}Hi.$",
        "no system": f"{_FINAL}Hi.$",
        "two turns": f"{_FINAL}Hi.^ ¦ {_FINAL}Bye.$",
        "first thought": f"{_FINAL}4^ ¦ {_FINAL}6$",
        "thought in content": f"{_FINAL}<think>\ntwo twos\n</think>\n\n4$",
        "unicode": f"{_FINAL}Ça va\u0301 👩‍👩‍👧 日本^ ¦ {_FINAL}e\u0301$",
        "long": f"{_FINAL}LONGend^ ¦ {_FINAL}Done.$",
        "spaces": f"{_FINAL}\n Hi. \n^ ¦ {_FINAL}Bye.$",
        "nothing said": f"{_FINAL}^ ¦ {_FINAL}Bye.$",
        "the same": f"{_FINAL}Echo.^ ¦ {_FINAL}Echo.$",
        "flagged": f"{_FINAL}Bye.$",
        "asked last": f"{_FINAL}Hi.^",
        "greets first": f"{_FINAL}Welcome.^ ¦ {_FINAL}Hi.$",
        "quotes": f'{_FINAL}"hi\\n" </b> {{"a": 1}} [x]$',
        "call": f"{_HARMONY} ¦ {_FINAL}It is 54.$",
        "call and text": f"<|channel|>commentary<|message|>I call it.<|end|><|start|>assistant{_HARMONY} "
        f"¦ {_FINAL}It is 54.$",
        "calls": "refused: its tool_calls[1].name is left out",
        "call last": _HARMONY,
        "nothing given": f" to=functions.now<|channel|>commentary json<|message|>{{}}<|call|> ¦ {_FINAL}At noon.$",
        "deep": ' to=functions.set<|channel|>commentary json<|message|>{"to": {"x": [1, true, "on"]}}<|call|> '
        f"¦ {_FINAL}Set.$",
        "as text": f"{_HARMONY} ¦ {_FINAL}It is 54.$",
        "thoughts": f"{_FINAL}4^ ¦ {_THINKS}two threes<|end|><|start|>assistant{_FINAL}6$",
        "last thought": f"{_FINAL}4^ ¦ {_THINKS}two threes<|end|><|start|>assistant{_FINAL}6$",
        "thoughtful call": f"{_THINKS}adding<|end|><|start|>assistant{_HARMONY} "
        f"¦ {_THINKS}added<|end|><|start|>assistant{_FINAL}It is 54.$",
        "thoughts before": f"{_THINKS}adding<|end|><|start|>assistant{_HARMONY} ¦ {_FINAL}It is 54.^ "
        f"¦ {_THINKS}polite<|end|><|start|>assistant{_FINAL}Welcome.$",
    },
    # The space before an answer is the model's: the prompt ends with its own marker.
    "mistral": {
        **NO_THOUGHTS,
        "plain": " Hi.$",
        "no system": " Hi.$",
        "two turns": " Hi.$ ¦  Bye.$",
        "first thought": " 4$ ¦  6$",
        "thought in content": " <think>\ntwo twos\n</think>\n\n4$",
        "unicode": " Ça va\u0301 👩‍👩‍👧 日本$ ¦  e\u0301$",
        "long": " LONGend$ ¦  Done.$",
        "spaces": " Hi.$ ¦  Bye.$",
        "nothing said": " $ ¦  Bye.$",
        "the same": " Echo.$ ¦  Echo.$",
        "flagged": " Bye.$",
        "asked last": " Hi.$",
        "greets first": "refused: rejects: user and assistant must take turns",
        "quotes": ' "hi\\n" </b> {"a": 1} [x]$',
        "call": f"[TOOL_CALLS][{_MISTRAL}]$ ¦  It is 54.$",
        "call and text": "refused: its content is left out",
        "calls": f'[TOOL_CALLS][{_MISTRAL}, {{"name": "look", "arguments": {{"up": "ice"}}, "id": "000000002"}}]$ '
        "¦  54, cold.$",
        "call last": f"[TOOL_CALLS][{_MISTRAL}]$",
        "nothing given": '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "000000001"}]$ ¦  At noon.$',
        "deep": '[TOOL_CALLS][{"name": "set", "arguments": {"to": {"x": [1, true, "on"]}}, "id": "000000001"}]$ '
        "¦  Set.$",
        "as text": f"[TOOL_CALLS][{_MISTRAL}]$ ¦  It is 54.$",
    },
    "gemma": {
        **TEXTS,
        "greets first": _TURNS,
        "call": _TURNS,
        "call and text": _TURNS,
        "calls": _TURNS,
        "call last": _UNSAID,
        "nothing given": _TURNS,
        "deep": _TURNS,
        "as text": _TURNS,
        "thoughts": LOST,
        "last thought": LOST,
        "thoughtful call": _TURNS,
        "thoughts before": _TURNS,
    },
    # The prompt opens a thought; a turn without one is written without.
    "minimax": {
        **TEXTS,
        **_SHARED,
        "call": f"{_MINIMAX}$ ¦ It is 54.$",
        "call and text": f"I call it.{_MINIMAX}$ ¦ It is 54.$",
        "calls": f'<minimax:tool_call>\n{_INVOKE}<invoke name="look">\n<parameter name="up">ice</parameter>\n'
        "</invoke>\n</minimax:tool_call>$ ¦ 54, cold.$",
        "call last": f"{_MINIMAX}$",
        "nothing given": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>$ ¦ At noon.$',
        "deep": '<minimax:tool_call>\n<invoke name="set">\n<parameter name="to">{"x": [1, true, "on"]}</parameter>\n'
        "</invoke>\n</minimax:tool_call>$ ¦ Set.$",
        "as text": f"{_MINIMAX}$ ¦ It is 54.$",
        "thoughts": "4$ ¦ two threes\n</think>\n\n6$",
        "last thought": "4$ ¦ two threes\n</think>\n\n6$",
        "thoughtful call": f"adding\n</think>\n\n{_MINIMAX}$ ¦ added\n</think>\n\nIt is 54.$",
        "thoughts before": f"{_MINIMAX}$ ¦ It is 54.$ ¦ polite\n</think>\n\nWelcome.$",
    },
    "granite": {
        **TEXTS,
        **NO_THOUGHTS,
        "spaces": "\n Hi. \n$ ¦ Bye.$",
        "call": '<|tool_call|>[{"arguments": {"a": 3, "b": 51}, "name": "add"}]$ ¦ It is 54.$',
        "call and text": 'I call it.<|tool_call|>[{"arguments": {"a": 3, "b": 51}, "name": "add"}]$ ¦ It is 54.$',
        "calls": '<|tool_call|>[{"arguments": {"a": 3, "b": 51}, "name": "add"}, '
        '{"arguments": {"up": "ice"}, "name": "look"}]$ ¦ 54, cold.$',
        "call last": '<|tool_call|>[{"arguments": {"a": 3, "b": 51}, "name": "add"}]$',
        "nothing given": '<|tool_call|>[{"arguments": {}, "name": "now"}]$ ¦ At noon.$',
        "deep": '<|tool_call|>[{"arguments": {"to": {"x": [1, true, "on"]}}, "name": "set"}]$ ¦ Set.$',
        "as text": '<|tool_call|>[{"arguments": {"a": 3, "b": 51}, "name": "add"}]$ ¦ It is 54.$',
    },
    # The marker takes the spaces after it, those that an answer begins with as well.
    "phi": {
        **TEXTS,
        "spaces": "Hi. \n$ ¦ Bye.$",
        "call": _UNSAID,
        "call and text": "refused: its tool_calls[0].name is left out",
        "calls": _UNSAID,
        "call last": _UNSAID,
        "nothing given": _UNSAID,
        "deep": _UNSAID,
        "as text": _UNSAID,
        "thoughts": LOST,
        "last thought": LOST,
        "thoughtful call": _UNSAID,
        "thoughts before": _UNSAID,
    },
}
