"""Chat records of every layout: what is read as what, what is learned of it, and keys that nothing reads."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from chats import write_lines, write_table
from hydra.core.override_parser.overrides_parser import OverridesParser
from streams import shown
from transformers.utils.chat_template_utils import render_jinja_template

from forgather_cli.checkpoint.compare import compare_configs
from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.build import load_data
from forgather_cli.data.cache import digest
from forgather_cli.data.chat import keys
from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.data.splits import DataSplits
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import DataError

# a letter of the role, and behind each turn a semicolon
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }};{% endif %}
{%- for message in messages %}
{{- message.role[0] }}:
{%- if message.role == 'assistant' %}
{%- generation %}
{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ (call.function or call) | tojson }}{% endfor %};
{%- endgeneration %}
{%- else %}{{ message.content }};
{%- endif %}
{%- endfor %}
"""
PLAIN = re.sub(r"\{%- if tools .*\n|\{%- if message\.reasoning.*\n", "", TEMPLATE)
"""Writes no tools and no thoughts."""
END = "<|endoftext|>"


def load(path: Path, template: str = TEMPLATE, **settings: Any) -> DataSplits:
    (path.parent / "template.jinja").write_text(template)
    defaults: dict[str, Any] = {"seq_len": 400, "eval_fraction": 0.0, "packing": "pad", "tokenizer": "bytes"}
    own = {"chat_template": str(path.parent / "template.jinja"), "cache_dir": str(path.parent / "cache")}
    return load_data(InstructSettings(files=[str(path)], **{**defaults, **own, **settings}), seed=0)


def learned(tmp_path: Path, records: list[Any], template: str = TEMPLATE, **settings: Any) -> list[str]:
    return shown(load(write_lines(tmp_path / "records.jsonl", records), template, **settings))


HI, YO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
MORE, SO = {"role": "user", "content": "More"}, {"role": "assistant", "content": "So"}
BE = {"role": "system", "content": "Be"}
MOVE = {"type": "function", "function": {"name": "move", "arguments": {"x": 1}}}
MOVED = {"role": "tool", "content": "ok", "name": "move"}
PASSAGE = "The bridge was built in 1931."
WHEN = "When was it built?"
DOLLY = {"instruction": WHEN, "context": PASSAGE, "response": "In 1931."}


def sharegpt(**turns: str) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in turns.items()]


LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "openai": ({"messages": [BE, HI, YO, MORE, SO]}, "s:Be;u:Hi;a:[Yo;]u:More;a:[So;]"),
    "openai, calls": (
        {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [MOVE]}, MOVED, SO]},
        'u:Hi;a:[{"name": "move", "arguments": {"x": 1}};]t:ok;a:[So;]',
    ),
    "openai, tools": ({"messages": [HI, YO], "tools": [{"name": "move"}]}, '[{"name": "move"}];u:Hi;a:[Yo;]'),
    "openai, parts": (
        {"messages": [{**each, "content": [{"type": "text", "text": part} for part in each["content"]]}
                      for each in (HI, YO)]},
        "u:Hi;a:[Yo;]",
    ),
    "openai, name": ({"messages": [{**HI, "name": "Ann"}, YO]}, "u:Hi;a:[Yo;]"),
    "openai, reasoning": ({"messages": [HI, {**YO, "reasoning_content": "hm"}]}, "u:Hi;a:[(hm)Yo;]"),
    "openai, thinking": ({"messages": [HI, {**YO, "thinking": "hm"}]}, "u:Hi;a:[(hm)Yo;]"),
    "sharegpt": ({"conversations": sharegpt(human="Hi", gpt="Yo"), "system": "Be"}, "s:Be;u:Hi;a:[Yo;]"),
    "sharegpt, calls": (
        {"conversations": sharegpt(
            human="Hi", function_call='{"name": "move", "arguments": {"x": 1}}', observation="ok", gpt="Yo"
         ) + sharegpt(function_call='[{"name": "say", "arguments": "{}"}, {"name": "go"}]'),
         "tools": '[{"name": "move"}]', "system": ""},
        '[{"name": "move"}];u:Hi;a:[{"name": "move", "arguments": {"x": 1}};]t:ok;a:[Yo;]'
        'a:[{"name": "say", "arguments": {}}{"name": "go"};]',
    ),
    "alpaca": ({"instruction": "Greet", "input": "Ann", "output": "Yo"}, "u:Greet\n\nAnn;a:[Yo;]"),
    "alpaca, history": (
        {"instruction": "Greet", "input": "", "output": "Yo", "history": [["Hi", "So"], ["More", ""]], "system": "Be"},
        "s:Be;u:Hi;a:[So;]u:More;a:[;]u:Greet;a:[Yo;]",
    ),
    "alpaca, no history": ({"instruction": "Hi", "output": "Yo", "history": []}, "u:Hi;a:[Yo;]"),
    "dolly": (DOLLY, f"u:{WHEN}\n\n{PASSAGE};a:[In 1931.;]"),
    "dolly, no passage": ({**DOLLY, "context": ""}, f"u:{WHEN};a:[In 1931.;]"),
    "trl, text": ({"prompt": "Hi", "completion": "Yo"}, "u:Hi;a:[Yo;]"),
    "trl, lists": ({"prompt": [BE, HI, YO, MORE], "completion": [SO]}, "s:Be;u:Hi;a:Yo;u:More;a:[So;]"),
    "trl, lists and system": ({"system": "Be", "prompt": [HI], "completion": [SO]}, "s:Be;u:Hi;a:[So;]"),
    "trl, a long completion": ({"prompt": [HI, YO], "completion": [MORE, SO, HI]}, "u:Hi;a:Yo;u:More;a:[So;]u:Hi;"),
    "trl, no prompt": ({"prompt": [], "completion": [HI, YO]}, "u:Hi;a:[Yo;]"),
    "trl, list and text": ({"prompt": [HI, YO, MORE], "completion": "So"}, "u:Hi;a:Yo;u:More;a:[So;]"),
    "question and answer": ({"question": "Hi", "answer": "Yo"}, "u:Hi;a:[Yo;]"),
    "a pair and its reasoning": ({"question": "Hi", "answer": "Yo", "thinking": "hm"}, "u:Hi;a:[(hm)Yo;]"),
    "text": ({"text": "Any text: u:Hi;"}, f"A[ny text: u:Hi;{END}]"),
    "text, with its end": ({"text": f"Any text{END}"}, f"A[ny text{END}]"),
    "roles": ({"system": "Be", "user": "Hi", "assistant": "Yo"}, "s:Be;u:Hi;a:[Yo;]"),
}  # fmt: skip
TO_ROLES = {"p": "user", "q": "user", "a": "assistant"}
SETTINGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"train_on": "last"}, {"prompt": [HI, YO, MORE], "completion": [SO, HI, YO]},
     "u:Hi;a:Yo;u:More;a:So;u:Hi;a:[Yo;]"),
    ({"train_on": "all"}, {"prompt": [BE, HI, YO, MORE], "completion": [SO, HI]}, "s:Be;u:Hi;a:Yo;u:More;[a:So;u:Hi;]"),
    ({"messages_key": "talk"}, {"talk": [HI, YO], "messages": "none"}, "u:Hi;a:[Yo;]"),
    ({"mapping": TO_ROLES | {"s": "system"}}, {"q": WHEN, "p": PASSAGE, "a": "In 1931.", "s": "Be"},
     f"s:Be;u:{PASSAGE}\n\n{WHEN};a:[In 1931.;]"),
    # in part
    ({"mapping": {"question": "user", "context": "user"}},
     {"context": PASSAGE, "question": WHEN, "answer": "In 1931."}, f"u:{WHEN}\n\n{PASSAGE};a:[In 1931.;]"),
    # to keys, and to lists
    ({"mapping": {"q": "instruction", "p": "context", "a": "response", "before": "history"}},
     {"q": WHEN, "p": PASSAGE, "a": "In 1931.", "before": [["Hi", "Yo"]]},
     f"u:Hi;a:[Yo;]u:{WHEN}\n\n{PASSAGE};a:[In 1931.;]"),
    ({"mapping": {"talk": "prompt", "reply": "completion"}}, {"talk": [HI, YO, MORE], "reply": "So"},
     "u:Hi;a:Yo;u:More;a:[So;]"),
    # beside messages, and in their place
    ({"mapping": {"context": "user", "rules": "system"}},
     {"messages": [BE, HI, YO, MORE, SO], "context": PASSAGE, "rules": "Soon"},
     f"s:Be\n\nSoon;u:Hi\n\n{PASSAGE};a:[Yo;]u:More;a:[So;]"),
    ({"mapping": {"q": "user", "a": "assistant"}}, {"messages": [HI, YO], "q": "More", "a": "So"}, "u:More;a:[So;]"),
    ({"ignore": ["context", "tools", "system"]}, {**DOLLY, "system": "Be", "tools": [{"name": "move"}]},
     f"u:{WHEN};a:[In 1931.;]"),
]  # fmt: skip


