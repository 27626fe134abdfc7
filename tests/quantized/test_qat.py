"""``precision=qat``: training rounds to what ``finalize --quantize`` stores, as torchao's QATConfig does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import token_batch
from torch import Tensor, nn

from forgather_cli.config.schema import GROUP_SIZES, FP8Settings, QATSettings
from forgather_cli.finalize.quantize import load_quantized, quantize_directory
from forgather_cli.loss.losses import CrossEntropy
from forgather_cli.plan.activations import activations_of
from forgather_cli.plan.memory import half_copies
from forgather_cli.plan.parameters import parameter_rows
from forgather_cli.quantized.convert import Conversion
from forgather_cli.strategies.base import ModelSpec
from forgather_cli.strategies.single import SingleDevice

CPU = torch.device("cpu")
RECIPES = (
    "int8-weight-only", "int8-dynamic-act-int4-weight", "int4-weight-only", "int8-dynamic-act-int8-weight",
)  # fmt: skip


def settings_for(recipe: str, **settings: Any) -> QATSettings:
    size = 16 if recipe in GROUP_SIZES else None
    return QATSettings(**{"qat_recipe": recipe, "group_size": size, **settings})


def loss_and_gradients(model: nn.Module, autocast: Any = torch.enable_grad) -> tuple[float, dict[str, Tensor]]:
    strategy = SingleDevice(CPU, CrossEntropy(), autocast)
    strategy.materialize(ModelSpec(lambda: model))
    share = strategy.forward_backward([token_batch()], torch.tensor(60.0))
    return share.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def converted(model: nn.Module, option: FP8Settings | QATSettings) -> Conversion:
    done: Conversion = option.load_maker()(model, option, CPU)
    return done


def assert_rounded_alike(
    found: nn.Module, reference: nn.Module, ours: Any = torch.enable_grad, theirs: Any = torch.enable_grad
) -> None:
    """And not as a model whose layers are plain."""
    loss, gradients = loss_and_gradients(found, ours)
    wanted, wanted_gradients = loss_and_gradients(reference, theirs)
    plain, plain_gradients = loss_and_gradients(tiny.decoder(), theirs)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert loss != pytest.approx(plain, rel=1e-6)
    assert not torch.equal(gradients["lm_head.weight"], plain_gradients["lm_head.weight"])
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], msg=name)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "int8-dynamic-act-int8-weight"])
def test_losses_and_gradients_are_torchaos(recipe: str) -> None:
    from torchao import quantization
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.qat import QATConfig

    base = {
        "int8-weight-only": quantization.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
        "int4-weight-only": quantization.Int4WeightOnlyConfig(group_size=16),
        "int8-dynamic-act-int4-weight": quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=PerGroup(16)
        ),
    }[recipe]
    reference, found = tiny.decoder(), tiny.decoder()
    linear = {name for name, module in reference.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    quantization.quantize_(reference, QATConfig(base, step="prepare"), lambda module, name: name in linear)
    done = converted(found, settings_for(recipe))
    assert set(done.converted) == linear
    assert_rounded_alike(found, reference)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "int4-weight-only"])
def test_the_forward_is_that_of_the_stored_model(tmp_path: Path, recipe: str) -> None:
    settings, model = settings_for(recipe), tiny.decoder()
    tiny.pretrained(tmp_path, model)
    converted(model, settings)
    quantize_directory(tmp_path, recipe, group_size=settings.group_size, exclude=settings.exclude, tables=False)
    stored = load_quantized(tmp_path, CPU)
    plain, tokens = tiny.decoder(), token_batch()["input_ids"]
    with torch.no_grad():
        for name in (name for name, module in model.named_modules() if type(module).__name__ == "FakeQuantizedLinear"):
            x = torch.randn(4, 16, model.get_submodule(name).in_features)
            torch.testing.assert_close(
                stored.get_submodule(name)(x), model.get_submodule(name)(x), rtol=1e-5, atol=1e-5
            )
        trained, plainly = model(tokens), plain(tokens)
        # after sums in another order some activations are rounded to the other neighbour, which others follow
        assert (stored(tokens) - trained).norm() < 0.5 * (plainly - trained).norm()


def test_groups_that_do_not_divide_a_row_leave_the_layer() -> None:
    done = converted(tiny.decoder(intermediate_size=48), QATSettings())
    first, *left = done
    assert first.startswith("12 of 15 linear layers round as int8-dynamic-act-int4-weight in groups of 32: ")
    assert left == [
        "left as they are, groups of 32 do not divide their rows: model.layers.*.mlp.down_proj (2)",
        "left as they are, exclude has lm_head: lm_head",
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_counts_what_rounding_keeps(tmp_path: Path, recipe: str) -> None:
    plain, rounded = (tiny.decoder(hidden_size=64, intermediate_size=160, head_dim=32) for _ in range(2))
    converted(rounded, QATSettings(qat_recipe=recipe, group_size=32 if recipe in GROUP_SIZES else None))
    configs = [
        tiny.config(tmp_path, *words) for words in ([], ["precision=qat", f"qat_recipe={recipe}", "warmup_steps=1"])
    ]
    sequences, layers = 8, 2
    planned = [
        sequences * 16 * layers * activations_of(config, plain.settings).kept[0]
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
