"""``LigerFusedLinearCrossEntropyLoss`` with the arguments and the habits of liger-kernel 0.8.5, in plain PyTorch.

Gradients are made in the forward pass, only if the hidden states want one, and the backward pass scales them in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        assert (ce_weight, softcap, accum_dtype, reduction) == (None, None, torch.float32, "sum")
        self.options = (ignore_index, lse_square_scale, label_smoothing)

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return _Fused.apply(_input, lin_weight, target, bias, *self.options)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, y: Tensor, b: Tensor | None, ignored: int, z: float, s: float
    ) -> Tensor:
        assert (x.dim(), w.dim(), y.dim()) == (2, 2, 1)
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (x, w, b) if t is not None]
            logits = F.linear(*leaves).float()
            total = F.cross_entropy(logits, y, ignore_index=ignored, reduction="sum", label_smoothing=s)
            total = total + z * (logits.logsumexp(-1).square() * (y != ignored)).sum()
        grads = list(torch.autograd.grad(total, leaves)) if x.requires_grad else [None, None, None]
        ctx.grads = [*grads, None][:3]
        return total.detach()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        dx, dw, db = (None if g is None else g.mul_(outputs[0]) for g in ctx.grads)
        return dx, dw, None, db, None, None, None
