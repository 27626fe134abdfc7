"""Muon: momentum whose matrices are made orthogonal before each step (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/), for whole matrices and for matrices of which each rank holds some rows.

``torch.optim.Muon`` has neither a warmup of its momentum nor a cautious weight decay, takes matrices one by one, and is
slow on DTensors: every product of its Newton-Schulz iteration gathers its operands and sums over ranks in bf16, so that
84 small matrices took 4.4 s per step instead of 0.2 s, and an update moved by 7 % (torch 2.13,
``torch/optim/_muon.py``, two gloo ranks). Without the added settings the numbers here are its numbers, on a CPU that is
fast in bf16 bit for bit. Matrices of one shape go together all the same, as threads wait for each other in small
products: the default recipe's 28 take 31 ms in place of 46 with two threads, 50 in place of 54 with one (AVX512-BF16,
torch 2.13).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forgather_cli.hardware import bf16_on
from forgather_cli.shards import is_sharded, local, row_group

_BATCH = 1 << 22
"""Numbers that are orthogonalised together: large matrices gain nothing from company, and would take memory."""
_ALONE_BELOW = 32
"""Rows or columns of matrices that a CPU takes one by one: there ``bmm`` rounds unlike ``mm`` once in some hundred
matrices, from here on it gave the same bits in thousands (torch 2.13)."""
_MOMENTUM_START = 0.85


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` with its arguments, and

    momentum_warmup_steps: steps in which the momentum rises from 0.85 to ``momentum``, along a line; counted in each
    parameter's state as ``step``.
    cautious_weight_decay: only weights that the step moves towards zero decay (Chen et al. 2025, arXiv 2510.12402).

    Parameters may be DTensors sharded by rows. ``step`` is then collective: as many matrices at a time as there are
    ranks, each rank orthogonalises one; what is sent is bf16, which the iteration begins with anyway. A rank has one
    whole update at a time, in bf16.
    """

    _plans: Mapping[int, _Plan] = MappingProxyType({})
    """By the number of the group; of the class, since a copy of an optimizer has none of its own."""

    def __init__(
        self, params: Any, *, momentum_warmup_steps: int = 0, cautious_weight_decay: bool = False, **settings: Any
    ) -> None:
        super().__init__(params, **settings)
        own = {"momentum_warmup_steps": momentum_warmup_steps, "cautious_weight_decay": cautious_weight_decay}
        self.defaults |= own
        for group in self.param_groups:
            for key, value in own.items():
                group.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            if not (matrices := [p for p in group["params"] if p.grad is not None]):
                continue
            plan, ids = self._plans.get(number), list(map(id, matrices))
            if plan is None or plan.ids != ids:
                by_rows, in_fp32 = is_sharded(matrices[0]), slow_in_bf16(matrices[0].device)
                plan = _Plan(ids, by_rows, in_fp32, list(_batches(matrices, by_rows)))
                self._plans = {**self._plans, number: plan}
            for together in plan.batches:
                self._step_together(together, group, plan)
        return loss

    def _step_together(self, matrices: list[Tensor], group: dict[str, Any], plan: _Plan) -> None:
        """Momentum, orthogonal updates, decay and step of matrices that are orthogonalised in one go."""
        warmup, updates = group["momentum_warmup_steps"], list[Tensor]()
        for parameter in matrices:
            state, momentum, gradient = self.state[parameter], group["momentum"], parameter.grad
            assert gradient is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
                if warmup:
                    state["step"] = 0
            if warmup and "step" in state:  # one that was saved without it is of a run without warmup: it goes on so
                start = min(_MOMENTUM_START, momentum)
                momentum = start + (momentum - start) * min(1.0, state["step"] / warmup)
                state["step"] += 1
            buffer = state["momentum_buffer"]
            if plan.by_rows:
                gradient, buffer = local(gradient), local(buffer)
            buffer.lerp_(gradient, 1 - momentum)
            # what is to be made orthogonal: of a sharded parameter this rank's rows
            updates.append((gradient.lerp(buffer, momentum) if group["nesterov"] else buffer).bfloat16())

        if plan.by_rows:
            updates = _orthogonalised_by_rows(updates, matrices, group, in_fp32=plan.in_fp32)
        elif len(matrices) == 1:
            updates = [orthogonalised(updates[0], group, in_fp32=plan.in_fp32)]
        else:
            updates = list(orthogonalised(torch.stack(updates), group, in_fp32=plan.in_fp32))

        lr = float(group["lr"])
        decay = lr * group["weight_decay"]
        for parameter, update in zip(matrices, updates, strict=True):
            rows, shape = local(parameter) if plan.by_rows else parameter, parameter.shape
            if group["cautious_weight_decay"]:
                rows.sub_(rows * (rows * update > 0), alpha=decay)
            else:
                rows.mul_(1 - decay)
            if group["adjust_lr_fn"] == "match_rms_adamw":  # Liu et al. 2025, arXiv 2502.16982: its RMS is 0.2
                scale = 0.2 * math.sqrt(max(shape))
            else:
                scale = math.sqrt(max(1, shape[0] / shape[1]))
            rows.add_(update, alpha=-lr * scale)