def test_what_is_read_as_what(tmp_path: Path) -> None:
    """Those without settings lie in one file."""
    assert learned(tmp_path, [record for record, _ in LAYOUTS.values()]) == [text for _, text in LAYOUTS.values()]
    for settings, record, text in SETTINGS:
        assert learned(tmp_path, [record], **settings) == [text]


def test_a_template_without_blocks_learns_the_completion_alone(tmp_path: Path) -> None:
    template = TEMPLATE.replace("{%- generation %}\n", "").replace("{%- endgeneration %}\n", "")
    template += "{%- if add_generation_prompt %}a:{% endif %}"
    record = {"prompt": [HI, YO, MORE], "completion": [SO, HI, YO]}
    assert learned(tmp_path, [record], template) == ["u:Hi;a:Yo;u:More;a:[So;]u:Hi;a:[Yo;]"]


def calls(*arguments: Any) -> list[dict[str, Any]]:
    return [
        {"messages": [HI, {**YO, "tool_calls": [{"function": {"name": name, "arguments": each}}]}]}
        for name, each in zip(("move", "say", "wait"), arguments, strict=False)
    ]


@pytest.mark.parametrize("flat", [False, True])
def test_arguments_as_json_text_are_those_of_objects(tmp_path: Path, flat: bool) -> None:
    objects = [{"x": 1, "deep": {"a": [1, None]}}, {"word": "Ü\"'"}, {}]
    texts = [json.dumps(each) for each in objects]

    def made(arguments: list[Any], as_text: bool = False) -> list[str]:
        found = calls(*arguments)
        for _, turn in (record["messages"] for record in found):
            turn["tool_calls"] = [each["function"] for each in turn["tool_calls"]] if flat else turn["tool_calls"]
            turn["tool_calls"] = json.dumps(turn["tool_calls"]) if as_text else turn["tool_calls"]
        return learned(tmp_path, found)

    expected = made(objects)
    assert expected[0] == 'u:Hi;a:[Yo{"name": "move", "arguments": {"x": 1, "deep": {"a": [1, null]}}};]'
    assert made(texts) == expected
    assert made(texts, as_text=True) == expected, "calls as one JSON text"


def test_arguments_that_spell_no_object_stay_text(tmp_path: Path) -> None:
    texts = ["", "print(1)", "5", "[1]", '"x"', "{", "NaN", "[" * 300]
    wanted = [json.dumps({"name": "move", "arguments": text}) for text in texts]
    made = learned(tmp_path, [record for text in texts for record in calls(text)], seq_len=1000)
    assert made == [f"u:Hi;a:[Yo{each};]" for each in wanted]


def test_tools_as_json_text(tmp_path: Path) -> None:
    kind: dict[str, Any] = {"type": "object", "properties": {}}
    tool, in_text = (
        {"type": "function", "function": {"name": "move", "parameters": each}} for each in (kind, json.dumps(kind))
    )
    tools = [[tool], json.dumps([tool]), [json.dumps(tool)], [in_text], json.dumps([json.dumps(in_text)])]
    made = learned(tmp_path, [{"messages": [HI, YO], "tools": each} for each in tools])
    assert made == [f"[{json.dumps(tool)}];u:Hi;a:[Yo;]"] * len(tools)


@pytest.mark.parametrize("order", [1, -1])
def test_a_table_gives_the_ids_and_targets_of_jsonl(tmp_path: Path, order: int) -> None:
    rows = [
        *calls({"deep": {"a": 1}, "x": 1}, {"deep": {"b": [{"c": 1}, {"d": 2}]}, "word": "up"}, {}),
        {"messages": [HI, YO], "tools": [{"name": "move", "parameters": {"x": 1}}]},
        {"messages": [HI, YO], "tools": [{"name": "say"}]},
    ][::order]
    expected = learned(tmp_path, rows)
    said = 'a:[Yo{"name": "say", "arguments": {"deep": {"b": [{"c": 1}, {"d": 2}]}, "word": "up"}};]'
    assert said in "".join(expected)
    assert shown(load(write_table(tmp_path / "records.parquet", [{"tools": None} | row for row in rows]))) == expected


