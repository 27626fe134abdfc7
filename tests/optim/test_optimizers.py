"""Optimizers: which parameter goes where, numbers against plain torch, and state that comes back bit for bit."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from option_rows import DECAY, LR, OPTIMIZERS, UNDECAYED, OptimizerRow
from processors import pretend
from refusals import case, cases, table
from torch import Tensor, nn

from forgather_cli.config.schema import (
    AdafactorSettings,
    AdamWSettings,
    GroupSettings,
    MuonSettings,
    OptimizerOption,
    OptimizerSettings,
    SGDSettings,
    Target,
)
from forgather_cli.errors import CheckpointError, ConfigError, PartError, SetupError
from forgather_cli.optim.build import Optimizers, build_optimizer
from forgather_cli.optim.eager import unguard_step
from forgather_cli.optim.groups import describe
from forgather_cli.optim.in_backward import FusedBackward
from forgather_cli.optim.muon import Muon, orthogonalised, slow_in_bf16
from forgather_cli.optim.state import ParameterOptimizer

OPTIONS = [row.option for row in OPTIMIZERS]
SHIPPED = [option for option in OPTIONS if not isinstance(option, Target)]


def name_of(option: OptimizerOption) -> str:
    return option.path if isinstance(option, Target) else f"{option.type}-{getattr(option, 'momentum', '')}"


every_option = pytest.mark.parametrize("option", OPTIONS, ids=name_of)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8, bias=False)
        self.norm = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(self.norm(x))))


class TinyModel(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.RMSNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build(option: OptimizerOption, model: nn.Module, lr: float = LR) -> Optimizers:
    return build_optimizer(option, model.named_parameters(), lr=lr, weight_decay=DECAY)


def adamw() -> Optimizers:
    return build(AdamWSettings(), TinyModel())


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(11, (4, 6), generator=generator)
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", LR) * (1 - step / 20)
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def trained(steps: int, option: OptimizerOption | None = None, make: Any = build) -> tuple[nn.Module, Any]:
    model = TinyModel()
    optimizers = make(option or AdamWSettings(), model)
    train(model, optimizers, range(steps))
    return model, optimizers


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_what_decays_of_a_llama_and_what_muon_takes():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
        attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        named = list(transformers.LlamaForCausalLM(config).named_parameters())
    rows = describe(AdamWSettings(), named, lr=LR, weight_decay=DECAY)
    assert [row.name for row in rows] == [name for name, _ in named]
    undecayed = {name for name, _ in named if re.search(r"embed_tokens|norm|bias", name)}
    assert {row.name for row in rows if row.group == "no_decay"} == undecayed
    assert {(row.group, row.weight_decay) for row in rows} == {("no_decay", 0.0), ("default", DECAY)}
    assert {row.optimizer for row in rows} == {"adamw"}
    rows = describe(MuonSettings(), named, lr=LR, weight_decay=DECAY)
    assert {row.name for row in rows if row.optimizer == "muon"} == {
        name for name, p in named if p.ndim == 2 and ".layers." in name
    }
    groups = {row.name: (row.group, row.lr, row.weight_decay) for row in rows}
    assert groups["lm_head.weight"] == ("head.adamw", 3 * LR, DECAY)
    assert groups["model.embed_tokens.weight"] == ("embedding.adamw", 4 * LR, 0.0)
    assert groups["model.norm.weight"] == ("no_decay.adamw", LR, 0.0)
    assert groups["model.layers.0.mlp.up_proj.weight"] == ("default.muon", LR, DECAY)


def test_first_match_wins_and_settings_reach_the_torch_groups():
    option = AdamWSettings(
        groups={
            "head": GroupSettings(regex="lm_head", settings={"lr_scale": 0.5, "betas": [0.8, 0.9]}),
            "outer": GroupSettings(regex="lm_head|embed", settings={"lr": 0.3, "weight_decay": 0.0}),
            "unused": GroupSettings(regex="nothing_is_called_so"),
        }
    )
    model, optimizers = trained(0, option)
    groups = {g["name"]: g for g in optimizers.param_groups}
    assert list(groups) == ["head", "outer", "default"]
    head, outer, default = groups.values()
    assert (head["lr"], head["initial_lr"], head["betas"], head["weight_decay"]) == (LR / 2, LR / 2, (0.8, 0.9), DECAY)
    assert (outer["lr"], outer["betas"], outer["weight_decay"]) == (0.3, (0.9, 0.95), 0.0)
    assert outer["params"] == [model.embed_tokens.weight]
    assert (default["lr"], len(default["params"])) == (LR, 9)


def test_own_group_that_matches_nothing_is_logged_and_the_shipped_one_not(caplog: pytest.LogCaptureFixture):
    linear = nn.Linear(2, 2, bias=False)
    build(AdamWSettings(), linear)
    assert not caplog.records
    build(AdamWSettings(groups={"mine": GroupSettings(regex="^gate$")}), linear)
    assert "optimizer.groups.mine.regex: '^gate$' matches no free parameter" in caplog.text


def test_a_group_may_have_an_optimizer_of_its_own():
    option = AdamWSettings(groups={"embed": GroupSettings(regex="embed", optimizer=SGDSettings(momentum=0.5))})
    model, optimizers = trained(0, option)
    assert [type(o).__name__ for o in optimizers.optimizers] == ["SGD", "AdamW"]
    before = weights(model)
    train(model, optimizers, range(2))
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
    assert "embed_tokens.weight.momentum_buffer" in optimizers.state_tensors()
    rows = describe(option, model.named_parameters(), lr=LR, weight_decay=DECAY)
    assert {row.optimizer for row in rows if "embed" in row.name} == {"sgd"}


def test_tied_parameters_count_once():
    model = TinyModel(tied=True)
    named = list(model.named_parameters(remove_duplicate=False))
    assert len(named) == 11
    optimizers = build_optimizer(AdamWSettings(), named, lr=LR, weight_decay=DECAY)
    assert sum(len(g["params"]) for g in optimizers.param_groups) == 10
    assert optimizers.names[model.lm_head.weight] == "embed_tokens.weight"
    assert len(describe(AdamWSettings(), named, lr=LR, weight_decay=DECAY)) == 10


@pytest.mark.parametrize("option", SHIPPED, ids=name_of)
def test_what_is_described_is_what_trains_and_its_bytes_those_of_the_state(option: OptimizerSettings):
    model, optimizers = trained(1, option)
    rows = describe(option, model.named_parameters(), lr=LR, weight_decay=DECAY)
    states = optimizers.state_tensors().values()
    assert ({row.optimizer for row in rows} == {option.type}) != option.brings_another
    assert sum(row.state_bytes or 0 for row in rows) == sum(t.numel() * t.element_size() for t in states)


def group(regex: str = "x", optimizer: OptimizerOption | None = None, **settings: Any) -> dict[str, GroupSettings]:
    return {"mine": GroupSettings(regex=regex, settings=settings, optimizer=optimizer)}


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (AdamWSettings(groups=group("(")), r"optimizer.groups.mine.regex: not a regular expression .*got '\('"),
        (AdamWSettings(groups=group(momentum=0.9)), r"groups.mine.settings.momentum: adamw has no such setting"),
        (SGDSettings(groups=group(betas=[0.9, 0.9])), r"mine.settings.betas: sgd has no such setting; it has lr"),
        (AdamWSettings(groups=group(momentum=1, optimizer=MuonSettings(), eps="x")), r"settings.eps: must be a number"),
        (AdamWSettings(groups=group(lr=-1.0)), r"mine.settings.lr: must be a number, at least 0, got -1.0"),
        (AdamWSettings(groups=group(lr=True)), r"mine.settings.lr: must be a number, at least 0, got True"),
        (AdamWSettings(groups=group(betas=[0.9, 1.0])), r"mine.settings.betas: must be two numbers"),
        (AdamWSettings(groups=group(lr=1.0, lr_scale=2.0)), r"mine.settings: lr and lr_scale exclude each other"),
        (MuonSettings(groups=group(nesterov=1)), r"mine.settings.nesterov: must be true or false, got 1"),
        (MuonSettings(groups=group(ns_steps=0)), r"mine.settings.ns_steps: must be a positive whole number, got 0"),
        (MuonSettings(groups=group(momentum_warmup_steps=-1)), r"warmup_steps: must be a whole number, at least 0"),
        (AdamWSettings(groups=group(betas=[0.9, 0.95, 0.99])), r"mine.settings.betas: must be two numbers"),
        (MuonSettings(groups=group(adjust_lr="big")), r"mine.settings.adjust_lr: must be one of original, match"),
        (AdafactorSettings(groups=group(beta2_decay=0.8)), r"mine.settings.beta2_decay: must be a number, at most 0"),
        (AdamWSettings(groups={"default": GroupSettings(regex="x")}), r"groups.default: this name stands for"),
        (AdamWSettings(groups=group(optimizer=SGDSettings(groups={}))), r"mine.optimizer.groups: nothing reads it"),
    ],
)  # fmt: skip
def test_mistakes_in_groups(option: OptimizerOption, problem: str):
    found = list(option.group_problems())
    assert len(found) == 1
    assert re.search(problem, found[0])


def wrapped(optimizer: Any) -> None:
    """Beside a model to which it does not belong."""
    Optimizers.wrap(optimizer, TinyModel().named_parameters())


def wrapped_twice() -> None:
    model = TinyModel()
    twice = [torch.optim.SGD([{"params": [p], "name": "a"}], lr=LR) for p in list(model.parameters())[:2]]
    Optimizers.wrap(twice, model.named_parameters())


def wrapped_with(**settings: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=LR)
    optimizer.param_groups[0] |= settings
    Optimizers.wrap(optimizer, [(str(i), p) for i, p in enumerate(optimizer.param_groups[0]["params"])])


def in_backward(option: OptimizerOption) -> None:
    model, fused = trained(0, option, fused_backward)
    try:
        backward(model, 0)
    finally:
        fused.close()


REFUSED: list[tuple[OptimizerOption, str]] = [
    (SGDSettings(nesterov=True), "optimizer: SGD refused its settings: Nesterov"),
    (AdafactorSettings(clipping_threshold=0.5), "optimizer: Adafactor refused its settings: Clipping threshold"),
    (AdafactorSettings(groups=group("head", clipping_threshold=0.5)), r"\(group mine\): Adafactor refused"),
    (Target("torch.optim.Nothing"), "optimizer._target_: cannot import torch.optim.Nothing"),
    (Target("torch.optim.Adam", {"speed": 3}), "optimizer.speed: torch.optim.Adam takes no such argument"),
    (Target("builtins.dict"), "optimizer: builtins.dict failed when it was made: ValueError"),
    (Target(f"{__name__}.LR"), "optimizer._target_: .*it is a float, no class or function"),
    (AdamWSettings(groups=group("head", Target("torch.optim.SGD"), betas=[0, 0])), "settings.betas: SGD has no"),
]
test_what_is_refused = table(
    *cases((ConfigError, PartError), lambda option: build(option, TinyModel()), *REFUSED),
    *(case(SetupError, "no trainable parameter", build, option, nn.Identity()) for option, _ in REFUSED),
    case(SetupError, "optimizer group default: hook holds a builtin_function_or_method", wrapped_with, hook=print),
    case(SetupError, r"group default holds a parameter of shape \(3, 2\) that the model does not",
         lambda: wrapped(torch.optim.SGD([nn.Parameter(torch.zeros(3, 2))], lr=LR))),
    case(ConfigError, "got a TinyModel; give a torch.optim.Optimizer", lambda: wrapped(TinyModel())),
    case(ConfigError, "two parameter groups have the same name", wrapped_twice),
    case(SetupError, "SignDescent keeps state in its parameter groups", in_backward, Target(f"{__name__}.SignDescent")),
)  # fmt: skip


def test_fused_on_a_device_without_the_kernel():
    with torch.device("meta"):
        model = TinyModel()
    with pytest.raises(ConfigError, match=r"optimizer.fused: adamw has no fused kernel for torch.float32 on meta"):
        build(AdamWSettings(fused=True), model)
    assert build(AdamWSettings(), model).param_groups[0]["fused"] is None
    assert all(g["fused"] is True for g in build(AdamWSettings(), TinyModel()).param_groups)


@pytest.mark.parametrize("row", OPTIMIZERS, ids=lambda row: name_of(row.option))
def test_equals_plain_torch_or_does_what_its_row_says(row: OptimizerRow, monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, "AVX512-BF16")
    assert row.twin or row.first_step, "a row says something"
    model, other = TinyModel(), TinyModel()
    optimizers = build(row.option, model)
    if row.first_step:
        backward(model, 0)
        pairs = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters()}
        build(row.option, model).step()
        for name, (weight, gradient) in pairs.items():
            expected = row.first_step(weight, gradient, LR, 0.0 if re.search(UNDECAYED, name) else DECAY)
            torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=0, atol=1e-7)
    if row.twin is None:
        return
    model.load_state_dict(other.state_dict())
    model.zero_grad()
    theirs = row.twin(other)
    for step in range(4):
        backward(model, step)
        backward(other, step)
        optimizers.step()
        optimizers.zero_grad()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    if row.bit_for_bit:
        assert same(weights(model), weights(other))
    else:
        torch.testing.assert_close(weights(model), weights(other), rtol=1e-5, atol=1e-7)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("shape", [(64, 64), (160, 48), (48, 160), (16, 16)])
def test_muon_has_the_bits_of_torchs_for_matrices_that_go_together(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    pretend(monkeypatch, "AVX512-BF16")
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for _ in range(5)]
    ours, theirs = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    settings = {"lr": LR, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [Muon(ours, **settings), torch.optim.Muon(theirs, **settings)]
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(shape, generator=generator)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(3, 48, 160), (160, 48)])
def test_muon_rounds_once_where_the_processor_is_slow_in_bf16(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    group = next(g for g in build(MuonSettings(), TinyModel()).param_groups if "ns_steps" in g)
    a, b, c = group["ns_coefficients"]
    updates = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = updates.double() if shape[-1] > shape[-2] else updates.double().mT
    expected = expected / expected.norm(dim=(-2, -1), keepdim=True)
    for _ in range(group["ns_steps"]):
        square = expected @ expected.mT
        expected = a * expected + (b * square + c * square @ square) @ expected
    expected = expected if shape[-1] > shape[-2] else expected.mT
    for instruction, equal in (("AVX2", True), ("AVX512-BF16", False)):
        pretend(monkeypatch, instruction)
        found = orthogonalised(updates, group, in_fp32=slow_in_bf16(updates.device))
        assert found.dtype == torch.bfloat16
        assert ((found - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all() == equal


@pytest.mark.full
def test_a_step_imports_no_compiler_and_is_otherwise_torchs():
    code = """
