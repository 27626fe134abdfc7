"""The one way in which ranks talk about checkpoints: small objects over a CPU process group."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from forgather_cli.checkpoint.messages import pack, unpack
from forgather_cli.errors import CheckpointError, ForgatherError

T = TypeVar("T")


class NoAnswerError(CheckpointError):
    """Some rank gave no answer in time, or is gone. The group is of no use any more: its members no longer agree on
    which operation comes next.
    """


def gather(value: T, group: Any, deadline: float | None = None) -> list[T]:
    """Collective. Every rank's ``value`` by rank, on every rank; ``[value]`` where ``group`` is None.

    Values are names, shapes, hashes and messages, of the types that ``pack`` takes. Rank 0's decision is
    ``gather(decision, group)[0]``. ``deadline``: a time of ``time.monotonic`` until which to wait, else as long as the
    group's timeout. Raises NoAnswerError then; and without a deadline what torch.distributed raises.
    """
    if group is None:
        return [value]
    import torch.distributed as dist

    content = pack(value)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    try:
        sizes = [int(size) for size in _all_gather(torch.tensor([len(content)], device=device), group, deadline)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        padded[: len(content)] = content
        contents = _all_gather(padded, group, deadline)
    except RuntimeError as error:
        if deadline is None:
            raise
        text = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]  # gloo: "[file:line] what. advice"
        raise NoAnswerError(f"not all ranks answered ({text})") from error
    return [unpack(content[:size].cpu()) for content, size in zip(contents, sizes, strict=True)]


def _all_gather(tensor: Tensor, group: Any, deadline: float | None) -> list[Tensor]:
    import torch.distributed as dist

    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(gathered, tensor, group=group, async_op=deadline is not None)
    if deadline is not None:
        assert work is not None
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    return gathered


def on_rank_0(action: Callable[[], T], group: Any) -> T:
    """Collective. What ``action`` returns on rank 0, on all ranks; its ForgatherError or OSError is raised on all."""
    answer: tuple[T | None, Exception | None] = (None, None)
    if rank_in(group) == 0:
        try:
            answer = (action(), None)
        except (ForgatherError, OSError) as error:
            answer = (None, error)
    value, failure = gather(answer, group)[0]
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def joined(failures: Sequence[str | None]) -> str | None:
    """What went wrong on which rank, ``failures`` by rank, in one line; None if nothing did."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            ranks.setdefault(failure, []).append(rank)
    if len(ranks) == 1 and all(failures):
        return failures[0]
    return "; ".join(f"{ranks_named(found)}: {failure}" for failure, found in ranks.items()) or None


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``, at most eight of them."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def rank_in(group: Any) -> int:
    """This rank's number in ``group``; 0 where there is none."""
    if group is None:
        return 0
    import torch.distributed as dist

    return dist.get_rank(group)


def new_group_like(group: Any) -> Any:
    """Collective. Another CPU group of all ranks, for a thread of its own; None where ``group`` is None."""
    if group is None:
        return None
    import torch.distributed as dist

    return dist.new_group(backend="gloo")