def test_layouts_are_the_same_from_a_table(tmp_path: Path) -> None:
    mapped: Any = ({"q": "Hi", "p": None, "a": "Yo"}, "u:Hi;a:[Yo;]")  # a key that is not there
    nothing = dict.fromkeys(("id", "messages", "prompt", "text", "tools", "history", "context"))
    for layout in ("openai, calls", "openai, parts", "alpaca, history", "trl, lists", "text", "mapped"):
        record, expected = {**LAYOUTS, "mapped": mapped}[layout]
        settings = {"mapping": TO_ROLES} if layout == "mapped" else {}
        table = write_table(tmp_path / "records.parquet", [nothing | record])
        assert shown(load(table, **settings)) == [expected], layout


def test_a_null_that_was_written_stays(tmp_path: Path) -> None:
    """In jsonl, and in a table whose arguments are JSON text or a map, which no type adds to."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    expected = ['u:Hi;a:[Yo{"name": "move", "arguments": {"x": null}};]']
    assert learned(tmp_path, calls({"x": None})) == expected
    assert shown(load(write_table(tmp_path / "records.parquet", calls('{"x": null}')))) == expected
    kind = arrow.list_(arrow.struct([
        ("role", arrow.string()), ("content", arrow.string()),
        ("tool_calls", arrow.list_(arrow.struct([("function", arrow.struct([
            ("name", arrow.string()), ("arguments", arrow.map_(arrow.string(), arrow.int64()))]))]))),
    ]))  # fmt: skip
    table = arrow.table({"messages": arrow.array([calls([("x", None)])[0]["messages"]], kind)})
    parquet.write_table(table, tmp_path / "map.parquet")
    assert shown(load(tmp_path / "map.parquet")) == expected


LONG = "These are at least four words"
ALPACA = {"instruction": "Greet her kindly", "input": "Ann", "output": "Good morning to you, Ann"}
TEXT = "Below is a task.\n### Instruction:\nGreet her kindly\n### Input:\nAnn\n### Response:\nGood morning to you, Ann"
ABOUT = {
    "id": 7, "conversation_id": LONG, "userID": LONG, "Idx": LONG, "hash": "a b c d", "source": LONG, "category": LONG,
    "topic": LONG, "url": "https://a.org/b", "tags": [LONG], "metadata": {"note": LONG}, "split": "train", "score": 0.5,
}  # fmt: skip


def refused(tmp_path: Path, records: list[Any], template: str = TEMPLATE, **settings: Any) -> tuple[list[str], str]:
    """The keys of the ``data.ignore`` that the refusal has, with which the records train, and the refusal."""
    with pytest.raises(DataError) as error:
        learned(tmp_path, records, template, **settings)
    (typed,) = shlex.split(str(error.value).rpartition(": ")[2])
    assert typed.startswith("data.ignore=")
    ignore = [str(each) for each in OverridesParser.create().parse_override(typed).value()]
    assert learned(tmp_path, records, template, **{**settings, "ignore": ignore})
    with pytest.raises(DataError):  # the tokens are cached now
        learned(tmp_path, records, template, **settings)
    return ignore, str(error.value)


def test_what_is_about_a_record_and_the_conversation_in_another_form_are_said(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "records.jsonl", [{**ALPACA, **ABOUT, "text": TEXT, "note": "short"}] * 3)
    for _ in range(2):  # from the cache too
        data = load(path)
        assert {*data.description["not_read"].split(", ")} == {*ABOUT, "text", "note"}
    assert shown(data) == ["u:Greet her kindly\n\nAnn;a:[Good morning to you, Ann;]"] * 3


@pytest.mark.parametrize(
    "key",
    ["context", "Context", "system_prompt", "SYSTEM-PROMPT", "passage", "document", "background", "knowledge",
     "reasoning", "history", "tools", "input", "images"],
)  # fmt: skip
def test_a_key_whose_name_says_what_the_model_is_to_see_is_refused(tmp_path: Path, key: str) -> None:
    """One row of many is enough, and a word. A list is empty where all in it is."""
    nothing: list[Any] = [None, "", " ", [], {}, [[""]], {"a": None}, float("nan"), False]
    value = [["Hi", 7]] if key in ("history", "tools") else "Why"
    records = [{"messages": [HI, YO], key: each} for each in nothing if key != "tools"]
    records += [{"messages": [HI, YO]}] * 200
    if records[0].get(key, "") is None:
        assert learned(tmp_path, records[:3])
    ignore, said = refused(tmp_path, [*records, {"messages": [HI, YO], key: value}], PLAIN)
    assert ignore == [key]
    assert f"'{key}' (in 1 of {len(records) + 1} rows)" in said


def test_all_keys_are_named_at_once_with_what_is_ignored_already(tmp_path: Path) -> None:
    others = {"my key": LONG, "a\"'\\b": LONG, "true": LONG, "größe": LONG, "5": LONG, "x,y]": LONG}
    records = [{**ALPACA, "context": "Why", "note": LONG}, {**ALPACA, **others}]
    write_lines(tmp_path / "more.jsonl", [{**ALPACA, "notes": [{"deep": LONG}]}])
    more = {"eval_files": [str(tmp_path / "more.jsonl")]}
    assert {*refused(tmp_path, records, ignore=["note"], **more)[0]} == {"note", "notes", *others} - {"context"}


def test_what_carries_meaning_under_any_name(tmp_path: Path) -> None:
    telling = [LONG, [LONG], {"a": [{"b": LONG}]}, f"{LONG}, see https://a.org/b", "一座桥建于一九三一年很久以前"]
    silent = [
        "Only three words", ["one", "two", "three", "four", "five"], "1 2 3 4 5 6", "数学", 12345,
        "https://a.org/x y.html http://a.org/b www.b.org https://c.org/d https://e.org/f",
        "/home/ann/My last holiday by the sea/a picture.png", "C:\\My last holiday by the sea\\a picture.png",
        "Mon, 5 January 2026 10:00:00 am UTC, Tuesday 6th Feb",
    ]  # fmt: skip
    for number, value in enumerate([*telling, *silent]):
        with pytest.raises(DataError, match="'extra'") if number < len(telling) else nullcontext():
            load(write_lines(tmp_path / "records.jsonl", [{**ALPACA, "extra": value}]))


def test_the_page_lists_the_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    told = {word for line in re.findall(r"[\w, \n]+", page) for word in re.split(r"[,\s]+", line)}
    assert {*keys._CARRY, *keys._ABOUT} <= told


THOUGHTS = """\
{%- for m in messages %}{{ m.role[0] }}:
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content and loop.last %}({{ m.reasoning_content | trim }}){% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ (call.function or call) | tojson(ensure_ascii=true) }}{% endfor %};
{%- elif m.role != 'developer' %}{{ m.content }};{% endif %}{% endfor %}
{%- if add_generation_prompt %}a:{% endif %}"""
"""Writes thoughts of the last turn alone, and a developer's header."""
SAY = {"function": {"name": "say", "arguments": {"words": 'Grüße, "Ann"\n', "loud": 1}}, "id": "c1", "type": "function"}


