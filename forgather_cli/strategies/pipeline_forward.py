"""A forward pass through the stages without a schedule: any shapes, no gradient.

torch's own ``schedule.eval()`` hangs with V schedules (torch 2.13: ``get_local_bwd_output`` raises in a stage without
backward) and wants n_microbatches equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forgather_cli.strategies.base import Batch
from forgather_cli.strategies.pipeline_schedule import StageModule


def forward_through(
    modules: Mapping[int, StageModule],
    owners: Sequence[int],
    batches: Sequence[Batch],
    device: torch.device,
    run: Callable[[StageModule, Batch], Any],
) -> list[Any]:
    """Collective. ``run`` on every stage in turn, for each of ``batches``; what the last stage returns, on its rank.

    ``modules`` are this rank's stages by index, ``owners`` the rank of each stage. ``run`` gets the batch with the
    stage's input as ``input_ids``. At tick t stage s has batch t - s: stages work at the same time, and all that is
    sent after a tick goes in one batch, in which no order of sends and receives can block.
    """
    rank, last = dist.get_rank(), len(owners) - 1
    waiting = {(0, index): batch["input_ids"] for index, batch in enumerate(batches)}
    results: list[Any] = []
    for tick in range(last + len(batches)):
        moving = [(stage, tick - stage) for stage in range(last + 1) if 0 <= tick - stage < len(batches)]
        made: dict[int, Tensor] = {}
        for stage, index in moving:
            if stage in modules:
                made[stage] = run(modules[stage], {**batches[index], "input_ids": waiting.pop((stage, index))})
        if last in made:
            results.append(made.pop(last))
        operations: list[dist.P2POp] = []
        for stage, index in moving:
            if stage == last or rank not in (owners[stage], owners[stage + 1]):
                continue
            if owners[stage] == owners[stage + 1]:
                waiting[stage + 1, index] = made[stage]
            elif rank == owners[stage]:
                operations.append(dist.P2POp(dist.isend, made[stage].contiguous(), owners[stage + 1]))
            else:
                boundary = modules[stage + 1].boundary
                received = boundary.empty(batches[index]["input_ids"], device)
                operations.append(dist.P2POp(dist.irecv, received, owners[stage]))
                waiting[stage + 1, index] = received
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    return results
