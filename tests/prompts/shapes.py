"""Chat templates in the shapes that models use, written for these tests, each with a small tokenizer of its own.

They keep what makes each shape hard: what is inserted, dropped, looped over, refused, or ends a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hsconnector.prompts.chat import ChatTokenizer
from hsconnector.prompts.preparation import Preparation

CHATML = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' }}Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MARKED = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>{% endgeneration %}

{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
{{- bos_token }}<|start_header_id|>system<|end_header_id|>

Today: {{ strftime_now('%d %b %Y') }}

{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>
{%- for message in messages if message.role != 'system' %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call a turn only') }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

QWEN3 = """\
{%- if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set last = namespace(query=messages | length - 1, seen=false) %}
{%- for message in messages[::-1] if not last.seen %}
{%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set last.seen = true %}{% set last.query = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' and not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- set content = message.content %}{% set thought = message.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>assistant
{% if loop.index0 > last.query and (loop.last or thought) %}<think>
{{ thought.strip('\\n') }}
</think>

{{ content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}
{%- endif %}"""

QWEN3_CODER = """\
{%- if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}
{%- if message.content | trim or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GLM = """\
[gMASK]<sop>
{%- set last = namespace(query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|user|>
{{ message.content }}
{%- elif message.role == 'system' %}<|system|>
{{ message.content }}
{%- elif message.role == 'assistant' %}<|assistant|>
{%- if loop.index0 > last.query and message.reasoning_content %}
<think>{{ message.reasoning_content.strip() }}</think>
{%- else %}
<think></think>
{%- endif %}
{%- if message.content.strip() %}
{{ message.content.strip() }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %}
<arg_key>{{ name }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor %}
</tool_call>
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}
<think></think>
{%- endif %}
{%- endif %}"""

DEEPSEEK = """\
{{- bos_token }}
{%- set state = namespace(user=false) %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{% set state.user = true %}<｜User｜>{{ message.content }}
{%- elif message.role == 'assistant' %}
{%- if state.user %}<｜Assistant｜></think>{% endif %}{% set state.user = false %}
{%- set content = message.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{% endif %}
{{- content }}
{%- if message.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in message.tool_calls %}<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>
{{- call.function.arguments | tojson }}<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>
{%- elif message.role == 'tool' %}{% set state.user = false -%}
<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and state.user %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"""

KIMI = """\
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ message.content }}
{%- if message.tool_calls %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{%- elif message.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message.content }}<|im_end|>
{%- else %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

HARMONY = """\
<|start|>system<|message|>Date: {{ strftime_now('%Y-%m-%d') }}<|end|>
{%- if messages[0].role == 'system' %}<|start|>developer<|message|># Instructions

{{ messages[0].content }}<|end|>{% endif %}
{%- set state = namespace(name=none) %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- elif message.content %}<|start|>assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>{% endif -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- set state.name = call.name %}
{%- elif message.role == 'assistant' and loop.last %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' -%}
<|start|>functions.{{ state.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else %}<|start|>user<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- set state = namespace(user=true) %}
{%- for turn in turns if turn.role in ['user', 'assistant'] and not turn.tool_calls %}
{%- if (turn.role == 'user') != state.user %}{{ raise_exception('user and assistant must take turns') }}{% endif %}
{%- set state.user = not state.user %}
{%- endfor %}
{{- bos_token }}
{%- for turn in turns %}
{%- if turn.role == 'user' %}
{%- if loop.last or turns[loop.index:] | selectattr('role', 'equalto', 'user') | list == [] %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ system + turn.content }}[/INST]
{%- else %}[INST]{{ turn.content }}[/INST]{% endif %}
{%- elif turn.tool_calls %}[TOOL_CALLS][
{%- for call in turn.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]{{ eos_token }}
{%- elif turn.role == 'assistant' %} {{ turn.content | trim }}{{ eos_token }}
{%- elif turn.role == 'tool' %}[TOOL_RESULTS]{"content": {{ turn.content | tojson }}, "call_id": "
{{- turn.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- for turn in turns %}
{%- if (turn.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
<start_of_turn>{{ 'model' if turn.role == 'assistant' else turn.role }}
{{ (system if loop.first else '') + turn.content | trim }}<end_of_turn>
{%- endfor %}
{%- if add_generation_prompt %}
<start_of_turn>model
{% endif %}"""

MINIMAX = """\
]~!b[
{%- set last = namespace(query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor -%}
]~b]system
{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}[e~[
{% for message in messages if message.role != 'system' %}
{%- if message.role == 'assistant' %}]~b]ai
{% if message.reasoning_content and loop.index0 >= last.query %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- if message.tool_calls %}
<minimax:tool_call>
{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
{% for name, value in call.function.arguments.items() %}<parameter name="{{ name }}">
{{- value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% elif message.role == 'tool' %}]~b]tool
<response>{{ message.content }}</response>[e~[
{% else %}]~b]user
{{ message.content }}[e~[
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""

GRANITE = """\
<|start_of_role|>system<|end_of_role|>
{{- messages[0].content if messages[0].role == 'system' else 'Today is ' + strftime_now('%B %d, %Y') }}<|end_of_text|>
{% for message in messages if message.role != 'system' -%}
<|start_of_role|>{{ 'tool_response' if message.role == 'tool' else message.role }}<|end_of_role|>{{ message.content }}
{%- if message.tool_calls %}<|tool_call|>[
{%- for call in message.tool_calls %}{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]
{%- endif %}<|end_of_text|>
{% endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

PHI = """\
{%- for message in messages %}
{%- if message.role == 'system' and message.content %}<|system|>
{{ message.content }}<|end|>
{% elif message.role == 'user' %}<|user|>
{{ message.content }}<|end|>
{% elif message.role == 'assistant' %}<|assistant|>
{{ message.content }}<|end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""


@dataclass(frozen=True)
class Shape:
    """A chat template with the markers of its tokenizer; the last of `stops` is the tokenizer's own eos."""

    template: str
    special: Sequence[str]
    stops: Sequence[str]
    added: Sequence[str] = ()
    """Tokens outside the vocabulary that are not called special."""
    bos: str | None = None
    composes: bool = False
    """The tokenizer normalises, so a character may come from two."""
    trims: bool = False
    """It leaves spaces out of a token's offsets."""
    strips: bool = False
    """Its markers take the spaces that follow them."""


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TOOLS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

SHAPES = {
    "chatml": Shape(CHATML, _IM, ["<|im_end|>"], _TOOLS),
    "marked": Shape(MARKED, _IM, ["<|im_end|>"]),
    "llama3": Shape(
        LLAMA3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"],
        ["<|end_of_text|>", "<|eot_id|>"],
        bos="<|begin_of_text|>",
        trims=True,
    ),
    "qwen3": Shape(QWEN3, _IM, ["<|endoftext|>", "<|im_end|>"], _TOOLS, composes=True),
    "qwen3-coder": Shape(QWEN3_CODER, _IM, ["<|im_end|>"], _TOOLS[2:], composes=True),
    "glm": Shape(
        GLM,
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"],
        ["<|user|>", "<|observation|>", "<|endoftext|>"],
        [*_TOOLS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    ),
    "deepseek": Shape(
        DEEPSEEK,
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
        ["<｜end▁of▁sentence｜>"],
        [
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
            *(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
            *(f"<｜tool▁output▁{part}｜>" for part in ("begin", "end")),
        ],
        bos="<｜begin▁of▁sentence｜>",
    ),
    "kimi": Shape(
        KIMI,
        [
            *(f"<|im_{part}|>" for part in ("system", "user", "assistant", "middle", "end")),
            *(f"<|tool_call{part}|>" for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin")),
            "<|tool_call_end|>",
        ],
        ["<|im_end|>"],
    ),
    # Only the marker at which the last turn returns is called special: huggingface/trl#5988.
    "harmony": Shape(
        HARMONY,
        ["<|return|>"],
        ["<|return|>"],
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"],
    ),
    "mistral": Shape(
        MISTRAL,
        [
            "<s>",
            "</s>",
            *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ],
        ["</s>"],
        bos="<s>",
    ),
    "gemma": Shape(
        GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], ["<end_of_turn>", "<eos>"], bos="<bos>"
    ),
    "minimax": Shape(MINIMAX, ["]~!b[", "]~b]", "[e~["], ["[e~["], ["<think>", "</think>", "<minimax:tool_call>"]),
    "granite": Shape(
        GRANITE, ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"], ["<|end_of_text|>"]
    ),
    # Its generation config is missing, so the marker after each turn has to be seen in what the template writes.
    "phi": Shape(
        PHI,
        ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"],
        ["<|endoftext|>"],
        strips=True,
    ),
}

TODAY = date(2026, 7, 26)


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, some pairs of letters and line ends, and the markers of a shape."""
    shape = SHAPES[name]
    letters = "aehinorst"
    pairs = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ġ", "t"), *((a, b) for a in letters for b in letters)]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in pairs]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    if shape.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if shape.trims:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True, rstrip=shape.strips) for each in shape.special])
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in shape.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=shape.bos,
        eos_token=shape.stops[-1],
        chat_template=shape.template,
        clean_up_tokenization_spaces=False,
    )


def chat_of(name: str, **options: Any) -> ChatTokenizer:
    """The tokenizer of a shape, ready to encode."""
    return _chat_of(name, msgspec.json.encode(Preparation(**{"date": TODAY, **options})))


@cache
def _chat_of(name: str, preparation: bytes) -> ChatTokenizer:
    tokenizer = tokenizer_of(name)
    stops = tokenizer.convert_tokens_to_ids(list(SHAPES[name].stops))
    return ChatTokenizer(tokenizer, name, msgspec.json.decode(preparation, type=Preparation), stops)
