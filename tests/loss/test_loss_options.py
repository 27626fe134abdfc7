"""Every loss there is: its row says what it computes, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from every_option import assert_planned_and_explained, assert_trained_on_ranks_and_resumed, of_options, row
from test_loss_kernels import Head, assert_equal, batch, results, standing_in
from torch import Tensor

from forgather_cli.config.schema import LossSettings
from forgather_cli.loss.build import build_loss

ON_GPUS = ("cut_cross_entropy", "liger")  # of packages that are not there
OF_PAIRS = "dpo"
"""It needs other data: tests/preference has its formulas, ranks, resumes and plans."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


TWINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "auto": cross_entropy,
    "cross_entropy": cross_entropy,
    "cut_cross_entropy": cross_entropy,
    "liger": cross_entropy,
    "linear_cross_entropy": cross_entropy,
}
"""Logits (N, V), and the target of each or -100 -> the sum over the targets, with the option's defaults."""


@of_options(LossSettings, without=(OF_PAIRS,))
def test_sum_and_gradients_are_those_of_plain_pytorch(option: LossSettings) -> None:
    model, given = Head(), batch()
    total = row(TWINS, option)(model(given["input_ids"])[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())
    with standing_in():
        found = results(build_loss(option), model, given)
    assert_equal(found, [total.detach(), *torch.autograd.grad(total / 7, [*model.parameters()])])


@of_options(LossSettings, without=("auto", OF_PAIRS, *ON_GPUS))
def test_ranks_agree_and_go_on(option: LossSettings, tmp_path: Path) -> None:
    assert_trained_on_ranks_and_resumed(tmp_path, f"loss={option.type}")


@of_options(LossSettings, without=(OF_PAIRS,))
def test_it_is_planned_and_explained(option: LossSettings, capsys: pytest.CaptureFixture[str]) -> None:
    assert_planned_and_explained(capsys, "loss", option, "device=auto", "precision=bf16")