import sys
import torch
from test_optimizers import *

def steps(model, optimizer):
    for step in range(4):
        backward(model, step)
        optimizer.step()
        model.zero_grad()  # an optimizer's would import it
    return weights(model)

def trained(option):
    model, calls = TinyModel(), []
    optimizers = build(option, model)
    for optimizer in optimizers.optimizers:
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    torch.optim.lr_scheduler.LambdaLR(optimizers.optimizers[0], lambda step: 1.0)
    result = steps(model, optimizers)
    assert calls == ["before", "after"] * (4 * len(optimizers.optimizers)), calls
    return result

def trained_in_backward():
    model = TinyModel()
    return steps(model, fused_backward(AdamWSettings(), model))

eager, profiled = [*map(trained, OPTIONS), trained_in_backward()], build(AdamWSettings(), TinyModel())
imported = "torch._dynamo" in sys.modules
with torch.profiler.profile() as profiler:  # imports it
    profiled.step()
ranges = {event.name for event in profiler.events()}
guarded = [*map(trained, OPTIONS), trained_in_backward()]
print(imported, "Optimizer.step#AdamW.step" in ranges, all(map(same, eager, guarded)))
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    assert done.stdout.split() == ["False", "True", "True"]


def test_a_differentiable_optimizer_keeps_its_step():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], differentiable=True)
    unguard_step(optimizer)
    assert "step" not in vars(optimizer)


