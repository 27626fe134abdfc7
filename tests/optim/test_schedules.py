"""Learning-rate schedules: against torch and transformers where these have them, and by numbers elsewhere."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from option_rows import SCHEDULES, ScheduleRow
from refusals import case, cases, table
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

from forgather_cli.config.schema import (
    AdamWSettings,
    ConstantSettings,
    CosineSettings,
    InfiniteSettings,
    InverseSqrtSettings,
    LinearSettings,
    MuonSettings,
    SchedulerOption,
    SchedulerSettings,
    Target,
    WSDSettings,
)
from forgather_cli.documents.fields import FieldError
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.optim.build import Optimizers, build_optimizer
from forgather_cli.optim.schedules import Schedule, TorchSchedule, build_schedule, schedule_factor

WARMUP, TOTAL = 7, 50


def curve(option: SchedulerOption, total: int | None = TOTAL, length: int = TOTAL + 5) -> list[float]:
    factor = schedule_factor(option, total_steps=total)
    return [factor(step) for step in range(length)]


def reference(make: Any, length: int = TOTAL + 5) -> list[float]:
    """Learning rates of a scheduler from elsewhere, at an initial rate of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(length):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def adamw(lr: float = 1e-2) -> Optimizers:
    return build_optimizer(AdamWSettings(), small_model().named_parameters(), lr=lr, weight_decay=0.1)


@pytest.mark.parametrize(
    ("kind", "ours", "name", "theirs"),
    [
        (LinearSettings, {}, "linear_schedule_with_warmup", {}),
        (CosineSettings, {"min_lr_ratio": 0.1}, "cosine_with_min_lr_schedule_with_warmup", {"min_lr_rate": 0.1}),
        (WSDSettings, {"decay_steps": 10, "decay_shape": "linear"}, "wsd_schedule", {"decay_type": "linear"}),
        (WSDSettings, {"decay_steps": 10, "decay_shape": "cosine"}, "wsd_schedule", {"decay_type": "cosine"}),
        (WSDSettings, {"decay_steps": 0.2, "decay_shape": "sqrt"}, "wsd_schedule", {"decay_type": "1-sqrt"}),
        (InverseSqrtSettings, {}, "inverse_sqrt_schedule", {}),
        (InverseSqrtSettings, {"timescale": 20}, "inverse_sqrt_schedule", {"timescale": 20}),
    ],
)
def test_equals_transformers_after_the_warmup(kind: Any, ours: dict[str, Any], name: str, theirs: dict[str, Any]):
    make = getattr(pytest.importorskip("transformers.optimization"), f"get_{name}")
    settings = {"num_warmup_steps": WARMUP, **theirs}
    settings |= {} if kind is InverseSqrtSettings else {"num_training_steps": TOTAL}
    settings |= {"num_decay_steps": 10} if kind is WSDSettings else {}
    expected = reference(lambda o: make(o, **settings), TOTAL)[WARMUP:]
    assert curve(kind(warmup_steps=WARMUP, **ours))[WARMUP:TOTAL] == pytest.approx(expected, abs=1e-12)


def test_equals_torch():
    theirs = reference(lambda o: torch_schedulers.CosineAnnealingLR(o, TOTAL, eta_min=0.25), TOTAL + 1)
    assert curve(CosineSettings(min_lr_ratio=0.25), length=TOTAL + 1) == pytest.approx(theirs, abs=1e-12)
    theirs = reference(lambda o: torch_schedulers.LinearLR(o, 1.0, 0.3, total_iters=TOTAL))
    assert curve(LinearSettings(min_lr_ratio=0.3)) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in SchedulerSettings.members if not kind.warms_up])
def test_warmup_is_step_plus_one_over_warmup_steps(kind: Any):
    option = kind(warmup_steps=WARMUP)
    rates = curve(option)
    assert rates[:WARMUP] == pytest.approx([(k + 1) / WARMUP for k in range(WARMUP)])
    assert rates[WARMUP] == pytest.approx(1.0)
    assert all(0 <= rate <= 1 for rate in rates)
    assert curve(option, total=2, length=2) == pytest.approx([1 / WARMUP, 2 / WARMUP]), "a run that is shorter"
    assert curve(kind())[0] == 1.0, "without a warmup"


