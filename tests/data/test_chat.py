"""Chat templates: text and spans as transformers' ``apply_chat_template`` gives them, and templates that refuse."""

from __future__ import annotations

import itertools
import json
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
    alternates = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Alternate') }}{% endif %}"
    turn = "{{ '[I]' + m.content + '[/I]' if m.role == 'user' else m.content | trim + eos_token }}"
    template = ChatTemplate("{% for m in messages %}" + alternates + turn + "{% endfor %}", TOKENS)
    for render in (template.render, template.render_spans):
        with pytest.raises(DataError, match=r"refuses these messages \(Alternate\)"):
            render([TALK[0], TALK[0], TALK[1]])
    assert template.render_spans(TALK)[1], "the one before left nothing behind"


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
