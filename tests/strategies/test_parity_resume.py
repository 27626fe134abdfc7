"""A checkpoint does not remember which layout wrote it; in the layout that wrote it, resuming is exact bit by bit."""

from __future__ import annotations

import functools
import itertools
import shutil
from pathlib import Path

import pytest
import torch
from parity import (
    LAYOUTS,
    SCHEDULES,
    Result,
    assert_near,
    assert_parity,
    assert_same_samples,
    checkpoint_tensors,
    corpus,
    go_on,
    scratch,
    train,
    with_others,
)
from torch import Tensor

from forgather_cli.run_dir import RunDir

BASE = (
    "model.num_hidden_layers=4", "global_batch_size=12", "per_device_train_batch_size=12", "max_grad_norm=0.2",
    "model.tie_word_embeddings=true", "data.isolate_documents=true", "max_steps=10", "eval_steps=5",
)  # fmt: skip
CROSS = with_others("single", "ddp 2", "fsdp2 2", "1F1B 2", "1F1B 2x2", "Interleaved1F1B 2", "ZBVZeroBubble 2")


@functools.cache
def written(layout: str) -> Result:
    """10 steps on one device, or the first 5 under another layout; with checkpoints of steps 2 and 5."""
    stop = "null" if layout == "single" else "5"
    probe = (f"+callbacks.probe.stop_after={stop}", "+callbacks.probe.save_at=[2]")
    return train(LAYOUTS[layout], (*corpus(), *BASE, "save_steps=5", *probe), scratch() / f"written-{layout}")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def _pairs() -> list[object]:
    """Every ordered pair; a circle is always run, so that each layout writes and reads."""
    places = {name: place for place, name in enumerate(CROSS)}
    pairs = itertools.permutations(CROSS, 2)
    distance = {(a, b): (places[b] - places[a]) % len(CROSS) for a, b in pairs}
    return [
        pytest.param(a, b, id=f"{a} to {b}", marks=() if step == 1 else pytest.mark.full)
        for (a, b), step in distance.items()
    ]


@pytest.mark.parametrize(("writer", "reader"), _pairs())
def test_any_layout_goes_on_from_any_other(tmp_path: Path, writer: str, reader: str) -> None:
    source = written(writer)
    found = go_on(LAYOUTS[reader], (*corpus(), *BASE), RunDir(source.path).checkpoint(5), tmp_path)
    assert_equal(found.begin, source.tensors(5))
    assert len(found.losses) == 5
    assert_parity(found, written("single"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "1F1B"])
def test_the_number_of_ranks_may_change_at_every_resume(tmp_path: Path, kind: str) -> None:
    whole, run = written("single"), RunDir(tmp_path)
    shutil.copytree(RunDir(whole.path).checkpoint(2), run.checkpoint(2))
    losses = whole.losses[:2]
    layouts = (*(f"{kind} {ranks}" for ranks in (2, 4, 3)), "single")
    for step, layout in zip((4, 6, 8, 10), layouts, strict=True):
        before = checkpoint_tensors(run)
        stop = f"+callbacks.probe.stop_after={step}"
        found = train(LAYOUTS[layout], (*corpus(), *BASE, stop), tmp_path, resume=True)
        assert_equal(found.begin, before)
        losses += found.losses
    assert len(losses) == 10
    assert_near(losses, whole.losses, "loss")
    assert_parity(found, whole)


EXACT = with_others("single", "ddp 3", "fsdp2 2", *(f"{schedule} 2" for schedule in SCHEDULES), "1F1B 2x2")
OPTIMIZERS = {
    "adamw": ("optimizer=adamw",),
    "sgd": ("optimizer=sgd", "optimizer.momentum=0.9", "learning_rate=0.1"),
    "muon": ("optimizer=muon",),
}
DROPOUT = {
    "without dropout": (),
    "with dropout": ("model.attention_dropout=0.1", "model.residual_dropout=0.1"),
}


def _exact_cases() -> list[object]:
    """Every combination; one of each layout is always run, the kinds in turn."""
    kinds = list(itertools.product(OPTIMIZERS, DROPOUT))
    return [
        pytest.param(layout, *kind, id=", ".join((layout, *kind)), marks=() if n == i % 6 else pytest.mark.full)
        for i, layout in enumerate(EXACT)
        for n, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(("layout", "optimizer", "dropout"), _exact_cases())
def test_resume_in_the_same_layout_is_exact(tmp_path: Path, layout: str, optimizer: str, dropout: str) -> None:
    settings = (
        *corpus(), *BASE, *OPTIMIZERS[optimizer], *DROPOUT[dropout],
        f"model.num_hidden_layers={LAYOUTS[layout].layers}", "deterministic=true", "max_steps=6", "eval_steps=5",
    )  # fmt: skip
    expected = train(LAYOUTS[layout], (*settings, "save_steps=3"), tmp_path / "whole")
    found = go_on(LAYOUTS[layout], settings, RunDir(expected.path).checkpoint(3), tmp_path / "resumed")
    assert_equal(found.begin, expected.tensors(3))
    assert_same_samples(found, expected)
    assert found.losses == expected.losses[3:]
    assert found.norms == expected.norms[3:]
    assert found.eval_losses == expected.eval_losses
    assert_equal(found.tensors(), expected.tensors())
    assert torch.equal(found.tokens, expected.tokens)
