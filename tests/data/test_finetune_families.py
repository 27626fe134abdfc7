"""A model directory of each family that the decoder covers, fine-tuned on chats, resumed, finalized, and loaded by
transformers; one of them as a user does it, with a job that is killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import chats
import pytest
import torch
import transformers
from program import Process, forgather
from tiny import metrics, training_curve

from forgather_cli.data.chat.template import CHATML
from forgather_cli.inference.source import load_source
from forgather_cli.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 40}),
    "qwen2": ("qwen2", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}
STEPS = ("seq_len=128", "global_batch_size=4", "per_device_train_batch_size=4", "logging_steps=1", "warmup_steps=1",
         "learning_rate=1e-2", "max_eval_samples=8", "eval_steps=8", "save_steps=2", "async_save=false",
         "deterministic=true", "device=cpu", "callbacks=minimal")  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats, and the model directory of each family with a tokenizer that has a chat template."""
    root = tmp_path_factory.mktemp("families")
    chats.write_chats(root / "chats.jsonl", 60)
    for name, (model_type, changes) in FAMILIES.items():
        tokenizer = chats.write_tokenizer(root / name, CHATML)
        chats.write_model(root / name, model_type, len(tokenizer), **changes)
    return root


def words(place: Path, name: str, run: Path, *more: str) -> list[str]:
    data = [f"data.files=[{place}/chats.jsonl]", f"cache_dir={place}/cache", "eval_fraction=0.2"]
    return ["chat_finetune", f"model.path={place / name}", *data, *STEPS, f"output_dir={run}", *more]


def ids(directory: Path) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == CHATML
    made = tokenizer.apply_chat_template(chats.conversation(7), return_dict=True)
    return torch.tensor([made["input_ids"]])


def assert_finalized(run: Path, dest: Path) -> None:
    """transformers loads what ``finalize`` wrote, and gives the checkpoint's logits."""
    assert forgather("finalize", str(run), str(dest)) == 0
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(dest, output_loading_info=True)
    assert not any(info.values()), info
    ours = load_source(run, device="cpu")
    prompt = ids(dest)
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(prompt).logits, ours.model(prompt), rtol=1e-5, atol=1e-5)
    assert theirs.generation_config.eos_token_id in (2, [2]), "stops where the assistant's turn ends"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen2"])
def test_fine_tuned_resumed_and_finalized(name: str, place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert forgather("train", *words(place, name, run, "max_steps=4")) == 0
    assert forgather("resume", str(run), "max_steps=8") == 0
    assert [step for step, _, _ in training_curve(run)] == list(range(1, 9))
    first = next(record["loss"] for record in metrics(run) if "loss" in record)
    last = [record["eval_loss"] for record in metrics(run) if "eval_loss" in record][-1]
    assert last < 0.8 * first, "it has learned"
    assert_finalized(run, tmp_path / "model")


def test_killed_and_resumed_as_a_user_does_it(place: Path, tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert forgather("train", *words(place, "qwen2", alone, "max_steps=12", "save_steps=12")) == 0
    with Process("train", *words(place, "qwen2", run, "max_steps=12"), cwd=tmp_path) as job:
        job.read_until(r"checkpoint saved: .*step-0*4\b")
        job.process.kill()
        assert job.finish() == -signal.SIGKILL
    assert forgather("resume", str(run)) == 0
    assert training_curve(run) == training_curve(alone)
    newest = RunDir(run).checkpoint(12)
    weights = (newest / "model" / "model.safetensors").read_bytes()
    assert weights == (RunDir(alone).checkpoint(12) / "model" / "model.safetensors").read_bytes()
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    assert_finalized(run, tmp_path / "model")
