"""Chat templates: text and spans as transformers' ``apply_chat_template`` gives them, and templates that refuse."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from test_masks import FAMILIES, PLAIN_TALKS, RIGHT
from transformers.utils.chat_template_utils import render_jinja_template

from forgather_cli.data.chat import sandbox
from forgather_cli.data.chat.template import CHATML, ChatTemplate
from forgather_cli.errors import DataError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def says(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALK = [
    says("user", "What is <2 + 2>?\n"),
    says("assistant", "4"),
    says("user", "4"),  # the same text as the answer's
    says("assistant", " Yes, 4. Ünïcödé 🙂\n"),
]


@pytest.mark.parametrize("template", [*FAMILIES.values(), *RIGHT.values()], ids=[*FAMILIES, *RIGHT])
def test_text_is_that_of_transformers(template: str) -> None:
    for talk, prompt in itertools.product([TALK, *PLAIN_TALKS], (False, True)):
        ours = ChatTemplate(template, TOKENS).render(talk, add_generation_prompt=prompt)
        kwargs: Any = {"chat_template": template, "add_generation_prompt": prompt, **TOKENS}
        assert ours == render_jinja_template([talk], **kwargs)[0][0]


def test_wrong_order_of_roles() -> None:
    alternates = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Alternate') }}{% endif %}"
    turn = "{{ '[I]' + m.content + '[/I]' if m.role == 'user' else m.content | trim + eos_token }}"
    template = ChatTemplate("{% for m in messages %}" + alternates + turn + "{% endfor %}", TOKENS)
    for render in (template.render, template.render_spans):
        with pytest.raises(DataError, match=r"refuses these messages \(Alternate\)"):
            render([TALK[0], TALK[0], TALK[1]])
    assert template.render_spans(TALK)[1], "the one before left nothing behind"
    shuffled = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content | upper }}{% endfor %}"
    assert ChatTemplate(shuffled, {}).ends_of_turns is None


def test_found_in_a_directory_as_transformers_finds_it(tmp_path: Path) -> None:
    assert ChatTemplate.of(tmp_path) is None
    named = [{"name": "default", "template": "{{ pad_token }}"}]
    config = {**TOKENS, "pad_token": {"content": "<p>"}, "chat_template": named}
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


def test_a_template_that_took_too_long_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    for seconds in (-1.0, 60.0):
        monkeypatch.setattr(sandbox, "RENDERING_SECONDS", seconds)
        with pytest.raises(DataError, match=r"refuses these messages \(it has not come to its end"):
            template.render(TALK)


def test_a_process_that_is_stopped_while_it_renders_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    monkeypatch.setattr("time.monotonic", itertools.count(0.0, 100.0).__next__)
    text = template.render(TALK)
    monkeypatch.undo()
    assert text == "".join(turn["content"] for turn in TALK)


BIG = "'x'*9999999"


@pytest.mark.parametrize(
    "expression",
    [
        "m|center(10**9)", "'x'|center(1000000000)", "m|center(width=10**9)", "m.center(10**9)", "m.ljust(10**9)",
        "m.zfill(10**9)|length", "(m|attr('rjust'))(10**9)", "['x']|map('center', 10**9)|list", "m.expandtabs(10**7)",
        f"m|indent({BIG})", "m|indent(10**7)", f"m|wordwrap(1, wrapstring={BIG})", f"m|replace('a', {BIG})",
        f"m|replace(new={BIG}, old='a')", f"m.replace('', {BIG})", f"m|join({BIG})", f"({BIG}).join(m|map('upper'))",
        f"([{{'c': {BIG}}}]*1000)|join('', attribute='c')", "'%1000000000s'|format(1)", "'%*d' % (10**9, 1)",
        "'%.1000000000f' % 1.5", f"('%s'*1000) % (({BIG},)*1000)", "'{:1000000000}'.format(1)",
        "'{:{}{}}'.format(1, 9, 99999999)", f"('{{0}}'*1000).format({BIG})",
        "'{a:>{b}}'.format_map({'a': 1, 'b': 10**9})", "lipsum(n=10**9)",
    ],
)  # fmt: skip
def test_what_a_template_makes_of_a_text_is_bounded(expression: str) -> None:
    source = "{% set m = messages[0].content %}{{ " + expression + " }}"
    talk = [says("user", "a" * 1000 + "\t" * 1000 + "\n" * 1000)]
    tracemalloc.start()
    try:
        for render in (ChatTemplate(source, {}).render, ChatTemplate(source, {}).render_spans):
            with pytest.raises(DataError, match=r"^the chat template refuses these messages \("):
                render(talk)
        assert tracemalloc.get_traced_memory()[1] < 150_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "made",
    [
        "{% for i in range(1000) %}{{ b }}{% endfor %}",
        "{% set c %}{% for i in range(1000) %}{{ b }}{% endfor %}{% endset %}",
        "{% macro m() %}{% for i in range(1000) %}{{ b }}{% endfor %}{% endmacro %}{{ m()|length }}", "{{ b ~ b ~ b }}",
    ],
)  # fmt: skip
def test_what_a_template_writes_is_bounded(made: str) -> None:
    template = ChatTemplate("{% set b = " + BIG + " %}" + made, {})
    for render in (template.render, template.render_spans):
        with pytest.raises(DataError, match=r"\(it writes more than 10,000,000 characters\)"):
            render(TALK)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%d of %s'|format(20000000, 'x') }}", "20000000 of x"),
        ("{{ '%5.1f|%-4s|' % (2.5, 'ab') }}{{ '%(a)s%%' % {'a': 3} }}{{ 7 % 4 }}", "  2.5|ab  |3%3"),
        ("{{ 'Date: 20260101 {:>5}{}'.format('x', 1700000000) }}", "Date: 20260101     x1700000000"),
        ("{{ '{a}'.format_map({'a': 'b'}) }}{{ 'x'.format() }}", "bx"),
        ("{{ [20000000, 2]|join(', ') }}{{ [{'a': 1}, {'a': 2}]|join('-', attribute='a') }}", "20000000, 21-2"),
        ("{{ '-'.join(['a', 'b']|map('upper')) }}{{ ['a', 'b']|map('upper')|join }}", "A-BAB"),
        ("{{ ('x' * 2000 ~ 'r' * 10000).replace('r' * 10000, '')|length }}", "2000"),
        ("{{ 'abc'|replace(new='', old='b') }}{{ ['a', 'b']|join(d='-') }}", "aca-b"),
        ("{{ 'a\nb'|indent(2) }}{{ 'abc'.replace('b', 'xx')|replace('a', '')|center(7) }}", "a\n  b  xxc  "),
    ],
)
def test_texts_are_made_as_jinja_makes_them(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(TALK) == text
