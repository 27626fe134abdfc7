"""``Trainer.generate``: the same text on every rank, under every strategy, and none of training's random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_ranks

from forgather_cli import Trainer, TrainingArguments
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir

LAYOUTS = {"ddp": ("trainer=ddp",), "fsdp2": ("trainer=fsdp2",), "pipeline": ("trainer=pipeline", "n_microbatches=2")}
IDS = [[5, 9, 200, 31], [7]]


def written(root: str, *overrides: str) -> dict[str, Any]:
    run = Path(root)
    more = ("nproc_per_node=2",) if dist.is_initialized() else ()
    trainer = tiny.train(tiny.config(run, "save_strategy=no", "eval_strategy=no", *more, *overrides), RunDir(run))
    before = torch.get_rng_state()
    found = {
        "greedy": trainer.generate(IDS, max_new_tokens=12, temperature=0),
        "drawn": trainer.generate(["def ", ""], max_new_tokens=12, temperature=1.5, top_p=0.9, seed=7),
        "other seed": trainer.generate("def ", max_new_tokens=12, temperature=1.5, seed=8),
        "tensor": trainer.generate(torch.tensor(IDS[0]), max_new_tokens=3, do_sample=False),
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training for part in trainer.strategy.parts)
    if not dist.is_initialized():
        found["reference"] = [greedy(trainer.model, row, 12) for row in IDS]
    return found


def greedy(model: Any, row: list[int], count: int) -> list[int]:
    """The likeliest token of the whole sequence, again and again, until the end token."""
    model.eval()
    ids = list(row)
    for _ in range(count):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids]))[0, -1].argmax())
        if token == ByteTokenizer().eos_token_id:
            break
        ids.append(token)
    return ids


def test_every_strategy_writes_the_same_on_all_ranks(tmp_path: Path) -> None:
    alone = written(str(tmp_path / "single"))
    assert alone["greedy"] == alone.pop("reference")
    assert alone["drawn"][0].startswith("def ")
    assert alone["drawn"][0] != alone["other seed"]
    assert alone["tensor"] == alone["greedy"][0][:7]
    for layout, words in LAYOUTS.items():
        first, second = run_ranks(2, written, str(tmp_path / layout), *words)
        assert first == second, layout
        assert first == alone, layout


class Says(torch.nn.Module):
    """Writes the bytes of a text one after another, whatever the prompt."""

    def __init__(self, text: str, start: int) -> None:
        super().__init__()
        self.text, self.start, self.weight = text.encode(), start, torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*input_ids.shape, 257)
        logits[:, -1, (*self.text, 256)[input_ids.shape[1] - self.start]] = 9.0
        return logits + self.weight


def speaking(text: str, path: Path, start: int = 2, **given: Any) -> Trainer:
    return Trainer(Says(text, start), TrainingArguments(str(path)), processing_class=ByteTokenizer(), **given)


def test_texts_end_before_a_stop_and_at_the_end_token(tmp_path: Path) -> None:
    assert speaking("one two.", tmp_path).generate("ab", temperature=0) == "abone two."
    assert speaking("one two.", tmp_path).generate("ab", temperature=0, stop="tw") == "abone "
    assert speaking("one two.", tmp_path).generate(["ab", "cd"], temperature=0, stop=["x", "e"]) == ["abon", "cdon"]
    assert speaking("one", tmp_path).generate([1, 2], temperature=0) == [1, 2, *b"one"]
    assert speaking("one", tmp_path).generate([]) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": "ab", "top_kk": 3}, ("generate: top_kk", "top_k")),
        ({"prompts": "ab", "generation_steps": 3}, ("generation_steps",)),
        ({"prompts": 3}, ("prompts: got a int",)),
        ({"prompts": [1, 999]}, ("prompts", "64 tokens", "999")),
        ({"prompts": [[1], []]}, ("prompts", "[]")),
        ({"prompts": [[1], "ab"]}, ("prompts",)),
        ({"prompts": "ab", "tokenizer": None}, ("prompts", "processing_class")),
        ({"prompts": [1], "stop": "x", "tokenizer": None}, ("stop", "processing_class")),
    ],
)
def test_what_it_cannot_continue_is_named(tmp_path: Path, given: dict[str, Any], words: tuple[str, ...]) -> None:
    tokenizer = given.pop("tokenizer", ByteTokenizer())
    trainer = Trainer(tiny.decoder(), TrainingArguments(str(tmp_path)), processing_class=tokenizer)
    with pytest.raises(ConfigError) as refused:
        trainer.generate(**given)
    assert all(word in str(refused.value) for word in words), str(refused.value)
