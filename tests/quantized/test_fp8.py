"""``precision=fp8``: torchao's float8 layers under every strategy, with checkpoints that know nothing of them.

The reference is plain PyTorch with ``torchao.float8.convert_to_float8_training``, on one device.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from parity import LAYOUTS, Layout, Result, assert_near, go_on, train
from program import Process
from torch import Tensor, nn

from forgather_cli.callbacks.metrics import DefaultMetrics, _matmul_kind, peak_flops
from forgather_cli.config.schema import FP8Settings
from forgather_cli.errors import ConfigError, ModelError, SetupError
from forgather_cli.loss import CrossEntropy
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import allocate, init_parameters
from forgather_cli.precision import autocast_for
from forgather_cli.quantized.convert import Conversion, converted, emulated
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import ModelSpec
from forgather_cli.strategies.single import SingleDevice

CPU = torch.device("cpu")
SPREAD = 0.02
"""Relative: what two seeds are apart at these sizes is more."""
SMALL = (
    "model.num_hidden_layers=4", "global_batch_size=8", "per_device_train_batch_size=8", "data=synthetic",
    "num_samples=64", "num_eval_samples=5", "max_steps=2", "eval_steps=2", "warmup_steps=1",
)  # fmt: skip


def conversion(model: nn.Module, **settings: Any) -> Conversion:
    return converted(model, FP8Settings(**settings), CPU)


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


# ------------------------------------------------------------------------------------------------- against torchao


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_losses_and_gradients_are_torchaos(recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    reference = convert_to_float8_training(
        tiny.decoder(), config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )
    found = tiny.decoder()
    settings = FP8Settings(fp8_recipe=recipe)  # type: ignore[arg-type]
    converted(found, settings, CPU)
    strategy = SingleDevice(CPU, CrossEntropy(), autocast_for(settings, CPU))
    strategy.materialize(ModelSpec(lambda: found))
    plain = tiny.decoder()

    share = strategy.forward_backward([batch()], torch.tensor(60.0))
    with torch.autocast("cpu", torch.bfloat16):
        total = CrossEntropy().total(reference, {"input_ids": batch()["input_ids"]}, batch()["labels"], None)
        in_bf16 = CrossEntropy().total(plain, {"input_ids": batch()["input_ids"]}, batch()["labels"], None)
    (total / 60.0).backward()
    (in_bf16 / 60.0).backward()

    assert share.item() == pytest.approx((total / 60.0).item(), rel=1e-6)
    assert share.item() != pytest.approx((in_bf16 / 60.0).item(), rel=1e-6)
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)
    assert not torch.equal(plain.lm_head.weight.grad, found.lm_head.weight.grad)  # type: ignore[union-attr, arg-type]


# ------------------------------------------------------------------------------------------------------- the layers


def test_converted_layers_keep_names_weights_and_how_they_start() -> None:
    with torch.device("meta"):
        model = Decoder(tiny.decoder_settings(tie_word_embeddings=True))
    before = dict(model.named_parameters())
    conversion(model, exclude=[])
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert model.head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    allocate(model, CPU)
    init_parameters(model, 3)
    plain = tiny.decoder(3, tie_word_embeddings=True)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    copied = copy.deepcopy(model)
    assert torch.equal(copied(batch()["input_ids"]), model(batch()["input_ids"]))


class OfUsers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fits = nn.Linear(32, 48)
        self.odd = nn.Linear(32, 40)
        self.scaled = Scaled(32, 32)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_layers_that_are_left_are_listed_with_the_reason() -> None:
    model = OfUsers()
    done = conversion(model, exclude=[r"layers\.1$"], fp8_recipe="rowwise")
    assert done.converted == ("fits", "layers.0", "layers.2")
    assert list(done.lines()) == [
        "3 of 6 linear layers multiply in float8 (rowwise, emulated): fits, layers.0, layers.2",
        "left as they are, sizes are not multiples of 16: odd",
        "left as they are, Scaled has a forward of its own: scaled",
        r"left as they are, exclude has layers\.1$: layers.1",
    ]
    assert type(model.scaled) is Scaled
    decoder_lines = list(conversion(tiny.decoder()).lines())
    assert "model.layers.*.mlp.down_proj (2)" in decoder_lines[0]
    assert decoder_lines[1] == "left as they are, exclude has lm_head: lm_head"


def test_a_model_without_a_fitting_layer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no linear layer of Linear can be converted \(: sizes are not multiples"):
        conversion(nn.Linear(8, 8))
    with pytest.raises(ModelError, match="it has none"):
        conversion(nn.ReLU())


def test_emulation_is_chosen_by_the_device() -> None:
    assert emulated(FP8Settings(), CPU)
    assert emulated(FP8Settings(emulate=True), CPU)
    with pytest.raises(SetupError, match="emulate: cpu does not multiply in float8"):
        emulated(FP8Settings(emulate=False), CPU)


def test_inputs_are_rounded_to_the_autocast_dtype_first() -> None:
    layer = nn.Linear(32, 32)
    with pytest.raises(ModelError):
        conversion(layer, exclude=[""])
    model = nn.Sequential(layer)
    conversion(model, fp8_recipe="rowwise_with_gw_hp")
    with autocast_for(FP8Settings(), CPU)():
        out = model(torch.randn(3, 32))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


# ------------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """One recipe under one device, and on two ranks."""
    root = tmp_path_factory.mktemp("fp8")

    def run(name: str, layout: Layout, *settings: str) -> Result:
        return train(layout, (*SMALL, "precision=fp8", *settings), root / name)

    return {
        "single": run("single", LAYOUTS["single"]),
        "recomputed": run("recomputed", LAYOUTS["single"], "gradient_checkpointing=true"),
        "fused": run("fused", LAYOUTS["single"], "fuse_optim_with_backward=true", "max_grad_norm=null"),
        **{name: run(name.replace(" ", "-"), LAYOUTS[name]) for name in ("ddp 2", "fsdp2 2", "1F1B 2")},
        "ZBVZeroBubble 2": run("zbv", LAYOUTS["ZBVZeroBubble 2"]),
    }


def test_every_strategy_trains_within_the_spread(runs: dict[str, Result]) -> None:
    reference = runs["single"]
    for name, found in runs.items():
        apart = [abs(a - b) / b for a, b in zip(found.losses, reference.losses, strict=True)]
        assert max(apart) < 1e-3, (name, apart)
        assert found.eval_losses == pytest.approx(reference.eval_losses, rel=1e-3), name
        assert found.norms == pytest.approx(reference.norms, rel=SPREAD), name


def test_gradients_are_those_of_one_pass_under_recomputation_and_zero_bubble(runs: dict[str, Result]) -> None:
    assert runs["recomputed"].losses == runs["single"].losses
    assert runs["recomputed"].norms == runs["single"].norms
    assert_near(runs["ZBVZeroBubble 2"].losses, runs["1F1B 2"].losses, "loss")
    assert_near(runs["ZBVZeroBubble 2"].norms, runs["1F1B 2"].norms, "gradient norm")


def test_a_checkpoint_is_a_plain_model_that_fp32_goes_on_from(runs: dict[str, Result], tmp_path: Path) -> None:
    checkpoint = RunDir(runs["fsdp2 2"].path).checkpoint(2)
    saved = runs["fsdp2 2"].tensors()
    assert all(tensor.dtype == torch.float32 for name, tensor in saved.items() if name.endswith("weight"))
    settings = (*SMALL, "precision=fp32", "max_steps=3")
    found = go_on(LAYOUTS["ddp 2"], settings, checkpoint, tmp_path / "fp32")
    for name, tensor in found.begin.items():
        assert torch.equal(tensor, saved[name]), name
    assert len(found.losses) == 1


def test_transformers_loads_the_checkpoint(runs: dict[str, Result]) -> None:
    from transformers import AutoModelForCausalLM

    from forgather_cli.inference.source import load_source

    path = RunDir(runs["ddp 2"].path).checkpoint(2)
    source = load_source(path, device="cpu")
    assert not any(type(module).__name__ == "Float8Linear" for module in source.model.modules())
    theirs = AutoModelForCausalLM.from_pretrained(path / "model")
    tokens = batch()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(source.model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # dynamo has warnings of its own
def test_compiled_blocks_compute_the_same(tmp_path: Path, runs: dict[str, Result]) -> None:
    compiled = ("torch_compile=true", "torch_compile_backend=aot_eager", "gradient_checkpointing=true")
    found = train(LAYOUTS["single"], (*SMALL, "precision=fp8", *compiled), tmp_path)
    assert found.losses == pytest.approx(runs["single"].losses, rel=1e-5)


# ---------------------------------------------------------------------------------------------------- mistakes, facts


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["emulate=false", "device=cpu"], "emulate: device=cpu does not multiply in float8"),
        (["precision.exclude=['(']"], "precision.exclude: not a regular expression"),
        (["loss=linear_cross_entropy", "precision.exclude=[]"], "precision.exclude: loss=linear_cross_entropy"),
        (["trainer=fsdp2", "param_dtype=fp32"], "param_dtype: fp32 contradicts precision=fp8"),
    ],
)
def test_contradictions_are_config_mistakes(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        tiny.config(tmp_path, "precision=fp8", *overrides)


def test_without_torchao_the_message_says_how_to_install_it(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torchao'] = None; from forgather_cli.__main__ import run; run()"
    words = ["train", "model=nano", "data=synthetic", "precision=fp8", "trainer=ddp", "output_dir=run"]
    with Process(code=f"import sys; sys.argv[1:] = {words}; {code}", cwd=tmp_path) as process:
        assert process.finish() == 2
        assert "precision=fp8: needs the package torchao; pip install 'forgather[quantize]'" in process.output
    assert not (tmp_path / "run").exists()


def test_utilization_is_counted_in_float8() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp8") == 1979e12
    assert peak_flops("NVIDIA L40S", "fp8") == pytest.approx(733e12, rel=0.02)
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert DefaultMetrics().settings.peak_hardware_flops is None

    class Args:
        precision = FP8Settings()

    assert _matmul_kind(Args()) == "fp8"
    Args.precision = FP8Settings(emulate=True)
    assert _matmul_kind(Args()) != "fp8"
