"""Chat templates: text and spans as transformers' ``apply_chat_template`` gives them, and templates that refuse."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from program import modules_after
from transformers.utils.chat_template_utils import render_jinja_template

from forgather_cli.data.chat import sandbox
from forgather_cli.data.chat.template import CHATML, ChatTemplate
from forgather_cli.errors import DataError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

QWEN2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
QWEN3 = """\
{%- set ns = namespace(last_query=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set thoughts = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query %}{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
PLAIN = (
    "{% for m in messages %}{{ m.role | title }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
GENERATION = """\
{{ bos_token }}{{ strftime_now('%Y') }}
{% for message in messages %}
  {% if message.role == 'assistant' %}
    {% generation %}
    {{ message.content }}{{ eos_token }}
    {% endgeneration %}
    {% continue %}
  {% endif %}
  [{{ message.role }}] {{ message | tojson }}
{% endfor %}
"""
TEMPLATES = {
    "qwen2": QWEN2, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3, "plain": PLAIN, "generation": GENERATION,
    "chatml": CHATML,
}  # fmt: skip


def says(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALK = [
    says("user", "What is <2 + 2>?\n"),
    says("assistant", "4"),
    says("user", "4"),  # the same text as the answer's
    says("assistant", " Yes, 4. Ünïcödé 🙂\n"),
]
TALKS = {
    "talk": TALK,
    "system": [says("system", "Be brief."), *TALK],
    "question": TALK[:3],
    "thoughts": [
        TALK[0],
        says("assistant", "<think>\nhm\n</think>\n\n4"),
        TALK[2],
        says("assistant", "", thinking="x"),
    ],
}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_text_is_that_of_transformers(name: str, talk: str, prompt: bool) -> None:
    ours = ChatTemplate(TEMPLATES[name], TOKENS).render(TALKS[talk], add_generation_prompt=prompt)
    kwargs: Any = {"chat_template": TEMPLATES[name], "add_generation_prompt": prompt, **TOKENS}
    assert ours == render_jinja_template([TALKS[talk]], **kwargs)[0][0]


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", ["generation", "chatml"])
def test_generation_blocks_are_those_of_transformers(name: str, talk: str) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    assert template.marks_turns
    text, [spans] = render_jinja_template(
        [TALKS[talk]], chat_template=TEMPLATES[name], return_assistant_tokens_mask=True, **TOKENS
    )
    assert template.render_spans(TALKS[talk]) == (text[0], spans)


def turns(name: str, messages: list[dict[str, Any]], **more: Any) -> list[str]:
    text, spans = ChatTemplate(TEMPLATES[name], TOKENS).render_spans(messages, **more)
    assert text == ChatTemplate(TEMPLATES[name], TOKENS).render(messages, **more)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    return [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2", ["4<|im_end|>", " Yes, 4. Ünïcödé 🙂\n<|im_end|>"]),
        ("chatml", ["4<|im_end|>", " Yes, 4. Ünïcödé 🙂\n<|im_end|>"]),
        ("llama3", ["4<|eot_id|>", "Yes, 4. Ünïcödé 🙂<|eot_id|>"]),
        ("mistral", [" 4</s>", " Yes, 4. Ünïcödé 🙂</s>"]),
        ("plain", ["4\n", " Yes, 4. Ünïcödé 🙂\n\n"]),
        ("qwen3", ["4<|im_end|>", "<think>\n\n</think>\n\n Yes, 4. Ünïcödé 🙂\n<|im_end|>"]),
    ],
)
def test_turns_run_from_the_prompt_to_the_token_that_ends_them(name: str, expected: list[str]) -> None:
    assert turns(name, TALK) == expected
    # Mistral's shows the system's text only where the user's message is the last, so its prompt is no part of the whole
    shown = [turn.strip() for turn in expected] if name == "mistral" else expected
    assert turns(name, TALKS["system"]) == shown


def test_thoughts_that_only_the_last_turn_shows() -> None:
    first, last = turns("qwen3", TALKS["thoughts"])
    assert (first, last) == ("4<|im_end|>", "<think>\nx\n</think>\n\n<|im_end|>")


def test_tool_calls_are_the_assistants() -> None:
    call = {"name": "add", "arguments": {"a": 2}}
    messages = [
        TALK[0],
        says("assistant", None, tool_calls=[call]),
        says("tool", "4"),
        says("assistant", "It is 4."),
    ]
    first, last = turns("qwen3", messages, tools=[{"name": "add"}])
    assert first == "<think>\n\n</think>\n\n\n<tool_call>" + json.dumps(call) + "</tool_call><|im_end|>"
    assert last == "<think>\n\n</think>\n\nIt is 4.<|im_end|>"


def test_templates_that_do_not_tell_are_refused() -> None:
    shuffled = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content | upper }}{% endfor %}"
    with pytest.raises(DataError, match=r"where the assistant's turn in message 2 begins; put {% generation %}"):
        ChatTemplate(shuffled, {}).render_spans(TALK)
    assert ChatTemplate(shuffled, {}).ends_of_turns is None
    backwards = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }};{% endfor %}"
    with pytest.raises(DataError, match="the assistant's turn in message 4 ends;"):
        ChatTemplate(backwards, {}).render_spans(TALK)
    for unlearned, told in ((0, "where message 1 ends, of which"), (3, "turn in message 4 begins;")):
        with pytest.raises(DataError, match=told):
            ChatTemplate(shuffled, {}).render_spans(TALK, train_on="all", unlearned=frozenset([unlearned]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", r"does not compile \(line 1: Unexpected end of template"),
        ("a\n{% generation %}{% if %}", r"does not compile \(line 2: "),
        ("{{ raise_exception('no system') }}", r"refuses these messages \(no system\)"),
        ("{{ messages[0].content + 1 }}", r"refuses these messages \(TypeError: "),
        ("{{ messages[9].content }}", r"refuses these messages \(.*has no element 9\)"),
        ("{{ 1 / 0 }}", r"refuses these messages \(ZeroDivisionError"),
        ("{{ messages.append(1) }}", r"refuses these messages \(access to attribute .append. .* is unsafe"),
        ("{{ ''.__class__.__mro__ }}", r"refuses these messages \(.*unsafe"),
        ("{{ namespace(__x=1) }}", r"refuses these messages \(a namespace holds no"),
        ("{{ dict.__subclasses__() }}", r"refuses these messages \(.*no attribute '__subclasses__'"),
    ],
)
def test_bad_templates_are_one_sentence(source: str, message: str) -> None:
    with pytest.raises(DataError, match=f"^the chat template {message}"):
        ChatTemplate(source, {}).render(TALK)


def test_wrong_order_of_roles() -> None:
    template = ChatTemplate(MISTRAL, TOKENS)
    for render in (template.render, template.render_spans):
        with pytest.raises(DataError, match=r"refuses these messages \(Conversation roles must alternate user/"):
            render([TALK[0], TALK[0], TALK[1]])
    assert template.render_spans(TALK)[1], "the one before left nothing behind"


def test_found_in_a_directory_as_transformers_finds_it(tmp_path: Path) -> None:
    assert ChatTemplate.of(tmp_path) is None
    config = {
        **TOKENS,
        "pad_token": {"content": "<p>"},
        "chat_template": [{"name": "default", "template": "{{ pad_token }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.of(tmp_path).render(TALK) == "<p>"  # type: ignore[union-attr]
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<u>", "eos_token": "<old>"}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ cls_token }}")
    assert ChatTemplate.of(tmp_path).render(TALK) == "<s></s><u>"  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text("{% if")
    with pytest.raises(DataError, match=rf"^{tmp_path}: the chat template does not compile"):
        ChatTemplate.of(tmp_path)


def test_what_is_learned_where_blocks_stand_side_by_side_or_in_one_another() -> None:
    def spans(block: str, talk: list[dict[str, Any]], **more: Any) -> list[tuple[int, int]]:
        return ChatTemplate("{% for m in messages %}" + block + "{% endfor %}", {}).render_spans(talk, **more)[1]

    begin, end = "{% generation %}", "{% endgeneration %}"
    each, talk = f"{begin}{{{{ m.content }}}}{end}", [says("user", "ab"), says("assistant", "cd"), says("user", "e")]
    assert spans(each, talk) == [(0, 2), (2, 4), (4, 5)]
    assert spans(each, talk, train_on="last") == [(2, 4)]
    assert ChatTemplate(CHATML, {}).render_spans(talk[:1], train_on="last")[1] == []
    assert spans(f"{begin}{each}>{end}", talk[1:2]) == [(0, 3)]
    assert spans("{{ m.content }}", talk[1:]) == [(0, 2)]
    assert spans("{{ m.content }}", talk, train_on="all") == [(0, 5)]
    alike = [says("user", "ab"), says("assistant", "ab")]
    assert spans("{{ m.content }}", alike, train_on="all", unlearned=frozenset([0])) == [(2, 4)]


def test_whether_tools_are_shown() -> None:
    sources = ("{{ tools | tojson }}", "{{ messages | tojson }}")
    assert [ChatTemplate(source, {}).shows_tools for source in sources] == [True, False]


def test_a_template_that_took_too_long_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    for seconds in (-1.0, 60.0):
        monkeypatch.setattr(sandbox, "RENDERING_SECONDS", seconds)
        with pytest.raises(DataError, match=r"refuses these messages \(it has not come to its end"):
            template.render(TALK)


def test_needs_no_torch() -> None:
    assert "torch" not in modules_after("from forgather_cli.data.chat import template")
