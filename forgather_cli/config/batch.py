"""How many sequences each rank takes at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forgather_cli.errors import ConfigError


class Sizes(Protocol):
    """The settings that a batch follows from."""

    @property
    def global_batch_size(self) -> int | None: ...
    @property
    def per_device_train_batch_size(self) -> int: ...
    @property
    def gradient_accumulation_steps(self) -> int | None: ...


@dataclass(frozen=True)
class BatchPlan:
    """Sequences per optimizer step over all ranks and per rank and micro-step; micro-steps per optimizer step."""

    global_batch: int
    micro_batch: int
    accumulation: int


def batch_plan(run: Sizes, world: int, *, multiple_of: int = 1) -> BatchPlan:
    """The batch sizes for ``world`` data-parallel ranks.

    With ``global_batch_size`` the micro-batch is the largest number of sequences up to per_device_train_batch_size that
    divides a rank's share and is divisible by ``multiple_of`` (n_microbatches of a pipeline). Raises ConfigError where
    there is none or gradient_accumulation_steps disagrees.
    """
    bound, accumulation = run.per_device_train_batch_size, run.gradient_accumulation_steps
    if run.global_batch_size is None:
        if bound % multiple_of:
            near = _multiples_near(bound, multiple_of)
            raise ConfigError(
                f"per_device_train_batch_size: {bound} cannot be cut into n_microbatches={multiple_of} equal parts; "
                f"set per_device_train_batch_size={near}, or another n_microbatches"
            )
        accumulation = accumulation or 1
        return BatchPlan(bound * accumulation * world, bound, accumulation)
    share, rest = divmod(run.global_batch_size, world)
    if rest:
        near = _multiples_near(run.global_batch_size, world)
        raise ConfigError(
            f"global_batch_size: {run.global_batch_size} sequences cannot be shared evenly by {world} ranks; "
            f"set global_batch_size={near}, or another number of ranks"
        )
    if accumulation is None:
        largest = _largest(share, bound, multiple_of)
        if largest is None:
            raise ConfigError(
                f"global_batch_size: {share} sequences per rank have no micro-batch up to per_device_train_batch_size="
                f"{bound} divisible by n_microbatches={multiple_of}; change one of the three"
            )
        return BatchPlan(run.global_batch_size, largest, share // largest)
    micro, rest = divmod(share, accumulation)
    if rest or micro > bound or micro % multiple_of:
        raise ConfigError(
            f"gradient_accumulation_steps: {accumulation} disagrees with global_batch_size={run.global_batch_size} "
            f"over {world} rank{'s' if world > 1 else ''} with at most per_device_train_batch_size={bound} sequences "
            "at a time; set global_batch_size=null for their product on each rank, or leave "
            "gradient_accumulation_steps out, which follows from the other two"
        )
    return BatchPlan(run.global_batch_size, micro, accumulation)


def smaller_micro_batch(plan: BatchPlan, multiple_of: int = 1) -> int | None:
    """The largest micro-batch of at most half the sequences with which a rank takes as many per step; None below 1."""
    return _largest(plan.micro_batch * plan.accumulation, plan.micro_batch // 2, multiple_of)


def _largest(share: int, bound: int, multiple_of: int) -> int | None:
    sizes = (size for size in range(min(share, bound), 0, -1) if share % size == 0 and size % multiple_of == 0)
    return next(sizes, None)


def _multiples_near(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
