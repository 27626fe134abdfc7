"""Samples as lines of a terminal: colour or brackets, and nothing that the data could do to it."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from forgather_cli.inspection.samples import Excerpt, ShownSample, Side
from forgather_cli.inspection.terminal import print_sample, visible


def sample(letters: list[str], targets: str, **changes: Any) -> ShownSample:
    """``targets``: x for each target, - for each other token, a blank for padding."""
    count = len(letters)
    values: dict[str, Any] = {
        "index": 4, "ids": [*range(count)], "targets": [mark == "x" for mark in targets], "pieces": letters,
        "letters": letters, "special": [False] * count, "parts": [Excerpt(0, ("/data/a.jsonl", 3))],
        "documents": [None if mark == " " else 0 for mark in targets],
    }  # fmt: skip
    return ShownSample(**(values | changes))


def shown(what: ShownSample, **console: Any) -> str:
    screen = Console(file=io.StringIO(), width=80, highlight=False, **console)
    print_sample(what, "train", 12, screen)
    text: str = screen.file.getvalue()  # type: ignore[attr-defined]
    return text


WORDS = sample(["ask ", "a", "ns", "wer", "<end>", "\n", "<pad>"], "-xxxx- ", special=[False] * 4 + [True, False, True])


@pytest.mark.parametrize("console", [{}, {"force_terminal": True, "no_color": True}])
def test_targets_stand_in_brackets_where_there_is_none(console: dict[str, Any]) -> None:
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown(WORDS, **console)).splitlines()
    assert "ask [answer<end>]\\n" in lines
    assert any("/data/a.jsonl:3" in line for line in lines)
    assert any(re.search("padding.* 1 ", line) for line in lines)
    assert "<pad>" not in "".join(lines)


def test_no_character_of_the_data_drives_a_terminal_or_hides() -> None:
    every = "".join(map(chr, [*range(0x3000), 0xFEFF, 0xE000, 0x1F642]))
    assert all(each.isprintable() or each == "\n" for each in visible(every))
    for each in "aü数🙂 \\[":
        assert visible(each) == each
    assert visible("\x1b\u202e\xa0\n") == "\\x1b\\u202e\\xa0\\n\n"
    assert "\\x1b]0;title\\x07[[red]]" in shown(sample(["\x1b]0;title\x07", "[red]"], "-x"))


def test_lines_fit_a_terminal_whose_letters_are_wide() -> None:
    text = shown(sample([*"数学" * 60, *"word " * 40], "x" * 320), force_terminal=True, no_color=True)
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(map(cell_len, plain.splitlines())) <= 80
    assert plain.count("数") == 60


def test_what_is_cut_and_what_an_encoder_reads_is_told() -> None:
    parts = [Excerpt(0, None, before=7, behind=5), Excerpt(1, ("b.txt", None), behind=9, is_cut=True)]
    text = shown(sample(["a", "b"], "xx", parts=parts, documents=[0, 1], encoder=Side([1], ["q"], ["question"])))
    for number in ("7", "5", "9"):
        assert re.search(rf"\b{number}\b.*token|token.*\b{number}\b", text)
    assert text.index("question") < text.index("[a]") < text.index("b.txt") < text.index("[b]")
    assert text.count("cut") == 1