class _Plan(NamedTuple):
    """What cannot change from step to step of a group's matrices, which one strategy has placed all alike."""

    ids: list[int]
    """Of those that have gradients."""
    by_rows: bool
    """Each rank holds some rows."""
    in_fp32: bool
    """The iteration is done in it."""
    batches: list[list[Tensor]]


def _batches(parameters: list[Tensor], by_rows: bool) -> Iterator[list[Tensor]]:
    """Matrices that are orthogonalised in one go: whole ones of equal shape, or one for each rank of those by rows.

    The latter in the order of their sizes, so that no rank waits for a larger one than its own.
    """
    parameters = sorted(parameters, key=lambda p: (p.numel(), p.shape))
    for _, members in itertools.groupby(parameters, lambda p: None if by_rows else p.shape):
        equal = list(members)
        size = 1
        if by_rows:
            size = row_group(equal[0]).size()
        elif equal[0].is_cuda or min(equal[0].shape) >= _ALONE_BELOW:
            size = max(1, _BATCH // equal[0].numel())
        for start in range(0, len(equal), size):
            yield equal[start : start + size]


def orthogonalised(updates: Tensor, group: dict[str, Any], *, in_fp32: bool) -> Tensor:
    """Of one matrix (A, B), or of each of several (N, A, B), something near the closest one whose rows or columns are
    orthonormal: singular values between 0.7 and 1.2. ``updates`` is bf16, as is the result.

    Newton-Schulz iteration: an odd polynomial of fifth degree, several times. In fp32 on a CPU that is slow in bf16:
    where it has AVX2 alone torch's bf16 products take 80 times as long as fp32's (2 and 160 GFLOP/s of a core, torch
    2.13), and a step of the default recipe took 15 s in place of 0.3.
    """
    tall = updates.size(-2) > updates.size(-1)
    x = updates.mT if tall else updates
    if in_fp32:
        x = x.float()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=group["eps"])
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        square = x @ x.mT
        x = add_product(x, add_product(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).bfloat16()


def slow_in_bf16(device: torch.device) -> bool:
    """Whether the iteration is done in fp32 there."""
    return device.type == "cpu" and not bf16_on("cpu")[0]


def _orthogonalised_by_rows(
    updates: Sequence[Tensor], matrices: Sequence[Tensor], group: dict[str, Any], *, in_fp32: bool
) -> list[Tensor]:
    """Collective. This rank's rows of each orthogonalised update; the n-th rank works on the n-th.

    ``matrices`` have the full shapes.
    """
    comm = row_group(matrices[0])
    rank, mine = dist.get_rank(comm), [u.numel() for u in updates]
    sizes = mine + [0] * (comm.size() - len(mine))
    own = matrices[rank].shape if rank < len(matrices) else torch.Size((0, 0))
    each = -(-own[0] // comm.size())  # rows are cut as torch.chunk cuts them: the last ranks hold less or none
    rows = [min(each, max(0, own[0] - n * each)) * own[1] for n in range(comm.size())]
    whole = _exchange(torch.cat([u.flatten() for u in updates]), rows, sizes, comm).view(own)
    if whole.numel():
        whole = orthogonalised(whole, group, in_fp32=in_fp32).contiguous()
    back = _exchange(whole.flatten(), sizes, rows, comm)
    return [part.view_as(u) for part, u in zip(torch.split(back, sizes), updates, strict=False)]


def _exchange(send: Tensor, receive_sizes: list[int], send_sizes: list[int], comm: Any) -> Tensor:
    """Collective. To rank n the n-th part of ``send``; the parts that came, in the order of their ranks."""
    received = send.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=comm)
    return received
