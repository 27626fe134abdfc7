"""A model tuned on chats learns which of two answers is preferred, by the commands as a user types them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from chats import write_lines, write_model, write_table, write_tokenizer
from pair_records import said
from program import Process, forgather, shown

from forgather_cli.data.chat.template import CHATML

WORDS = ["apple", "river", "stone", "cloud", "table", "horse", "bread", "glass", "paper", "light"]
SMALL = ("seq_len=80", "callbacks=minimal", "device=cpu", "cache_dir=cache")
BEST = ("eval_on_start=true", "metric_for_best_model=eval_rewards/accuracies", "greater_is_better=true")
COMMANDS = {
    "whole": ["data.files=[pairs.jsonl]", "learning_rate=1e-4"],
    "lora": ["adapter=lora", "learning_rate=1e-3", "data.files=[pairs.parquet]", "trainer=fsdp2", "nproc_per_node=2"],
    "orpo": ["loss.variant=orpo", "data.files=[pairs.jsonl]", "learning_rate=1e-3"],
}


def answers(random: random.Random) -> tuple[str, str, str]:
    """What is asked, and two answers of which the first follows the rule."""
    things = " ".join(random.choices(WORDS, k=3))
    return f"Say {things}.", f"Gladly: {things}. Thank you.", f"Whatever: {things}. Go away."


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with pairs and a model, ``base``, that answers either way."""
    here, draws = tmp_path_factory.mktemp("tuned"), random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        chats = []
        for number in range(320):
            asked, *either = answers(draws)
            chats.append({"messages": [said("user", asked), said("assistant", either[number % 2])]})
        pairs = [dict(zip(("prompt", "chosen", "rejected"), answers(draws), strict=True)) for _ in range(320)]
        write_lines(here / "chats.jsonl", chats)
        write_lines(here / "pairs.jsonl", pairs)
        write_table(here / "pairs.parquet", pairs)
        size = len(write_tokenizer(here / "fresh", CHATML))
        write_model(here / "fresh", "llama", size, max_position_embeddings=2048, initializer_range=0.02)
        words = ["model.path=fresh", "data.files=[chats.jsonl]", "learning_rate=5e-3", "max_steps=20"]
        assert forgather("train", "chat_finetune", *words, "output_dir=tuned", *SMALL) == 0
        assert forgather("finalize", "tuned", "base") == 0
    return here


@pytest.mark.parametrize("name", COMMANDS)
def test_held_out_pairs_are_told_apart(
    name: str, tuned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tuned)
    words = ["train", "dpo", "model.path=base", *COMMANDS[name], f"output_dir={name}", "eval_steps=8", *BEST, *SMALL]
    with Process(*words) as process:
        assert process.finish() == 0, process.output
    records = [json.loads(line) for line in (tuned / name / "metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if "eval_loss" in record]
    assert found[-1]["eval_rewards/accuracies"] > 0.9
    assert found[-1]["eval_rewards/margins"] > found[0]["eval_rewards/margins"]
    assert re.search(r"step 9/9 .*pair_acc \d+\.\d% margin -?\d", process.output)
    assert re.search(r"step 8 eval loss \S+ pair_acc (9\d|100)\.\d% margin \d", process.output)
    if name == "whole":
        assert re.search(r"accuracy of pairs +(9\d|100)\.", shown(capsys, "eval", name))
