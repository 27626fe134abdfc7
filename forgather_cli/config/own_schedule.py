"""A pipeline schedule of the user's: a class of torch's kind, which tells its order before anything runs.

It is made with stand-ins for the stages. torch is imported where a config names such a class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from forgather_cli.errors import ConfigError
from forgather_cli.targets import argument_problem, import_target

_TRIED = range(2, 9)
"""Ranks to ask a schedule with, where nobody says how many there are."""

Action = tuple[str, int, int]
"""(F, I, W, or B for both of these; stage; micro-batch): forward, gradients of the inputs and of the weights."""


@dataclass(frozen=True)
class PipelineOrder:
    """What a schedule does."""

    rank_of: list[int]
    """The rank of each stage."""
    actions: list[list[Action]] | None
    """Of each rank, in turn; None: a schedule of one stage per rank, which does not tell."""

    @property
    def in_flight(self) -> list[int] | None:
        """Of each rank how many forwards wait for their backward, at most."""
        if self.actions is None:
            return None
        change = {"F": 1, "W": -1, "B": -1, "I": 0}
        return [max(accumulate(change[kind] for kind, *_ in each)) for each in self.actions]

    @property
    def bubble(self) -> float | None:
        """The share of its time that a rank waits, 0 to 1, where each F, I and W takes one unit."""
        if self.actions is None:
            return None
        ended: dict[Action, int] = {}
        clocks, left, last = (
            [0] * len(self.actions),
            [[*reversed(each)] for each in self.actions],
            len(self.rank_of) - 1,
        )
        while any(left):
            before = len(ended)
            for rank, todo in enumerate(left):
                while todo:
                    kind, stage, part = todo[-1]
                    needs = {"F": [("F", stage - 1, part)] * (stage > 0), "W": [("I", stage, part)]}.get(
                        kind, [("F", stage, part)] + [("I", stage + 1, part)] * (stage < last)
                    )
                    if any(need not in ended for need in needs):
                        break
                    todo.pop()
                    clocks[rank] = max([clocks[rank], *(ended[need] for need in needs)]) + 1 + (kind == "B")
                    ended["I" if kind == "B" else kind, stage, part] = clocks[rank]
            if len(ended) == before:
                return None  # the order waits for itself
        busy = sum(1 + (kind == "B") for each in self.actions for kind, *_ in each)
        return 1 - busy / (max(clocks) * len(clocks))


class OwnSchedule:
    """The class at ``path`` with its arguments. Raises ConfigError if it cannot be one."""

    def __init__(self, path: str, kwargs: dict[str, Any]) -> None:
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

        kind: Any = import_target(path, "schedule")
        if not isinstance(kind, type) or not issubclass(kind, PipelineScheduleMulti | PipelineScheduleSingle):
            raise ConfigError(
                f"schedule._target_: {path} is no pipeline schedule; name a subclass of PipelineScheduleSingle or "
                "PipelineScheduleMulti of torch.distributed.pipelining"
            )
        if problem := argument_problem("schedule", path, kind, kwargs, ("stages", "n_microbatches"), ("loss_fn",)):
            raise ConfigError(problem)
        self.has_one_stage = issubclass(kind, PipelineScheduleSingle)
        """On each rank."""
        self._path, self._kwargs = path, kwargs
        self._kind: Any = kind

    def made(self, stages: Sequence[Any], n_microbatches: int) -> Any:
        """The schedule over this rank's stages. The last stage's output is the loss."""
        given = stages[0] if self.has_one_stage else stages
        return self._kind(given, n_microbatches, loss_fn=lambda loss, target: loss, **self._kwargs)

    def order(self, ranks: int, stages_each: int, n_microbatches: int) -> PipelineOrder:
        """Raises ConfigError with what the class raises, or where it does not run every micro-batch in every stage."""
        count = ranks * stages_each
        stand_ins = [
            SimpleNamespace(
                stage_index=index, num_stages=count, group_rank=0, group_size=ranks, is_first=index == 0,
                is_last=index == count - 1, has_backward=True, submod=None, device=None, group=None,
                stage_index_to_group_rank={},
            )
            for index in range(0, count, ranks)
        ]  # fmt: skip
        setup = f"{n_microbatches} micro-batches in {count} stages on {ranks} ranks"
        try:
            made = self.made(stand_ins, n_microbatches)
        except Exception as error:  # a user's code
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(
                f"schedule: {self._path} refused {setup}: {reason}; change n_microbatches, stages_per_rank or its "
                "arguments"
            ) from error
        if self.has_one_stage:
            return PipelineOrder([*range(ranks)], None)
        rank_of = [made.stage_index_to_group_rank[stage] for stage in range(count)]
        if set(Counter(rank_of).values()) != {stages_each} or set(rank_of) != set(range(ranks)):
            raise ConfigError(f"schedule: {self._path} puts stages on ranks {rank_of}; give each rank {stages_each}")
        actions = [_computed(made.pipeline_order.get(rank, ())) for rank in range(ranks)]
        done = Counter(
            (kind, stage, part)
            for each in actions
            for letter, stage, part in each
            for kind in ("IW" if letter == "B" else letter)
        )
        wanted = {(kind, stage, part) for kind in "FIW" for stage in range(count) for part in range(n_microbatches)}
        if done != Counter(wanted):
            kind, stage, part = min(wanted - done.keys(), default=None) or max(done, key=lambda each: done[each])
            what = {"F": "forward", "I": "backward", "W": "gradients of the weights"}[kind]
            times = done[kind, stage, part]
            raise ConfigError(
                f"schedule: the pipeline_order of {self._path} has the {what} of micro-batch {part} in stage {stage} "
                f"{times} times, with {setup}; it must be there once"
            )
        return PipelineOrder(rank_of, actions)

    def splits_backward(self, stages_each: int, n_microbatches: int) -> bool:
        """Gradients of inputs and of weights are computed at different times."""
        for ranks in _TRIED:
            try:
                actions = self.order(ranks, stages_each, n_microbatches).actions
            except ConfigError:
                continue
            return any(kind == "I" for each in actions or () for kind, *_ in each)
        return False


def _computed(actions: Sequence[Any]) -> list[Action]:
    flat = [part for each in actions if each is not None for part in (each.sub_actions or (each,))]
    named = ((each.computation_type.value, each.stage_index, each.microbatch_index) for each in flat)
    return [(kind, stage, part) for kind, stage, part in named if kind in ("F", "I", "W", "B")]
