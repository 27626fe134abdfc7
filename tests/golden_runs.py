"""The golden runs: how those in ``tests/golden/`` were made. ``tests/test_golden.py`` goes on with them.

Each folder there is a run that was cut off after ``STOPPED`` of ``MAX_STEPS`` steps, as the commit that its
``expected.json`` names left it: ``config.yaml``, ``origin.yaml``, ``metrics.jsonl`` and the checkpoint, which format
version 1 promises to be readable. ``expected.json`` (records of the steps after it) and ``expected.safetensors``
(weights after the last step) are those of the same run uninterrupted. ``data/`` has what they were trained on.

    scripts/make_golden [CASE...]    # trains the cases that are not there yet; never touches one that is

Component keys, kinds, class names of optimizers and callbacks, seeds and all that goes into a digest are format: where
a golden run cannot be resumed any more, the code is wrong and not the folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.run_dir import RunDir

GOLDEN = Path(__file__).parent / "golden"
STOPPED, MAX_STEPS = 6, 10


class Notes(TrainerCallback):
    """A user's callback whose state has every type that a state may hold. Ends the run after step ``stop_after``."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.state: dict[str, Any] = {
            "steps": [], "total": torch.zeros((), dtype=torch.float64), "seen": np.zeros(3, np.int32), "pair": (1, "ü"),
            "bytes": b"\x00\xff", "nothing": None, "yes": True, "half": 0.5, "infinite": float("inf"),
            "nested": {"": {}}, "bf16": torch.arange(4, dtype=torch.bfloat16),
        }  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state["steps"].append(state.global_step)
        self.state["total"] += state.global_step
        self.state["seen"] += np.array([0, 1, 2], np.int32)
        control.should_training_stop |= state.global_step == self.stop_after

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


_BASE = (
    f"max_steps={MAX_STEPS}", f"save_steps={STOPPED}", "deterministic=true", "global_batch_size=8", "logging_steps=1",
    "learning_rate=5e-3", "warmup_steps=3", "max_grad_norm=0.5", "eval_steps=8", "max_eval_samples=6",
    "per_device_eval_batch_size=4", "precision=fp32", "callbacks=minimal", "model=nano", "model.hidden_size=16",
    "model.intermediate_size=16", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=8",
    "data.seq_len=16", "+callbacks.notes._target_=golden_runs.Notes",
)  # fmt: skip
_LETTERS = "data.tokenizer=data/letters"
_HELD_OUT = ("data.eval_fraction=0.2", "data.cache_dir=cache")
_TEXT = ("data=text", "data.files=[data/corpus.jsonl]", *_HELD_OUT)
_STREAM = ("data=hf", "data.data_files=[data/first.jsonl,data/second.jsonl]", "data.eval_files=[data/corpus.jsonl]",
           "data.streaming=true")  # fmt: skip
_TIED = "model.tie_word_embeddings=true"
_GROUPS = (
    "+optimizer.groups.attention={regex: self_attn, settings: {lr: 0.05}, optimizer: {type: sgd, momentum: 0.9}}",
    "+optimizer.groups.mlp={regex: mlp, settings: {weight_decay: 0.2}, optimizer: {type: adamw, betas: [0.8, 0.9]}}",
    "+optimizer.groups.late={regex: embed_tokens, settings: {lr: 1.0}}",  # the shipped no_decay is before it
)


def _pipeline(schedule: str, layers: int = 4) -> tuple[str, ...]:
    return ("trainer=pipeline", f"schedule={schedule}", f"model.num_hidden_layers={layers}")


CASES: dict[str, tuple[str, ...]] = {
    # the default tokenizer; saved within a logging interval
    "single": (*_TEXT, "logging_steps=4"),
    "single-muon": (*_TEXT, _LETTERS, _TIED, "optimizer=muon", "lr_scheduler=wsd", "model.residual_dropout=0.1"),
    "single-adafactor": ("data=instruct", "data.files=[data/chats.jsonl]", "data.chat_template=chatml",
                         "data.seq_len=64", *_HELD_OUT, "optimizer=adafactor", "lr_scheduler=constant", _TIED),
    "single-bf16_true": (*_TEXT, "data.tokenizer=bpe", "data.bpe_vocab_size=270", "precision=bf16_true",
                         "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.nesterov=true",
                         "lr_scheduler=inverse_sqrt", _TIED),
    "ddp": ("trainer=ddp", "data=tokens", "data.files=[data/tokens.npy]", "data.document_separator=0", _LETTERS,
            *_HELD_OUT, "data.isolate_documents=true", "load_best_model_at_end=true", "eval_steps=3"),
    "ddp-post_local_sgd": ("trainer=ddp", *_TEXT, _LETTERS, "trainer.post_local_sgd.enabled=true",
                           "trainer.post_local_sgd.start_step=2", "trainer.post_local_sgd.period=2"),
    "ddp-fp16": ("trainer=ddp", *_TEXT, _LETTERS, _TIED, "precision=fp16", "precision.init_scale=4194304",
                 "precision.growth_interval=2"),
    "ddp-stream": ("trainer=ddp", *_STREAM, _LETTERS, "data.shuffle_buffer=8", "trainer.comm_hook=powersgd"),
    "ddp-shards": ("trainer=ddp", *_STREAM, _LETTERS, "data.dispatch_batches=false",
                   "data.dispatch_eval_batches=true", "data.packing=best_fit"),
    "fsdp2": ("trainer=fsdp2", *_TEXT, _LETTERS, _TIED, "data.packing=best_fit", "data.isolate_documents=true",
              "lr_scheduler=linear", "eval_steps=2", "+callbacks.parameter_norms={}", "+callbacks.early_stopping={}",
              "+callbacks.divergence={threshold: 3.0}"),
    "fsdp2-muon": ("trainer=fsdp2", *_TEXT, _LETTERS, "optimizer=muon", "per_device_train_batch_size=2",
                   "logging_steps=4"),
    "fsdp2-optimizers": ("trainer=fsdp2", *_TEXT, _LETTERS, _TIED, *_GROUPS),
    "1F1B": (*_pipeline("1F1B", 2), "data=synthetic", "data.num_samples=50", "data.num_eval_samples=6",
             "data.ragged=true", _LETTERS),
    "GPipe": (*_pipeline("GPipe", 2), *_TEXT, _LETTERS, _TIED, "optimizer=muon", "lr_scheduler=infinite"),
    "Interleaved1F1B": (*_pipeline("Interleaved1F1B"), *_TEXT, _LETTERS, _TIED, *_GROUPS),
    "LoopedBFS": (*_pipeline("LoopedBFS"), *_TEXT, _LETTERS, "loss=linear_cross_entropy", "chunk_size=20",
                  "logging_steps=4"),
    "InterleavedZeroBubble": (*_pipeline("InterleavedZeroBubble"), *_TEXT, _LETTERS, "optimizer=muon",
                              "data.packing=pad"),
    "ZBVZeroBubble": (*_pipeline("ZBVZeroBubble"), *_TEXT, _LETTERS, _TIED),
    "DualPipeV": (*_pipeline("DualPipeV"), *_TEXT, _LETTERS, *_GROUPS),
}  # fmt: skip