@pytest.mark.parametrize(
    ("more", "unwritten"),
    [
        ({"tool_calls": [MOVE]}, "tool_calls"),
        ({"tool_calls": [{"function": {"name": "Yo", "arguments": {"x": 7}}}]}, "tool_calls"),
        ({"function_call": {"name": "move", "arguments": "{}"}}, "function_call"),
        ({"refusal": "No"}, "refusal"),
        ({"reasoning_content": "hm"}, "reasoning_content"),
        ({"thinking": "Hi"}, "thinking"),
        ({"annotations": [{"title": LONG}]}, "annotations"),
        ({"id": LONG, "type": LONG, "name": LONG, "source": LONG, "tool_call_id": LONG, "note": "short"}, ""),
        ({"tool_calls": [], "refusal": "", "reasoning_content": None, "function_call": {}, "audio": None}, ""),
    ],
)
def test_what_a_message_carries_and_the_template_writes_in_no_turn_is_refused(
    tmp_path: Path, more: dict[str, Any], unwritten: str
) -> None:
    """Its words may stand elsewhere in the conversation. One row of many is enough."""
    records = [{"messages": [HI, YO]}, {"messages": [HI, {**YO, **more}, MORE, SO]}]
    if not unwritten:
        assert learned(tmp_path, records, "chatml", chat_template="chatml")
        return
    ignore, said = refused(tmp_path, records, "", chat_template="chatml")
    assert ignore == [unwritten]
    assert f"'{unwritten}' (in 1 of 2 rows)" in said


