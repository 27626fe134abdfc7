"""Rows of pairs as models, people and mixtures get them."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import write_lines, write_model, write_tokenizer
from pair_records import pair, record, said, write_pairs
from program import document, forgather

from forgather_cli.config.load import load_config
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.data.loaders.map_style import is_map_style
from forgather_cli.data.splits import DataSplits
from forgather_cli.inference.source import load_source
from forgather_cli.inspection.samples import Samples
from forgather_cli.labels import LENGTHS, UNITS
from forgather_cli.worker import read_data

NONE = -100
SETTINGS = ["loss=dpo", "data.chat_template=chatml", "data.tokenizer=bytes", "model=nano", "cache_dir=cache",
            "precision=fp32", "device=cpu", "callbacks=minimal"]  # fmt: skip
PREFERENCE = ["data=preference", "data.files=[pairs.jsonl]", *SETTINGS]
PAIRS = "{type: preference, files: [pairs.jsonl], packing: best_fit, weight: 0.75}"
MORE = "{type: preference, files: [more.jsonl], weight: 0.25}"
MIXTURE = ["data=mixture", f"+data.sources.a={PAIRS}", f"+data.sources.b={MORE}", *SETTINGS]


@pytest.fixture(autouse=True)
def _files(own_directory: None) -> None:
    write_pairs(Path("pairs.jsonl"), 30)
    write_pairs(Path("more.jsonl"), 12, first=30)


def load(*words: str) -> DataSplits:
    return read_data(load_config("default", [*words]).config)


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_side_in_a_row_is_computed_as_by_itself(kind: str, packing: str) -> None:
    """By transformers, alone and without padding; gpt2 has positions for one side, and no more."""
    size = write_tokenizer(Path("model"), CHATML).vocab_size
    side = 208
    theirs = write_model(
        Path("model"), kind, size, max_position_embeddings=side, **{"n_positions": side} if kind == "gpt2" else {}
    )
    data = load(
        *PREFERENCE,
        "model=transformers",
        "model.path=model",
        "data.tokenizer=model",
        f"seq_len={side}",
        f"packing={packing}",
    )
    assert {len(data.train.row_pairs(row)) for row in range(len(data.train))} >= ({1} if packing == "pad" else {2})
    batch = data.train.__getitems__([*range(min(len(data.train), 6))])
    kept = {key: batch[key] for key in ("input_ids", "document_ids", "position_ids")}
    model = load_source(Path("model"), device="cpu").model
    with torch.no_grad():
        logits = model(**kept)
        for row, sides in enumerate(batch["document_ids"]):
            assert logits[row].isfinite().all()
            for number in range(2 * int(batch[UNITS][row])):
                where = sides == number
                alone = theirs(input_ids=batch["input_ids"][row][where][None]).logits[0]
                torch.testing.assert_close(logits[row][where], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
def test_what_is_shown_is_both_sides_and_what_differs(packing: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*PREFERENCE, "seq_len=360", f"packing={packing}"]
    config = load_config("default", words).config
    samples = Samples(config, read_data(config), "train")
    for sample in islice(samples.read(), 6):
        assert sample.sides == ["chosen", "rejected"] * (len(sample.parts) // 2)
        assert sample.differs is not None
        for first in range(0, len(sample.parts), 2):
            at = [[n for n, owner in enumerate(sample.documents) if owner == first + side] for side in (0, 1)]
            same = [[sample.ids[n] for n in side if not sample.differs[n]] for side in at]
            assert same[0] == same[1]
            prompts = [[sample.ids[n] for n in side[: [sample.targets[n] for n in side].index(True)]] for side in at]
            assert prompts[0] == prompts[1]
            assert not any(sample.differs[n] for side in at for n in side[: len(prompts[0])])
            assert any(sample.differs[n] for side in at for n in side)
            assert sample.parts[first].source == sample.parts[first + 1].source
    found = document(capsys, "data", "show", *words, "--from", "pairs.jsonl:7", "--count", "1")
    [shown] = found["samples"]
    number = [part.source for part in next(samples.read(shown["index"])).parts].index(
        f"{Path('pairs.jsonl').resolve()}:7"
    )
    assert shown["sides"][number] == "chosen"
    assert len(shown["differs"]) == 720
    assert forgather("data", "show", *words, "--from", "pairs.jsonl:7", "--count", "1") == 0
    out = capsys.readouterr().out
    chosen, rejected = (answer[0]["content"] for answer in pair(6)[1:])
    assert f"pair {number // 2}, chosen" in out
    assert f"pair {number // 2}, rejected" in out
    assert "{" in out
    told = out.replace("{", "").replace("}", "")
    assert f"[{chosen}<|im_end|>]" in told
    assert f"[{rejected}<|im_end|>]" in told
    assert forgather("data", "show", *words, "--count", "1", "--html", "page.html") == 0
    assert 'class="target differs"' in Path("page.html").read_text()


def test_what_of_a_prompt_is_in_no_row_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    prompt, chosen, rejected = [said("user", "x" * 200)], [said("assistant", "Yes.")], [said("assistant", "No.")]
    write_lines(Path("pairs.jsonl"), [{"prompt": prompt, "chosen": chosen, "rejected": rejected}])
    assert forgather("data", "show", *PREFERENCE, "data.eval_fraction=0", "seq_len=64") == 0
    assert capsys.readouterr().out.count("from its token") == 2
    stats = document(capsys, "data", "stats", *PREFERENCE, "data.eval_fraction=0", "seq_len=64")["splits"]["train"]
    assert (stats["cut"], stats["dropped"], stats["samples"]) == (2, 0, 1)


def test_a_mixture_of_pairs_reads_each_pair_once() -> None:
    data = load(*MIXTURE, "seq_len=300", "data.sources.a.weight=null", "data.sources.b.weight=null")
    alone = [load(*PREFERENCE, "seq_len=300", "packing=best_fit"),
             load(*PREFERENCE, "seq_len=300", "data.files=[more.jsonl]")]  # fmt: skip
    for split in ("train", "eval"):
        joined, parts = getattr(data, split), [getattr(each, split) for each in alone]
        assert is_map_style(joined)
        assert joined.num_pairs == sum(part.num_pairs for part in parts)
        assert joined.max_pairs == max(part.max_pairs for part in parts)
        numbers = [number for row in range(len(joined)) for number in joined.row_pairs(row)]
        assert numbers == [*range(joined.num_pairs)]
        batch = joined.__getitems__([*range(len(joined))])
        assert batch["input_ids"].shape[1] == 600
        for key in ("input_ids", "labels", "document_ids", "position_ids", UNITS, LENGTHS):
            wanted = torch.cat([part.__getitems__([*range(len(part))])[key] for part in parts])
            assert torch.equal(batch[key], wanted), key
    assert data.seq_len == 300
    assert data.description["row_tokens"] == 600


def test_a_plan_of_a_mixture_counts_rows_of_two_sides(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MIXTURE, "seq_len=300", "global_batch_size=4", "max_steps=8"]
    load(*words)
    found = document(capsys, "plan", *words)
    assert found["tokens_per_step"] == 4 * 600
    assert {each["name"]: each["sequences"] for each in found["sources"]} == {"a": 24, "b": 8}
    assert sum(each["tokens"] for each in found["sources"]) == 32 * 600
    assert found["row"] == "sequence"


def test_ranks_and_workers_read_the_same_pairs() -> None:
    train = load(*PREFERENCE, "seq_len=300", "packing=best_fit").train

    def rows(key: str = "document_ids", **given: Any) -> list[torch.Tensor]:
        loader = TrainLoader(train, global_batch_size=4, micro_batch_size=2, seed=1, drop_last=False, **given)
        steps = (step.microbatches for step in loader if step.microbatches)
        return [torch.cat([batch[key] for batch in step]) for step in steps]

    whole = rows()
    shares = [rows(rank=rank, size=2) for rank in (0, 1)]
    assert all(torch.equal(one, torch.cat(parts)) for one, *parts in zip(whole, *shares, strict=True) if len(one) == 4)
    assert sum(int(each.sum()) for each in rows(UNITS)) == train.num_pairs


def test_equal_rows_have_one_fingerprint_and_others_another() -> None:
    found = {
        load(*PREFERENCE, "seq_len=300", *more).fingerprint
        for more in ([], ["packing=best_fit"], ["data.too_long=drop"], ["seq_len=200"], ["data.files=[more.jsonl]"])
    }
    assert len(found) == 5
    assert load(*PREFERENCE, "seq_len=300").fingerprint in found


def test_pairs_and_chats_of_one_file_are_cached_apart() -> None:
    records = [record(number) | {"messages": [said("user", "A"), said("assistant", "B")]} for number in range(6)]
    for each in records:
        del each["prompt"]
    write_lines(Path("both.jsonl"), [json.loads(json.dumps(each)) for each in records])
    words = ["data.files=[both.jsonl]", "data.chat_template=chatml", "data.tokenizer=bytes", "cache_dir=cache"]
    pairs = load("data=preference", "loss=dpo", *words, "seq_len=300", "data.eval_fraction=0")
    ignored = "data.ignore=[chosen,rejected]"
    chats = load("data=instruct", *words, "seq_len=290", "data.eval_fraction=0", ignored, "packing=pad")
    assert (pairs.train.num_pairs, len(chats.train)) == (6, 6)


def test_a_run_on_a_mixture_of_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its first loss says that the reference's rows are those that are trained on."""
    words = ["seq_len=300", "global_batch_size=4", "max_steps=4", "logging_steps=1", "warmup_steps=1"]
    assert forgather("train", *MIXTURE, *words, "callbacks.json={}", "output_dir=run", "save_strategy=no") == 0
    logged = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [each["loss"] for each in logged if "loss" in each]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0]
    capsys.readouterr()
    found = document(capsys, "data", "audit", "run")
    assert (found["lost"], found["repeated"]) == (0, 0)