def test_arguments_of_a_target_stand_for_all_groups_that_say_nothing_else():
    optimizers = build(Target("torch.optim.Adam", {"lr": 0.5, "weight_decay": 0.3, "eps": 1e-5}), TinyModel())
    seen = [(g["name"], g["lr"], g["weight_decay"], g["eps"]) for g in optimizers.param_groups]
    assert seen == [("no_decay", 0.5, 0.0, 1e-5), ("default", 0.5, 0.3, 1e-5)]
    optimizers = build(Target(f"{__name__}.SignDescent", {"lr": 0.5}), TinyModel())
    assert {g["lr"] for g in optimizers.param_groups} == {0.5}
    assert all("weight_decay" not in g for g in optimizers.param_groups)


class SignDescent(torch.optim.Optimizer):
    """A user's optimizer: no weight decay, a counter in its groups, a plain number in its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
                    p.add_(p.grad.sign(), alpha=-group["lr"] / group["k"])


def saved_state(optimizers: ParameterOptimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As a checkpoint would hold it: copies, and JSON there and back."""
    return (
        {name: tensor.clone() for name, tensor in optimizers.state_tensors().items()},
        json.loads(json.dumps(optimizers.group_state())),
    )


@pytest.mark.parametrize("option", [*OPTIONS, Target(f"{__name__}.SignDescent")], ids=name_of)
def test_state_comes_back_bit_for_bit(option: OptimizerOption):
    model, optimizers = trained(3, option)
    tensors, groups = saved_state(optimizers)

    other = TinyModel()
    other.load_state_dict(model.state_dict())
    fresh = build(option, other)
    assert fresh.load(tensors, groups) == []
    assert same(fresh.state_tensors(), tensors)
    assert fresh.group_state() == optimizers.group_state()
    assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizers.param_groups]

    given = {name: tensor.clone() for name, tensor in tensors.items()}
    train(model, optimizers, range(3, 6))
    train(other, fresh, range(3, 6))
    assert same(weights(model), weights(other))
    assert same(tensors, given)  # what was given is not written to


