"""``forgather generate``: texts as they come, many prompts at a time, conversations, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from program import Result, printed
from safetensors.torch import save_file
from terminal import Terminal
from tiny import decoder

from forgather_cli.config.schema import Sampling
from forgather_cli.data.text.detokenize import Detokenizer
from forgather_cli.data.text.tokenizer import ByteTokenizer, FileTokenizer, train_bpe
from forgather_cli.errors import ModelError
from forgather_cli.inference.generation import Generator
from forgather_cli.inference.source import Source
from forgather_cli.models.pretrained import write_model_files

pytestmark = pytest.mark.usefixtures("own_directory")

TEXT = "def naïve(x):\n    return '日本語' * x  # 🙂👩‍👩‍👧\n"
PROMPTS = ["def f(x", "日本", "import os", "a", "  \tclass"]
CHAT = """\
{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ 'MARK' if m.role == 'assistant' else '/' }}{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


def write_model(directory: Path, tokenizer: Any, **changes: Any) -> Path:
    """A model directory with weights so large that each prompt goes its own way, in printable ASCII without an end."""
    directory.mkdir()
    model = decoder(vocab_size=tokenizer.vocab_size, initializer_range=0.4, **changes)
    with torch.no_grad():
        model.head.weight[:32] = model.head.weight[127:] = 0
    write_model_files(model, tokenizer, directory)
    save_file({k: v for k, v in model.state_dict().items()}, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 positions, a token for each byte."""
    return write_model(tmp_path_factory.mktemp("models") / "bytes", ByteTokenizer())


@pytest.fixture
def say(model: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run ``forgather generate MODEL WORDS``."""

    def call(*words: str, source: Path = model, stdin: str = "") -> Result:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            return printed(capsys, "generate", str(source), "--device", "cpu", *words)

    return call


def document(result: Result) -> Any:
    assert result.code == 0, result.err
    return result.json()


def lines(result: Result) -> list[Any]:
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


def test_characters_come_when_they_are_whole(tmp_path: Path) -> None:
    train_bpe(["def return class"], 270, tmp_path)
    text = TEXT * 3  # longer than what is decoded at a time
    for tokenizer in (ByteTokenizer(), FileTokenizer(tmp_path)):
        following = Detokenizer(tokenizer, tokenizer.encode("日本"))
        pieces = [following.add(token) for token in tokenizer.encode(text)]
        assert "".join(pieces) == text
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert sum(bool(piece) for piece in pieces) > 50, "and not all at the end"
        assert following.rest() == ""
    # what never becomes one comes at last
    following, unknown = Detokenizer(ByteTokenizer()), "\N{REPLACEMENT CHARACTER}"
    assert [following.add(token) for token in (0xE6, 0x97, 0x41, 0xF0, 0x9F)] == ["", "", f"{unknown}A", "", ""]
    assert following.rest() == unknown


def test_a_stop_text_is_found_across_tokens_and_left_out() -> None:
    following = Detokenizer(ByteTokenizer(), stops=["\n\n", "END."])
    pieces = [following.add(token) for token in b"one\nENDING END, END.more"]
    assert "".join(pieces) == "one\nENDING END, "
    assert following.stopped
    assert following.rest() == ""
    unfinished = Detokenizer(ByteTokenizer(), stops=["END."])
    assert "".join(unfinished.add(token) for token in b"an EN") + unfinished.rest() == "an EN"


def test_the_text_is_streamed_and_is_what_the_document_has(say: Callable[..., Any]) -> None:
    words = ["--prompt", "def 日", "--max-new-tokens", "40", "--greedy"]
    told = document(say(*words, "--json"))
    assert (told["num_tokens"], told["finish_reason"]) == (40, "length")
    assert document(say(*words[2:], "--json", stdin="def 日")) == told
    assert say(*words)[1] == f"def 日{told['text']}\n"
    stop = told["text"][20:22]
    cut = document(say(*words, "--json", "--stop", stop, "--stop", "never there"))
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == told["text"][: told["text"].index(stop)]
    assert cut["num_tokens"] < 40


def test_the_end_of_the_positions_is_told(say: Callable[..., Any]) -> None:
    done = say("--prompt", "12345", "--greedy", "--json")
    assert (document(done)["num_tokens"], done.json()["finish_reason"]) == (64 - 5, "limit")
    assert done.err == "note: the text ends at token 64 (prompt and text), where the model's positions end\n"
    code, _, err = say("--prompt", "x" * 70)
    assert (code, err) == (2, "error: --prompt: has 70 tokens, and the model takes 64 in all; shorten it\n")


def test_a_model_of_the_users_that_fails_is_one_line() -> None:
    class Mine(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    source = Source(Mine(), ByteTokenizer(), None, torch.device("cpu"))
    writer = Generator(source, end_tokens=(), chat=None, limit=None, directory=Path())
    with pytest.raises(ModelError, match=r"^Mine: forward failed .*\(1, 3\) \(AssertionError, .*py:\d+\); ") as caught:
        writer.write([[1, 2, 3]], Sampling(max_new_tokens=2, do_sample=False))
    assert "\n" not in str(caught.value)


def test_several_texts_to_one_prompt(say: Callable[..., Any]) -> None:
    words = ["--prompt", "def ", "--max-new-tokens", "9", "--num-samples", "3", "--seed"]
    told = document(say(*words, "5", "--json", "--output", "samples.json"))
    texts = [each["text"] for each in told["samples"]]
    assert len(set(texts)) == 3
    assert json.loads(Path("samples.json").read_text()) == told
    assert [each["text"] for each in document(say(*words, "6", "--json"))["samples"]] != texts
    shown = say(*words, "5")[1]
    assert shown == "".join(f"--- {number} ---\ndef {text}\n" for number, text in enumerate(texts, 1))


def by_transformers(directory: Path, prompt: str, count: int, **settings: Any) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=count, do_sample=False, **settings)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(made, skip_special_tokens=True))


def test_a_batch_says_what_each_prompt_says_alone_and_transformers_says(say: Callable[..., Any], model: Path) -> None:
    Path("prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")
    options = ["--max-new-tokens", "20", "--greedy", "--json"]
    together = lines(say("--prompts", "prompts.txt", "--batch-size", "3", *options))
    assert [each["prompt"] for each in together] == PROMPTS
    assert [each["index"] for each in together] == list(range(len(PROMPTS)))
    alone = [document(say("--prompt", prompt, *options)) for prompt in PROMPTS]
    for key in ("text", "finish_reason"):
        assert [each[key] for each in together] == [each[key] for each in alone]
    assert [each["text"] for each in alone[:3]] == [by_transformers(model, prompt, 20) for prompt in PROMPTS[:3]]


def test_beams_stream_and_stop(say: Callable[..., Any]) -> None:
    beams = ["--num-beams", "3", "--no-repeat-ngram-size", "2", "--greedy", "--json"]
    words = ["--prompt", PROMPTS[0], "--max-new-tokens", "20", *beams]
    told = document(say(*words))
    assert say(*words[:-1])[:2] == (0, f"{PROMPTS[0]}{told['text']}\n")
    stop = told["text"][4:6]
    assert stop not in document(say(*words, "--stop", stop))["text"]


def test_rows_of_a_batch_end_for_themselves(say: Callable[..., Any]) -> None:
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    options = ["--prompts", "prompts.txt", "--greedy", "--json", "--max-new-tokens"]
    free = lines(say(*options, "20"))
    stop = free[1]["text"][5]
    for before, after in zip(free, lines(say(*options, "20", "--stop", stop)), strict=True):
        assert after["text"] == before["text"].partition(stop)[0]
        assert after["finish_reason"] == ("stop" if stop in before["text"] else "length")
    for more in ([], ["--num-beams", "3"]):
        long = lines(say(*options, "100", *more))
        assert {each["finish_reason"] for each in long} == {"limit"}
        assert [each["num_tokens"] for each in long] == [64 - len(prompt.encode()) for prompt in PROMPTS]


def test_prompts_in_yaml_and_json_lines(say: Callable[..., Any]) -> None:
    Path("p.yaml").write_text("- def f(x\n- |\n  two\n  lines\n")
    found = lines(say("--prompts", "p.yaml", "--max-new-tokens", "3", "--json", "--num-samples", "2"))
    assert [(each["index"], each["prompt"]) for each in found] == [
        (0, "def f(x"), (0, "def f(x"), (1, "two\nlines\n"), (1, "two\nlines\n"),
    ]  # fmt: skip
    Path("p.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b\\nc"}\n')
    code, out, err = say("--prompts", "p.jsonl", "--max-new-tokens", "3", "--output", "out.jsonl")
    assert (code, out, err) == (0, "", "2 texts in out.jsonl\n")
    assert [json.loads(line)["prompt"] for line in Path("out.jsonl").read_text().splitlines()] == ["a", "b\nc"]
    shown = say("--prompts", "p.jsonl", "--max-new-tokens", "3")[1]
    assert shown.startswith("--- 1 ---\na")
    assert "--- 2 ---\nb\nc" in shown


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 256 positions with a chat template whose turns end at a character that the model writes."""
    directory = write_model(tmp_path_factory.mktemp("models") / "chat", ByteTokenizer(), max_position_embeddings=256)
    (directory / "chat_template.jinja").write_text(CHAT)
    return directory


def test_a_conversation_goes_by_the_template(say: Callable[..., Any], talker: Path) -> None:
    rendered = "<system>be kind/<user>hi/<assistant>"
    options = ["--greedy", "--max-new-tokens", "30"]
    free = document(say("--raw", "--prompt", rendered, *options, "--json", source=talker))["text"]
    mark = next(c for c in free[4:] if c not in "'\"\\{}%# x")
    (talker / "chat_template.jinja").write_text(CHAT.replace("MARK", mark))
    first = free.partition(mark)[0].strip()
    words = ["--chat", "--system", "be kind", *options]
    assert say(*words, "--prompt", "hi", source=talker)[1].strip() == first
    told = document(say(*words, "--json", source=talker, stdin="hi\n\nand now?\n"))["messages"]
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user", "assistant"]
    assert told[2]["content"] == first
    again = f"{rendered}{first}{mark}<user>and now?/<assistant>"
    second = document(say("--raw", "--prompt", again, *options, "--json", source=talker))["text"]
    assert told[4]["content"] == second.partition(mark)[0].strip()
    Path("p.jsonl").write_text(json.dumps({"messages": told[:2]}) + '\n{"prompt": "hi"}\n')
    answers = lines(say("--prompts", "p.jsonl", *options, "--json", source=talker))
    assert answers[0]["text"].strip() == first
    assert answers[0]["messages"] == told[:2]
    # a text is one turn of the user, as a conversation of that turn, and ends where the turn does
    Path("turn.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    [turn] = lines(say("--prompts", "turn.jsonl", *options, "--json", source=talker))
    assert mark not in turn["text"]
    assert {**answers[1], "index": 0} == {key: value for key, value in turn.items() if key != "messages"} | {
        "prompt": "hi"
    }
    one = document(say("--prompt", "hi", *options, "--json", source=talker))
    assert (one["prompt"], one["text"], one["finish_reason"]) == ("hi", turn["text"], turn["finish_reason"])
    assert say("--prompt", "hi", *options, source=talker)[1] == f"{turn['text']}\n"
    raw = document(say("--prompt", "hi", "--raw", *options, "--json", source=talker))["text"]
    assert raw == by_transformers(talker, "hi", 30)
    assert raw != turn["text"]
    assert lines(say("--prompts", "p.jsonl", "--raw", *options, "--json", source=talker))[1]["text"] == raw


def test_the_oldest_turns_of_a_full_conversation_are_forgotten(say: Callable[..., Any], talker: Path) -> None:
    words = ["--chat", "--system", "S", "--greedy", "--max-new-tokens", "20", "--json"]
    done = say(*words, source=talker, stdin="".join(f"{letter * 90}\n" for letter in "abcd"))
    said = [message["content"][0] for message in document(done)["messages"] if message["role"] != "assistant"]
    assert (said[0], said[-1], "a" in said) == ("S", "d", False)
    assert "note: the model takes 256 tokens; the oldest turn is forgotten" in done.err
    code, _, err = say(*words, source=talker, stdin="x" * 300)
    assert code == 2
    assert "the conversation: has 3" in err


def test_without_a_template_the_way_to_one_is_told(say: Callable[..., Any], model: Path) -> None:
    code, out, err = say("--chat", stdin="hi\n")
    assert (code, out) == (2, "")
    remedy = "give it one with forgather finalize SOURCE DEST --chat-template FILE"
    assert err == f"error: {model}: has no chat template; {remedy}\n"
    Path("p.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert say("--prompts", "p.jsonl")[2].startswith(f"error: p.jsonl:1: {model}: has no chat template")


def test_on_a_terminal_ctrl_c_ends_a_conversation(talker: Path) -> None:
    # it has a chat template, so --chat goes without saying
    terminal = Terminal("generate", str(talker), "--greedy", "--max-new-tokens", "4", "--device", "cpu")
    terminal.read_until(r"> $")
    terminal.press("日本\n".encode())
    terminal.read_until(r"日本\r\n(.|\r|\n)*\n> $")
    for _ in range(10):  # input() looks for signals before it waits for keys: one that comes in between it hears late
        terminal.press(b"\x03")
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.process.wait(timeout=20)
            break
    assert terminal.finish() == 130
    assert "Traceback" not in terminal.output


def test_on_a_terminal_texts_to_continue_are_asked_for(model: Path, say: Callable[..., Any]) -> None:
    words = ("--greedy", "--max-new-tokens", "4", "--device", "cpu")
    expected = [say("--prompt", prompt, *words[:3])[1].strip() for prompt in ("abc ", "x")]
    terminal = Terminal("generate", str(model), *words)
    terminal.read_until(r"> $")
    for prompt in (b"abc \n", b"b" * 70 + b"\n", b"\n", b"x\n"):
        terminal.output = ""
        terminal.press(prompt)
        terminal.read_until(r"> $")
        if prompt.startswith(b"bb"):
            assert "error: the text: has 70 tokens, and the model takes 64" in terminal.output
        elif prompt != b"\n":
            assert expected.pop(0) in terminal.output
    terminal.press(b"exit\n")
    assert terminal.finish() == 0


MISTAKES = {
    "--greedy --top-k 3 --top-p 0.5": ["--top-k: nothing reads it where nothing is drawn", "--top-p: nothing reads it"],
    "--greedy --temperature 0.5": ["--temperature: nothing reads it with --greedy; give one of the two"],
    "--temperature 0 --num-samples 2": ["--num-samples: all texts would be equal where nothing is drawn"],
    "--device gpu": ["--device: must be auto, cpu, cuda, cuda:N (a number) or mps, got 'gpu'"],
    "--top-p 2 --min-p nan": ["--top-p: must be less than or equal to 1, got 2", "--min-p: must be a finite number"],
    "--min-new-tokens 9 --max-new-tokens 8": ["got 9, and max_new_tokens is 8; lower one or raise the other"],
    "--system x": ["--system: nothing reads it without --chat; add --chat"],
    "--chat --raw": ["--raw: nothing reads it with --chat; leave it out"],
    "--chat --num-samples 2": ["--num-samples: nothing reads it with --chat; leave it out"],
    "--batch-size 2": ["--batch-size: nothing reads it without --prompts; leave it out"],
    "--prompts p.txt": ["--prompt: nothing reads it with --prompts; give one of the two"],
    "--stop=": ["--stop: is empty; give the text to stop before"],
    "--output nowhere/x": ["--output: nowhere/x has no folder"],
}
FILES = {
    "p.csv": ("a", "--prompts: must be a .txt, .jsonl, .yaml or .yml file, got p.csv"),
    "p.txt": (" \n", "--prompts: p.txt has no prompts; write one on each line"),
    "p.jsonl": ('{"prompt": "a"}\n{"promt": "b"}\n', '--prompts: p.jsonl:2: needs a text as "prompt"'),
    "q.jsonl": ("{\n", "--prompts: q.jsonl:1: is not JSON"),
    "p.yaml": ("a: b\n", "--prompts: p.yaml must hold a list of texts, got a mapping; begin each text with '- '"),
    "e.yaml": ("# none\n", "--prompts: e.yaml has no prompts"),
    "q.yaml": ("- 3\n", "--prompts: q.yaml, prompt 1: must be a text, got 3; quote it"),
    "r.yaml": ("[", "--prompts: r.yaml is not YAML"),
    "r.txt": (b"\xff\xfe", "--prompts: r.txt: is text in UTF-16"),
    "long.txt": ("a\n" + "b" * 70, "long.txt:2: has 70 tokens, and the model takes 64 in all; shorten it"),
}


def test_options_that_contradict_each_other_and_files_that_are_no_list_of_prompts(say: Callable[..., Any]) -> None:
    cases = [(["--prompt", "x", *words.split()], problems) for words, problems in MISTAKES.items()]
    for name, (content, problem) in FILES.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        cases.append((["--prompts", name, "--output", "out.jsonl"], [problem]))
    for words, problems in cases:
        code, out, err = say(*words)
        assert (code, out) == (2, ""), words
        assert [problem for problem in problems if problem not in err] == []
        assert err.count("error") == 1
    assert not Path("out.jsonl").exists()
