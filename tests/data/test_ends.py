"""Fine-tuning on chats as a user does it, with a job that is killed; and the tokens that end a text."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import chats
import pytest
import tiny
import torch
import transformers
from program import Process, forgather
from ranks import run_ranks
from tiny import metrics, training_curve

from forgather_cli.config.load import load_config
from forgather_cli.data.chat.ends import end_of_turn
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.text.tokenizer import FileTokenizer
from forgather_cli.inference.source import load_source
from forgather_cli.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("one_thread")

NAMED = {"turn": 1, "text": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats, a tokenizer with a template that ends a turn by a token of its own, and a model of transformers' with a
    third token that ends texts."""
    root = tmp_path_factory.mktemp("ends")
    chats.write_chats(root / "chats.jsonl", 20)
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]  # the last is the tokenizer's own end
    tokenizer = chats.write_tokenizer(root / "tokenizer", CHATML, special)
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


@pytest.mark.parametrize(("model", "trainer"), [("nano", "single"), ("nano", "pipeline"), ("transformers", "single")])
def test_a_checkpoint_names_the_end_tokens_that_finalize_writes(
    model: str, trainer: str, place: Path, tmp_path: Path
) -> None:
    """Also those of a class of transformers that has ends of its own."""
    own = f"data.tokenizer={place}/tokenizer" if model == "nano" else f"model.path={place}/theirs"
    words = [f"model={model}", own, f"trainer={trainer}", f"data.files=[{place}/chats.jsonl]"]
    if trainer == "pipeline":
        run_ranks(2, trained, tmp_path / "run", words)
    else:
        trained(tmp_path / "run", words)
    made = RunDir(tmp_path / "run").checkpoint(2) / "model"
    assert ends(made) == [NAMED["text"], *([] if model == "nano" else [7]), NAMED["turn"]]
    if trainer == "single":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(made)
        assert theirs.generation_config.eos_token_id == ends(made)
        assert forgather("finalize", str(made.parent), str(tmp_path / "final")) == 0
        assert ends(tmp_path / "final") == ends(made)


def test_a_tokenizer_of_transformers_tells_the_same(place: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(place / "tokenizer")
    ours = FileTokenizer(place / "tokenizer")
    assert end_of_turn(place / "tokenizer", theirs) == end_of_turn(place / "tokenizer", ours) == NAMED["turn"]


def test_killed_resumed_and_finalized_as_a_user_does_it(tmp_path: Path) -> None:
    chats.write_chats(tmp_path / "chats.jsonl", 60)
    tokenizer = chats.write_tokenizer(tmp_path / "qwen3", CHATML)
    chats.write_model(tmp_path / "qwen3", "qwen3", len(tokenizer), tie_word_embeddings=True)
    words = [
        "chat_finetune", f"model.path={tmp_path}/qwen3", f"data.files=[{tmp_path}/chats.jsonl]",
        f"cache_dir={tmp_path}/cache", "eval_fraction=0.2", "seq_len=128", "global_batch_size=4",
        "per_device_train_batch_size=4", "logging_steps=1", "warmup_steps=1", "learning_rate=1e-2",
        "max_eval_samples=8", "eval_steps=12", "async_save=false", "deterministic=true", "device=cpu",
        "callbacks=minimal", "max_steps=12",
    ]  # fmt: skip
    alone, run, dest = (tmp_path / name for name in ("alone", "run", "model"))
    assert forgather("train", *words, "save_steps=12", f"output_dir={alone}") == 0
    with Process("train", *words, "save_steps=2", f"output_dir={run}", cwd=tmp_path) as job:
        job.read_until(r"checkpoint saved: .*step-0*4\b")
        job.process.kill()
        assert job.finish() == -signal.SIGKILL
    assert forgather("resume", str(run)) == 0
    assert training_curve(run) == training_curve(alone)
    assert [step for step, _, _ in training_curve(run)] == list(range(1, 13))
    first = next(record["loss"] for record in metrics(run) if "loss" in record)
    last = [record["eval_loss"] for record in metrics(run) if "eval_loss" in record][-1]
    assert last < 0.8 * first, "it has learned"
    weights = [RunDir(each).checkpoint(12) / "model" / "model.safetensors" for each in (run, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    # transformers loads what finalize wrote, and gives the checkpoint's logits
    assert forgather("finalize", str(run), str(dest)) == 0
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(dest, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(dest)
    assert tokenizer.chat_template == CHATML
    prompt = torch.tensor([tokenizer.apply_chat_template(chats.conversation(7), return_dict=True)["input_ids"]])
    ours = load_source(run, device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(prompt).logits, ours.model(prompt), rtol=1e-5, atol=1e-5)
    assert theirs.generation_config.eos_token_id in (2, [2]), "stops where the assistant's turn ends"
