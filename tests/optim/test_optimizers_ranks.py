"""Optimizers over sharded parameters: the numbers of one device, and state that goes from layout to layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from option_rows import OPTIMIZERS
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from forgather_cli.config.schema import (
    AdamWSettings,
    GroupSettings,
    MuonSettings,
    OptimizerOption,
    OptimizerSettings,
)
from forgather_cli.errors import CheckpointError
from forgather_cli.optim.build import Optimizers, build_optimizer
from forgather_cli.optim.state import merge_group_states
from forgather_cli.shards import box_of, local

SHAPES = {
    "embed_tokens.weight": (7, 6), "up_proj.weight": (10, 6), "down_proj.weight": (6, 10), "few.weight": (2, 9),
    "norm.weight": (5,),
}  # fmt: skip
"""Rows that do not divide by 2 or 4, and fewer of them than ranks."""
CAUTIOUS = MuonSettings(momentum_warmup_steps=4, cautious_weight_decay=True)
OPTIONS = {
    f"{n} {row.option.type}": row.option for n, row in enumerate(OPTIMIZERS)
    if isinstance(row.option, OptimizerSettings) and row.option.trains_shards
}  # fmt: skip


def numbers(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Model:
    """Named parameters, of which this rank holds rows where there is a mesh, and their optimizer."""

    def __init__(self, option: OptimizerOption, replicate: int | None = None) -> None:
        """``replicate``: copies of the model among the ranks; None: whole parameters."""
        self._mesh, self._placements = None, []
        if replicate is not None:
            size = torch.distributed.get_world_size() // replicate
            self._mesh = init_device_mesh("cpu", (replicate, size), mesh_dim_names=("replicate", "shard"))
            self._placements = [Replicate(), Shard(0)]
        self.parameters = {name: nn.Parameter(self.share(value)) for name, value in numbers(0).items()}
        self.optimizer: Optimizers = build_optimizer(option, self.parameters.items(), lr=1e-2, weight_decay=0.1)

    def share(self, value: Tensor) -> Tensor:
        return distribute_tensor(value, self._mesh, self._placements) if self._mesh else value

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            for name, gradient in numbers(100 + step).items():
                self.parameters[name].grad = self.share(gradient)
            self.optimizer.step()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Collective. Whole tensors, as a checkpoint holds them, and the rest."""
        tensors = {name: whole(t) for name, t in self.optimizer.state_tensors().items()}
        return tensors, self.optimizer.group_state()

    def load(self, tensors: dict[str, Tensor], groups: dict[str, Any]) -> None:
        """As the Trainer does: rows of what has the parameter's shape, the rest whole."""
        read = {}
        for name, tensor in tensors.items():
            parameter = self.parameters[name.rpartition(".")[0]]
            start, stop = box_of(parameter).rows
            read[name] = tensor[start:stop] if tensor.shape == parameter.shape else tensor
        self.optimizer.load(read, groups)

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(p) for name, p in self.parameters.items()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def stepped(option: OptimizerOption, replicate: int | None = None) -> dict[str, Tensor]:
    model = Model(option, replicate)
    model.steps(0, 3)
    return model.weights()


def all_stepped(replicate: int) -> dict[str, dict[str, Tensor]]:
    return {name: stepped(option, replicate) for name, option in OPTIONS.items()}


@pytest.mark.parametrize("replicate", [1, 2])
def test_sharded_steps_are_those_of_one_device(replicate: int) -> None:
    every_rank = run_ranks(4, all_stepped, replicate)
    for name, option in OPTIONS.items():
        for weights in every_rank:
            assert_close(weights[name], stepped(option))


