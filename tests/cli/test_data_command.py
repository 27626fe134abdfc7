"""``forgather data``: samples on a terminal, as JSON and as a page; counts; and caches made before a run."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest
from chats import write_lines
from program import printed as run
from terminal import Terminal

pytestmark = pytest.mark.usefixtures("own_directory")
CHATS = ["data=instruct", "data.files=[chats.jsonl]", "data.chat_template=chatml", "seq_len=160",
         "data.cache_dir=cache", "model=nano", "data.add_tokens=false"]  # fmt: skip
EVIL = "a \x1b[31mred\x1b[0m\x07 <b>&amp;</b> \u202e'\" [x]"


@pytest.fixture(autouse=True)
def _chats(tmp_path: Path) -> None:
    def chat(question: str, answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    chats = [chat(f"{n}?", "Yes, ü." * (1 + n % 9)) for n in range(30)]
    write_lines(tmp_path / "chats.jsonl", [*chats[:16], chat("16?", EVIL), *chats[17:]])


def test_json_is_one_document_of_samples_and_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "data", "show", *CHATS, "--json", "--sample", "1", "--count", "2")
    assert code == 0
    found = json.loads(out)
    assert found.keys() == {"split", "seq_len", "samples"}
    assert (found["split"], found["seq_len"]) == ("train", 160)
    assert [sample["index"] for sample in found["samples"]] == [1, 2]
    for sample in found["samples"]:
        assert sample.keys() == {"index", "source", "ids", "targets", "pieces", "documents"}
        assert len(sample["ids"]) == len(sample["targets"]) == len(sample["pieces"]) == len(sample["documents"]) == 160
        assert sample["source"].startswith(f"{tmp_path}/chats.jsonl:")
    _, out, _ = run(capsys, "data", "show", *CHATS, "--json", "--split", "eval", "--from", "chats.jsonl")
    assert json.loads(out)["split"] == "eval"


def test_without_colour_targets_stand_in_brackets_and_nothing_drives_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "data", "show", *CHATS, "packing=pad", "--from", "chats.jsonl:17")
    assert code == 0
    assert not {"\x1b", "\x07", "\u202e"} & {*out}
    shown = "a \\x1b[31mred\\x1b[0m\\x07 <b>&amp;</b> \\u202e'\" [x]"
    assert f"<|im_start|>assistant\\n\n[{shown}<|im_end|>]" in out
    assert all(word in out for word in ("chats.jsonl:17", "padding"))
    _, out, _ = run(capsys, "data", "show", *CHATS, "packing=pad", "--from", "chats.jsonl:9", "seq_len=100")
    assert re.search(r"cut: \d+ more tokens", out)


def test_on_a_terminal_targets_are_coloured_and_lines_fit() -> None:
    terminal = Terminal("data", "show", *CHATS, "--count", "2")
    terminal.read_until(None)
    assert terminal.close() == 0
    coloured = re.findall(r"\x1b\[([\d;]+)m([^\x1b]*)", terminal.output)
    targets = "".join(text for style, text in coloured if style in ("30;42", "1;30;42")).replace("\r\n", "")
    assert "Yes, ü." in targets
    assert "user" not in targets
    assert "[Yes" not in terminal.output
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.output).splitlines()
    shown = lines[next(n for n, line in enumerate(lines) if line.startswith("sample 0")) :]
    assert max(map(len, shown)) <= 80


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the text of tokens by their titles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[tuple[dict[str, str | None], str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["span"] and "title" in self.tags[-1][1]:
            self.tokens.append((self.tags[-1][1], data))


def test_a_page_holds_every_token_for_light_and_dark_and_nothing_of_another_address(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["data", "show", *CHATS, "packing=pad", "--from", "chats.jsonl:17"]
    assert run(capsys, *words, "--html", "page.html")[:2] == (0, "page.html\n")
    [sample] = json.loads(run(capsys, *words, "--json")[1])["samples"]
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "a", "b", "object", "base"} & {tag for tag, _ in page.tags}
    assert not {"src", "href", "style", "onload"} & {name for _, attributes in page.tags for name in attributes}
    assert not re.search(r"url\(|@import|//\w", text)
    assert "prefers-color-scheme: dark" in text
    assert "\x1b" not in text
    assert not re.search(r">[<&]</span", text)  # of a token, as it stands
    real = sample["documents"].count(0)
    assert len(page.tokens) == real
    for at, (attributes, shown) in enumerate(page.tokens):
        told = re.fullmatch(r"id (\d+), position (\d+), (no )?target", attributes["title"] or "")
        assert told
        assert (int(told[1]), int(told[2]), told[3] is None) == (sample["ids"][at], at, sample["targets"][at])
        assert ("target" in (attributes.get("class") or "").split()) == sample["targets"][at]
        assert shown.rstrip("\n") in (sample["pieces"][at], repr(sample["pieces"][at])[1:-1])
    # every colour of the light page has one for the dark
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    assert set(re.findall(r"(--[\w-]+):", light)) == set(re.findall(r"(--[\w-]+):", dark.split("}")[0]))


MISTAKES = {
    "--sample 99999": "--sample",
    "--sample 0 --from chats.jsonl:1": "--from",
    "--split evla": "eval",
    "--from chat.jsonl:1": "chat.jsonl",
    "--from chats.jsonl:99": "chats.jsonl:99",
    "--split eval data.eval_fraction=0": "eval_fraction",
    "--html nowhere/page.html": "--html",
    "--html page.html --json": "--json",
    "data.filez=[a]": "data.files",
    "data.files=[none.jsonl]": "none.jsonl",
}


def test_a_mistake_is_one_line_that_names_it_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in MISTAKES.items():
        code, out, err = run(capsys, "data", "show", *CHATS, *words.split())
        assert (code, out) == (2, ""), words
        [line] = [line for line in err.splitlines() if line.startswith("error")]
        assert named in line
    code, _, err = run(capsys, "data", "stats", "data=text", "data.files=[none.txt]", "--plot", "lengths.txt")
    assert code == 2
    assert "--plot" in err  # before anything is read


# ------------------------------------------------------------------------------------------------- counts, and caches


def test_stats_are_told_in_80_columns_and_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "data", "stats", *CHATS, "--json", "--plot", "lengths.svg")
    assert code == 0
    found = json.loads(out)
    train = found["splits"]["train"]
    assert train["documents"] + found["splits"]["eval"]["documents"] == 30
    assert train["sources"][f"{tmp_path}/chats.jsonl"]["documents"] == train["documents"]
    assert "<svg" in (tmp_path / "lengths.svg").read_text()
    terminal = Terminal("data", "stats", *CHATS)
    terminal.read_until(None)
    assert terminal.close() == 0
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.output).replace("\r", "").splitlines()
    shown = "\n".join(line for line in lines if not line.startswith("data.tokenizer"))
    assert max(map(len, shown.splitlines())) <= 80
    assert f"{train['targets']:,}" in shown
    assert re.search(r"65 - 128 +\d+ +█", shown)


def test_build_makes_what_training_needs_and_a_second_one_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def cached() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*.bin")}

    code, out, _ = run(capsys, "data", "build", *CHATS)
    assert (code, "tokens" in out, "packings" in out) == (0, True, True)
    before = cached()
    assert {path.name.partition(".")[0] for path in before} == {"train", "eval"}
    code, again, _ = run(capsys, "data", "build", *CHATS)
    assert (code, again) == (0, "everything is there already, in cache\n")
    run(capsys, "data", "show", *CHATS, "--split", "eval", "--json")
    assert cached() == before
    assert "nothing to make" in run(capsys, "data", "build", "data=synthetic")[1]


def test_a_run_shows_what_it_trains_on_and_begins_with_its_first_targets(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["max_steps=1", "global_batch_size=2", "callbacks=minimal", "+callbacks.info={}", "device=cpu",
             "precision=fp32", "seed=5"]  # fmt: skip
    code, out, _ = run(capsys, "train", *CHATS, *small, "output_dir=my run")
    assert code == 0
    shown = [["my run"], [*CHATS, "seed=5"], [*CHATS, "seed=6"]]
    of_run, of_words, of_others = (run(capsys, "data", "show", *words, "--json")[1] for words in shown)
    assert of_run == of_words != of_others
    sample = json.loads(of_run)["samples"][0]
    first = bytes(number for number, is_target in zip(sample["ids"], sample["targets"], strict=True) if is_target)
    [line] = [line for line in out.splitlines() if line.startswith("first_targets")]
    words = re.sub(r"[\[\] ]|^first_targets|\.\.\.$", "", line)
    assert first.decode().replace(" ", "").startswith(words)
    assert len(words) > 10
    assert len(line) < 130
    assert "forgather data show 'my run'" in out
