"""``precision=fp16``: autocast with a scaled loss, against plain PyTorch with ``torch.amp.GradScaler``."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from parity import LAYOUTS, Result, corpus, go_on, scratch, train
from selection import some
from torch import Tensor, nn

from forgather_cli import Trainer, TrainingArguments
from forgather_cli.checkpoint.load import Reader
from forgather_cli.errors import ConfigError, DivergenceError
from forgather_cli.run_dir import RunDir

FP16 = torch.float16
HIGH = (f"precision.init_scale={2.0**24}", "precision.growth_interval=3")
"""2^24 overflows at first, and so does what three steps without overflow double."""


LR, WARMUP, CLIP = 1e-2, 4, 0.5


def plain(batches: list[list[dict[str, Tensor]]]) -> SimpleNamespace:
    """The same steps with torch's GradScaler."""
    model = tiny.decoder()
    found = SimpleNamespace(losses=[], norms=[], scales=[], updates=[], model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    for step, parts in enumerate(batches):
        found.scales.append(scaler.get_scale())
        targets = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        losses = []
        for part in parts:
            with torch.autocast("cpu", dtype=FP16):
                logits = model(part["input_ids"])[:, :-1].flatten(0, 1)
            losses.append(F.cross_entropy(logits.float(), part["labels"][:, 1:].flatten(), reduction="sum") / targets)
            scaler.scale(losses[-1]).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if norm.isfinite():
            schedule.step()
            found.updates.append(step)
        found.losses.append(sum(loss.item() for loss in losses))
        found.norms.append(float(norm))
    return found


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # GradScaler hides the skipped first step
def test_one_device_is_a_plain_loop_with_a_grad_scaler(tmp_path: Path) -> None:
    seen = SimpleNamespace(losses=[], norms=[], scales=[], updates=[])

    def measured(state: Any, control: Any, loss: Any, grad_norm: Any, **_: Any) -> None:
        seen.losses.append(float(loss))
        seen.norms.append(float(grad_norm))

    notes = tiny.acts(
        on_step_begin=lambda state, control, trainer, **_: seen.scales.append(trainer.run.scaler.scale),
        on_optimizer_step=lambda state, control, **_: seen.updates.append(state.global_step),
        on_train_metrics=measured,
    )
    arguments = tiny.config(
        tmp_path, "precision=fp16", *HIGH, "max_steps=30", f"learning_rate={LR}", "lr_scheduler=constant",
        f"warmup_steps={WARMUP}", "weight_decay=0", f"max_grad_norm={CLIP}", "per_device_train_batch_size=4",
        "save_strategy=no", "eval_strategy=no", "logging_steps=1", "logging_first_step=true",
    )  # fmt: skip
    trainer = Trainer(tiny.decoder(), arguments, train_dataset=tiny.RandomTokens(ragged=True), callbacks=[notes])
    batches = tiny.note_batches(trainer.strategy)
    trainer.train()
    expected = plain(batches)
    assert {len(parts) for parts in batches} == {2}, "micro-batches are accumulated"
    assert seen.scales == expected.scales
    assert seen.updates == expected.updates
    skipped = sorted(set(range(30)) - set(expected.updates))
    assert len(skipped) > 3
    assert max(skipped) > expected.updates[3], "an overflow in the middle, of a scale that has grown"
    assert seen.losses == pytest.approx(expected.losses, rel=1e-6)
    updates = expected.updates
    assert [seen.norms[n] for n in updates] == pytest.approx([expected.norms[n] for n in updates], rel=1e-5)
    for ours, theirs in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert trainer.state.global_step == 30
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(LR)
    logs = [record for record in trainer.state.log_history if "loss_scale" in record]
    assert [record["step"] for record in logs] == list(range(1, len(seen.losses) + 1))
    for step, record in enumerate(logs):
        assert record["loss"] == pytest.approx(seen.losses[step])
        assert record["skipped_steps"] == sum(n <= step for n in skipped)
        assert ("grad_norm" in record) == ("max_grad_norm" in record) == (step not in skipped)
        if step not in skipped:
            assert record["grad_norm"] == pytest.approx(seen.norms[step])


BASE = (
    *corpus(), "precision=fp16", "model.num_hidden_layers=4", "model.tie_word_embeddings=true", "global_batch_size=12",
    "max_grad_norm=0.2", "deterministic=true", "max_steps=10", "eval_steps=5", "warmup_steps=2",
)  # fmt: skip
SAVED = "+callbacks.probe.save_at=[5]"
ONE, TWO = ("per_device_train_batch_size=12",), ("per_device_train_batch_size=3",)


@functools.cache
def whole(layout: str, *more: str) -> Result:
    return train(LAYOUTS[layout], (*BASE, SAVED, *more), scratch() / f"fp16-{whole.cache_info().misses}")


@pytest.mark.parametrize(("layout", "loss"), [("ddp 2", "linear_cross_entropy"), ("fsdp2 2", "cross_entropy")])
def test_strategies_agree_within_what_fp16_rounds(layout: str, loss: str) -> None:
    """An fp16 number is off by up to 2^-11; losses, means of many, by less, and norms of updated weights by more."""
    found, expected = whole(layout, *TWO, f"loss={loss}"), whole("single", *ONE)
    assert found.losses == pytest.approx(expected.losses, rel=2**-11)
    assert found.eval_losses == pytest.approx(expected.eval_losses, rel=2**-11)
    assert found.norms == pytest.approx(expected.norms, rel=2**-7)
    assert {t.dtype for t in found.tensors().values()} == {torch.float32}


@pytest.mark.parametrize("layout", some(["single", "fsdp2 2", "ddp 2"], "single", "fsdp2 2"))
def test_resume_goes_on_with_scale_and_counts_bit_by_bit(tmp_path: Path, layout: str) -> None:
    batch = ONE if layout == "single" else TWO
    expected = whole(layout, *batch, *HIGH, "logging_steps=1")
    finite = [norm < float("inf") for norm in expected.norms]
    assert not all(finite)
    assert any(finite)
    found = go_on(LAYOUTS[layout], (*BASE, *batch, *HIGH), RunDir(expected.path).checkpoint(5), tmp_path)
    assert found.losses == expected.losses[5:]
    assert str(found.norms) == str(expected.norms[5:]), "infinite ones and NaN at the same steps"
    ours, theirs = found.tensors(), expected.tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for run in (expected.path, found.path):
        reader = Reader(RunDir(run).checkpoint(10))
        assert reader.state("loss_scale") == Reader(RunDir(expected.path).checkpoint(10)).state("loss_scale")
        assert reader.state("trainer")["metrics"]["skipped"][1] == finite.count(False)


def test_another_strategy_goes_on_with_the_scale(tmp_path: Path) -> None:
    source = whole("fsdp2 2", *TWO, *HIGH, "logging_steps=1")
    checkpoint = RunDir(source.path).checkpoint(5)
    saved = Reader(checkpoint).state("loss_scale")
    stop = "+callbacks.probe.stop_after=6"
    found = go_on(LAYOUTS["single"], (*BASE, *ONE, *HIGH, stop), checkpoint, tmp_path)
    assert found.losses == pytest.approx(source.losses[5:6], rel=2**-11)
    scale = Reader(RunDir(tmp_path).checkpoint(6)).state("loss_scale")["scale"]
    assert scale == saved["scale"] * (1.0 if found.norms[0] < float("inf") else 0.5)


class Overflows(nn.Module):
    """Its gradients are infinite from step ``sound`` on."""

    def __init__(self, sound: int) -> None:
        super().__init__()
        self.inner, self.left = tiny.decoder(), sound

    def forward(self, input_ids: Tensor) -> Tensor:
        self.left -= 1
        logits: Tensor = self.inner(input_ids)
        if self.left < 0:
            logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits


def test_gradients_that_always_overflow_end_the_run(tmp_path: Path) -> None:
    arguments = tiny.config(
        tmp_path, "precision=fp16", "precision.init_scale=4.0", "max_steps=20", "save_steps=2", "eval_strategy=no",
        "async_save=false",
    )  # fmt: skip
    trainer = Trainer(Overflows(sound=3), arguments, train_dataset=tiny.RandomTokens())
    message = (
        r"precision=fp16: the gradients of 3 steps in a row overflowed, by step 6, with a loss scale down to 1; "
        r"precision=bf16 has the range of fp32; forgather resume .* resumes from .*step-00000004"
    )
    with pytest.raises(DivergenceError, match=message):
        trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters()), "no overflow was applied"


def test_training_arguments_take_fp16(tmp_path: Path) -> None:
    trainer = tiny.script(tmp_path, evaluated=tiny.RandomTokens(8), fp16=True, max_steps=3, logging_steps=1)
    seen: list[torch.dtype] = []
    trainer.model.get_submodule("model.layers.0.mlp").register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 4.5
    assert set(seen) == {FP16}, "in training and in evaluation"
    assert trainer.state.log_history[0]["loss_scale"] == 65536.0
    with pytest.raises(ConfigError, match="fp16: excludes bf16"):
        TrainingArguments(str(tmp_path), fp16=True, bf16=True)
