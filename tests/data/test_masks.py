"""What of a conversation is learned, by templates of many families and blocks anywhere; turns that are context."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from chats import write_lines, write_table
from streams import shown
from test_records import load
from transformers.utils.chat_template_utils import render_jinja_template

from forgather_cli.data.chat.template import CHATML, ChatTemplate
from forgather_cli.data.splits import DataSplits
from forgather_cli.errors import DataError

TOKENS = {"bos_token": "<b>", "eos_token": "</s>"}
SHOWN = "{{ m.tool_calls | tojson if m.tool_calls else m.content }}"
FAMILIES = {
    # a system message of its own
    "chatml": """\
{%- if messages[0].role != 'system' %}{{ '<s>system\nBe.<e>\n' }}{% endif %}
{%- for m in messages %}{{ '<s>' + m.role + '\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ '<e>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}""",
    # a begin token, contents are trimmed
    "llama3": """\
{{- bos_token }}{% for m in messages %}
{%- set shown = (m.tool_calls | tojson if m.tool_calls else m.content) | trim %}
{{- '<h>' + m.role + '</h>\n\n' + shown + '<e>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}""",
    # no header, and a system message in the last question alone
    "mistral": """\
{%- set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}{{ bos_token }}
{%- for m in loop_messages %}{% if m.role == 'user' %}
{%- if loop.last and messages[0].role == 'system' %}{{ '[I] ' + messages[0].content + '\n' + m.content + ' [/I]' }}
{%- else %}{{ '[I] ' + m.content + ' [/I]' }}{% endif %}
{%- elif m.role == 'tool' %}{{ '[R] ' + m.content + ' [/R]' }}
{%- elif m.tool_calls %}{{ '[C] ' + m.tool_calls | tojson + eos_token }}
{%- else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}""",
    # a system message in the first question, another name of the role
    "gemma": """\
{{- bos_token }}{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if first else messages) %}
{{- '<s>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}
{{- (m.tool_calls | tojson if m.tool_calls else m.content) | trim + '<e>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<s>model\n' }}{% endif %}""",
    # thoughts behind the last question alone, tool results as a question
    "qwen3": """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'assistant' %}{{ '<s>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<call>' + c | tojson + '</call>' }}{% endfor %}{{ '<e>\n' }}
{%- elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<s>user' }}{% endif %}
{{- '\n<r>' + m.content + '</r>' }}{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<e>\n' }}{% endif %}
{%- else %}{{ '<s>' + m.role + '\n' + m.content + '<e>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}""",
    # the prompt begins a thought, of which no turn keeps anything
    "r1": """\
{{- bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<R>' + m.content + '</R>' }}
{%- elif m.role == 'assistant' %}{{ '<A>' + (m.content or '').split('</think>')[-1] }}
{%- for c in m.tool_calls or [] %}{{ '<call>' + c | tojson + '</call>' }}{% endfor %}{{ eos_token }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}""",
    # the same, and the last turn shows one without the line break of the prompt
    "r1 with thoughts": """\
{{- bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<A>' }}
{%- if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.tool_calls | tojson if m.tool_calls else m.content }}{{ eos_token }}
{%- else %}{{ '<' + m.role[0] | upper + '>' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}""",
    # no token ends a turn
    "plain": """\
{%- for m in messages %}{{ m.role | title + ': ' }}SHOWN{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}""",
    # the question ends with the answer's header
    "vicuna": """\
{%- for m in messages %}{% if m.role == 'assistant' %}{{ ' ' }}SHOWN{{ eos_token }}
{%- elif m.role == 'system' %}{{ m.content + '\n\n' }}
{%- else %}{{ m.role | upper + ': ' + m.content + ' ASSISTANT:' }}{% endif %}{% endfor %}""",
    # an end token behind all of it
    "phi": """\
{%- for m in messages %}{{ '<' + m.role + '>\n' }}SHOWN{{ '<e>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>\n' }}{% else %}{{ eos_token }}{% endif %}""",
    # the end token of the last turn alone
    "alpaca": """\
{%- set names = {'user': 'Instruction', 'assistant': 'Response', 'tool': 'Input', 'system': 'System'} %}
{%- for m in messages %}{{ '### ' + names[m.role] + ':\n' }}SHOWN
{%- if loop.last and m.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\n\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}""",
    # channels, and another end token of the last turn
    "harmony": """\
{%- macro say(m, is_last) %}
{%- if m.reasoning_content and is_last %}{{ '<s>assistant<c>analysis<m>' + m.reasoning_content + '<e>' }}{% endif %}
{%- if m.tool_calls %}{{ '<s>assistant<c>call<m>' + m.tool_calls | tojson + '<call>' }}
{%- else %}{{ '<s>assistant<c>final<m>' + m.content + ('<return>' if is_last else '<e>') }}{% endif %}{% endmacro %}
{%- for m in messages %}{% if m.role == 'assistant' %}{{ say(m, loop.last) }}
{%- else %}{{ '<s>' + m.role + '<m>' + m.content + '<e>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}""",
    # no loop over messages
    "by number": """\
{%- for i in range(messages | length) %}{% set m = messages[i] %}
{%- if m.role == 'assistant' %}{{ '<A>' }}SHOWN{{ '<e>' }}
{%- else %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<A>' }}{% endif %}""",
    # answers in a row are one
    "merged": """\
{%- for m in messages %}{% if m.role != 'assistant' %}{{ '<' + m.role + '>' + m.content + '<e>' }}
{%- else %}{% if loop.first or loop.previtem.role != 'assistant' %}{{ '<A>' }}{% endif %}SHOWN
{%- if loop.last or loop.nextitem.role != 'assistant' %}{{ '<e>' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<A>' }}{% endif %}""",
}
FAMILIES = {name: source.replace("SHOWN", SHOWN) for name, source in FAMILIES.items()}
BY_NUMBER = "for i in range(messages | length) %}{% set m = messages[i] %}"


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM, CALL, RESULT = {"role": "system", "content": "S"}, [{"f": 1}], {"role": "tool", "content": "r"}
TALKS = {
    "one": [user("a?"), assistant("b")],
    "system": [SYSTEM, user("a?"), assistant("b")],
    "equal": [user("x"), assistant("x"), user("x"), assistant("x")],
    "empty": [user("a?"), assistant(""), user("c?"), assistant("d")],
    "in a row": [user("a?"), assistant("b"), assistant("b"), user("c?")],
    "tools": [user("a?"), assistant(None, tool_calls=CALL), RESULT, assistant("d")],
    "thoughts": [user("a?"), assistant("b", reasoning_content="t"), user("c?"), assistant("d", reasoning_content="v")],
    "agent": [
        user("a?"), assistant(None, tool_calls=CALL, reasoning_content="t"), RESULT,
        assistant("b", reasoning_content="u"), user("c?"), assistant("d"),
    ],
    "ends alike": [user("a>"), assistant("e>"), user("<e>"), assistant("<d")],
    "spaces": [user(" a "), assistant(" b\n"), user("c"), assistant("\nd ")],
}  # fmt: skip


def by_hand() -> dict[tuple[str, str], str]:
    found, family = {}, ""
    for line in (Path(__file__).parent / "masks.txt").read_text(encoding="utf-8").splitlines()[1:]:
        if line.startswith("["):
            family = line[1:-1]
        elif line:
            talk, _, text = line.partition(": ")
            found[family, talk] = text.replace("⏎", "\n")
    return found


def learned(source: str, talk: list[dict[str, Any]], **more: Any) -> str:
    text, spans = ChatTemplate(source, TOKENS).render_spans(talk, **more)
    for start, end in reversed(spans):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    expected = {talk: text for (name, talk), text in by_hand().items() if name == family}
    assert {talk: learned(FAMILIES[family], TALKS[talk]) for talk in TALKS} == expected
    template = ChatTemplate(FAMILIES[family], TOKENS)
    for talk in TALKS.values():
        assert template.render_spans(talk, train_on="last")[1] == template.render_spans(talk)[1][-1:]


def test_a_conversation_may_begin_with_an_answer_and_a_turn_may_be_written_nowhere() -> None:
    talk, in_qwen3 = [assistant("h"), user("a?"), assistant("b")], "⟦<think>\n\n</think>\n\nb<e>⟧\n"
    assert learned(FAMILIES["qwen3"], talk) == f"<s>assistant\n⟦h<e>⟧\n<s>user\na?<e>\n<s>assistant\n{in_qwen3}"
    assert learned(FAMILIES["alpaca"], talk).startswith("### Response:\n⟦h\n\n⟧### Instruction")
    line = FAMILIES["alpaca"].replace("SHOWN", SHOWN).replace("{{ eos_token }}", "{{ eos_token + '\n' }}")
    assert learned(line, talk).endswith("### Response:\n⟦b</s>⟧\n")
    silent = "{% for m in messages %}{% if m.content %}<{{ m.role }}>{{ m.content }}<e>{% endif %}{% endfor %}"
    silent += "{% if add_generation_prompt %}<assistant>{% endif %}"
    found = learned(silent, TALKS["empty"], train_on="all", unlearned=frozenset([1]))
    assert found == "⟦<user>a?<e>⟧⟦<user>c?<e><assistant>d<e>⟧"
    ahead = "{{ messages[0].content }};{% for m in messages[1:] %}<{{ m.role }}>{{ m.content }}{% endfor %}[end]"
    found = learned(ahead, TALKS["system"], train_on="all", unlearned=frozenset([0]))
    assert found == "S;⟦<user>a?<assistant>b[end]⟧"
    assert learned(silent, TALKS["empty"]) == "<user>a?<e><user>c?<e><assistant>⟦d<e>⟧"


def test_a_loop_over_numbers_tells_as_much_though_a_turn_is_shown_otherwise_once_another_follows() -> None:
    turn = "{% if m.role == 'assistant' %}"
    numbers = FAMILIES["qwen3"].replace("for m in messages %}" + turn, BY_NUMBER + turn)
    expected = {talk: text for (name, talk), text in by_hand().items() if name == "qwen3" and talk != "ends alike"}
    assert {talk: learned(numbers, TALKS[talk]) for talk in expected} == expected


def test_results_may_be_written_with_the_call_and_tools_with_the_last_question() -> None:
    ahead = """\
{%- for m in messages %}{% if m.role == 'assistant' %}{{ '<A>' }}SHOWN{{ '<e>' }}
{%- if not loop.last and loop.nextitem.role == 'tool' %}{{ '<R>' + loop.nextitem.content }}{% endif %}
{%- elif m.role == 'user' %}{{ '<U>' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<A>' }}{% endif %}""".replace("SHOWN", SHOWN)
    assert learned(ahead, TALKS["tools"]) == '<U>a?<A>⟦[{"f": 1}]<e>⟧<R>r<A>⟦d<e>⟧'
    found = learned(ahead, TALKS["tools"], train_on="all", unlearned=frozenset([1]))
    assert found == '⟦<U>a?⟧<A>[{"f": 1}]<e>⟦<R>r<A>d<e>⟧'
    tools = """\
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}{% if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[T]' + tools | tojson }}{% endif %}{{ '[I]' + m.content + '[/I]' }}
{%- elif m.role == 'tool' %}{{ '[R]' + m.content + '[/R]' }}
{%- elif m.tool_calls %}{{ '[C]' + m.tool_calls | tojson + '<e>' }}{% else %}{{ m.content + '<e>' }}{% endif %}
{%- endfor %}"""
    talk = [*TALKS["tools"], user("c?"), *TALKS["tools"][1:]]
    for given, told in ([], ""), (["f"], '[T]["f"]'):
        expected = '[I]a?[/I]⟦[C][{"f": 1}]<e>⟧[R]r[/R]⟦d<e>⟧' + told + '[I]c?[/I]⟦[C][{"f": 1}]<e>⟧[R]r[/R]⟦d<e>⟧'
        assert learned(tools, talk, tools=given) == expected


TURN = "{% generation %}{{ m.content + '<e>' }}{% endgeneration %}"
OTHERS = "{% else %}{{ '<s>' + m.role + '\n' + m.content + '<e>\n' }}{% endif %}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"


def blocks(turn: str, before: str = "", behind: str = PROMPT) -> str:
    return before + "{% for m in messages %}{% if m.role == 'assistant' %}" + turn + OTHERS + behind


SAY = "{% macro say(m) %}" + TURN + "{% endmacro %}"
HEADED = "{{ '<s>assistant\n' }}" + TURN
RIGHT = {
    "where it stands": blocks(HEADED + "{{ '\n' }}"),
    "a macro in its place": blocks("{{ '<s>assistant\n' }}{{ say(m) }}{{ '\n' }}", SAY),
    "a filter that changes nothing": blocks(
        "{{ '<s>assistant\n' }}{% filter string %}" + TURN + "{% endfilter %}{{ '\n' }}"
    ),
    "chatml": CHATML,
    "thought and answer": blocks(
        "{{ '<s>assistant\n' }}{% if m.reasoning_content %}{% generation %}{{ m.reasoning_content + '<t>' }}"
        "{% endgeneration %}{% endif %}" + TURN + "{{ '\n' }}"
    ),
    "loop controls, and the time": """\
{{ bos_token }}{{ strftime_now('%Y') }}
{% for m in messages %}
  {% if m.role == 'assistant' %}
    {% generation %}
    {{ m.content }}{{ eos_token }}
    {% endgeneration %}
    {% continue %}
  {% endif %}
  [{{ m.role }}] {{ m | tojson }}
{% endfor %}
""",
    "answers without an end": blocks(
        "{{ '<s>assistant\n' }}{% generation %}{{ m.content }}{% endgeneration %}{{ '<e>\n' }}"
    ),
}
WRONG = {
    "set": blocks("{% set t %}" + HEADED + "{% endset %}{{ t + '\n' }}"),
    "joined": blocks("{{ '<s>assistant\n' + say(m) + '\n' }}", SAY),
    "joined by ~": blocks("{{ '<s>assistant\n' ~ say(m) ~ '\n' }}", SAY),
    "a macro with the header": blocks("{{ say(m) }}", "{% macro say(m) %}" + HEADED + "{{ '\n' }}{% endmacro %}"),
    "a filter over the header": blocks("{% filter trim %}" + HEADED + "{% endfilter %}{{ '\n' }}"),
    "a call": blocks(
        "{% call say() %}" + HEADED + "{% endcall %}{{ '\n' }}", "{% macro say() %}{{ caller() }}{% endmacro %}"
    ),
    "made, not written": blocks("{% set t %}" + TURN + "{% endset %}{{ '<s>assistant\n' + m.content + '<e>\n' }}"),
    "made twice": blocks("{% set size = say(m) | length %}{{ '<s>assistant\n' }}{{ say(m) }}{{ '\n' }}", SAY),
    "one in another": blocks(
        "{{ '<s>assistant\n' }}{% generation %}{{ m.content }}{% generation %}{{ '<e>' }}{% endgeneration %}"
        "{% endgeneration %}{{ '\n' }}"
    ),
    "collected": (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set end %}{% if m.role == 'assistant' %}" + TURN
        + "{% else %}{{ m.content + '<e>' }}{% endif %}{% endset %}{% set ns.t = ns.t + '<s>' + m.role + '\n' + end +"
        " '\n' %}{% endfor %}{% if add_generation_prompt %}{% set ns.t = ns.t + '<s>assistant\n' %}{% endif %}"
        "{{ ns.t }}"
    ),
}  # fmt: skip
PLAIN_TALKS = [talk for name, talk in TALKS.items() if name not in ("tools", "agent")]


@pytest.mark.parametrize("name", RIGHT)
def test_blocks_where_they_stand_are_those_of_transformers(name: str) -> None:
    for talk in PLAIN_TALKS:
        [text], [spans] = render_jinja_template(
            [talk], chat_template=RIGHT[name], return_assistant_tokens_mask=True, **TOKENS
        )
        template = ChatTemplate(RIGHT[name], TOKENS)
        assert template.marks_turns
        assert template.render_spans(talk) == (text, spans)


@pytest.mark.parametrize("name", WRONG)
def test_blocks_that_are_written_elsewhere_are_found_where_transformers_masks_what_is_not_theirs(name: str) -> None:
    right, wrong = ChatTemplate(RIGHT["where it stands"], TOKENS), ChatTemplate(WRONG[name], TOKENS)
    for talk in PLAIN_TALKS:
        expected = right.render_spans(talk)
        assert wrong.render_spans(talk) == expected
        [text], [spans] = render_jinja_template(
            [talk], chat_template=WRONG[name], return_assistant_tokens_mask=True, **TOKENS
        )
        assert text == expected[0]
        assert spans != expected[1], "transformers has mended it: the table is shorter"


@pytest.mark.parametrize("name", WRONG)
def test_no_header_is_learned_where_no_generation_prompt_tells_it(name: str) -> None:
    """Of blocks that are written elsewhere, and with a prompt are found."""
    silent, num_prompts = re.subn(r"\{% if add_generation_prompt.*?endif %\}", "", WRONG[name], flags=re.DOTALL)
    assert num_prompts == 1
    with pytest.raises(DataError, match=r"message 2 begins: .*generation"):
        ChatTemplate(silent, TOKENS).render_spans(TALKS["one"])


def made(tmp_path: Path, messages: list[dict[str, Any]], template: str = CHATML, **settings: Any) -> str:
    """The text of a conversation of a file, with what is learned in marks."""
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": messages}])
    return in_marks(load(path, template, **settings))


def in_marks(data: DataSplits) -> str:
    [text] = shown(data, "⟦⟧")
    text = text.replace("<⟦|", "⟦<|")  # nothing predicts the first token
    return text.replace("<|im_start|>", "<s>").replace("<|im_end|>", "<e>")


def test_the_last_turn_is_learned_whole(tmp_path: Path) -> None:
    template = RIGHT["thought and answer"]
    expected = "<s>user\na?<e>\n<s>assistant\nt<t>b<e>\n<s>user\nc?<e>\n<s>assistant\n⟦v<t>d<e>⟧\n"
    assert made(tmp_path, TALKS["thoughts"], template, train_on="last") == expected
    # as many blocks as turns, of which the last turn has none
    talk = [user("a?"), assistant("b", reasoning_content="t"), user("c?"), assistant("d")]
    with pytest.raises(DataError, match="no conversation has a turn that is to be learned"):
        made(tmp_path, talk, template.replace(TURN, "{{ m.content + '<e>' }}"), train_on="last")
    by_number = template.replace("for m in messages %}", BY_NUMBER)
    assert made(tmp_path, TALKS["thoughts"], by_number, train_on="last") == expected


@pytest.mark.parametrize("name", ["chatml", "no blocks"])
@pytest.mark.parametrize(
    ("marks", "train_on", "expected"),
    [
        ({3: {"weight": 0}}, "assistant", "U:a. A:⟦b.⟧ U:c. A:d. "),
        ({1: {"weight": 0.0}, 3: {"weight": 1}}, "assistant", "U:a. A:b. U:c. A:⟦d.⟧ "),
        ({3: {"train": False}}, "last", None),
        ({1: {"masked": True}, 3: {"masked": False}}, "all", "⟦U:a. ⟧A:b. ⟦U:c. A:d. ⟧"),
        ({0: {"training": False}, 2: {"loss": False}}, "all", "U:a. ⟦A:b. ⟧U:c. ⟦A:d. ⟧"),
    ],
)  # fmt: skip
def test_turns_that_are_marked_are_not_learned(
    tmp_path: Path, name: str, marks: dict[int, dict[str, Any]], train_on: str, expected: str | None
) -> None:
    without = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    template = without if name == "no blocks" else CHATML
    talk = [user("a"), assistant("b"), user("c"), assistant("d")]
    talk = [{**message, **marks.get(i, {})} for i, message in enumerate(talk)]
    none = pytest.raises(DataError, match="no conversation has a turn that is to be learned")
    with nullcontext() if expected else none:
        found = made(tmp_path, talk, template, train_on=train_on)
        for long, mark in {"<s>user\n": "U:", "<s>assistant\n": "A:", "<e>": ".", "\n": " "}.items():
            found = found.replace(long, mark)
        assert found == expected


@pytest.mark.parametrize(
    ("key", "off"),
    [
        ("weight", 0), ("train", False), ("training", False), ("train_on_turn", False), ("trainable", 0),
        ("loss", False), ("loss_mask", 0), ("step_loss_mask", 0), ("masked", True),
    ],
)  # fmt: skip
def test_spellings_of_marks(tmp_path: Path, key: str, off: Any) -> None:
    talk = [user("a"), assistant("b", **{key: off}), user("c"), assistant("d", **{key: not off})]
    assert made(tmp_path, talk).count("⟦") == 1
    assert "⟦d<e>⟧" in made(tmp_path, talk)
    assert "⟦b<e>⟧" in made(tmp_path, [{name: value for name, value in each.items() if name != key} for each in talk])
    for value in ("0", 0.5, 2, [0]):
        with pytest.raises(DataError, match=rf"message 2 has '{key}': "):
            made(tmp_path, [user("a"), assistant("b", **{key: value})])


def test_marks_of_sharegpt_and_of_tables(tmp_path: Path) -> None:
    turns = [("human", "a", None), ("gpt", "b", 0), ("human", "c", None), ("gpt", "d", None)]
    talk = [{"from": role, "value": text, **({} if mark is None else {"weight": mark})} for role, text, mark in turns]
    found = in_marks(load(write_table(tmp_path / "chats.parquet", [{"conversations": talk}]), CHATML))
    assert found == made(tmp_path, talk)
    assert found.endswith("\nb<e>\n<s>user\nc<e>\n<s>assistant\n⟦d<e>⟧\n")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "by number"])
