"""``precision=fp8``: layers compute as torchao's float8 training does in plain PyTorch, on one device."""

from __future__ import annotations

import copy
import dataclasses
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from program import forgather
from refusals import case, table
from test_qat import assert_rounded_alike, converted
from tiny import token_batch
from torch import Tensor, nn

from forgather_cli.callbacks.metrics import DefaultMetrics, _matmul_kind, peak_flops
from forgather_cli.config.schema import FP8Settings
from forgather_cli.errors import ModelError, SetupError
from forgather_cli.precision.dtypes import autocast_for
from forgather_cli.quantized.convert import Conversion, emulated

CPU = torch.device("cpu")


def conversion(model: nn.Module, **settings: Any) -> Conversion:
    return converted(model, FP8Settings(**settings))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_losses_and_gradients_are_torchaos(recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    reference = convert_to_float8_training(
        tiny.decoder(), config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )
    found, settings = tiny.decoder(), FP8Settings(fp8_recipe=recipe)
    converted(found, settings)
    assert_rounded_alike(found, reference, autocast_for(settings, CPU), partial(torch.autocast, "cpu", torch.bfloat16))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_copy_of_a_converted_model_computes_the_same() -> None:
    model = tiny.decoder(tie_word_embeddings=True)
    conversion(model, exclude=[])
    tokens = token_batch()["input_ids"]
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


def test_layers_that_are_left_are_listed_with_the_reason() -> None:
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    given = {"fits": nn.Linear(32, 48), "odd": nn.Linear(32, 40), "scaled": Scaled(32, 32), "layers": layers}
    model = nn.ModuleDict(given)
    done = conversion(model, exclude=[r"layers\.1$"], fp8_recipe="rowwise")
    assert done.converted == ("fits", "layers.0", "layers.2")
    assert list(done) == [
        "3 of 6 linear layers multiply in float8 (rowwise, emulated): fits, layers.0, layers.2",
        "left as they are, sizes are not multiples of 16: odd",
        "left as they are, Scaled has a forward of its own: scaled",
        r"left as they are, exclude has layers\.1$: layers.1",
    ]
    assert type(model["scaled"]) is Scaled
    wider = conversion(nn.ModuleDict({"fits": nn.Linear(64, 32), "odd": nn.Linear(32, 48)}), fp8_dim_alignment=32)
    assert (wider.converted, wider.left) == (("fits",), {"odd": "sizes are not multiples of 32"})
    decoder_lines = list(conversion(tiny.decoder()))
    assert "model.layers.*.mlp.down_proj (2)" in decoder_lines[0]
    assert decoder_lines[1] == "left as they are, exclude has lm_head: lm_head"


def test_emulation_is_chosen_by_the_device() -> None:
    assert emulated(None, CPU)
    assert emulated(True, CPU)


NOT_MULTIPLES = r"no linear layer of Linear can be converted \(: sizes are not multiples"
test_what_is_refused = table(
    case(ModelError, NOT_MULTIPLES, lambda: conversion(nn.Linear(8, 8))),
    case(ModelError, "it has none", lambda: conversion(nn.ReLU())),
    case(ModelError, "no linear layer of Linear can be converted", lambda: conversion(nn.Linear(32, 32), exclude=[""])),
    case(SetupError, "emulate: cpu does not multiply in float8", emulated, False, CPU),
)


def test_inputs_are_rounded_to_the_autocast_dtype_first() -> None:
    layer = nn.Linear(32, 32)
    model = nn.Sequential(layer)
    conversion(model, fp8_recipe="rowwise_with_gw_hp")
    with autocast_for(FP8Settings(), CPU)():
        out = model(torch.randn(3, 32))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_without_torchao_the_message_says_how_to_install_it(
    own_directory: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert forgather("train", "model=nano", "data=synthetic", "precision=fp8", "trainer=ddp", "output_dir=run") == 2
    assert "precision=fp8: needs the package torchao; pip install 'forgather[quantize]'" in capfd.readouterr().err
    assert not any(Path().iterdir())


def test_utilization_is_counted_in_float8() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp8") == 1979e12
    assert peak_flops("NVIDIA L40S", "fp8") == pytest.approx(733e12, rel=0.02)
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert DefaultMetrics().settings.peak_hardware_flops is None
    assert _matmul_kind(SimpleNamespace(precision=FP8Settings())) == "fp8"
    assert _matmul_kind(SimpleNamespace(precision=FP8Settings(emulate=True))) != "fp8"
