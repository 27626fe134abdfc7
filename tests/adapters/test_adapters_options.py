"""Every adapter there is: its row says what a matrix is with it, in plain PyTorch and bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from every_option import (
    WITHOUT_MODEL,
    assert_planned_and_explained,
    assert_trained_on_ranks_and_resumed,
    of_options,
    row,
)
from lazily import bitsandbytes
from test_adapters_peft import IDS, SHAPE, built, on_meta, stirred
from torch import Tensor, nn

from forgather_cli.adapters.layers import is_adapter
from forgather_cli.adapters.load import starting
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import AdapterSettings
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.loss.model_io import model_logits
from forgather_cli.models.build import initialize
from forgather_cli.models.init import allocate
from forgather_cli.trainer.build import choose_trained

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny.llama(**SHAPE | {"vocab_size": 260}).save_pretrained(path)
    load_tokenizer("bytes").save(path)
    return path


def _lora(weight: Tensor, layer: Any) -> Tensor:
    return weight + 32 / 16 * layer.lora_B.weight @ layer.lora_A.weight


def _dora(weight: Tensor, layer: Any) -> Tensor:
    whole = _lora(weight, layer)
    return layer.lora_magnitude_vector[:, None] * whole / whole.norm(dim=1, keepdim=True)


def _qlora(weight: Tensor, layer: Any) -> Tensor:
    packed = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    return _lora(bitsandbytes.functional.dequantize_4bit(*packed), layer)


TWINS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "none": lambda weight, layer: weight, "lora": _lora, "dora": _dora, "qlora": _qlora,
}  # fmt: skip
"""(a linear layer's weight in the base, the layer) -> what it multiplies with, with the option's defaults."""


@of_options(AdapterSettings)
@torch.no_grad()
def test_logits_are_those_of_plain_pytorch(option: AdapterSettings, base: Path) -> None:
    twin = row(TWINS, option)
    words = ("data=synthetic", "data.tokenizer=bytes", "model.replace_tokenizer=true", "precision=fp32")
    config = load_config(None, ["model=pretrained", f"model.path={base}", f"adapter={option.type}", *words]).config
    model, plain = on_meta(config, 260), built(config, 260)
    choose_trained(model, config)
    allocate(model, "cpu")

    def init(part: nn.Module) -> None:
        initialize(config.model, part, 0)

    (starting(init, config, 1) if option.freezes_base else init)(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if option.freezes_base and not is_adapter(n)}
    for name, layer in plain.named_modules():
        if option.freezes_base and isinstance(layer, nn.Linear) and name != "lm_head":
            layer.weight.copy_(twin(layer.weight, stirred(model.get_submodule(name))))
    found, expected = (model_logits(each, {"input_ids": IDS}) for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@of_options(AdapterSettings)
def test_ranks_agree_and_go_on(option: AdapterSettings, base: Path, tmp_path: Path) -> None:
    words = ("model=pretrained", f"model.path={base}", f"adapter={option.type}", "model.replace_tokenizer=true")
    assert_trained_on_ranks_and_resumed(tmp_path, *words, base=WITHOUT_MODEL)


@of_options(AdapterSettings)
def test_it_is_planned_and_explained(option: AdapterSettings, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=pretrained", f"model.path={base}", "model.replace_tokenizer=true")
    assert_planned_and_explained(capsys, "adapter", option, *words)
