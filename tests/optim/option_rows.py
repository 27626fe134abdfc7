"""What shipped optimizers and schedules are held against: a row for each, or more; all tests of them read these."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgather_cli.config.schema import (
    AdafactorSettings,
    AdamWSettings,
    ConstantSettings,
    CosineSettings,
    InfiniteSettings,
    InverseSqrtSettings,
    LinearSettings,
    MuonSettings,
    OptimizerOption,
    SchedulerSettings,
    SGDSettings,
    Target,
    TransformersScheduleSettings,
    WSDSettings,
)

LR, DECAY = 1e-2, 0.1
UNDECAYED = r"embed|norm|bias"


class OptimizerRow(NamedTuple):
    """An option, and its twin in plain torch or what it makes of a weight in its first step."""

    option: OptimizerOption
    twin: Callable[[nn.Module], list[torch.optim.Optimizer]] | None = None
    first_step: Callable[[Tensor, Tensor, float, float], Tensor] | None = None
    """(weight, gradient, learning rate, weight decay) -> the weight after it."""
    bit_for_bit: bool = True
    """It computes what its twin does to the last bit."""


class ScheduleRow(NamedTuple):
    """An option over a run of so many steps, and the factors from its first step on."""

    option: SchedulerSettings
    total_steps: int | None
    factors: list[float]


def plain(cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[..., list[torch.optim.Optimizer]]:
    """A torch optimizer over a model's parameters, of which norms, biases and embeddings do not decay."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        free, undecayed = [], []
        for name, parameter in model.named_parameters():
            (undecayed if re.search(UNDECAYED, name) else free).append(parameter)
        groups = [{"params": undecayed, "weight_decay": 0.0}, {"params": free}]
        return [cls(groups, lr=LR, weight_decay=DECAY, **settings)]

    return make


class WarmedUpAndCautious(torch.optim.Muon):
    """With a momentum that rises to 0.9 in 3 steps, and a decay of what the step makes smaller anyway."""

    done = 0

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        decay = group["weight_decay"]
        group["momentum"], group["weight_decay"] = (0.85, 0.85 + 0.05 / 3, 0.85 + 0.1 / 3, 0.9)[min(self.done, 3)], 0.0
        self.done += 1
        before = [p.detach().clone() for p in group["params"]]
        super().step()
        with torch.no_grad():
            for p, old in zip(group["params"], before, strict=True):
                p.sub_(LR * decay * torch.where((old - p) * old > 0, old, 0.0))
        group["weight_decay"] = decay


def muon_and_adamw(model: nn.Module, muon: type[torch.optim.Muon] = torch.optim.Muon) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    embedding, head = named["embed_tokens.weight"], named["lm_head.weight"]
    rest = [
        {"params": [embedding], "weight_decay": 0.0, "lr": 4 * LR},
        {"params": [head], "lr": 3 * LR},
        {"params": [p for name, p in named.items() if re.search("norm|bias", name)], "weight_decay": 0.0},
    ]
    hidden = [p for name, p in named.items() if "layers" in name and p.ndim == 2]
    return [
        muon(hidden, lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=LR, weight_decay=DECAY, betas=(0.9, 0.95), fused=True),
    ]


OPTIMIZERS = [
    OptimizerRow(AdamWSettings(), plain(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-8, fused=True)),
    OptimizerRow(AdamWSettings(fused=False), plain(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-8)),
    OptimizerRow(AdafactorSettings(), plain(torch.optim.Adafactor, beta2_decay=-0.8, d=1.0)),
    OptimizerRow(MuonSettings(momentum_warmup_steps=0), muon_and_adamw),
    OptimizerRow(  # the twin decays after the step, which rounds otherwise
        MuonSettings(momentum=0.9, momentum_warmup_steps=3, cautious_weight_decay=True),
        partial(muon_and_adamw, muon=WarmedUpAndCautious), bit_for_bit=False,
    ),
    OptimizerRow(SGDSettings(), plain(torch.optim.SGD), lambda w, gradient, lr, decay: w - lr * (gradient + decay * w)),
    OptimizerRow(SGDSettings(momentum=0.9, nesterov=True), plain(torch.optim.SGD, momentum=0.9, nesterov=True)),
    OptimizerRow(Target("torch.optim.NAdam", {"momentum_decay": 0.01}), plain(torch.optim.NAdam, momentum_decay=0.01)),
]  # fmt: skip

SCHEDULES = [
    ScheduleRow(ConstantSettings(warmup_steps=1), 9, [1.0, 1.0]),
    ScheduleRow(CosineSettings(min_lr_ratio=0.2), 4, [0.6 + 0.4 * math.cos(math.pi * k / 4) for k in range(5)]),
    ScheduleRow(InfiniteSettings(cooldown_steps=0, constant_lr_ratio=0.3), 9, [0.3, 0.3]),
    ScheduleRow(InfiniteSettings(cooldown_steps=1, constant_lr_ratio=0.3), None, [1.0, 0.3, 0.3]),
    ScheduleRow(InverseSqrtSettings(), 9, [1.0, 0.5**0.5, 3**-0.5, 0.5]),
    ScheduleRow(LinearSettings(warmup_steps=2), 2, [0.5, 1.0, 1.0, 0.0]),
    ScheduleRow(TransformersScheduleSettings(name="linear", warmup_steps=2), 2, [0.0, 0.5, 0.0]),
    ScheduleRow(
        WSDSettings(warmup_steps=2, decay_steps=4, min_lr_ratio=0.2), 10, [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    ),
]
