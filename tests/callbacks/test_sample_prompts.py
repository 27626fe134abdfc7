"""What samples are written to: prompts from held-out data, and a user's own as turns of a chat."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import write_chats, write_tokenizer
from ranks import run_ranks
from tiny import RandomTokens, decoder, script, stream, train, training_curve

from forgather_cli.callbacks.textgen import TextgenCallback
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.run_dir import RunDir

STRATEGIES = {
    "single": (1, ["trainer=single"]),
    "ddp": (2, ["trainer=ddp"]),
    "pipeline": (2, ["trainer=pipeline", "n_microbatches=2"]),
    "fsdp2": (2, ["trainer=fsdp2"]),
}
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_chats(folder / "chats.jsonl", 40)
    write_chats(folder / "held_out.jsonl", 4, first=901)
    (folder / "text.txt").write_text("Training only, which is not held out. " * 60)
    (folder / "held_out.txt").write_text("Zebras and llamas graze on the wide plain near the river. " * 9)
    write_tokenizer(folder / "tokenizer", CHATML)
    return folder


def settings(corpus: Path, path: Path, kind: str, *words: str) -> Config:
    end = "jsonl" if kind == "instruct" else "txt"
    files = [f"data.files=[{corpus}/{'chats' if end == 'jsonl' else 'text'}.{end}]"]
    files += [f"data.eval_files=[{corpus}/held_out.{end}]", f"data.cache_dir={corpus}/cache", "seq_len=64"]
    base = [
        "model=nano", "precision=fp32", f"data={kind}", f"tokenizer={corpus}/tokenizer", *files, f"output_dir={path}",
        "global_batch_size=4", "max_steps=4", "eval_steps=2", "save_strategy=no", "logging_steps=1",
        "callbacks=minimal",
    ]  # fmt: skip
    return load_config(None, [*base, *words]).config


SAMPLES = ["+callbacks.textgen.max_new_tokens=6", "callbacks.textgen.do_sample=false"]


def on_a_rank(config: Config, path: Path) -> None:
    train(config, RunDir(path))


def samples(path: Path) -> list[str]:
    """The texts of the first record."""
    record = (path / "samples.txt").read_text().split("=== step 4 ===")[0]
    return [text.partition(" ---\n")[2] for text in record.split("\n--- ")[1:]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_prompts_of_the_users_samples_begin_as_held_out_data(
    corpus: Path, tmp_path: Path, strategy: str
) -> None:
    ranks, words = STRATEGIES[strategy]
    for name, more in (("run", SAMPLES), ("silent", [])):
        made = settings(corpus, tmp_path / name, "instruct", *words, *more)
        run_ranks(2, on_a_rank, made, tmp_path / name) if ranks == 2 else on_a_rank(made, tmp_path / name)
    first, second = samples(tmp_path / "run")
    assert first.startswith(TURN.format("What is 901 + 0?\n")), "up to the answer, which the model is to write"
    assert "<|im_start|>user\nWhat is 90" in second
    assert second.count("assistant\n") == 1
    curve = training_curve(tmp_path / "run")
    assert curve == training_curve(tmp_path / "silent")
    assert len(curve) == 4


def test_text_that_is_held_out_is_continued(corpus: Path, tmp_path: Path) -> None:
    on_a_rank(settings(corpus, tmp_path, "text", *SAMPLES), tmp_path)
    assert samples(tmp_path)[0].startswith("Zebras and l")


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_of_the_users_is_a_turn_of_a_chat(corpus: Path, tmp_path: Path, raw: bool) -> None:
    words = [*SAMPLES, "callbacks.textgen.prompts=[Hello]", f"callbacks.textgen.raw={raw}"]
    on_a_rank(settings(corpus, tmp_path, "instruct", *words), tmp_path)
    assert samples(tmp_path)[0].startswith("Hello" if raw else TURN.format("Hello"))


def test_users_data_are_read_as_without_samples(tmp_path: Path) -> None:
    class Drawn(RandomTokens):
        """Each example draws from every generator that users know."""

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            noise = random.random() + np.random.random() + float(torch.rand(()))
            example = super().__getitem__(index)
            return {**example, "input_ids": (example["input_ids"] + int(20 * noise)) % 64}

    def losses(folder: str, data: Any, **given: Any) -> list[float]:
        trainer = script(tmp_path / folder, decoder(vocab_size=257), data, max_steps=4, logging_steps=1, **given)
        trainer.train()
        return [record["loss"] for record in trainer.state.log_history if "loss" in record]

    for name, data in (("numbers", Drawn), ("stream", lambda: stream(RandomTokens()))):
        told = TextgenCallback(generation_steps=2, max_new_tokens=3, do_sample=False)
        with_samples = losses(f"{name}-1", data(), callbacks=[told], processing_class=ByteTokenizer())
        assert with_samples == losses(f"{name}-2", data(), processing_class=ByteTokenizer())
        first = samples(tmp_path / f"{name}-1")
        assert len(first) == (2 if name == "numbers" else 1), "what can be read once is not read: the begin token"
        assert name == "numbers" or first[0].startswith("<|endoftext|>")