def test_state_names_and_what_was_known_is_forgotten():
    model, optimizers = trained(0)
    empty = saved_state(optimizers)
    assert empty[0] == {}
    train(model, optimizers, range(2))
    states = optimizers.state_tensors()
    assert {name.rpartition(".")[2] for name in states} == {"step", "exp_avg", "exp_avg_sq"}
    assert {name.rpartition(".")[0] for name in states} == set(dict(model.named_parameters()))
    assert states["norm.weight.step"].shape == ()
    assert states["norm.weight.step"].item() == 2
    optimizers.load(*empty)
    assert optimizers.state_tensors() == {}


def test_fp32_moments_of_bf16_parameters_keep_their_dtype_and_parameters_without_gradient_have_none():
    model = TinyModel().bfloat16()
    optimizers = build(AdamWSettings(fused=False), model)
    model.lm_head.weight.requires_grad_(False)
    train(model, optimizers, range(2))
    tensors, groups = saved_state(optimizers)
    assert not any(name.startswith("lm_head") for name in tensors)
    tensors = {name: tensor.float() + 1e-4 for name, tensor in tensors.items()}
    fresh = build(AdamWSettings(fused=False), TinyModel().bfloat16())
    for each in (optimizers, fresh):
        each.load(tensors, groups)
        assert same(each.state_tensors(), tensors)


