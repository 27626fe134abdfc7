"""Process-wide state, sums over ranks and the global gradient norm: plain functions.

A group of None means "only this rank": the functions then return their argument without communication.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather_cli.documents.messages import pack, unpack
from forgather_cli.errors import CheckpointError, ForgatherError, SetupError, ranks_named
from forgather_cli.shards import locals_of

T = TypeVar("T")


def pick_device(name: str) -> torch.device:
    """The device a rank trains on: ``auto`` is CUDA where there is one, else CPU; of CUDA each rank takes its own.

    Raises SetupError.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name, int(os.environ.get("LOCAL_RANK", "0"))) if name == "cuda" else torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SetupError(f"device: cannot use {name!r} ({reason}); set device=auto or device=cpu") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class World:
    """This process among all that train together."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The group of all ranks, on the device's backend; None for one rank."""


def world() -> World:
    """The default process group's world; one rank where there is none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World()
    return World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def world_size() -> int:
    """Processes of the job, whether they have joined yet or not."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def join_world(device: torch.device, timeout: float = 1800.0) -> None:
    """Collective. Join the process group that the environment describes (torchrun's), where there is none yet.

    Collectives that wait longer than ``timeout`` seconds raise.
    """
    if not dist.is_initialized() and world_size() > 1:
        one_node = os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
        init_process_group(device.type == "cuda", timeout, one_node=one_node)


def init_process_group(on_cuda: bool, timeout: float, *, one_node: bool, **where: Any) -> None:
    """Collective. Make the default process group, whose collectives raise after ``timeout`` seconds.

    ``where``: torch's store, rank and world_size; without them the environment tells. Ranks of ``one_node`` have gloo
    and NCCL listen for each other there alone, unless the environment says otherwise: they would listen where the
    host's name resolves, open to the network (torch 2.13, ``GlooDeviceFactory.cpp``).
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)  # Linux, macOS
    if one_node and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **where)


def cpu_group() -> Any:
    """Collective. A new group of all ranks for host tensors and objects (gloo); None for one rank."""
    if world().size == 1:
        return None
    return dist.new_group(backend="gloo")


def all_sum(value: Tensor, group: Any) -> Tensor:
    """Collective. Sum of ``value`` over the ranks of ``group``, in place."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


# ------------------------------------------------------------------------------------------------------- small objects


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


def that_of_rank_0(group: Any) -> Callable[[Tensor], Tensor] | None:
    """What makes all ranks go on with the same tokens, and so end together.

    Their logits may differ: in the last bits on GPUs of several kinds, in more while post-local SGD lets weights part.
    """
    if group is None:
        return None

    def agree(token: Tensor) -> Tensor:
        chosen = token.cpu()
        dist.broadcast(chosen, src=0, group=group)
        return chosen.to(token.device)

    return agree


def joined(failures: Sequence[str | None]) -> str | None:
    """What went wrong on which rank, ``failures`` by rank, in one line; None if nothing did."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            ranks.setdefault(failure, []).append(rank)
    if len(ranks) == 1 and all(failures):
        return failures[0]
    return "; ".join(f"{ranks_named(found)}: {failure}" for failure, found in ranks.items()) or None


def rank_in(group: Any) -> int:
    """This rank's number in ``group``; 0 where there is none."""
    if group is None:
        return 0
    return dist.get_rank(group)


# --------------------------------------------------------------------------------------------------- gradient norm


def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    max_norm: float | None,
    model_group: Any = None,
    duplicates: Collection[nn.Parameter] = (),
    *,
    loss_scale: float = 1.0,
) -> Tensor:
    """Collective. Global L2 norm of the gradients before clipping, 0-dim; scales them in place to ``max_norm``.

    None or 0 measures only. Gradients that come ``loss_scale`` times too large are divided by it in the same pass, and
    so is their norm. ``duplicates`` are clipped and not counted: another rank of ``model_group`` counts them. Norms of
    half formats are fp32. Of a DTensor the local rows are used. The same numbers as ``torch.nn.utils.clip_grad_norm_``,
    whose CPU path loops over parameters in Python (torch 2.13, ``clip_grad.py``): the foreach calls save about 2 us per
    parameter and step.
    """
    grads = locals_of([grad for p in parameters if (grad := p.grad) is not None])
    counted = grads
    if duplicates:
        counted = locals_of([p.grad for p in parameters if p.grad is not None and p not in duplicates])
    device = parameters[0].device if parameters else None
    norm: Tensor = torch.zeros((), device=device)
    if counted:
        norm = torch.linalg.vector_norm(_norms(counted))
    if model_group is not None:
        norm = all_sum(norm.square(), model_group).sqrt()
    if loss_scale != 1.0:
        norm = norm / loss_scale
    if max_norm and norm.is_cpu and loss_scale == 1.0 and float(norm) < 0.999 * max_norm:
        return norm  # which is known on a CPU: all would be multiplied by 1
    if max_norm and grads:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(grads, scale / loss_scale if loss_scale != 1.0 else scale)
    elif loss_scale != 1.0 and grads:
        torch._foreach_div_(grads, loss_scale)
    return norm


_LONG = 1 << 14  # numbers
_HALF = (torch.bfloat16, torch.float16)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norms whose own L2 norm is that of all ``tensors`` together, 1-dim.

    Long tensors on the CPU are taken row by row: torch adds up one tensor's squares in fp32 (2.13), which is off by
    4e-7 at 2^20 numbers and by less for each rank's rows of them. Clipping hands that on to all weights: fsdp2's
    drifted from one device's ten times as fast as ddp's. No slower.
    """
    wide: torch.dtype | None = None
    long: list[Tensor] = []
    short: list[Tensor] = []
    for tensor in tensors:
        if tensor.dtype in _HALF:
            wide = torch.float32
        is_long = tensor.numel() > _LONG and tensor.ndim > 1 and tensor.is_cpu and tensor.dtype != torch.float64
        (long if is_long else short).append(tensor)
    rows = [torch.linalg.vector_norm(tensor, dim=-1, dtype=wide).flatten() for tensor in long]
    return torch.cat([*rows, torch.stack(torch._foreach_norm(short, 2, wide))] if short else rows)