def test_renderings_do_not_grow_with_the_turns(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 turns each is that which is found where it alone is looked for."""
    num_rendered, render = 0, ChatTemplate.render

    def counted(self: ChatTemplate, *given: Any, **more: Any) -> str:
        nonlocal num_rendered
        num_rendered += 1
        return render(self, *given, **more)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    template, found, numbers = ChatTemplate(FAMILIES[family], TOKENS), [], []
    for repeats in (1, 2, 40):
        talk = [SYSTEM, *(TALKS["thoughts"] + TALKS["tools"] + TALKS["spaces"]) * repeats]
        num_rendered = 0
        found.append(template.render_spans(talk)[1])
        numbers.append(num_rendered)
        turns = [i for i, message in enumerate(talk) if message["role"] == "assistant"]
        if repeats < 3:
            alone = [template.render_spans(talk, unlearned=frozenset(turns) - {i})[1] for i in turns]
            assert found[-1] == [span for spans in alone for span in spans]
    assert [len(spans) for spans in found] == [6, 12, 240]
    assert numbers[1] == numbers[2] <= 30


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_prompt_nothing_is_learned_under_all(family: str) -> None:
    template = ChatTemplate(FAMILIES[family], TOKENS)
    headers = {
        "mistral": "", "vicuna": "", "gemma": "<s>model\n", "llama3": "<h>assistant</h>\n\n", "plain": "Assistant: ",
        "phi": "<assistant>\n", "alpaca": "### Response:\n", "harmony": "<s>assistant",
    }  # fmt: skip
    default = "<s>assistant\n" if family in ("chatml", "qwen3") else "<A>"
    for name in ("system", "equal", "empty", "tools", "thoughts", "agent", "ends alike", "spaces"):
        talk = TALKS[name]
        text, [(start, end)] = template.render_spans(talk, train_on="all", unlearned=frozenset(range(len(talk) - 1)))
        first = template.render_spans(talk, train_on="last")[1][0][0]
        assert end == len(text)
        assert text[start:first].strip(" ").replace("<think>", "") == headers.get(family, default).strip(" ")


def test_a_part_of_another_message_is_not_guessed() -> None:
    template = ChatTemplate(FAMILIES["gemma"], TOKENS)
    for learned in ("assistant", "last"):
        assert template.render_spans(TALKS["system"], train_on=learned, unlearned=frozenset([0]))[1]  # type: ignore[arg-type]


def test_keys_that_may_be_marks_are_refused_unless_the_template_reads_them(tmp_path: Path) -> None:
    talk = [user("a"), assistant("b", draft=True)]
    with pytest.raises(DataError, match="message 2 has 'draft': True, which the chat template does not read"):
        made(tmp_path, talk)
    for source in (CHATML + "{% if messages[1].draft %}{% endif %}", CHATML + "{{ messages[1]['draft'] }}",
                   CHATML + "{{ messages | tojson }}"):  # fmt: skip
        assert "⟦b<e>⟧" in made(tmp_path, talk, source)
    for key, value in (("index", 1), ("turn_id", 0), ("name", "Ann"), ("logprob", 0.5), ("draft", "no")):
        assert "⟦b<e>⟧" in made(tmp_path, [user("a"), assistant("b", **{key: value})])
    assert "⟦b<e>⟧" in made(tmp_path, talk, ignore=["draft"])
    assert "⟦b<e>⟧" in made(tmp_path, [user("a"), assistant("b", weight=0)], ignore=["weight"])
    with pytest.raises(DataError, match="message 2 has 'train_detail'"):
        made(tmp_path, [user("a"), assistant("b", train_detail=[{"begin_offset": 0, "end_offset": 0, "train": False}])])


def test_conversations_without_a_turn_to_learn_are_left_out_and_counted(tmp_path: Path) -> None:
    records = [{"messages": [user("a"), assistant("b", weight=number % 2)]} for number in range(6)]
    data = load(write_lines(tmp_path / "chats.jsonl", records), CHATML)
    assert len(data.train) == 3
    assert "3 without a target" in data.description["left_out"]