_RECORDED = (
    "step", "epoch", "loss", "grad_norm", "max_grad_norm", "tokens", "total_tokens", "total_flos", "eval_loss",
    "eval_tokens", "skipped_steps", "loss_scale",
)  # fmt: skip


def make(names: list[str]) -> int:
    """Train the cases ``names``, or all, that are not stored yet; 1 if one of ``names`` is."""
    if existing := [name for name in names if (GOLDEN / name).exists()]:
        print(
            f"{', '.join(existing)}: stored already, and never made again: it proves that old checkpoints are readable"
        )
        return 1
    missing = [name for name in names or CASES if not (GOLDEN / name).exists()]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)  # the runs see nothing but relative paths
        if not (GOLDEN / "data").exists():
            write_data(GOLDEN / "data")
        shutil.copytree(GOLDEN / "data", work / "data")
        for name in missing:
            print(name, flush=True)
            _train(work, name, name, f"+callbacks.notes.stop_after={STOPPED}")
            _train(work, name, "whole", "save_total_limit=null")
            _store(work, name)
            shutil.rmtree(work / "whole")
    return 0


def _train(work: Path, name: str, output_dir: str, *more: str) -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "forgather_cli", "train", *_BASE, *CASES[name], *more, f"output_dir={output_dir}"]
    path = os.pathsep.join([str(root), str(root / "tests")])
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(work / "config")}
    done = subprocess.run(command, cwd=work, env={**os.environ, **settings}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _store(work: Path, name: str) -> None:
    run, whole = RunDir(work / name), RunDir(work / "whole")
    assert run.checkpoint_steps() == [STOPPED], run.checkpoint_steps()
    assert whole.checkpoint_steps()[-1] == MAX_STEPS
    origin = yaml.safe_load(run.origin.read_text())
    origin["recipe_path"] = str(Path(origin["recipe_path"]).relative_to(Path(__file__).parents[1]))
    run.origin.write_text(yaml.safe_dump(origin, sort_keys=False))
    records = [json.loads(line) for line in whole.metrics.read_text().splitlines()]
    later = [{key: r[key] for key in _RECORDED if key in r} for r in records if r["step"] > STOPPED]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=GOLDEN, capture_output=True, text=True).stdout.strip()
    expected = {
        "commit": commit,
        "versions": origin["versions"],
        "records": [record for record in later if {"loss", "eval_loss"} & record.keys()],
    }
    target = GOLDEN / name
    target.mkdir()
    for entry in ("config.yaml", "origin.yaml", "metrics.jsonl", "checkpoints"):  # cut off: no exit.json
        source = run.root / entry
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target / entry)
    shutil.copy(whole.checkpoint(MAX_STEPS) / "model/model.safetensors", target / "expected.safetensors")
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def write_data(folder: Path) -> None:
    """Short documents of 20 letters, conversations, token ids, and a tokenizer of letters."""
    import tokenizers

    numbers = random.Random(0)
    folder.mkdir(parents=True)

    def documents(count: int) -> list[str]:
        return ["".join(numbers.choices("abcdefghijklmnopqrs ", k=numbers.randrange(8, 40))) for _ in range(count)]

    for name, count in {"corpus": 60, "first": 40, "second": 40}.items():
        lines = [json.dumps({"text": text}) + "\n" for text in documents(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    talks = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
        for a, b in zip(documents(60), documents(60), strict=True)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    ids = [id for text in documents(60) for id in (*(1 + ord(letter) % 20 for letter in text), 0)]
    np.save(folder / "tokens.npy", np.array(ids, np.uint16))
    vocabulary = {token: number for number, token in enumerate(["<end>", *" abcdefghijklmnopqrs", "?"])}
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    (folder / "letters").mkdir()
    letters.save(str(folder / "letters/tokenizer.json"))
    (folder / "letters/tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<end>"}) + "\n"
    )


if __name__ == "__main__":
    raise SystemExit(make(sys.argv[1:]))