KEPT = {name: {} for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop")} | {
    "Adam": {"amsgrad": True}, "AdamW": {"capturable": False}, "RMSprop": {"centered": True, "momentum": 0.9},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*KEPT, "muon"])
def test_what_optimizers_keep_is_possible_and_no_square_below_zero_is(name: str, dtype: torch.dtype):
    model = TinyModel().to(dtype)
    option = MuonSettings() if name == "muon" else Target(f"torch.optim.{name}", KEPT[name])
    optimizers = build(option, model)
    train(model, optimizers, range(4))
    tensors = optimizers.state_tensors()
    assert dict(optimizers.impossible(tensors)) == {}
    whole = {name: tensor for name, tensor in tensors.items() if tensor.ndim}
    signed = {name.rpartition(".")[2] for name, tensor in whole.items() if (tensor < 0).any()} | {"step_size"}
    squares = {name for name in whole if name.rpartition(".")[2] not in signed}
    assert dict(optimizers.impossible({name: -1 - tensor.abs() for name, tensor in whole.items()})).keys() == squares
    assert dict(optimizers.impossible({name: tensor.double() for name, tensor in whole.items()})).keys() == whole.keys()


def test_config_wins_over_the_checkpoint_which_wins_where_asked_to():
    _, optimizers = trained(11)  # the last learning rate is half the first
    tensors, groups = saved_state(optimizers)

    fresh = build(AdamWSettings(betas=(0.8, 0.95)), TinyModel(), lr=4 * LR)
    assert fresh.load(tensors, groups) == [
        "group no_decay: betas was [0.9, 0.95] in the checkpoint, is [0.8, 0.95] now",
        f"group no_decay: learning rate was {LR} in the checkpoint, is {4 * LR} now",
        "group default: betas was [0.9, 0.95] in the checkpoint, is [0.8, 0.95] now",
        f"group default: learning rate was {LR} in the checkpoint, is {4 * LR} now",
    ]
    assert all(g["betas"] == (0.8, 0.95) and g["initial_lr"] == 4 * LR for g in fresh.param_groups)
    assert all(g["lr"] == pytest.approx(2 * LR) for g in fresh.param_groups)
    assert same(fresh.state_tensors(), tensors)

    lines = fresh.load(tensors, groups, hyperparameters="checkpoint")
    assert lines[0] == "group no_decay: betas is [0.9, 0.95], as in the checkpoint"
    assert fresh.group_state() == optimizers.group_state()
    assert all(g["betas"] == (0.9, 0.95) for g in fresh.param_groups)