def test_what_a_message_carries_is_looked_for_in_every_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As JSON with escapes; and of earlier turns, where the template writes it of the last one, it is only said."""
    calls = {"messages": [HI, {**YO, "tool_calls": [SAY, SAY]}, MOVED, SO]}
    found = learned(tmp_path, [calls], THOUGHTS)
    assert found[0].count(json.dumps(SAY["function"])) == 2
    assert not caplog.records
    thoughts = {"messages": [HI, {**YO, "reasoning_content": "hm"}, MORE, {**SO, "thinking": "ah"}]}
    for _ in range(2):  # from the cache too
        caplog.clear()
        assert learned(tmp_path, [calls, thoughts, thoughts], THOUGHTS)[1] == "u:Hi;a:[Yo;]u:More;a:[(ah)So;]"
        (line,) = [line for line in caplog.messages if "last turns alone" in line]
        assert "'reasoning_content' (in 2 of 3 rows)" in line
    both = {"messages": [HI, {**YO, "reasoning_content": "hm", "thinking": LONG}]}
    assert refused(tmp_path, [both], THOUGHTS)[0] == ["thinking"], "another one has its place"


def test_a_turn_of_a_role_that_the_template_drops_is_refused(tmp_path: Path) -> None:
    record = {"messages": [{"role": "developer", "content": "Yo"}, HI, YO]}
    ignore, said = refused(tmp_path, [record, {"messages": [HI, YO]}], THOUGHTS)
    assert ignore == ["developer"]
    assert "'developer' (in 1 of 2 rows)" in said
    assert learned(tmp_path, [record]) == ["d:Yo;u:Hi;a:[Yo;]"]
    pair = {"system": "Be", "prompt": "Hi", "completion": "Yo"}
    assert refused(tmp_path, [pair], THOUGHTS.replace("'developer'", "'system'"))[0] == ["system"]


IN_PARTS = """\
<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}
{%- if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}
{%- for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] | trim }}
{%- elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
IN_BOTH = """\
{% for message in messages %}{% if message.content is string %}{{ message.role + ': ' + message.content }}
{%- else %}{{ message.role + ': ' }}{% for part in message.content %}{% if part.type == 'text' %}
{{- part.text + '|' }}{% endif %}{% endfor %}{% endif %}<end>
{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
IN_TEXT = "{% for m in messages %}{{ m.role + ': ' + (m.content | string) + '<end>' }}{% endfor %}"
OF_USERS = IN_BOTH.replace("message.content is string", "message.role != 'user'")
"""Parts of questions alone."""


def test_a_template_that_asks_for_parts_gets_them_and_one_that_asks_for_text_gets_text(tmp_path: Path) -> None:
    def parts(message: dict[str, Any]) -> dict[str, Any]:
        texts = [message["content"], " and more "]
        return {"role": message["role"], "content": [{"type": "text", "text": text} for text in texts]}

    def by_transformers(template: str, talk: list[Any], prompt: bool = False) -> str:
        return str(render_jinja_template([talk], chat_template=template, add_generation_prompt=prompt)[0][0])

    def whole(template: str, talk: list[Any]) -> str:
        return learned(tmp_path, [{"messages": talk}], template, train_on="all")[0].replace("[", "").replace("]", "")

    talk, single = (
        [BE, HI, YO],
        [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in (BE, HI, YO)],
    )
    several = list(map(parts, talk))
    for template in (IN_PARTS, IN_BOTH):
        assert whole(template, several) == by_transformers(template, several)
        rendered = ChatTemplate(template, {}).render(several[:2], add_generation_prompt=True)
        assert rendered == by_transformers(template, several[:2], prompt=True), "prompts of generate"
    assert whole(IN_PARTS, talk) == by_transformers(IN_PARTS, single)
    assert ChatTemplate(IN_PARTS, {}).render(talk) == by_transformers(IN_PARTS, single)
    assert whole(IN_BOTH, talk) == by_transformers(IN_BOTH, talk)
    joined = [{**each, "content": each["content"] + " and more "} for each in talk]
    assert whole(IN_TEXT, several) == by_transformers(IN_TEXT, joined)
    assert whole(OF_USERS, talk) == by_transformers(OF_USERS, [BE, single[1], YO])
    assert whole(OF_USERS, several) == by_transformers(OF_USERS, [joined[0], several[1], joined[2]])
    assert "[Yo<end_of_utterance>]" in learned(tmp_path, [{"messages": [HI, YO]}], IN_PARTS)[0].replace("[ ", "[")


def test_a_number_as_content_is_text(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    for number in (5, 0, -1.5, 1e30):
        talk = [HI, {**YO, "content": number}]
        told = render_jinja_template([talk], chat_template=template)[0][0]
        assert learned(tmp_path, [{"messages": talk}], template, train_on="all") == [f"{told[0]}[{told[1:]}]"]
        assert learned(tmp_path, [{"messages": talk}]) == learned(
            tmp_path, [{"messages": [HI, {**YO, "content": str(number)}]}]
        )


def test_a_run_of_before_goes_on_where_its_tokens_are_the_same(tmp_path: Path) -> None:
    """Its fingerprint says rules 2; those of other tokens are others."""
    several = {**HI, "content": [{"type": "text", "text": text} for text in ("a", "b")]}
    say = {"function": {"name": "say", "arguments": "5"}}
    no = {"function": {"name": "say", "arguments": ""}}
    for talk, template, rules in (
        ([HI, {**YO, "tool_calls": [say]}], TEMPLATE, 2),
        ([several, YO], TEMPLATE, 2),
        ([several, YO], IN_BOTH, 3),
        ([HI, YO], IN_BOTH, 2),
        ([HI, YO], IN_PARTS, 3),
        ([HI, {**YO, "content": 5}], TEMPLATE, 3),
        ([HI, {**YO, "tool_calls": [no]}], TEMPLATE, 3),
    ):
        data = load(write_lines(tmp_path / "records.jsonl", [{"messages": talk}]), template)
        assert data.tokenized is not None
        content, special = data.tokenized.meta["content"], {"bos_token": END, "eos_token": END, "pad_token": END}
        key = [content, [rules, 1, 0.0, None, "assistant", [], []], ByteTokenizer().fingerprint, [template, special]]
        assert data.fingerprint == digest([digest(key), 400, "pad", True, "cut"])
        assert data.description["rules"] == rules


def test_one_row_of_a_hundred_is_enough_and_one_of_more_is_said(tmp_path: Path) -> None:
    rows = [{**ALPACA, "extra": LONG}, *[ALPACA] * 99]
    assert "'extra' (in 1 of 100 rows)" in refused(tmp_path, rows)[1]
    data = load(write_lines(tmp_path / "records.jsonl", [*rows, ALPACA]))
    assert data.description["not_read"] == "extra"


TOLD = [HI, {**YO, "content": PASSAGE}]
GERMAN = {"instruction": "To German", "input": "cat", "output": "Katze"}


@pytest.mark.parametrize(
    ("record", "unread"),
    [
        ({"messages": TOLD, "full": f"Hi {PASSAGE}"}, []),
        ({"messages": TOLD, "full": PASSAGE}, []),
        ({**GERMAN, "text": "Do: To German In: cat Out: Katze"}, []),
        ({**GERMAN, "text": "Do it: To German Out: Katze"}, ["text"]),
        ({"messages": TOLD, "prompt": "Hi"}, []),
        ({"messages": TOLD, "conversations": [{"from": "gpt", "value": PASSAGE}]}, []),
        ({"messages": [{**BE, "content": LONG}, HI, YO], "system": LONG}, []),
        ({"messages": [{**BE, "content": LONG}, HI, YO], "system": f"{LONG}."}, ["system"]),
        # it holds the answer because that is taken from it
        ({"question": WHEN, "answer": "1931", "background": PASSAGE}, ["background"]),
        ({"question": WHEN, "answer": "1931", "extra": PASSAGE}, ["extra"]),
        ({"question": WHEN, "answer": "built in 1931 or so", "passage": "It was built in 1931 or so."}, ["passage"]),
        ({"question": WHEN, "answer": "", "extra": PASSAGE}, ["extra"]),
        ({"question": "Hi", "answer": "Yo", "input": "o"}, ["input"]),
        # a text alone is no conversation of which another could be a form
        ({"text": "Any", "extra": LONG}, ["extra"]),
        ({"text": LONG, "extra": "are at least four words"}, []),
        # not read in this layout, or named in vain
        ({"prompt": [HI], "completion": [YO], "history": [["Hi", "Yo now"]]}, ["history"]),
        ({"instruction": "Hi", "output": "Yo", "input": 5}, ["input"]),
        ({"messages": [HI, YO], "tools": [{"name": "move"}]}, ["tools"]),
        ({"messages": [HI, YO], "functions": [{"name": "move"}]}, ["functions"]),
        ({"prompt": "Hi", "completion": "Yo", "reasoning": "hm"}, ["reasoning"]),
    ],
)
def test_what_lies_in_the_conversation_is_read(tmp_path: Path, record: dict[str, Any], unread: list[str]) -> None:
    if unread:
        assert refused(tmp_path, [record], PLAIN)[0] == unread
    else:
        assert learned(tmp_path, [record], PLAIN)


def test_a_mapping_says_what_a_key_is_or_is_refused(tmp_path: Path) -> None:
    record = {"messages": [HI, YO], "word": "why"}
    assert refused(tmp_path, [record], mapping={"word": "context"})[0] == ["word"], "no instruction to go with"
    assert learned(tmp_path, [record], mapping={"word": "system"}) == ["s:why;u:Hi;a:[Yo;]"]
    with pytest.raises(DataError, match=r"^data\.mapping: no record has 'wrod'"):
        learned(tmp_path, [record], mapping={"word": "system", "wrod": "user"})
    hidden = {"context": PASSAGE, "ctx": LONG, "instruction": WHEN, "response": "Yo"}
    assert refused(tmp_path, [hidden], mapping={"ctx": "context"})[0] == ["context"], "another one has its name"
    both = {"context": "context", "ctx": "context"}
    assert learned(tmp_path, [hidden], mapping=both) == [f"u:{WHEN}\n\n{PASSAGE}\n\n{LONG};a:[Yo;]"]


def test_a_cache_of_before_is_built_anew_and_says_whether_a_run_of_before_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(tmp_path / "records.jsonl", [LAYOUTS["openai, calls"][0]])
    assert "formerly" not in load(path).description, "of this template nothing is known without the old tokens"
    (made,) = (tmp_path / "cache" / "tokens").iterdir()
    source = json.loads((made / "meta.json").read_text())["content"]
    special = {"bos_token": END, "eos_token": END, "pad_token": END}
    key = digest([source, [1, 1, 0.0, None, "assistant"], ByteTokenizer().fingerprint, [TEMPLATE, special]])
    before = made.with_name(key)
    for changed in (False, True):
        if changed:
            targets = bytearray((before / "train.targets.bin").read_bytes())
            targets[5] ^= 1
            (before / "train.targets.bin").write_bytes(targets)
            shutil.rmtree(made)
        else:
            made.rename(before)
        caplog.clear()
        data = load(path)
        assert len([line for line in caplog.messages if "rules" in line and "made anew" in line]) == 1
        found = {data.description.get("formerly"), data.fingerprint}
        assert found == {None if changed else digest([key, 400, "pad", True, "cut"]), data.fingerprint}
        assert ("are others" in caplog.text) is changed
    caplog.clear()
    load(path)
    assert "made anew" not in caplog.text


def test_what_a_checkpoint_of_before_is_compared_with() -> None:
    """Fingerprints of data before and now, and which rules have made them."""

    def refusal(saved: dict[str, Any], now: dict[str, Any], changed_files: str = "") -> str:
        refused, _ = compare_configs({"data": saved}, {"data": now}, {"data"}, changed_files)
        return "".join(refused)

    old, new = {"fingerprint": "1" * 32}, {"fingerprint": "2" * 32, "rules": 2}
    assert not refusal(old, {**new, "formerly": "1" * 32})
    assert not refusal(new, {**new, "formerly": "1" * 32})
    for now in (new, {**new, "formerly": "3" * 32}):
        assert "read by other rules" in refusal(old, now)
        assert "a.jsonl (changed); bring them back" in refusal(old, now, "a.jsonl (changed)")
    assert "other files" in refusal({**new, "fingerprint": "1" * 32}, new)
    assert "other files" in refusal(old, {"fingerprint": "2" * 32})
