"""``precision=qat``: what training rounds is what ``finalize --quantize`` stores, under every strategy.

The reference is plain PyTorch with torchao's ``QATConfig(step="prepare")``.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from parity import LAYOUTS, Layout, Result, train
from torch import Tensor, nn

from forgather_cli.config.schema import GROUP_SIZES, QATSettings
from forgather_cli.errors import ConfigError
from forgather_cli.finalize.quantize import load_quantized, quantize_directory
from forgather_cli.inference.source import load_source
from forgather_cli.loss import CrossEntropy
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import allocate, init_parameters
from forgather_cli.plan.activations import activations_of
from forgather_cli.plan.memory import half_copies
from forgather_cli.plan.parameters import parameter_rows
from forgather_cli.quantized.convert import converted
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import ModelSpec
from forgather_cli.strategies.single import SingleDevice

CPU = torch.device("cpu")
RECIPES = (
    "int8-weight-only", "int8-dynamic-act-int4-weight", "int4-weight-only", "int8-dynamic-act-int8-weight",
)  # fmt: skip
SPREAD = 0.02
"""Relative: what two seeds are apart at these sizes is more."""
SMALL = (
    "model.num_hidden_layers=4", "global_batch_size=8", "per_device_train_batch_size=8", "data=synthetic",
    "num_samples=64", "num_eval_samples=5", "max_steps=2", "eval_steps=2", "warmup_steps=1",
)  # fmt: skip


def settings_for(recipe: str, **settings: Any) -> QATSettings:
    size = 16 if recipe in GROUP_SIZES else None
    return QATSettings(**{"qat_recipe": recipe, "group_size": size, **settings})


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def loss_and_gradients(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    strategy = SingleDevice(CPU, CrossEntropy(), torch.enable_grad)
    strategy.materialize(ModelSpec(lambda: model))
    share = strategy.forward_backward([batch()], torch.tensor(60.0))
    return share.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------------------------------------- against torchao


def base_config(recipe: str) -> Any:
    from torchao.quantization import Int4WeightOnlyConfig, Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis, PerGroup

    if recipe == "int8-weight-only":
        return IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    if recipe == "int4-weight-only":
        return Int4WeightOnlyConfig(group_size=16)
    return Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(16))


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "int8-dynamic-act-int8-weight"])
def test_losses_and_gradients_are_torchaos(recipe: str) -> None:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    reference, found = tiny.decoder(), tiny.decoder()
    linear = {name for name, module in reference.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    quantize_(reference, QATConfig(base_config(recipe), step="prepare"), lambda module, name: name in linear)
    done = converted(found, settings_for(recipe), CPU)
    assert set(done.converted) == linear

    loss, gradients = loss_and_gradients(found)
    wanted, wanted_gradients = loss_and_gradients(reference)
    plain, _ = loss_and_gradients(tiny.decoder())
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert loss != pytest.approx(plain, rel=1e-6)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], msg=name)


# --------------------------------------------------------------------------------------------- against what is stored


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "int4-weight-only"])
def test_the_forward_is_that_of_the_stored_model(tmp_path: Path, recipe: str) -> None:
    from safetensors.torch import save_file

    from forgather_cli.models.pretrained import write_config

    settings = settings_for(recipe)
    model = tiny.decoder()
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", {"format": "pt"})
    write_config(tmp_path, model.settings)
    converted(model, settings, CPU)
    quantize_directory(tmp_path, recipe, group_size=settings.group_size, exclude=settings.exclude, tables=False)  # type: ignore[arg-type]
    stored = load_quantized(tmp_path, CPU)
    plain, tokens = tiny.decoder(), batch()["input_ids"]
    with torch.no_grad():
        for name in converted_names(model):
            x = torch.randn(4, 16, model.get_submodule(name).in_features)  # type: ignore[arg-type]
            torch.testing.assert_close(
                stored.get_submodule(name)(x), model.get_submodule(name)(x), rtol=1e-5, atol=1e-5
            )
        trained, plainly = model(tokens), plain(tokens)
        # after sums in another order some activations are rounded to the other neighbour, which others follow
        assert (stored(tokens) - trained).norm() < 0.5 * (plainly - trained).norm()


def converted_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "FakeQuantizedLinear"]


# ------------------------------------------------------------------------------------------------------- the layers


def test_converted_layers_keep_names_weights_and_how_they_start() -> None:
    for recipe in RECIPES:
        with torch.device("meta"):
            model = Decoder(tiny.decoder_settings(tie_word_embeddings=True))
        converted(model, settings_for(recipe, exclude=[]), CPU)
        allocate(model, CPU)
        init_parameters(model, 3)
        plain = tiny.decoder(3, tie_word_embeddings=True).state_dict()
        assert model.state_dict().keys() == plain.keys()
        for name, tensor in plain.items():
            assert torch.equal(model.state_dict()[name], tensor), name
        assert model.head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_groups_that_do_not_divide_a_row_leave_the_layer() -> None:
    done = converted(tiny.decoder(intermediate_size=48), QATSettings(), CPU)
    first, *left = done.lines()
    assert first.startswith("12 of 15 linear layers round as int8-dynamic-act-int4-weight in groups of 32: ")
    assert left == [
        "left as they are, groups of 32 do not divide their rows: model.layers.*.mlp.down_proj (2)",
        "left as they are, exclude has lm_head: lm_head",
    ]


# ------------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """One recipe under one device, and on two ranks."""
    root = tmp_path_factory.mktemp("qat")

    def run(name: str, layout: Layout, *settings: str) -> Result:
        return train(layout, (*SMALL, "precision=qat", "group_size=16", *settings), root / name)

    return {
        "single": run("single", LAYOUTS["single"]),
        "recomputed": run("recomputed", LAYOUTS["single"], "gradient_checkpointing=true"),
        **{name: run(name.replace(" ", "-"), LAYOUTS[name]) for name in ("ddp 2", "fsdp2 2", "ZBVZeroBubble 2")},
    }


def test_every_strategy_trains_within_the_spread(runs: dict[str, Result]) -> None:
    reference = runs["single"]
    for name, found in runs.items():
        assert found.losses == pytest.approx(reference.losses, rel=1e-3), name
        assert found.losses[0] == pytest.approx(reference.losses[0], rel=1e-6), name
        assert found.eval_losses == pytest.approx(reference.eval_losses, rel=1e-3), name
        assert found.norms == pytest.approx(reference.norms, rel=SPREAD), name


def test_recomputation_rounds_as_the_first_forward(runs: dict[str, Result]) -> None:
    assert runs["recomputed"].losses == runs["single"].losses
    assert runs["recomputed"].norms == runs["single"].norms


def test_a_checkpoint_is_a_plain_model_whose_quantized_form_is_what_was_trained(
    runs: dict[str, Result], tmp_path: Path
) -> None:
    path = RunDir(runs["fsdp2 2"].path).checkpoint(2)
    assert not any("quant" in type(m).__name__.lower() for m in load_source(path, device="cpu").model.modules())
    shutil.copytree(path / "model", tmp_path / "model")
    quantize_directory(tmp_path / "model", "int8-dynamic-act-int4-weight", group_size=16)
    quantized = load_source(tmp_path / "model", device="cpu").model
    trained = load_source(path, device="cpu").model
    converted(trained, QATSettings(group_size=16), CPU)
    tokens = batch()["input_ids"]
    losses = []
    with torch.no_grad():
        for model in (quantized, trained):
            losses.append(CrossEntropy().total(model, {"input_ids": tokens}, tokens, None).item() / 60)
    assert math.exp(losses[0] - losses[1]) == pytest.approx(1, abs=1e-3)  # embedding and head are rounded too


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # dynamo has warnings of its own
def test_compiled_blocks_compute_the_same(tmp_path: Path, runs: dict[str, Result]) -> None:
    compiled = ("torch_compile=true", "torch_compile_backend=aot_eager", "gradient_checkpointing=true")
    found = train(LAYOUTS["single"], (*SMALL, "precision=qat", "group_size=16", *compiled), tmp_path)
    assert found.losses == pytest.approx(runs["single"].losses, rel=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_counts_what_rounding_keeps(tmp_path: Path, recipe: str) -> None:
    plain, rounded = (tiny.decoder(hidden_size=64, intermediate_size=160, head_dim=32) for _ in range(2))
    converted(rounded, QATSettings(qat_recipe=recipe, group_size=32 if recipe in GROUP_SIZES else None), CPU)  # type: ignore[arg-type]
    configs = [
        tiny.config(tmp_path, *words) for words in ([], ["precision=qat", f"qat_recipe={recipe}", "warmup_steps=1"])
    ]
    sequences, layers = 8, 2
    planned = [
        sequences * 16 * layers * activations_of(config, plain.settings).kept  # type: ignore[union-attr]
        + half_copies(config, parameter_rows(plain, config))
        for config in configs
    ]
    found = [kept(model, sequences) for model in (plain, rounded)]
    assert planned[1] - planned[0] == pytest.approx(found[1] - found[0], rel=0.1)


def kept(model: nn.Module, sequences: int) -> int:
    """Bytes that a forward of so many sequences of 16 tokens keeps for its backward, beside parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(torch.zeros((sequences, 16), dtype=torch.int64))
    return sum(storage.nbytes() for storage in storages.values())


# --------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["qat_recipe=int8-weight-only", "group_size=32"], "group_size: nothing reads it with qat_recipe=int8-weight"),
        (["group_size=1"], "group_size: must be at least 2, got 1"),
        (["qat_recipe=int4-weight-only", "group_size=16"], "group_size: qat_recipe=int4-weight-only takes one of"),
        (["loss=linear_cross_entropy", "precision.exclude=[]"], "precision.exclude: loss=linear_cross_entropy"),
        (["trainer=fsdp2", "param_dtype=bf16"], "param_dtype: bf16 contradicts precision=qat"),
    ],
)
def test_contradictions_are_config_mistakes(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        tiny.config(tmp_path, "precision=qat", *overrides)
