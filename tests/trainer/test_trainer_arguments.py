"""What a Trainer from Python is refused for, and that its arguments are what they say: against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from forgather_cli import PipelineSettings, Trainer, TrainingArguments
from forgather_cli.config.schema import GroupSettings
from forgather_cli.errors import ConfigError
from forgather_cli.launch.exit_status import read_exit_record
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import check_supported
from forgather_cli.strategies.build import build_strategy

DATA = [tiny.RandomTokens(1, ragged=True)[0]] * 24  # one sample, so that the order is no matter


def make(arguments: dict[str, Any] | None = None, **given: Any) -> Trainer:
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no", "use_cpu": True}
    args = TrainingArguments("never-written", **{**settings, **(arguments or {})})
    model = {} if "model_init" in given else {"model": tiny.decoder()}
    return Trainer(args=args, train_dataset=DATA, **{**model, **given})


def refusal(arguments: dict[str, Any] | None = None, **given: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        make(arguments, **given)
    return refused.value.problems


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"fuse_optim_with_backward": True}, ("fuse_optim_with_backward", "max_grad_norm=1", "max_grad_norm=None")),
    ({"fuse_optim_with_backward": True, "max_grad_norm": None, "gradient_accumulation_steps": 2},
     ("fuse_optim_with_backward", "gradient_accumulation_steps=1")),
    ({"fuse_optim_with_backward": True, "max_grad_norm": 0, "fp16": True}, ("fuse_optim_with_backward", "fp16=True")),
    ({"fuse_optim_with_backward": True, "max_grad_norm": None, "optimizer": "muon"}, ('optimizer="muon"',)),
    ({"load_best_model_at_end": True, "save_strategy": "steps"}, ("load_best_model_at_end", 'eval_strategy="steps"')),
    ({"activation_memory_budget": 0.5}, ("activation_memory_budget", "torch_compile=True")),
    ({"trainer": "pipeline"}, ("trainer", "torchrun")),
    ({"trainer": {"type": "fsdp2", "param_dtype": "fp16"}}, ("param_dtype", 'precision="fp16"')),
    ({"global_batch_size": 7, "gradient_accumulation_steps": 2}, ("gradient_accumulation_steps", "global_batch_size")),
    ({"nproc_per_node": 2}, ("nproc_per_node", "torchrun")),
    ({"optimizer": {"type": "adamw", "groups": {"a": {"regex": "("}}}}, ("optimizer_groups.a.regex",)),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_what_a_recipe_is_refused_for_a_script_is_too(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    problems = refusal(arguments)
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_a_given_strategy_is_asked_what_it_can() -> None:
    cannot = build_strategy(TrainingArguments("x", use_cpu=True))
    cannot.supports_fp16 = cannot.supports_compile = cannot.supports_optimizer_in_backward = False
    [problem] = refusal({"fuse_optim_with_backward": True, "max_grad_norm": None}, strategy=cannot)
    assert "fuse_optim_with_backward" in problem
    [problem] = refusal({"torch_compile": True}, strategy=cannot)
    assert "torch_compile" in problem
    with pytest.raises(ConfigError, match="precision: "):  # one that a recipe names; no object is given the scaler
        check_supported(TrainingArguments("x", use_cpu=True, fp16=True), cannot)


ON_TWO_RANKS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"fuse_optim_with_backward": True, "max_grad_norm": None}, {}, ("fuse_optim_with_backward", 'trainer="ddp"')),
    ({"trainer": "single"}, {}, ("trainer", "ddp")),
    ({"fp16": True}, {"strategy": "pipeline"}, ("fp16", 'strategy="pipeline"', 'precision="bf16"')),
    ({"torch_compile": True, "trainer": PipelineSettings(schedule="ZBVZeroBubble")}, {},
     ("torch_compile", 'schedule="ZBVZeroBubble"')),
    ({"trainer": PipelineSettings(n_microbatches=1)}, {}, ("n_microbatches", 'schedule="1F1B"')),
    ({"trainer": PipelineSettings()}, {}, ("model_init", 'trainer="pipeline"')),
    ({"per_device_train_batch_size": 6, "trainer": "pipeline"}, {}, ("per_device_train_batch_size", "6")),
    ({"global_batch_size": 7}, {}, ("global_batch_size", "2 ranks")),
    ({"optimizer": "adafactor", "trainer": "fsdp2"}, {}, ("optimizer", "adafactor")),
]  # fmt: skip


def test_rules_of_several_ranks() -> None:
    for found in run_ranks(2, refused_on_two_ranks):
        for problems, (_, _, words) in zip(found, ON_TWO_RANKS, strict=True):
            assert any(all(word in problem for word in words) for problem in problems), problems


def refused_on_two_ranks() -> list[list[str]]:
    return [refusal(arguments, **given) for arguments, given, _ in ON_TWO_RANKS]


def test_arguments_that_exclude_each_other() -> None:
    model = tiny.decoder()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"optimizers": (optimizer, None), "optimizer_factory": SGD}, "optimizers"),
        ({}, {"optimizers": (None, schedule)}, "optimizers"),
        ({}, {"optimizers": (optimizer, schedule), "lr_scheduler_factory": StepLR}, "lr_scheduler_factory"),
        ({}, {"optimizers": (optimizer, schedule), "optimizer_groups": {"a": {"regex": "a"}}}, "optimizer_groups"),
        ({}, {"optimizers": (optimizer, None), "model_init": tiny.decoder}, "optimizers"),
        ({"optimizer": "sgd"}, {"optimizer_factory": SGD}, "optimizer"),
        ({"warmup_steps": 2}, {"lr_scheduler_factory": StepLR}, "warmup_steps"),
        ({"loss": "cross_entropy"}, {"loss_fn": len}, "loss"),
        ({}, {"loss_fn": len, "fused_loss_factory": len}, "loss_fn"),
        ({"trainer": "ddp"}, {"strategy": "fsdp2"}, "strategy"),
        ({"precision": "bf16", "fp16": True}, {}, "fp16"),
        ({"fuse_optim_with_backward": True, "max_grad_norm": 0}, {"optimizer_factory": SGD}, "optimizer_factory"),
        ({}, {"enable_activation_checkpoint_fn": len}, "enable_activation_checkpoint_fn"),
        ({"gradient_checkpointing": True}, {"enable_activation_checkpoint_fn": setattr},
         "enable_activation_checkpoint_fn"),
        ({}, {"optimizer_groups": [{"params": []}]}, "optimizer_groups"),
        ({}, {"optimizer_groups": {"a": {"rgx": "a"}}}, "optimizer_groups.a.rgx"),
        ({}, {"optimizer_groups": {"a": {"regex": "("}}, "optimizer_factory": SGD}, "optimizer_groups.a.regex"),
    ]  # fmt: skip
    for arguments, given, name in cases:
        problems = refusal(arguments, **{"model": model, **given} if "model_init" not in given else given)
        assert any(problem.startswith(name) for problem in problems), (arguments, given, problems)


# ------------------------------------------------------------------------------------------- optimizers and schedulers


def norms_without_decay(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    return [
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0, "lr": 0.05},
        {"params": [(n, p) for n, p in named if "norm" not in n]},
    ]


GROUPS: dict[str, Any] = {
    "dict": {"norms": {"regex": "norm", "settings": {"weight_decay": 0.0, "lr": 0.05}}},
    "settings": {"norms": GroupSettings(regex="norm", settings={"weight_decay": 0.0, "lr": 0.05})},
    "function": norms_without_decay,
}


def trained(path: Path | str, **given: Any) -> dict[str, Tensor]:
    """Whole weights after three steps of at most eight rows."""
    settings = {"max_steps": 3, "per_device_train_batch_size": 8, "max_grad_norm": None, **given}
    trainer = tiny.script(path, settings.pop("model", None), DATA, **settings)
    trainer.train()
    full = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in trainer.model.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def by_hand(factor: Callable[[int], float]) -> dict[str, Tensor]:
    """Three steps of plain SGD: norms at 0.05 without decay, the rest at 0.2 with 0.5."""
    model = tiny.decoder()
    tokens, labels = (DATA[0][key][None] for key in ("input_ids", "labels"))
    for step in range(3):
        nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                lr, decay = (0.05, 0.0) if "norm" in name else (0.2, 0.5)
                p -= lr * factor(step) * (p.grad + decay * p)
                p.grad = None
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def linear(step: int) -> float:
    return 1 - step / 3


def assert_close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("way", "groups"),
    [
        ("settings", "settings"),
        ("settings", "function"),
        ("factory", "dict"),
        ("class", "function"),
        ("object", "dict"),
    ],
)
def test_groups_are_in_effect_with_every_way_to_give_an_optimizer(tmp_path: Path, way: str, groups: str) -> None:
    model = tiny.decoder()
    rates = {"learning_rate": 0.2, "weight_decay": 0.5}
    sgd = partial(SGD, lr=0.2, weight_decay=0.5)
    arguments, given = {
        "settings": ({**rates, "optimizer": "sgd"}, {}),
        "factory": ({}, {"optimizer_factory": sgd}),
        "class": (rates, {"optimizer_cls_and_kwargs": (SGD, {})}),
        "object": ({}, {"optimizers": (sgd(model.parameters()), None)}),
    }[way]
    weights = trained(tmp_path, **arguments, model=model, optimizer_groups=GROUPS[groups], **given)
    assert_close(weights, by_hand(linear))


def test_weight_decay_reaches_an_optimizer_class_without_norms_and_biases(tmp_path: Path) -> None:
    own = (AdamW, {"betas": (0.5, 0.6)})
    trainer = tiny.script(tmp_path, None, DATA, max_steps=1, weight_decay=0.5, optimizer_cls_and_kwargs=own)
    trainer.train()
    decays = {group["name"]: (group["weight_decay"], group["betas"]) for group in trainer.optimizer.param_groups}
    assert decays == {"no_decay": (0.0, (0.5, 0.6)), "default": (0.5, (0.5, 0.6))}


def test_a_setting_that_the_optimizer_does_not_know_is_refused(tmp_path: Path) -> None:
    groups = {"norms": {"regex": "norm", "settings": {"wieght_decay": 0.0}}}
    with pytest.raises(ConfigError, match=r"optimizer_groups\.norms\.settings\.wieght_decay"):
        trained(tmp_path, optimizer_groups=groups, optimizer_cls_and_kwargs=(SGD, {}))
    with pytest.raises(ConfigError, match=r"optimizer_groups.*lm_head|optimizer_groups.*model\."):
        trained(tmp_path, optimizer_groups=lambda named: norms_without_decay(named)[:1])


def two_optimizers(named: list[tuple[str, nn.Parameter]]) -> list[Optimizer]:
    norms = [p for n, p in named if "norm" in n]
    rest = [p for n, p in named if "norm" not in n]
    return [SGD(rest, lr=0.2, weight_decay=0.5), SGD(norms, lr=0.05)]


def test_a_scheduler_factory_schedules_every_optimizer(tmp_path: Path) -> None:
    halves = partial(StepLR, step_size=1, gamma=0.5)
    weights = trained(tmp_path, optimizer_factory=two_optimizers, lr_scheduler_factory=halves)
    assert_close(weights, by_hand(lambda step: 0.5**step))


def test_schedulers_that_leave_out_an_optimizer_are_refused(tmp_path: Path) -> None:
    model = tiny.decoder()
    both = two_optimizers(list(model.named_parameters()))
    with pytest.raises(ConfigError, match="2 optimizers"):
        trained(tmp_path, model=model, optimizers=(both, StepLR(both[0], 1)))


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("takes_rank", [True, False])
def test_a_function_of_the_user_s_checkpoints_activations(tmp_path: Path, returns: bool, takes_rank: bool) -> None:
    calls, ranks = [], []

    def recompute(model: nn.Module) -> nn.Module | None:
        for layer in model.get_submodule("model.layers").children():
            layer.forward = partial(count, layer.forward)  # type: ignore[method-assign]
        return model if returns else None

    def count(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    def with_rank(rank: int, model: nn.Module) -> nn.Module | None:
        ranks.append(rank)
        return recompute(model)

    settings = {"gradient_checkpointing": True}
    trained(tmp_path, **settings, enable_activation_checkpoint_fn=with_rank if takes_rank else recompute)
    assert (len(calls), ranks) == (2 * 3, [0] * takes_rank)
    [problem] = refusal({**settings, "gradient_checkpointing_every": 2}, enable_activation_checkpoint_fn=recompute)
    assert "gradient_checkpointing_every" in problem
    assert "enable_activation_checkpoint_fn" in problem


# ------------------------------------------------------------------------------------------------------- several ranks


def layers_given() -> list[int]:
    layers: list[int] = []
    make(
        {"gradient_checkpointing": True, "trainer": "pipeline"},
        model_init=tiny.decoder,
        enable_activation_checkpoint_fn=lambda model: layers.append(len(model.model.layers)),
    )
    return layers


def test_a_checkpointing_function_gets_a_stage_after_it_is_cut() -> None:
    assert run_ranks(2, layers_given) == [[1], [1]]


def fused_on_two_ranks(path: str) -> dict[str, Tensor]:
    ranks: list[int] = []  # a checkpointing function gets its own
    make({"gradient_checkpointing": True}, enable_activation_checkpoint_fn=lambda rank, model: ranks.append(rank))
    assert ranks == [dist.get_rank()]
    rates = {"optimizer": "sgd", "learning_rate": 0.2, "weight_decay": 0.5, "optimizer_groups": GROUPS["dict"]}
    return trained(path, **rates, strategy="fsdp2", per_device_train_batch_size=4, fuse_optim_with_backward=True)


def test_the_optimizer_in_the_backward_on_two_ranks(tmp_path: Path) -> None:
    for weights in run_ranks(2, fused_on_two_ranks, str(tmp_path)):
        assert_close(weights, by_hand(linear))
    ended = read_exit_record(RunDir(tmp_path))
    assert (ended.code, ended.step) == (0, 3)