@pytest.mark.parametrize(
    ("option", "last"),
    [
        (CosineSettings(min_lr_ratio=0.1), 0.1),
        (LinearSettings(min_lr_ratio=0.0), 0.0),
        (WSDSettings(min_lr_ratio=0.05), 0.05),
        (ConstantSettings(), 1.0),
        (InfiniteSettings(cooldown_steps=5, constant_lr_ratio=0.3), 0.3),
    ],
)
def test_final_value_stays_after_the_last_step(option: SchedulerOption, last: float):
    factor = schedule_factor(option, total_steps=TOTAL)
    assert [factor(TOTAL), factor(TOTAL + 1), factor(10 * TOTAL)] == pytest.approx([last] * 3)


def test_wsd_numbers():
    sqrt = curve(WSDSettings(decay_steps=4, decay_shape="sqrt"), total=10, length=11)
    assert sqrt[6:] == pytest.approx([1 - math.sqrt(p) for p in (0, 0.25, 0.5, 0.75, 1)])
    warming = curve(WSDSettings(warmup_steps=6, decay_steps=8), total=10, length=11)
    assert warming[5:] == pytest.approx([1, 1, 0.75, 0.5, 0.25, 0]), "the decay never cuts the warmup"


def test_infinite_numbers():
    option = InfiniteSettings(
        warmup_steps=2, cooldown_steps=4, constant_lr_ratio=0.5, anneal_start_step=8, anneal_steps=4, min_lr_ratio=0.1
    )
    half = [0.5 + 0.25 * (1 + math.cos(math.pi * p)) for p in (0, 0.25, 0.5, 0.75)]
    expected = [0.5, 1, *half, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]
    assert curve(option, total=None, length=14) == pytest.approx(expected)
    # it anneals from where it stands in the cooldown
    rates = curve(InfiniteSettings(cooldown_steps=10, anneal_start_step=5, anneal_steps=5), total=None, length=11)
    assert rates[5:] == pytest.approx([(0.3 + 0.7 * 0.5) * p for p in (1, 0.8, 0.6, 0.4, 0.2, 0)])


@pytest.mark.parametrize("row", SCHEDULES, ids=lambda row: row.option.type)
def test_first_steps_and_a_resume_have_the_factors_of_the_row(row: ScheduleRow):
    steps = len(row.factors)
    assert curve(row.option, row.total_steps, steps) == pytest.approx(row.factors)
    began = build_schedule(row.option, adamw(lr=0.5), total_steps=row.total_steps)
    began.step()
    resumed = build_schedule(row.option, adamw(lr=0.5), total_steps=row.total_steps)
    resumed.load_state_dict(json.loads(json.dumps(began.state_dict())))
    for factor in row.factors[1:]:
        assert resumed.get_last_lr() == pytest.approx([0.5 * factor] * 2)
        resumed.step()


def test_warmup_below_one_is_a_fraction_of_all_steps():
    assert curve(ConstantSettings(warmup_steps=0.07), total=100) == curve(ConstantSettings(warmup_steps=7), total=100)
    assert curve(ConstantSettings(warmup_steps=0.5), total=3)[:3] == [0.5, 1.0, 1.0]  # 1.5 steps rounded up


def test_a_warmup_that_never_ends_is_said_in_one_line(caplog: pytest.LogCaptureFixture):
    build_schedule(ConstantSettings(warmup_steps=10), adamw(lr=0.5), total_steps=10)
    assert not caplog.records
    build_schedule(ConstantSettings(warmup_steps=11), adamw(lr=0.5), total_steps=10)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert all(word in record.message for word in ("warmup_steps", "11", "10"))
    build_schedule(ConstantSettings(warmup_steps=11), adamw(lr=0.5), total_steps=0)
    assert len(caplog.records) == 1
    build_schedule(ConstantSettings(warmup_steps=2), adamw(lr=0.5), total_steps=1)
    assert len(caplog.records) == 2


def test_a_constant_rate_needs_no_length():
    for option in (ConstantSettings(), InverseSqrtSettings(), InfiniteSettings()):
        assert schedule_factor(option, total_steps=None)(0) == 1.0, option.type


