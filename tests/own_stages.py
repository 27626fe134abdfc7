"""A model of a user's that cannot be cut, functions that make stages of it, and a schedule of a user's."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleGPipe,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _Action,
    _ComputationType,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        shifted = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.down(self.up(self.norm(x + shifted)).relu())


class Words(nn.Module):
    """Each block sees one token more; has what a fused loss asks for."""

    def __init__(self, vocab_size: int, width: int = 16, depth: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocab_size)
        if tied:
            self.head.weight = self.embed.weight

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.hidden_states(input_ids))


class Part(nn.Module):
    def __init__(self, model: Any, stage: Any) -> None:
        super().__init__()
        is_tied = model.head.weight is model.embed.weight
        self.embed = model.embed if stage.has_embedding or (stage.has_head and is_tied) else None
        self.blocks = nn.ModuleDict({str(n): model.blocks[n] for n in stage.layers})
        self.head = model.head if stage.has_head else None

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        x: Tensor = input_ids if input_ids.is_floating_point() or self.embed is None else self.embed(input_ids)
        for block in self.blocks.values():
            x = block(x)
        return x

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.hidden_states(input_ids)
        return x if self.head is None else self.head(x)


def split(model: nn.Module, stages: Any) -> list[nn.Module]:
    return [Part(model, stage) for stage in stages]


def too_few(model: nn.Module, stages: Any) -> list[nn.Module]:
    return split(model, stages)[:-1]


def forgets_the_embedding(model: nn.Module, stages: Any) -> list[nn.Module]:
    parts: list[Any] = split(model, stages)
    parts[0].embed = None
    return parts


def renames(model: nn.Module, stages: Any) -> list[nn.Module]:
    return [nn.Sequential(part) for part in split(model, stages)]


def no_list(model: nn.Module, stages: Any) -> nn.Module:
    return split(model, stages)[0]


def raises(model: nn.Module, stages: Any) -> list[nn.Module]:
    raise KeyError("blocks.9")


def without_hidden_states(model: nn.Module, stages: Any) -> list[nn.Module]:
    parts = split(model, stages)
    parts[-1] = nn.ModuleDict(dict(copy.copy(parts[-1]).named_children()))
    return parts


class Alone(ScheduleGPipe):
    """One stage per rank."""


class Rounds(ScheduleLoopedBFS):
    """All forwards, then all backwards in the order of the micro-batches, each in two parts if ``split``."""

    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, split: bool = False) -> None:
        self.split = split
        super().__init__(stages, n_microbatches, loss_fn=loss_fn)

    def _calculate_single_rank_operations(self, rank: int) -> Any:
        stages, parts = range(rank, self._num_stages, self.pp_group_size), range(self._n_microbatches)
        kinds = ("I", "W") if self.split else ("B",)
        order = [_Action(stage, _ComputationType("F"), part) for stage in stages for part in parts]
        for kind in kinds:
            order += [_Action(s, _ComputationType(kind), part) for s in reversed(stages) for part in parts]
        return order


class BackAndForth(ScheduleZBVZeroBubble):
    """Two stages on each rank, in the shape of a V."""


class Idle(PipelineScheduleMulti):
    """Computes nothing."""


class NeedsFour(Alone):
    def __init__(self, stage: Any, n_microbatches: int, loss_fn: Any = None) -> None:
        if n_microbatches % 4:
            raise ValueError("four at a time")
        super().__init__(stage, n_microbatches, loss_fn=loss_fn)
