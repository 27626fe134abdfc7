"""Pairs to rows: ids and targets beside transformers' and TRL's, what is cut and packed, layouts and file formats."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from chats import write_lines, write_table, write_tokenizer
from pair_records import pair, record, said, write_pairs

from forgather_cli.data.build import load_data
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.order import Order
from forgather_cli.data.splits import DataSplits
from forgather_cli.errors import DataError
from forgather_cli.labels import LENGTHS, UNITS
from forgather_cli.preference.settings import PreferenceSettings

NONE = -100
COUNT = 30
Side = tuple[list[int], list[int]]
"""Ids, and labels."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, CHATML)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "pairs.jsonl", COUNT)


def load(path: Path, directory: Path | str, **settings: Any) -> DataSplits:
    given: dict[str, Any] = {"files": [str(path)], "seq_len": 200, "eval_fraction": 0.0, **settings}
    return load_data(
        PreferenceSettings(tokenizer=str(directory), cache_dir=str(path.parent / "cache"), **given), seed=0
    )


def sides(dataset: Any) -> list[list[Side]]:
    """Of each pair, in order, both sides; and what a batch says of them is right."""
    batch = dataset.__getitems__(list(range(len(dataset))))
    assert {*batch} == {"input_ids", "labels", "document_ids", "position_ids", LENGTHS, UNITS}
    found: list[list[Side]] = []
    for row in range(len(dataset)):
        keys = ("input_ids", "labels", "document_ids", "position_ids")
        ids, labels, documents, positions = (batch[key][row] for key in keys)
        of = torch.where(torch.arange(len(ids)) < batch[LENGTHS][row], documents, -1)
        assert int(of.max()) + 1 == 2 * int(batch[UNITS][row]) == 2 * len(dataset.row_pairs(row))
        assert dataset.row_pairs(row) == range(len(found), len(found) + int(batch[UNITS][row]))
        assert of.tolist() == sorted(of.tolist(), key=lambda side: side if side >= 0 else 1 << 15), "padding is last"
        both: list[Side] = []
        for side in range(int(of.max()) + 1):
            where = of == side
            assert positions[where].tolist() == list(range(int(where.sum())))
            both.append((ids[where].tolist(), labels[where].tolist()))
        padding = of < 0
        assert set(labels[padding].tolist()) <= {NONE}
        assert not set(documents[padding].tolist()) & set(range(int(of.max()) + 1))
        assert positions.max() < len(ids) // 2, "no position is beyond those of a side"
        begins = torch.cat([documents[1:] != documents[:-1], torch.tensor([True])])
        assert (positions[1:][begins[:-1]] == 0).all(), "a document's positions begin anew"
        found += [both[first : first + 2] for first in range(0, len(both), 2)]
    assert len(found) == dataset.num_pairs
    assert dataset.max_pairs == batch[UNITS].max()
    return found


