"""What is no pair, and data that pairs cannot be read from: one message each, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chats import write_lines, write_model, write_tokenizer
from pair_records import record, said, write_pairs
from program import Process, forgather, refusal

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.splits import DataSplits
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.worker import read_data

pytestmark = pytest.mark.usefixtures("own_directory")

ASKED, YES, NO = said("user", "Is it?"), said("assistant", "Yes."), said("assistant", "No.")
SAME, NO_ANSWER = "'chosen' and 'rejected' are the same", "'rejected' has no answer of the assistant behind the prompt"
RECORDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "Is it?", "chosen": "Yes."}, r"no 'rejected' \(its keys: prompt, chosen\); set data\.mapping"),
    ({"prompt": "Is it?", "rejected": "No."}, "no 'chosen'"),
    ({"prompt": "Is it?", "chosen": "Yes.", "rejected": ""}, "no 'rejected'"),
    ({"prompt": [ASKED], "chosen": [], "rejected": [NO]}, "no 'chosen'"),
    ({"prompt": "Is it?", "chosen": "Yes.", "rejected": "Yes."}, SAME),
    ({"prompt": [ASKED], "chosen": [YES], "rejected": [{"from": "gpt", "value": "Yes."}]}, SAME),
    ({"chosen": [ASKED, YES], "rejected": [ASKED, YES]}, SAME),
    ({"chosen": "Is it? Yes.", "rejected": "Is it? Yes."}, SAME),
    ({"prompt": [ASKED], "chosen": [YES], "rejected": [ASKED]}, NO_ANSWER),
    ({"prompt": [ASKED], "chosen": [ASKED, YES], "rejected": [ASKED]}, NO_ANSWER),
    ({"chosen": [ASKED, YES, ASKED, NO], "rejected": [ASKED, YES]}, NO_ANSWER),
    ({"chosen": [ASKED, YES], "rejected": [said("user", "Not?"), NO]}, "have prompts that differ, in message 1"),
    ({"prompt": [said("system", "S")], "chosen": [ASKED, YES], "rejected": [said("user", "Not?"), NO]}, "message 2"),
    ({"chosen": [YES], "rejected": [NO]}, r"no 'prompt'.* \(its keys: chosen, rejected\); set data\.mapping"),
    ({"chosen": "Yes.", "rejected": "No."}, "texts that begin differently, and there is no 'prompt'"),
    ({"prompt": "Is it?", "chosen": "Yes.", "rejected": [NO]}, "one of .* is text, and the other a list|other a list"),
    ({"prompt": "Is it?", "chosen": 1, "rejected": 2}, "'chosen' is int, not text or a list of messages"),
    ({"prompt": 7, "chosen": "Yes.", "rejected": "No."}, "'prompt' is int, not text or a list of messages"),
    ({"prompt": [ASKED], "chosen": [YES], "rejected": ["No."]}, "'rejected' has no answer"),
    ({"prompt": [ASKED], "chosen": [YES], "rejected": [NO | {"weight": 0}]}, "'rejected' has no turn that is to be le"),
]
GOOD = record(1)


def config(*words: str) -> Config:
    common = ["data=preference", "loss=dpo", "data.chat_template=chatml", "data.tokenizer=bytes", "model=nano"]
    return load_config("default", [*common, "seq_len=256", "cache_dir=cache", *words]).config


def load(*words: str) -> DataSplits:
    return read_data(config("data.files=[pairs.jsonl]", *words))


@pytest.mark.parametrize(("bad", "told"), RECORDS, ids=[told for _, told in RECORDS])
def test_what_is_no_pair_is_refused_by_its_line_or_left_out(bad: dict[str, Any], told: str) -> None:
    write_lines(Path("pairs.jsonl"), [GOOD, bad, record(2)])
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2: .*(?:{told})") as refused:
        load()
    assert "\n" not in str(refused.value)
    found = load("on_bad_row=skip", "eval_fraction=0")
    assert found.description["skipped"].startswith("1 bad rows left out")
    assert found.train.num_pairs == 2


KEYS: list[tuple[dict[str, Any], str]] = [
    (
        {"context": "It was a long day in the year of 1931."},
        r"'context' \(in 4 of 4 rows\).* 'data\.ignore=\[context\]'",
    ),
    ({"note": "Anne wrote this one down by hand"}, r"'note' \(in 4 of 4 rows\)"),
    ({"prompt_id": "a", "score_chosen": 7.0, "chosen_model": "gpt"}, ""),
    ({"all_answers": ["One of the two that are above, no. "]}, "'all_answers'"),
]


@pytest.mark.parametrize(("more", "told"), KEYS, ids=[told or "none" for _, told in KEYS])
def test_keys_that_say_something_are_read_or_refused(more: dict[str, Any], told: str) -> None:
    write_lines(Path("pairs.jsonl"), [record(number) | more for number in range(4)])
    if not told:
        assert load().description["not_read"] == ", ".join(more)
        return
    with pytest.raises(DataError, match=told):
        load()
    assert load(f"data.ignore={[*more]}").train.num_pairs == 3


def test_a_key_that_has_an_answer_again_is_none_that_nothing_reads() -> None:
    for side in ("chosen", "rejected"):
        answers = {"chosen": f"Yes, it is one of them, {side}.", "rejected": "No, it is none of all these."}
        write_lines(Path("pairs.jsonl"), [{"prompt": "Is it?", **answers, "copy": answers[side]}] * 4)
        assert load().description["not_read"] == "copy"


def test_what_a_message_carries_counts_once_for_a_pair() -> None:
    calls = [{"function": {"name": "add", "arguments": {"numbers": "one and two and three"}}}]
    prompt = [ASKED, said("assistant", "Wait.") | {"tool_calls": calls}, said("tool", "3")]
    write_lines(Path("pairs.jsonl"), [{"prompt": prompt, "chosen": [YES], "rejected": [NO]}] * 3)
    with pytest.raises(DataError, match=r"'tool_calls' \(in 3 of 3 rows\)"):
        load()


SETTINGS = {
    "data.streaming=true": "data.streaming",
    "data.isolate_documents=false": "isolate_documents",
    "data.train_on=all": "train_on",
    "data.messages_key=chat": "messages_key",
    "data.packing=concat": "packing: must be pad or best_fit",
    "data.mapping={a: answer}": "data.mapping.a",
    "data.seq_len=1": "data.seq_len",
    "data.files=[]": "files: data=preference reads files",
    "loss=cross_entropy": "loss: cross_entropy does not compare the sides",
    "data.eval_split=test": "eval_split: nothing reads it with files=",
}


@pytest.mark.parametrize("word", SETTINGS)
def test_settings_that_pairs_have_no_use_for(word: str) -> None:
    with pytest.raises(ConfigError, match=SETTINGS[word]):
        config("data.files=[pairs.jsonl]", word)


def test_other_data_have_no_pairs() -> None:
    with pytest.raises(ConfigError, match="loss: dpo compares the sides of pairs, got data=python_stdlib"):
        load_config("default", ["loss=dpo"])


PAIRS = "{type: preference, files: [pairs.jsonl]}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["+data.sources.b={type: text, files: [a.txt]}"], "data.sources.b: has no pairs, and other sources have"),
        (["data.isolate_documents=false"], "data.isolate_documents: the sides of pairs are kept apart"),
    ],
)
def test_a_mixture_has_pairs_alone_or_none(words: list[str], told: str) -> None:
    mixture = ["data=mixture", f"+data.sources.a={PAIRS}", "data.chat_template=chatml", "loss=dpo"]
    with pytest.raises(ConfigError, match=told):
        load_config("default", [*mixture, *words])


def test_a_class_that_cannot_keep_the_sides_apart_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs.jsonl"), 8)
    size = write_tokenizer(Path("model"), CHATML).vocab_size
    write_model(Path("model"), "mamba", size, state_size=4)
    words = ["model=transformers", "model.path=model", "data.files=[pairs.jsonl]", "seq_len=128", "global_batch_size=2"]
    assert forgather("train", "dpo", *words, "precision=fp32", "device=cpu", "callbacks=minimal") != 0
    told = capsys.readouterr().err
    assert "isolate_documents: MambaForCausalLM" in told
    assert "data=preference" in told


def test_plan_counts_pairs_and_does_not_try_them(capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs.jsonl"), 20)
    words = ["data=preference", "loss=dpo", "data.files=[pairs.jsonl]", "data.chat_template=chatml", "seq_len=256"]
    words += ["model=nano", "data.tokenizer=bytes", "global_batch_size=6", "cache_dir=cache", "precision=fp32"]
    load("global_batch_size=6")  # its tokens are cached
    assert forgather("plan", *words, "num_train_epochs=3", "max_steps=-1") == 0
    out = capsys.readouterr().out
    assert "512 tokens per pair" in out
    assert "6 pairs = 6 x 1 micro-steps, 3,072 tokens per step" in out
    num = read_data(config("data.files=[pairs.jsonl]")).train.num_pairs
    assert f"{3 * (num // 6)} steps" in out
    assert f", {3 * (num // 6) * 6 / num:.2f} epochs" in out
    assert forgather("plan", *words, "data.packing=best_fit") == 0
    assert "6 sequences = 6 x 1" in capsys.readouterr().out
    assert forgather("plan", *words, "--fit", "--confirm", "--memory", "4GiB") == 2
    assert "--confirm: trains on random text, and data=preference has examples of two sides" in capsys.readouterr().err


TOLD = {
    "the same": {"prompt": "Is it?", "chosen": "Yes.", "rejected": "Yes."},
    "prompts that differ": {"chosen": [ASKED, YES], "rejected": [said("user", "Not?"), NO]},
    "no 'rejected'": {"prompt": "Is it?", "chosen": "Yes."},
}


@pytest.mark.parametrize("told", TOLD)
def test_training_ends_with_one_line_that_names_the_broken_pair(told: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("good.jsonl"), 8)
    write_lines(Path("pairs.jsonl"), [GOOD, TOLD[told]])
    size = len(write_tokenizer(Path("model"), CHATML))
    write_model(Path("model"), "llama", size)
    words = ["dpo", "model.path=model", "data.files=[good.jsonl,pairs.jsonl]", "cache_dir=cache", "device=cpu"]
    error = one_error(refusal(capsys, "train", *words))
    assert "pairs.jsonl:2" in error
    assert told in error


@pytest.mark.parametrize("ranks", [(), ("trainer=ddp", "nproc_per_node=2")], ids=["one", "two"])
def test_training_ends_with_one_line_for_a_reference_of_other_tokens(
    ranks: tuple[str, ...],
) -> None:
    write_pairs(Path("pairs.jsonl"), 16)
    size = len(write_tokenizer(Path("model"), CHATML))
    write_tokenizer(Path("other"), CHATML)
    for name, tokens in (("model", size), ("other", size + 8)):
        write_model(Path(name), "llama", tokens)
    words = ["dpo", "model.path=model", "loss.reference=other", "data.files=[pairs.jsonl]", "cache_dir=cache"]
    words += ["global_batch_size=4", "data.eval_fraction=0"]
    with Process("train", *words, "seq_len=128", "device=cpu", "callbacks=minimal", *ranks) as process:
        assert process.finish() == 2, process.output
    error = one_error(process.output)
    assert f"another vocabulary than the model that is trained ({size + 8} and {size} tokens)" in error


def one_error(output: str) -> str:
    """The one line of an error."""
    (found,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert "Traceback" not in output
    return found