def test_schedule_sets_every_group_and_goes_on_after_a_resume():
    optimizers = adamw(lr=0.5)
    optimizers.param_groups[1]["initial_lr"] = 0.25
    schedule = build_schedule(LinearSettings(), optimizers, total_steps=10)
    assert schedule.get_last_lr() == [0.5, 0.25]
    for _ in range(4):
        schedule.step()
    assert [g["lr"] for g in optimizers.param_groups] == pytest.approx([0.3, 0.15])
    assert schedule.state_dict() == {"step": 4}

    resumed = build_schedule(LinearSettings(), adamw(lr=1.0), total_steps=20)  # config wins: rate and length
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.get_last_lr() == pytest.approx([0.8, 0.8])


def test_schedule_around_a_bare_torch_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = Schedule(optimizer, lambda step: 1 / (step + 1), last_step=3)
    assert optimizer.param_groups[0]["lr"] == 0.5
    schedule.step()
    assert schedule.get_last_lr() == [0.4]
    parts = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.2, 0.3)]
    assert Schedule(torch.optim.SGD(parts), lambda step: 1.0).learning_rate() == 0.1


def train(model: nn.Module, optimizers: Optimizers, schedule: Any, steps: int) -> list[list[float]]:
    rates = []
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(5, 3)).square().sum().backward()
        rates.append([g["lr"] for g in optimizers.param_groups])
        optimizers.step()
        schedule.step()
        optimizers.zero_grad()
    return rates


def make_target(path: str, kwargs: dict[str, Any], option: Any = None) -> tuple[nn.Module, Optimizers, TorchSchedule]:
    model = small_model()
    optimizers = build_optimizer(option or AdamWSettings(), model.named_parameters(), lr=0.1, weight_decay=0.0)
    schedule = build_schedule(Target(path, kwargs), optimizers, total_steps=None)
    return model, optimizers, schedule


def sequential(optimizer: torch.optim.Optimizer) -> torch_schedulers.SequentialLR:
    constant = torch_schedulers.ConstantLR(optimizer, 0.5, 2)
    falls = torch_schedulers.MultiStepLR(optimizer, [2, 4], gamma=0.1)
    return torch_schedulers.SequentialLR(optimizer, [constant, falls], milestones=[2])


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        ("torch.optim.lr_scheduler.StepLR", {"step_size": 2}),
        ("torch.optim.lr_scheduler.MultiStepLR", {"milestones": [2, 5]}),
        ("torch.optim.lr_scheduler.OneCycleLR", {"max_lr": 0.2, "total_steps": 20}),
        ("torch.optim.lr_scheduler.CosineAnnealingLR", {"T_max": 9}),
        (f"{__name__}.sequential", {}),
    ],
)
def test_torch_schedulers_resume_exactly(path: str, kwargs: dict[str, Any]):
    model, optimizers, schedule = make_target(path, kwargs)
    train(model, optimizers, schedule, 3)
    tensors = {k: v.clone() for k, v in optimizers.state_tensors().items()}
    saved = (model.state_dict(), optimizers.group_state(), schedule.state_dict())
    assert "Counter(" not in str(saved[2]), "milestones are kept in a plain dict"

    other, again, resumed = make_target(path, kwargs)
    other.load_state_dict({k: v.clone() for k, v in saved[0].items()})
    assert again.load(tensors, saved[1]) == []
    resumed.load_state_dict(saved[2])
    assert train(other, again, resumed, 6) == train(model, optimizers, schedule, 6)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_resume_with_another_learning_rate_keeps_the_place_in_a_torch_schedule():
    model, optimizers, schedule = make_target("torch.optim.lr_scheduler.StepLR", {"step_size": 2})
    train(model, optimizers, schedule, 3)
    _, again, resumed = make_target("torch.optim.lr_scheduler.StepLR", {"step_size": 2})
    for group in again.param_groups:
        group["initial_lr"] = group["lr"] = 0.4
    resumed.load_state_dict(schedule.state_dict())
    assert schedule.get_last_lr() == pytest.approx([0.01, 0.01])
    assert [g["lr"] for g in again.param_groups] == pytest.approx([0.04, 0.04])


def test_target_scheduler_gets_one_instance_per_torch_optimizer():
    model, optimizers, schedule = make_target("torch.optim.lr_scheduler.StepLR", {"step_size": 1}, MuonSettings())
    assert len(optimizers.optimizers) == len(schedule.schedulers) == 2
    train(model, optimizers, schedule, 2)
    assert schedule.get_last_lr() == pytest.approx([0.001] * len(optimizers.param_groups))
    with pytest.raises(SetupError, match="2 schedulers, this run 1"):
        make_target("torch.optim.lr_scheduler.StepLR", {"step_size": 1})[2].load_state_dict(schedule.state_dict())


