"""``forgather data``: samples on a terminal, as JSON and as a page; counts; and caches made before a run."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import pytest
from chats import write_lines
from program import document, printed, refusal, shown
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
    found = document(capsys, "data", "show", *CHATS, "--sample", "1", "--count", "2")
    assert found.keys() == {"split", "seq_len", "samples"}
    assert (found["split"], found["seq_len"]) == ("train", 160)
    assert [sample["index"] for sample in found["samples"]] == [1, 2]
    for sample in found["samples"]:
        assert sample.keys() == {"index", "source", "ids", "targets", "pieces", "documents"}
        assert len(sample["ids"]) == len(sample["targets"]) == len(sample["pieces"]) == len(sample["documents"]) == 160
        assert sample["source"].startswith(f"{tmp_path}/chats.jsonl:")
    of_eval = document(capsys, "data", "show", *CHATS, "--split", "eval", "--from", "chats.jsonl")
    assert of_eval["split"] == "eval"


def test_without_colour_targets_stand_in_brackets_and_nothing_drives_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, "data", "show", *CHATS, "packing=pad", "--from", "chats.jsonl:17")
    assert re.search(r"targets.*\[ and \]", out.splitlines()[-1]), "a legend"
    assert not {"\x1b", "\x07", "\u202e"} & {*out}
    evil = "a \\x1b[31mred\\x1b[0m\\x07 <b>&amp;</b> \\u202e'\" [x]"
    assert f"<|im_start|>assistant\\n\n[{evil}<|im_end|>]" in out
    assert all(word in out for word in ("chats.jsonl:17", "padding"))
    out = shown(capsys, "data", "show", *CHATS, "packing=pad", "--from", "chats.jsonl:9", "seq_len=100")
    assert re.search(r"cut: \d+ more tokens", out)


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
    assert shown(capsys, *words, "--html", "page.html") == "page.html\n"
    [sample] = document(capsys, *words)["samples"]
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "a", "b", "object", "base"} & {tag for tag, _ in page.tags}
    assert not {"src", "href", "style", "onload"} & {name for _, attributes in page.tags for name in attributes}
    assert not re.search(r"url\(|@import|//\w", text)
    assert "prefers-color-scheme: dark" in text
    assert "\x1b" not in text
    assert not re.search(r">[<&]</span", text)  # of a token, as it stands
    assert len(page.tokens) == sample["documents"].count(0)
    for at, (attributes, token) in enumerate(page.tokens):
        told = re.fullmatch(r"id (\d+), position (\d+), (no )?target", attributes["title"] or "")
        assert told
        assert (int(told[1]), int(told[2]), told[3] is None) == (sample["ids"][at], at, sample["targets"][at])
        assert ("target" in (attributes.get("class") or "").split()) == sample["targets"][at]
        assert token.rstrip("\n") in (sample["pieces"][at], repr(sample["pieces"][at])[1:-1])
    # every colour of the light page has one for the dark
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    assert set(re.findall(r"(--[\w-]+):", light)) == set(re.findall(r"(--[\w-]+):", dark.split("}")[0]))


def test_a_mistake_is_one_line_that_names_it_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in {
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
    }.items():
        code, out, err = printed(capsys, "data", "show", *CHATS, *words.split())
        assert (code, out) == (2, ""), words
        [line] = [line for line in err.splitlines() if line.startswith("error")]
        assert named in line
    plot = ["--plot", "lengths.txt"]
    assert "--plot" in refusal(capsys, "data", "stats", "data=text", "data.files=[none.txt]", *plot)  # nothing is read


def test_stats_are_told_in_80_columns_and_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = document(capsys, "data", "stats", *CHATS, "--plot", "lengths.svg")
    train = found["splits"]["train"]
    assert train["documents"] + found["splits"]["eval"]["documents"] == 30
    assert train["sources"][f"{tmp_path}/chats.jsonl"]["documents"] == train["documents"]
    assert "<svg" in (tmp_path / "lengths.svg").read_text()
    terminal = Terminal("data", "stats", *CHATS)
    terminal.read_until(None)
    assert terminal.close() == 0
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.output).replace("\r", "").splitlines()
    assert max(len(line) for line in lines if not line.startswith("data.tokenizer")) <= 80
    assert f"{train['targets']:,}" in "\n".join(lines)
    assert any(re.search(r"65 - 128 +\d+ +█", line) for line in lines)


def test_build_makes_what_training_needs_and_a_second_one_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def cached() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*.bin")}

    out = shown(capsys, "data", "build", *CHATS)
    assert ("tokens" in out, "packings" in out) == (True, True)
    before = cached()
    assert {path.name.partition(".")[0] for path in before} == {"train", "eval"}
    assert shown(capsys, "data", "build", *CHATS) == "everything is there already, in cache\n"
    document(capsys, "data", "show", *CHATS, "--split", "eval")
    assert cached() == before
    assert "nothing to make" in shown(capsys, "data", "build", "data=synthetic")


def test_a_run_shows_what_it_trains_on_and_begins_with_its_first_targets(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["max_steps=1", "global_batch_size=2", "callbacks=minimal", "+callbacks.info={}", "device=cpu",
             "precision=fp32", "seed=5"]  # fmt: skip
    out = shown(capsys, "train", *CHATS, *small, "output_dir=my run")
    sources = [["my run"], [*CHATS, "seed=5"], [*CHATS, "seed=6"]]
    of_run, of_words, of_others = (document(capsys, "data", "show", *words) for words in sources)
    assert of_run == of_words != of_others
    sample = of_run["samples"][0]
    first = bytes(number for number, is_target in zip(sample["ids"], sample["targets"], strict=True) if is_target)
    [line] = [line for line in out.splitlines() if line.startswith("first_targets")]
    words = re.sub(r"[\[\] ]|^first_targets|\.\.\.$", "", line)
    assert first.decode().replace(" ", "").startswith(words)
    assert len(words) > 10
    assert len(line) < 130
    assert "forgather data show 'my run'" in out
