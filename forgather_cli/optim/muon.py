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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            by_rows = bool(matrices) and is_sharded(matrices[0])  # one strategy has placed them all
            for together in _batches(matrices, by_rows):
                updates = [self._update(p, group, by_rows) for p in together]
                if by_rows:
                    updates = _orthogonalised_by_rows(updates, together, group)
                elif len(together) == 1:
                    updates = [orthogonalised(updates[0], group)]
                else:
                    updates = list(orthogonalised(torch.stack(updates), group))
                for parameter, update in zip(together, updates, strict=True):
                    _apply(local(parameter) if by_rows else parameter, parameter.shape, update, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], by_rows: bool) -> Tensor:
        """What is to be made orthogonal, of a sharded parameter this rank's rows, in bf16."""
        state, momentum, warmup = self.state[parameter], group["momentum"], group["momentum_warmup_steps"]
        assert parameter.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            if warmup:
                state["step"] = 0
        if warmup and "step" in state:  # a state that was saved without it is of a run without warmup, which goes on so
            start = min(_MOMENTUM_START, momentum)
            momentum = start + (momentum - start) * min(1.0, state["step"] / warmup)
            state["step"] += 1
        gradient, buffer = parameter.grad, state["momentum_buffer"]
        if by_rows:
            gradient, buffer = local(gradient), local(buffer)
        buffer.lerp_(gradient, 1 - momentum)
        return (gradient.lerp(buffer, momentum) if group["nesterov"] else buffer).bfloat16()


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


def orthogonalised(updates: Tensor, group: dict[str, Any]) -> Tensor:
    """Of one matrix (A, B), or of each of several (N, A, B), something near the closest one whose rows or columns are
    orthonormal: singular values between 0.7 and 1.2. ``updates`` is bf16, as is the result.

    Newton-Schulz iteration: an odd polynomial of fifth degree, several times. In fp32 on a CPU that is slow in bf16:
    where it has AVX2 alone torch's bf16 products take 80 times as long as fp32's (2 and 160 GFLOP/s of a core, torch
    2.13), and a step of the default recipe took 15 s in place of 0.3.
    """
    tall = updates.size(-2) > updates.size(-1)
    x = updates.mT if tall else updates
    if x.device.type == "cpu" and not bf16_on("cpu")[0]:
        x = x.float()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=group["eps"])
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        square = x @ x.mT
        x = add_product(x, add_product(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).bfloat16()


def _apply(rows: Tensor, shape: Sequence[int], update: Tensor, group: dict[str, Any]) -> None:
    """Decay the weights and take the step; ``rows`` and ``update`` are this rank's, of a matrix of ``shape``."""
    lr = float(group["lr"])
    decay = lr * group["weight_decay"]
    if group["cautious_weight_decay"]:
        rows.sub_(rows * (rows * update > 0), alpha=decay)
    else:
        rows.mul_(1 - decay)
    if group["adjust_lr_fn"] == "match_rms_adamw":  # Liu et al. 2025, arXiv 2502.16982: the root mean square of 0.2
        scale = 0.2 * math.sqrt(max(shape))
    else:
        scale = math.sqrt(max(1, shape[0] / shape[1]))
    rows.add_(update, alpha=-lr * scale)


def _orthogonalised_by_rows(
    updates: Sequence[Tensor], matrices: Sequence[Tensor], group: dict[str, Any]
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
        whole = orthogonalised(whole, group).contiguous()
    back = _exchange(whole.flatten(), sizes, rows, comm)
    return [part.view_as(u) for part, u in zip(torch.split(back, sizes), updates, strict=False)]


def _exchange(send: Tensor, receive_sizes: list[int], send_sizes: list[int], comm: Any) -> Tensor:
    """Collective. To rank n the n-th part of ``send``; the parts that came, in the order of their ranks."""
    received = send.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=comm)
    return received
