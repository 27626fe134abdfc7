"""Every precision there is: its row says how a model computes, in plain PyTorch and torchao."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import tiny
import torch
from every_option import assert_planned_and_explained, assert_trained_on_ranks_and_resumed, of_options, row
from tiny import token_batch
from torch import nn

from forgather_cli.config.schema import PrecisionSettings
from forgather_cli.hardware import without_auto
from forgather_cli.loss.losses import CrossEntropy
from forgather_cli.precision.dtypes import autocast_for
from forgather_cli.strategies.single import SingleDevice
from forgather_cli.trainer.build import model_spec

CPU = torch.device("cpu")
Context = AbstractContextManager[object]


def _is_converted(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != "lm_head"


def _in_bf16(model: nn.Module) -> Context:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return nullcontext()


def _in_float8(model: nn.Module) -> Context:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=_is_converted)
    return torch.autocast("cpu", torch.bfloat16)


def _rounded(model: nn.Module) -> Context:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import QATConfig

    int4 = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(model, QATConfig(int4, step="prepare"), _is_converted)
    return nullcontext()


TWINS: dict[str, Callable[[nn.Module], Context]] = {
    "fp32": lambda model: nullcontext(),
    "bf16": lambda model: torch.autocast("cpu", torch.bfloat16),
    "bf16_true": _in_bf16,
    "fp16": lambda model: torch.autocast("cpu", torch.float16),
    "fp8": _in_float8,
    "qat": _rounded,
}
"""Changes a model in fp32, and returns what its forward is entered in, with the option's defaults. ``auto`` is one of
them."""


@of_options(PrecisionSettings)
def test_loss_and_gradients_are_those_of_plain_pytorch(option: PrecisionSettings, tmp_path: Path) -> None:
    option, _ = without_auto(option, "cpu")
    theirs, batch = tiny.decoder(), token_batch()
    with row(TWINS, option)(theirs):
        expected = CrossEntropy().total(theirs, {"input_ids": batch["input_ids"]}, batch["labels"], None) / 60
    expected.backward()

    config, ours = tiny.config(tmp_path, f"precision={option.type}"), tiny.decoder()
    strategy = SingleDevice(CPU, CrossEntropy(), autocast_for(config.precision, CPU))
    strategy.materialize(model_spec(lambda: ours, config, strategy))
    found = strategy.forward_backward([batch], torch.tensor(60.0))
    torch.testing.assert_close(found, expected.detach())
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


# what is rounded twice on the way, and what is rounded to steps, differs by more than sums in another order
NEAR = {"bf16_true": (1e-3, 0.02), "fp8": (1e-3, 0.02), "qat": (1e-3, 0.02)}


@of_options(PrecisionSettings, without=("auto",))
def test_ranks_agree_and_go_on(option: PrecisionSettings, tmp_path: Path) -> None:
    near, norms = NEAR.get(option.type, (1e-4, 1e-2))
    assert_trained_on_ranks_and_resumed(tmp_path, f"precision={option.type}", near=near, norms=norms)


@of_options(PrecisionSettings)
def test_it_is_planned_and_explained(option: PrecisionSettings, capsys: pytest.CaptureFixture[str]) -> None:
    assert_planned_and_explained(capsys, "precision", option)
