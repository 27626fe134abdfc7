"""Rules of options that stand within another option of their group, as the sources of a mixture do."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any

import pytest

from forgather_cli.config.load import load_config
from forgather_cli.config.rules import rule_problems
from forgather_cli.config.schema import DataSettings, HfSettings, SequenceSettings, TextSettings, settings


@settings
class Sources(SequenceSettings):
    """Options of data by name. It has no type, so that it is no option of the group."""

    sources: dict[str, DataSettings] = field(default_factory=dict)


HF: Any = {"data_files": ["a.jsonl"]}
UNREAD = "shuffle_buffer: nothing reads it with streaming=false; set streaming=true or leave shuffle_buffer out"
NOTHING_READ = (
    "dataset: data=hf reads a dataset of the hub, a directory or data_files, got none; set data.dataset=user/name or "
    "data.data_files=[texts/*.jsonl]"
)


def problems(data: DataSettings, *given: str, later: str = "seed") -> list[str]:
    """Of a run on ``data``, whose settings ``given`` are in one layer, and ``later`` in the next."""
    config = load_config("default", ["data=synthetic", "model=nano", "max_steps=2", "eval_strategy=no"]).config
    return rule_problems(replace(config, data=data), {**dict.fromkeys(given, 0), later: 1})


def within(**sources: DataSettings) -> Sources:
    return Sources(sources=dict(sources))


def test_at_the_place_of_its_group_an_option_has_short_names() -> None:
    assert problems(HfSettings(shuffle_buffer=8, **HF), "data.shuffle_buffer") == [UNREAD]
    assert problems(HfSettings()) == [NOTHING_READ]


def test_a_condition_is_of_the_settings_beside_the_field() -> None:
    """Whatever another source says."""
    streaming, whole = HfSettings(streaming=True, shuffle_buffer=8, **HF), HfSettings(shuffle_buffer=8, **HF)
    names = ["data.sources.a.shuffle_buffer", "data.sources.b.shuffle_buffer"]
    assert problems(within(a=streaming, b=streaming), *names) == []
    assert problems(within(a=streaming, b=whole), *names) == [
        "data.sources.b.shuffle_buffer: nothing reads it with data.sources.b.streaming=false; set "
        "data.sources.b.streaming=true or leave shuffle_buffer out"
    ]
    text = within(a=TextSettings(files=["a.txt"], text_key="body"), b=TextSettings(files=["a.jsonl"], text_key="body"))
    [problem] = problems(text, "data.sources.a.text_key", "data.sources.b.text_key")
    assert problem.startswith("data.sources.a.text_key: nothing reads it with data.sources.a.files=[a.txt]; give jsonl")


@pytest.mark.parametrize("later", ["data.sources.a.streaming", "data"])
def test_a_setting_that_a_later_layer_makes_void_is_no_mistake(later: str) -> None:
    nested = within(a=HfSettings(shuffle_buffer=8, **HF))
    assert problems(nested, "data.sources.a.shuffle_buffer", later=later) == []
    assert problems(nested, "data.sources.a.shuffle_buffer", later="data.sources.b.streaming") != []


def test_contradictions_name_the_settings_where_they_stand() -> None:
    assert problems(within(a=TextSettings(files=["a.txt"]), c=HfSettings())) == [
        NOTHING_READ.replace("dataset: ", "data.sources.c.dataset: ").replace("data.da", "data.sources.c.da")
    ]
    [problem] = problems(within(c=HfSettings(eval_split="test", eval_files=["b.jsonl"], **HF)))
    assert problem == ("data.sources.c.eval_split: eval_files are evaluated on already; set one of the two")