def expected(directory: Path, number: int) -> list[Side]:
    """By transformers: what follows the prompt, as far as the assistant writes it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompt, *answers = pair(number)
    context = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"])
    found = []
    for answer in answers:
        made = tokenizer.apply_chat_template(prompt + answer, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = made["input_ids"], made["assistant_masks"]
        found.append(
            (ids, [i if m and at >= context else NONE for at, (i, m) in enumerate(zip(ids, mask, strict=True))])
        )
    return found


def test_ids_and_targets_are_those_of_transformers(corpus: Path, directory: Path) -> None:
    data = load(corpus, directory)
    assert data.train[0]["input_ids"].shape == (400,)
    assert data.seq_len == 200
    assert data.description["row_tokens"] == 400
    wanted = [expected(directory, number) for number in range(COUNT)]
    assert sides(data.train) == wanted
    ends = {side[1][-2] for both in wanted for side in both}
    assert ends == {transformers.AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids("<|im_end|>")}


def test_best_fit_holds_every_pair_once_and_cuts_none(corpus: Path, directory: Path) -> None:
    data = load(corpus, directory, packing="best_fit").train
    wanted = [expected(directory, number) for number in range(COUNT)]
    assert sorted(sides(data)) == sorted(wanted)
    assert len(data) < COUNT / 2
    assert data.max_pairs > 1
    assert data.num_pairs == COUNT
    assert load(corpus, directory, packing="best_fit").fingerprint != load(corpus, directory).fingerprint


def first_of(labels: list[int]) -> int:
    return next(n for n, i in enumerate(labels) if i != NONE)


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
def test_the_beginning_of_the_prompt_is_left_out_of_both_sides(
    corpus: Path, directory: Path, packing: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [expected(directory, number) for number in range(COUNT)]
    longest = [max(len(ids) for ids, _ in both) for both in wanted]
    answers = [
        max(len(ids) - next(n for n, i in enumerate(labels) if i != NONE) for ids, labels in both) for both in wanted
    ]
    side = max(sorted(answers)[COUNT // 2], 8)
    cut = []
    for both, length, answer in zip(wanted, longest, answers, strict=True):
        if answer < side:  # one token of the prompt is left at least
            gone = max(length - side, 0)
            cut.append([(ids[gone:], labels[gone:]) for ids, labels in both])
    data = load(corpus, directory, packing=packing, seq_len=side)
    assert sorted(sides(data.train)) == sorted(cut)
    num_cut = sum(length > side for length, answer in zip(longest, answers, strict=True) if answer < side)
    assert num_cut
    assert len(cut) < COUNT
    told = f"of {COUNT} train pairs {num_cut} longer, cut (data.too_long=cut), {COUNT - len(cut)} without a target"
    assert data.description["left_out"].startswith(told)
    assert told in caplog.text

    side = sorted(longest)[COUNT // 2]
    data = load(corpus, directory, packing=packing, seq_len=side, too_long="drop")
    kept = [both for both, length in zip(wanted, longest, strict=True) if length <= side]
    assert sorted(sides(data.train)) == sorted(kept)
    dropped = f"{COUNT - len(kept)} longer, left out (data.too_long=drop)"
    assert data.description["left_out"] == f"of {COUNT} train pairs {dropped}"
    with pytest.raises(DataError, match=r"data\.seq_len: no pair fits with 8 .*, the shortest has"):
        load(corpus, directory, seq_len=8, too_long="drop")


ANSWERS = "chosen", "rejected"
TEXTS = {"chosen": "It is 3.", "rejected": "It is 4."}
ASKED = said("user", "What is 1 + 2?")
CHATS = {key: [said("assistant", text)] for key, text in TEXTS.items()}
WHOLE = {key: [ASKED, *talk] for key, talk in CHATS.items()}
SHARED: dict[str, Any] = {key: {"from": "gpt", "value": text} for key, text in TEXTS.items()}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "texts": ({"prompt": ASKED["content"], **TEXTS}, {}),
    "a question in text, answers as messages": ({"prompt": ASKED["content"], **CHATS}, {}),
    "a question as messages, answers in text": ({"prompt": [ASKED], **TEXTS}, {}),
    "messages": ({"prompt": [ASKED], **CHATS}, {}),
    "messages by themselves": ({"prompt": ASKED, **{key: talk[0] for key, talk in CHATS.items()}}, {}),
    "whole chats": (WHOLE, {}),
    "whole chats and their question": ({"prompt": ASKED["content"], **WHOLE}, {}),
    "whole chats and their prompt": ({"prompt": [ASKED], **WHOLE}, {}),
    "whole chats and one of them": ({"messages": WHOLE["chosen"], **WHOLE}, {}),
    "question": ({"question": ASKED["content"], **TEXTS}, {}),
    "Alpaca": ({"instruction": ASKED["content"], "input": "", **TEXTS}, {}),
    "ShareGPT": ({"conversations": [{"from": "human", "value": ASKED["content"]}], **SHARED}, {}),
    "ShareGPT, whole": ({key: [{"from": "human", "value": ASKED["content"]}, SHARED[key]] for key in ANSWERS}, {}),
    "mapped": ({"ask": ASKED["content"], "good": TEXTS["chosen"], "bad": TEXTS["rejected"]},
               {"mapping": {"ask": "prompt", "good": "chosen", "bad": "rejected"}}),
    "JSON text": ({key: json.dumps(talk) for key, talk in WHOLE.items()}, {}),
    "about it": ({"prompt": ASKED["content"], **TEXTS, "score_chosen": 8.5, "source": "by hand, all of it"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_the_same_pair(name: str, tmp_path: Path, directory: Path) -> None:
    given, settings = LAYOUTS[name]
    [found] = sides(load(write_lines(tmp_path / "a.jsonl", [given]), directory, **settings).train)
    [wanted] = sides(load(write_lines(tmp_path / "b.jsonl", [LAYOUTS["messages"][0]]), directory).train)
    assert found == wanted
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert [tokenizer.decode([i for i in labels if i != NONE]) for _, labels in found] == [
        f"{text}<|im_end|>" for text in TEXTS.values()
    ]


def test_earlier_answers_system_and_history_are_of_the_prompt(tmp_path: Path, directory: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", [{"instruction": "Go on", "history": [["Hi", "Hello"]], "system": "S", **TEXTS}]
    )
    [both] = sides(load(path, directory).train)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    talk = [said("system", "S"), said("user", "Hi"), said("assistant", "Hello"), said("user", "Go on")]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    for (ids, labels), text in zip(both, TEXTS.values(), strict=True):
        answer = tokenizer.encode(f"{text}<|im_end|>")
        assert ids[: len(prompt)] == prompt
        assert labels == [NONE] * len(prompt) + answer + [NONE] * (len(ids) - len(prompt) - len(answer))


def test_a_tool_and_a_user_among_the_answers_are_no_targets(tmp_path: Path, directory: Path) -> None:
    more = [said("assistant", "Wait."), said("tool", "3"), said("assistant", "It is 3.")]
    given = {"prompt": [ASKED], "chosen": more, "rejected": more[:1]}
    [[(_, chosen), (_, rejected)]] = sides(load(write_lines(tmp_path / "a.jsonl", [given]), directory).train)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    learned = [tokenizer.decode([i for i in labels if i != NONE]) for labels in (chosen, rejected)]
    assert learned == ["Wait.<|im_end|>It is 3.<|im_end|>", "Wait.<|im_end|>"]


def test_a_prompt_that_a_template_writes_in_two_ways_ends_where_they_part(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages | length }}:" + CHATML)  # of one turn more, another beginning
    longer = [said("assistant", "A"), said("user", "B"), said("assistant", "C")]
    given = {"prompt": [said("system", "S"), ASKED], "chosen": longer, "rejected": longer[:1]}
    path = write_lines(tmp_path / "a.jsonl", [given, given | {"prompt": [ASKED]}])
    with pytest.raises(DataError, match="no pair fits"):  # they have nothing in common
        load(path, directory, chat_template=str(tmp_path / "own.jinja"))
    (tmp_path / "own.jinja").write_text("Of {{ messages | length }}:" + CHATML)
    for chosen, rejected in sides(load(path, directory, chat_template=str(tmp_path / "own.jinja")).train):
        firsts = [first_of(labels) for _, labels in (chosen, rejected)]
        shared = next(n for n, (one, other) in enumerate(zip(chosen[0], rejected[0], strict=False)) if one != other)
        assert firsts == [shared, shared]


FORMATS = ("jsonl", "json", "jsonl.gz", "parquet", "csv", "tsv", "dataset", "data_files")


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_rows(suffix: str, tmp_path: Path, corpus: Path, directory: Path) -> None:
    import gzip

    records = [record(number) for number in range(COUNT)]
    path, settings = tmp_path / f"given.{suffix}", dict[str, Any]()
    if suffix == "json":
        path.write_text(json.dumps(records))
    elif suffix == "jsonl.gz":
        path.write_bytes(gzip.compress(corpus.read_bytes()))
    elif suffix == "parquet":
        write_table(path, records)
    elif suffix in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, records[0], delimiter="\t" if suffix == "tsv" else ",")
            rows.writeheader()
            rows.writerows({key: json.dumps(value) for key, value in each.items()} for each in records)
    elif suffix == "dataset":
        import datasets

        datasets.Dataset.from_list(records).save_to_disk(tmp_path / "saved")
        settings = {"files": [], "dataset": str(tmp_path / "saved")}
    elif suffix == "data_files":
        settings = {"files": [], "data_files": [str(corpus)]}
    else:
        path.write_bytes(corpus.read_bytes())
    assert sides(load(path, directory, **settings).train) == sides(load(corpus, directory).train)


def test_held_out_pairs_are_whole_and_in_no_training(corpus: Path, directory: Path) -> None:
    data = load(corpus, directory, eval_fraction=0.3)
    train, held_out = sides(data.train), sides(data.eval)
    assert len(train) + len(held_out) == COUNT
    assert held_out
    assert sorted(train + held_out) == sorted(expected(directory, number) for number in range(COUNT))
    other = write_pairs(corpus.parent / "other.jsonl", 3, first=COUNT)
    found = sides(load(corpus, directory, eval_files=[str(other)], eval_fraction=0.05).eval)
    assert found == [expected(directory, number) for number in range(COUNT, COUNT + 3)]


def test_a_text_alone_goes_without_the_template(tmp_path: Path, directory: Path) -> None:
    given = {"chosen": "Human: Hi\n\nAssistant: What is it?", "rejected": "Human: Hi\n\nAssistant: What"}
    [both] = sides(load(write_lines(tmp_path / "a.jsonl", [given]), directory).train)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    whole = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in given.values()]
    assert [ids for ids, _ in both] == whole
    shared = next(n for n, (one, other) in enumerate(zip(*whole, strict=False)) if one != other)
    assert [labels for _, labels in both] == [[NONE] * shared + ids[shared:] for ids in whole]


@pytest.mark.full
def test_ids_are_those_of_trl(tmp_path: Path, corpus: Path, directory: Path) -> None:
    """But for what a template writes behind the end token, which TRL learns too."""
    import datasets
    from trl.trainer.dpo_trainer import DPOTrainer  # 1.16

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    texts = [
        {
            key: f"Human: What is {n}?\n\nAssistant: {what}"
            for key, what in zip(ANSWERS, (f"It is {n}.", "I say no"), strict=True)
        }
        for n in range(8)
    ]
    for name, records in {"chats": [record(n) for n in range(COUNT)], "texts": texts}.items():
        settings = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
        trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
        made = DPOTrainer._prepare_dataset(trainer, datasets.Dataset.from_list(records), tokenizer, settings, name)
        path = write_lines(tmp_path / f"{name}.jsonl", records)
        behind = tokenizer.encode("\n") if name == "chats" else []
        for row, both in zip(made, sides(load(path, directory).train), strict=True):
            for key, (ids, labels) in zip(ANSWERS, both, strict=True):
                answer = row[f"{key}_ids"]
                assert ids == row["prompt_ids"] + answer
                assert answer[len(answer) - len(behind) :] == behind
                learned = answer[: len(answer) - len(behind)]
                assert labels == [NONE] * len(row["prompt_ids"]) + learned + [NONE] * len(behind)


def test_a_run_begins_with_the_first_pair_in_words(corpus: Path, directory: Path) -> None:
    data = load(corpus, directory)
    [first] = Order(COUNT, 0, 0)[0:1]
    answers = [answer[0]["content"] for answer in pair(first)[1:]]
    assert data.description["first_targets"] == " ".join(f"[{answer}<|im_end|>]" for answer in answers)
    assert data.description["train_pairs"] == COUNT
    assert np.diff(data.tokenized.train.documents.array).sum() == data.description["train_tokens"]