def test_a_setting_changed_during_training_survives_and_regrouped_parameters_are_told():
    _, optimizers = trained(2)
    optimizers.param_groups[1]["weight_decay"] = 0.7  # as a callback might
    tensors, groups = saved_state(optimizers)
    fresh = adamw()
    assert fresh.load(tensors, groups) == []
    assert [g["weight_decay"] for g in fresh.param_groups] == [0.0, 0.7]
    fresh = build(AdamWSettings(groups=group("lm_head")), TinyModel())
    assert fresh.load(tensors, groups) == ["group no_decay is only in the checkpoint", "group mine is new"]
    assert same(dict(sorted(fresh.state_tensors().items())), dict(sorted(tensors.items())))


def other_names() -> Optimizers:
    named = [(n.replace("layers.1", "layers.2"), p) for n, p in TinyModel().named_parameters()]
    return build_optimizer(AdamWSettings(), named, lr=LR, weight_decay=DECAY)


MISFITS: dict[str, tuple[dict[str, Tensor | None], Callable[[], Optimizers], tuple[str, ...]]] = {
    "tensors missing in the checkpoint: norm.weight.exp_avg": ({"norm.weight.exp_avg": None}, adamw, ()),
    "tensors that belong to no parameter: o.exp_avg": ({"o.exp_avg": torch.zeros(1)}, adamw, ()),
    "missing in the checkpoint: layers.2.down_proj.weight, layers.2.norm.weight": (
        {}, other_names, ("not trained by this run's optimizer: layers.1.down_proj.weight",)
    ),
    "trained by AdamW in the checkpoint, by Muon now: layers.0.up_proj.weight": (
        {}, lambda: build(MuonSettings(), TinyModel()), ()
    ),
    "norm.weight.exp_avg: its shape is (9,), the parameter's (8,)": (
        {"norm.weight.exp_avg": torch.zeros(9)}, adamw, ()
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", MISFITS)
def test_state_that_does_not_fit_changes_nothing(message: str):
    changes, make, more = MISFITS[message]
    (_, saving), loading = trained(2), make()
    tensors, groups = saved_state(saving)
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    before = copy.deepcopy(loading.group_state())
    with pytest.raises(CheckpointError, match="leave optimizer out of resume_components") as error:
        loading.load(tensors, groups)
    assert all(words in str(error.value) for words in (message, *more)), error.value
    assert loading.group_state() == before
    assert loading.state_tensors() == {}
    assert "lm_head" not in str(error.value), "a parameter that fits"
    with pytest.raises(CheckpointError, match="and 25 more"):
        adamw().load({}, groups)


def test_wrapped_optimizers_of_the_user_keep_their_names():
    model = TinyModel()
    first = torch.optim.RMSprop([{"params": model.lm_head.parameters(), "name": "head"}], lr=LR)
    second = torch.optim.AdamW(model.layers.parameters(), lr=LR)
    optimizers = Optimizers.wrap([first, second], model.named_parameters())
    assert [g["name"] for g in optimizers.param_groups] == ["head", "group_1"]
    train(model, optimizers, range(2))
    assert "lm_head.weight.square_avg" in optimizers.state_tensors()
    assert not any("embed" in name for name in optimizers.state_tensors())


def fused_backward(option: OptimizerOption, model: nn.Module) -> FusedBackward:
    return FusedBackward(option, model.named_parameters(), lr=LR, weight_decay=DECAY)


@every_option
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_in_backward_equals_the_ordinary_optimizer(option: OptimizerOption, tied: bool):
    model, other = TinyModel(tied=tied), TinyModel(tied=tied)
    fused, ordinary = fused_backward(option, model), build(option, other)
    train(model, fused, range(5))
    train(other, ordinary, range(5))
    assert same(weights(model), weights(other))
    assert same(fused.state_tensors(), ordinary.state_tensors())
    assert fused.group_state() == ordinary.group_state()


def test_in_backward_holds_one_gradient_at_a_time_and_none_is_added_to_before_the_step():
    model, fused = trained(0, make=fused_backward)
    alive: list[int] = []
    for parameter in model.parameters():  # these hooks run after the optimizer's
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    backward(model, 0)
    assert alive == [0] * len(fused.names)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(SetupError, match="set gradient_accumulation_steps=1"):
        backward(model, 1)


def test_in_backward_measures_the_gradient_norm():
    model, other = TinyModel(), TinyModel()
    fused = fused_backward(SGDSettings(), model)
    assert fused.grad_norm().item() == 0
    for step in range(2):
        other.load_state_dict(model.state_dict())
        backward(model, step)
        other.zero_grad()
        backward(other, step)
        expected = torch.nn.utils.get_total_norm([p.grad for p in other.parameters()])
        torch.testing.assert_close(fused.grad_norm(), expected, rtol=1e-6, atol=0)
        fused.step()


def test_in_backward_resumes_bit_for_bit_also_as_the_ordinary_optimizer():
    model, fused = trained(3, MuonSettings(), fused_backward)
    state, values = saved_state(fused), copy.deepcopy(model.state_dict())
    train(model, fused, range(3, 6))
    for make in (fused_backward, build):
        other = TinyModel()
        other.load_state_dict(values)
        again = make(MuonSettings(), other)
        assert again.load(*state) == []
        train(other, again, range(3, 6))
        assert same(weights(model), weights(other))


def test_only_the_newest_in_backward_steps():
    model, other = TinyModel(), TinyModel()
    first = fused_backward(SGDSettings(), model)
    train(model, fused_backward(SGDSettings(), model), range(1))
    train(other, build(SGDSettings(), other), range(1))
    assert same(weights(model), weights(other))
    assert first.state_tensors() == {}


def test_gradients_are_left_alone_after_close_and_after_the_optimizer_is_gone():
    model, fused = trained(0, SGDSettings(), fused_backward)
    fused.close()
    backward(model, 0)
    assert all(p.grad is not None for p in model.parameters())
    other = TinyModel()
    fused_backward(SGDSettings(), other)  # nobody holds it
    backward(other, 0)
    assert all(p.grad is not None for p in other.parameters())


def test_torch_schedulers_work_with_the_optimizer_in_backward():
    model, fused = trained(0, make=fused_backward)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(fused.optimizers[0], 0.5)
    for step in range(2):
        backward(model, step)
        fused.step()
        scheduler.step()  # torch warns, here fails, if no optimizer step was seen before
    assert math.isclose(fused.param_groups[0]["lr"], LR / 4)
