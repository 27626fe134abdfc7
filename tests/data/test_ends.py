"""Tokens that end a text: a checkpoint names those that finalize writes, under every strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chats
import pytest
import tiny
import transformers
from program import forgather
from ranks import run_ranks

from forgather_cli.config.load import load_config
from forgather_cli.data.chat.ends import end_of_turn
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.text.tokenizer import FileTokenizer
from forgather_cli.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("one_thread")

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]  # the last is the tokenizer's own end
NAMED = {"turn": 1, "text": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats, a tokenizer with a template that ends a turn by a token of its own, and a model of transformers' with a
    third token that ends texts."""
    root = tmp_path_factory.mktemp("ends")
    chats.write_chats(root / "chats.jsonl", 20)
    tokenizer = chats.write_tokenizer(root / "tokenizer", CHATML, SPECIAL)
    chats.write_model(root / "theirs", "gpt2", len(tokenizer), n_embd=32, n_head=2, n_layer=2, n_positions=512,
                      bos_token_id=0, eos_token_id=7)  # fmt: skip
    tokenizer.save_pretrained(root / "theirs")
    return root


def trained(run: Path, words: list[str]) -> None:
    """Collective. Two steps on chats, with a checkpoint."""
    settings = ["data=instruct", "precision=fp32", "callbacks=minimal", "device=cpu", "seq_len=128", "max_steps=2",
                "global_batch_size=4", "eval_strategy=no", "async_save=false", f"output_dir={run}"]  # fmt: skip
    tiny.train(load_config(None, [*settings, *words]).config, RunDir(run))


def ends(directory: Path) -> Any:
    return json.loads((directory / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("trainer", ["single", "ddp", "pipeline", "fsdp2"])
def test_a_checkpoint_names_the_end_tokens_that_finalize_writes(trainer: str, place: Path, tmp_path: Path) -> None:
    words = ["model=nano", f"trainer={trainer}", f"data.files=[{place}/chats.jsonl]", f"data.cache_dir={place}/cache",
             f"data.tokenizer={place}/tokenizer"]  # fmt: skip
    if trainer == "single":
        trained(tmp_path / "run", words)
    else:
        run_ranks(2, trained, tmp_path / "run", words)
    model = RunDir(tmp_path / "run").checkpoint(2) / "model"
    assert ends(model) == [NAMED["text"], NAMED["turn"]]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert theirs.generation_config.eos_token_id == [NAMED["text"], NAMED["turn"]]
    if trainer == "single":
        assert forgather("finalize", str(model.parent), str(tmp_path / "final")) == 0
        assert ends(tmp_path / "final") == ends(model)


def test_of_a_class_of_transformers_with_ends_of_its_own(place: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", ["model=transformers", f"model.path={place}/theirs", "trainer=single",
                               f"data.files=[{place}/chats.jsonl]", f"data.cache_dir={place}/cache"])  # fmt: skip
    model = RunDir(tmp_path / "run").checkpoint(2) / "model"
    assert forgather("finalize", str(model.parent), str(tmp_path / "final")) == 0
    assert ends(tmp_path / "final") == ends(model) == [NAMED["text"], 7, NAMED["turn"]]


def test_a_tokenizer_of_transformers_tells_the_same(place: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(place / "tokenizer")
    ours = FileTokenizer(place / "tokenizer")
    assert end_of_turn(place / "tokenizer", theirs) == end_of_turn(place / "tokenizer", ours) == NAMED["turn"]
