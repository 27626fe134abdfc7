"""No path, id or command is broken where a row of a terminal ends."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path

import pytest
from terminal import Screen

from forgather_cli.launch.rank_log import rank_log
from forgather_cli.terminal.folding import fold, tell

RUN = "outputs/of_the_department/learning_rate=0.001"
LONG = f"{RUN}/{RUN}/{RUN}"


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (f"output_dir: {RUN} already holds a run; resume it with forgather resume {RUN} (in a script: no)",
         [f"forgather resume {RUN}", f"{RUN}"]),
        (f"it is a checkpoint: forgather train RECIPE resume_from_checkpoint={RUN} resume_components=[model]; or not",
         [f"forgather train RECIPE resume_from_checkpoint={RUN} resume_components=[model];"]),
        ("make room here and there and everywhere else too (forgather runs list, cache list), or another folder",
         ["(forgather runs list,"]),
        ("one two three four five six seven eight nine pip install 'forgather[quantize] more', and then",
         ["pip install 'forgather[quantize] more',"]),
        ("worker   TOKEN=$(cat outputs/token) forgather diloco worker RECIPE --server node:12345",
         ["TOKEN=$(cat outputs/token) forgather diloco worker RECIPE --server node:12345"]),
        (f"{LONG}: no such directory; forgather resume {LONG}, and all is well",
         [f"{LONG}:", f"forgather resume {LONG},"]),
    ],
)  # fmt: skip
def test_what_is_copied_stands_whole_in_one_row(text: str, whole: list[str]) -> None:
    for width in range(24, 120):
        rows = fold(text, width)
        assert " ".join(rows).split() == text.split()
        for piece in whole:
            assert any(piece in row for row in rows)
            assert piece in rows or len(piece) <= width
        wide = [row for row in rows if len(row) > width and " " in row]
        assert [row for row in wide if not re.match("TOKEN|forgather|pip", row)] == []


def test_lines_and_their_beginnings_stay_and_wide_letters_count_twice() -> None:
    assert fold("one\n\n    two three\n", 9) == ["one", "", "    two", "three", ""]
    assert fold("日本語 日本語 ab", 13) == ["日本語 日本語", "ab"]


def test_a_pipe_gets_each_line_whole(capsys: pytest.CaptureFixture[str]) -> None:
    tell("word " * 100 + "end", sys.stdout)
    assert capsys.readouterr().out == "word " * 100 + "end\n"


@pytest.mark.parametrize("kind", [Screen, io.StringIO])
def test_a_line_of_the_log_breaks_no_path(
    kind: type[io.StringIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", said := kind())
    with rank_log(tmp_path / "rank-0.log"):
        logging.getLogger("forgather_cli.test").info("resumed from %s at step %d", f"{RUN}/{RUN[:20]}", 3)
    lines = said.getvalue().splitlines()
    assert any(f"{RUN}/{RUN[:20]}" in line for line in lines)
    assert (max(map(len, lines)) <= 80) == (kind is Screen) == (len(lines) > 1)