def assert_close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def resumed(
    option: OptimizerOption, tensors: dict[str, Tensor], groups: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    model = Model(option, 1)
    for name, p in model.parameters.items():
        local(p.detach()).copy_(weights[name][box_of(p).slices])
    model.load(tensors, groups)
    for name, tensor in model.optimizer.state_tensors().items():
        if tensor.ndim:
            parameter = model.parameters[name.rpartition(".")[0]]
            assert isinstance(tensor, DTensor)
            assert local(tensor).shape == local(parameter).shape
    found, rest = model.state()
    model.steps(3, 5)
    return found, rest, model.weights()


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_state_goes_from_layout_to_layout_bit_for_bit(option: OptimizerOption) -> None:
    single = Model(option)
    single.steps(0, 3)
    tensors, groups = single.state()
    weights = single.weights()
    single.steps(3, 5)
    for found, rest, end in run_ranks(4, resumed, option, tensors, groups, weights):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert rest["tensors"] == groups["tensors"]
        assert rest["values"] == groups["values"]
        assert_close(end, single.weights())


def misfits(tensors: dict[str, Tensor], groups: dict[str, Any]) -> str:
    model = Model(AdamWSettings(), 1)
    with pytest.raises(CheckpointError) as caught:
        model.optimizer.load(tensors, groups)
    return str(caught.value)


def test_whole_moments_of_a_sharded_parameter_are_refused() -> None:
    single = Model(AdamWSettings())
    single.steps(0, 1)
    first = run_ranks(2, misfits, *single.state())[0]
    assert "up_proj.weight.exp_avg: its shape is (10, 6), the parameter's (5, 6)" in first


def part(names: list[str], option: OptimizerOption) -> tuple[dict[str, nn.Parameter], Optimizers]:
    parameters = {name: nn.Parameter(numbers(0)[name].clone()) for name in names}
    optimizer = build_optimizer(option, parameters.items(), lr=1e-2, weight_decay=0.1)
    for name, p in parameters.items():
        p.grad = numbers(1)[name]
    optimizer.step()
    return parameters, optimizer


STAGES = [["embed_tokens.weight", "up_proj.weight"], ["down_proj.weight", "norm.weight"]]
WHOLE = [*STAGES[0], *STAGES[1]]
NORMS_APART = AdamWSettings(groups={"norms": GroupSettings(regex="norm", settings={"lr": 0.5})})


@pytest.mark.parametrize("option", [AdamWSettings(), CAUTIOUS, NORMS_APART], ids=["adamw", "muon", "groups"])
def test_states_of_parts_are_the_whole_models_and_a_part_takes_its_own_from_it(option: OptimizerOption) -> None:
    merged = merge_group_states([part(names, option)[1].group_state() for names in STAGES])
    whole_model = part(WHOLE, option)[1]
    expected = whole_model.group_state()
    assert merged["tensors"] == expected["tensors"]
    assert merged["values"] == expected["values"]
    assert merged["groups"].keys() == expected["groups"].keys()
    for name, group in merged["groups"].items():
        assert sorted(group["parameters"]) == sorted(expected["groups"][name]["parameters"])
        assert {**group, "parameters": []} == {**expected["groups"][name], "parameters": []}
    for own in STAGES:
        parameters, optimizer = part(own, option)
        for p in parameters.values():
            p.grad = torch.ones_like(p)
        optimizer.step()  # other moments now
        tensors = {n: t for n, t in whole_model.state_tensors().items() if n.rpartition(".")[0] in own}
        assert optimizer.load(tensors, expected, all_names=set(WHOLE)) == []
        restored = optimizer.state_tensors()
        assert restored.keys() == tensors.keys()
        assert all(torch.equal(restored[name], tensors[name]) for name in tensors)


def test_what_no_rank_trains_is_still_a_mistake() -> None:
    whole_model = part(WHOLE, AdamWSettings())[1]
    optimizer = part(STAGES[0], AdamWSettings())[1]
    tensors = {n: t for n, t in whole_model.state_tensors().items() if n.rpartition(".")[0] in STAGES[0]}
    with pytest.raises(CheckpointError, match=r"not trained by this run's optimizer: norm.weight"):
        optimizer.load(tensors, whole_model.group_state(), all_names={*STAGES[0], "down_proj.weight"})
