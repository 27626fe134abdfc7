"""``precision=fp8`` and ``qat`` in whole runs: under every strategy, with plain checkpoints."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from parity import LAYOUTS, Result, assert_near, go_on, scratch, train
from test_qat import converted
from tiny import token_batch

from forgather_cli.config.schema import FP8Settings, QATSettings
from forgather_cli.finalize.quantize import quantize_directory
from forgather_cli.inference.source import load_source
from forgather_cli.loss.losses import CrossEntropy
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import allocate, init_parameters
from forgather_cli.run_dir import RunDir

CPU = torch.device("cpu")
SMALL = (
    "model.num_hidden_layers=4", "global_batch_size=8", "per_device_train_batch_size=8", "data=synthetic",
    "num_samples=64", "num_eval_samples=5", "max_steps=2", "eval_steps=2", "warmup_steps=1",
)  # fmt: skip
PRECISIONS = {"fp8": ("precision=fp8",), "qat": ("precision=qat", "group_size=16")}
ON_ONE_DEVICE = {
    "recomputed": ("gradient_checkpointing=true",),
    "fused": ("fuse_optim_with_backward=true", "max_grad_norm=null"),
    "compiled": ("torch_compile=true", "torch_compile_backend=aot_eager", "gradient_checkpointing=true"),
}


@functools.cache
def run(precision: str, kind: str = "single") -> Result:
    """Under a layout, or on one device with more settings."""
    settings = (*SMALL, *PRECISIONS[precision], *ON_ONE_DEVICE.get(kind, ()))
    layout = LAYOUTS["single" if kind in ON_ONE_DEVICE else kind]
    return train(layout, settings, scratch() / f"{precision}-{kind.replace(' ', '-')}")


@pytest.mark.parametrize("kind", ["fused", "ddp 2", "fsdp2 2", "ZBVZeroBubble 2"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_strategy_trains_within_the_spread(precision: str, kind: str) -> None:
    found, reference = run(precision, kind), run(precision)
    assert found.losses == pytest.approx(reference.losses, rel=1e-3)
    assert found.eval_losses == pytest.approx(reference.eval_losses, rel=1e-3)
    assert found.norms == pytest.approx(reference.norms, rel=0.02), "two seeds are further apart"
    if precision == "qat":
        assert found.losses[0] == pytest.approx(reference.losses[0], rel=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputation_rounds_as_the_first_forward(precision: str) -> None:
    found, reference = run(precision, "recomputed"), run(precision)
    assert (found.losses, found.norms) == (reference.losses, reference.norms)


def test_gradients_of_zero_bubble_are_those_of_one_pass() -> None:
    assert_near(run("fp8", "ZBVZeroBubble 2").losses, run("fp8", "1F1B 2").losses, "loss")
    assert_near(run("fp8", "ZBVZeroBubble 2").norms, run("fp8", "1F1B 2").norms, "gradient norm")


def test_a_checkpoint_is_a_plain_model_that_fp32_goes_on_from(tmp_path: Path) -> None:
    source = run("fp8", "fsdp2 2")
    saved = source.tensors()
    assert all(tensor.dtype == torch.float32 for name, tensor in saved.items() if name.endswith("weight"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(RunDir(source.path).checkpoint(2) / "model").state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in theirs.items())
    settings = (*SMALL, "precision=fp32", "max_steps=3")
    found = go_on(LAYOUTS["ddp 2"], settings, RunDir(source.path).checkpoint(2), tmp_path)
    for name, tensor in found.begin.items():
        assert torch.equal(tensor, saved[name]), name
    assert len(found.losses) == 1


def test_a_checkpoint_is_a_plain_model_whose_quantized_form_is_what_was_trained(tmp_path: Path) -> None:
    path = RunDir(run("qat", "fsdp2 2").path).checkpoint(2)
    assert not any("quant" in type(m).__name__.lower() for m in load_source(path, device="cpu").model.modules())
    shutil.copytree(path / "model", tmp_path / "model")
    quantize_directory(tmp_path / "model", "int8-dynamic-act-int4-weight", group_size=16)
    quantized = load_source(tmp_path / "model", device="cpu").model
    trained = load_source(path, device="cpu").model
    converted(trained, QATSettings(group_size=16))
    batch, losses = token_batch(), []
    with torch.no_grad():
        for model in (quantized, trained):
            losses.append(CrossEntropy().total(model, {"input_ids": batch["input_ids"]}, batch["labels"], None) / 60)
    assert math.exp(losses[0] - losses[1]) == pytest.approx(1, abs=1e-3)  # embedding and head are rounded too


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # dynamo has warnings of its own
@pytest.mark.parametrize("precision", PRECISIONS)
def test_compiled_blocks_compute_the_same(precision: str) -> None:
    assert run(precision, "compiled").losses == pytest.approx(run(precision).losses, rel=1e-5)


ROUNDED = {
    "fp8": FP8Settings(exclude=[]),
    "int8-weight-only": QATSettings(qat_recipe="int8-weight-only", exclude=[]),
    "int8-dynamic-act-int4-weight": QATSettings(group_size=16, exclude=[]),
    "int4-weight-only": QATSettings(qat_recipe="int4-weight-only", group_size=16, exclude=[]),
    "int8-dynamic-act-int8-weight": QATSettings(qat_recipe="int8-dynamic-act-int8-weight", exclude=[]),
}


@pytest.mark.parametrize("settings", ROUNDED.values(), ids=ROUNDED)
def test_converted_layers_keep_names_weights_and_how_they_start(settings: FP8Settings | QATSettings) -> None:
    with torch.device("meta"):
        model = Decoder(tiny.decoder_settings(tie_word_embeddings=True))
    before = dict(model.named_parameters())
    converted(model, settings)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert model.head.weight is model.model.embed_tokens.weight
    allocate(model, CPU)
    init_parameters(model, 3)
    plain = tiny.decoder(3, tie_word_embeddings=True).state_dict()
    assert model.state_dict().keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(model.state_dict()[name], tensor), name
