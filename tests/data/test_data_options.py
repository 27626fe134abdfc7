"""Every option of the group data: what its source tells others, how two ranks share it, and how it goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import write_chats, write_lines
from paired import SHAPE
from program import forgather
from test_loader import at, loader

from forgather_cli.config.explain import explain
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import DataSettings
from forgather_cli.data.build import source_of
from forgather_cli.data.loaders.map_style import is_map_style
from forgather_cli.data.splits import DataSource
from forgather_cli.models.build import most_tokens
from forgather_cli.models.pretrained import num_sentinels
from forgather_cli.worker import read_data

pytestmark = pytest.mark.usefixtures("own_directory")

ROWS: dict[str, list[str]] = {
    "python_stdlib": ["seq_len=32"],
    "text": ["data.files=[pages.jsonl]", "seq_len=32"],
    "hf": ["data.data_files=[pages.jsonl]", "seq_len=32"],
    "tokens": ["data.files=[tokens.npy]", "seq_len=16"],
    "instruct": ["data.files=[chats.jsonl]", "data.chat_template=chatml", "seq_len=128"],
    "preference": ["data.files=[preferred.jsonl]", "data.chat_template=chatml", "seq_len=128", "loss=dpo"],
    "synthetic": ["seq_len=16", "num_samples=64"],
    "mixture": ["data.sources={a: {type: text, files: [pages.jsonl]}, b: {type: tokens, files: [tokens.npy]}}",
                "+data.sources.c={type: instruct, files: [chats.jsonl], packing: pad}", "data.chat_template=chatml",
                "data.isolate_documents=false", "data.seq_len=64"],
    "ul2": ["source=text", "data.files=[pages.jsonl]", "max_seq_length=96", "max_encoder_length=96",
            "max_decoder_length=64", *SHAPE],
    "seq2seq": ["data.files=[pairs.jsonl]", "max_encoder_length=64", "max_decoder_length=48", *SHAPE],
}  # fmt: skip
"""Option -> the words that make it small, on the files below."""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 40)
    write_lines(tmp_path / "pages.jsonl", [{"text": f"A page, number {n}. " * (1 + n % 4)} for n in range(60)])
    write_lines(tmp_path / "pairs.jsonl", [{"input": f"question {n}", "target": f"answer {n}"} for n in range(40)])
    pairs = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(40)]
    write_lines(tmp_path / "preferred.jsonl", pairs)
    np.save(tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16) % 11)


@pytest.mark.parametrize("option", DataSettings.members, ids=lambda option: option.type)
def test_an_option_of_the_group_data(option: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert option.type in ROWS, f"no row of ROWS knows data={option.type}; add one"
    model = ["hidden_size=32"] if option.is_paired else ["model=nano"]
    common = ["data.tokenizer=bytes", "precision=fp32", "callbacks=minimal", "device=cpu"]
    words = [f"data={option.type}", *ROWS[option.type], *model, *common]
    config = load_config("default", words).config
    assert issubclass(option(**dict(vars(config.data))).load_maker(), DataSource)
    data = read_data(config)
    assert data.fingerprint == read_data(config).fingerprint
    assert is_map_style(data.train) is not config.data.is_stream

    source = source_of(config.data, num_sentinels=num_sentinels(config.model), model_tokens=most_tokens(config))
    assert source.vocabulary() == (data.vocab_size, data.num_new)
    counts = source.counts() or {"vocab_size": data.vocab_size, "train_tokens": None}
    assert counts["vocab_size"] == data.vocab_size
    assert counts["train_tokens"] in (None, data.description.get("train_tokens"))
    steps = list(zip(range(3), reader := loader(data.train), strict=False))
    [first, second] = [step.microbatches for _, step in steps][:2]
    encoder, decoder = source.sides()
    assert {batch["input_ids"].shape[1] for batch in first} == {encoder}
    assert all(("decoder_input_ids" in batch) is (decoder > 0) for batch in first)

    # two ranks read what one reads; from the position behind the first step comes the second
    if is_map_style(data.train):
        ranks = [next(iter(loader(data.train, rank=rank, size=2))).microbatches for rank in range(2)]
        assert torch.equal(rows(ranks[0] + ranks[1]), rows(first))
    reader = loader(data.train)
    next(iter(reader))
    assert torch.equal(rows(next(iter(at(reader.state_dict(), loader(data.train)))).microbatches), rows(second))

    assert forgather("plan", *words, "max_steps=2") == 0
    for field in dataclasses.fields(option):
        if field.name != "type" and field.default is not dataclasses.MISSING:
            [explained] = explain(f"data.{field.name}")
            assert f"data={option.type}" in explained.values


def rows(batches: Any) -> torch.Tensor:
    return torch.cat([batch["input_ids"] for batch in batches])
