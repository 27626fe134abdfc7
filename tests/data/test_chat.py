"""Chat templates: text and spans as transformers' ``apply_chat_template`` gives them, and templates that refuse."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from program import modules_after
from test_masks import FAMILIES, PLAIN_TALKS, RIGHT
from transformers.utils.chat_template_utils import render_jinja_template

from forgather_cli.data.chat.template import ChatTemplate
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
    alternates = (
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    )
    turn = "{{ '[I]' + m.content + '[/I]' if m.role == 'user' else m.content | trim + eos_token }}"
    template = ChatTemplate("{% for m in messages %}" + alternates + turn + "{% endfor %}", TOKENS)
    for render in (template.render, template.render_spans):
        with pytest.raises(DataError, match=r"refuses these messages \(Roles must alternate\)"):
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


def test_needs_no_torch() -> None:
    assert "torch" not in modules_after("from forgather_cli.data.chat import template")