def test_wrapped_scheduler_of_the_user():
    optimizer = torch.optim.SGD(small_model().parameters(), lr=1.0)
    schedule = Schedule.wrap(torch_schedulers.LambdaLR(optimizer, lambda step: 0.5**step))
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
    steps = LambdaStep()
    schedule = Schedule.wrap([steps])
    schedule.step()
    assert (schedule.learning_rate(), schedule.get_last_lr()) == (0.5, [0.5, 0.25])
    schedule.load_state_dict({"schedulers": [{"steps": 3}], "initial_lr": [[]]})
    assert schedule.state_dict() == {"schedulers": [{"steps": 3}], "initial_lr": [[]]}


class LambdaStep:
    """A scheduler whose optimizer is not where torch's have it."""

    steps = 0

    def step(self) -> None:
        self.steps += 1

    def get_last_lr(self) -> list[float]:
        return [0.5**self.steps, 0.25**self.steps]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_a_learning_rate_in_a_tensor_stays_there():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(small_model().parameters(), lr=rate, foreach=False)
    schedule = Schedule.wrap(torch_schedulers.StepLR(optimizer, 1))
    saved = schedule.state_dict()
    optimizer.step()
    schedule.step()
    schedule.load_state_dict(saved)
    assert (optimizer.param_groups[0]["lr"] is rate, float(rate)) == (True, pytest.approx(0.1))


def linear_of(state: dict[str, Any]) -> None:
    build_schedule(LinearSettings(), adamw(), total_steps=9).load_state_dict(state)


def wrapped_of(state: dict[str, Any]) -> None:
    Schedule.wrap(LambdaStep()).load_state_dict(state)


test_what_is_refused = table(
    *cases(ConfigError, make_target,
        ("torch.optim.lr_scheduler.Nothing", {}, r"lr_scheduler._target_: cannot import .*Nothing"),
        ("torch.optim.lr_scheduler.StepLR", {"step": 1}, r"lr_scheduler.step: .*StepLR takes no such .*step_size"),
        ("torch.optim.lr_scheduler.ReduceLROnPlateau", {}, "steps on a metric"),
        ("builtins.id", {}, r"a int has no step, state_dict, load_state_dict, get_last_lr"),
    ),
    case(FieldError, "step", linear_of, {"step": -1}),
    *cases(FieldError, wrapped_of,
        ({"schedulers": [1], "initial_lr": [[0.1]]}, "schedulers"),
        ({"schedulers": [{"last_epoch": "x"}], "initial_lr": [[]]}, "last_epoch|schedulers"),
    ),
    *cases(SetupError, lambda option: schedule_factor(option, total_steps=None),
        *((option, rf"lr_scheduler: {option.type} needs .* set max_steps")
          for option in (CosineSettings(), LinearSettings(), WSDSettings())),
        (ConstantSettings(warmup_steps=0.1), r"lr_scheduler.warmup_steps: 0.1 is a fraction .* set max_steps"),
    ),
    case(ConfigError, r"lr_scheduler.warmup_steps: must be whole steps.*10.5",
         schedule_factor, ConstantSettings(warmup_steps=10.5), total_steps=100),
)  # fmt: skip


def test_the_runs_learning_rate_is_that_of_parameters_without_a_group_of_their_own():
    names = ("embed_tokens.weight", "layers.0.up_proj.weight", "lm_head.weight")
    parameters = [(name, torch.nn.Parameter(torch.zeros(2, 2))) for name in names]
    optimizers = build_optimizer(MuonSettings(), parameters, lr=0.1, weight_decay=0.0)
    schedule = build_schedule(LinearSettings(), optimizers, total_steps=10)
    schedule.step()
    assert schedule.learning_rate() == pytest.approx(0.09)
    assert sorted(schedule.get_last_lr()) == pytest.approx([0.09, 0.27, 0.36])
    step_lr = Target("torch.optim.lr_scheduler.StepLR", {"step_size": 1})
    optimizers = build_optimizer(MuonSettings(), parameters, lr=0.1, weight_decay=0.0)
    assert build_schedule(step_lr, optimizers, total_steps=10).learning_rate() == pytest.approx(0.1)
