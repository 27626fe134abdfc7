"""What the loop does to its process: when Python's garbage is collected, and when cached device memory is released."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from forks import FREEZE_COUNT

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import DivergenceError
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.process import garbage_collection


class Litter(TrainerCallback):
    """Leaves more garbage in each step than the collector lets lie, and notes after which steps it is collected."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.collected: list[int] = []
        self.enabled: set[bool] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        self.enabled.add(gc.isenabled())
        for _ in range(10 * gc.get_threshold()[0]):
            cycle: list[Any] = []
            cycle.append(cycle)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = None

    def heard(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and self.step is not None:
            self.collected.append(self.step)


def test_garbage_is_collected_every_gc_steps_and_at_no_other_moment(tmp_path: Path) -> None:
    litter = Litter()
    trainer = tiny.script(tmp_path, max_steps=7, gc_steps=3, callbacks=[litter])
    gc.callbacks.append(litter.heard)
    try:
        trainer.train()
    finally:
        gc.callbacks.remove(litter.heard)
    assert litter.collected == [3, 6]
    assert litter.enabled == {False}
    assert gc.isenabled()


def test_what_the_program_has_frozen_stays_frozen_and_what_it_has_not_is_thawed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", FREEZE_COUNT)
    was_frozen = gc.get_freeze_count() > 0
    try:
        for frozen in (True, False):
            gc.freeze() if frozen else gc.unfreeze()
            with garbage_collection(RunSettings()):
                assert gc.get_freeze_count() > 0
            assert (gc.get_freeze_count() > 0) == frozen
    finally:
        if was_frozen:
            gc.freeze()


def test_a_collector_that_was_off_stays_off_and_one_that_was_on_is_on_after_an_error() -> None:
    for was_on in (True, False):
        gc.enable() if was_on else gc.disable()
        try:
            with pytest.raises(ZeroDivisionError), garbage_collection(RunSettings()):
                raise ZeroDivisionError
            assert gc.isenabled() == was_on
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("threshold", "reserved", "allocated", "released"),
    [
        (0.8, 81, 70, True),
        (0.8, 80, 0, False),  # not above the threshold
        (0.8, 95, 85, False),  # no more than a tenth of the device can be won
        (None, 99, 0, False),
    ],
)
def test_cuda_memory_is_released_above_the_threshold_where_a_tenth_can_be_won(
    monkeypatch: pytest.MonkeyPatch, threshold: float | None, reserved: int, allocated: int, released: bool
) -> None:
    """torch.cuda as it would answer on a device of 100 bytes."""
    emptied: list[bool] = []
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=100),
        "memory_reserved": lambda: reserved,
        "memory_allocated": lambda: allocated,
        "empty_cache": lambda: emptied.append(True),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    garbage_collection(RunSettings(gc_threshold=threshold)).after_step(1)
    assert emptied == [True] * released


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the heap is not glibc's")
def test_a_long_step_gives_free_memory_back_and_a_short_one_keeps_it() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [torch.ones(25_000) for _ in range(1000)]  # 100 kB each, less than has a mapping of its own
    blocks = blocks[::4]  # holes, which no end of the heap can give back
    collector, before = garbage_collection(RunSettings()), resident()
    collector.after_step(1)
    kept = resident()
    began = time.process_time()
    while time.process_time() < began + 0.15:
        torch.ones(1000).sum()
    collector.after_step(2)
    assert before - kept < 1e6
    assert kept - resident() > 50e6
    assert all(bool(block.all()) for block in blocks)


def test_fp32_products_are_as_precise_as_the_setting_says(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    tiny_run = ["max_steps=1", "save_strategy=no", "eval_strategy=no", "float32_matmul_precision=medium"]
    tiny.train(tiny.config(tmp_path, *tiny_run), RunDir(tmp_path))
    assert torch.get_float32_matmul_precision() == "medium"
    tiny.train(tiny.config(tmp_path, *tiny_run[:-1]), RunDir(tmp_path))
    assert torch.get_float32_matmul_precision() == "medium", "null leaves it as it is"


class _VoidGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * float("nan")


@pytest.mark.parametrize("finds", [True, False])
def test_anomaly_mode_names_what_has_made_a_gradient_nan(
    tmp_path: Path, finds: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return _VoidGradient.apply(logits).float().square().mean()

    trainer = tiny.script(tmp_path, max_steps=4, detect_anomaly=finds, loss_fn=loss_fn)
    with pytest.raises(RuntimeError if finds else DivergenceError, match="VoidGradient" if finds else "gradient norm"):
        trainer.train()
    assert ("detect_anomaly" in caplog.text) == finds
    assert not torch.is_anomaly_enabled()
