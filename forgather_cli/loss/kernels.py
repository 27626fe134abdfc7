"""Head and cross entropy together in kernels of other packages: LinkedIn's Liger and Apple's Cut Cross-Entropy.

None of these kernels was run on a GPU. Values and gradients were compared with plain PyTorch in Triton 3.9's
interpreter: Liger 0.6.2 and 0.8.5 in fp32 and under bf16 autocast, Cut Cross-Entropy 25.1.1 in fp16 (with its log1p
written as a logarithm, for the interpreter has none); and on a CPU what the latter lets torch compile for other
devices. Neither has a backward that a zero-bubble schedule could split (``config/schema/loss.py``).

Legend: B sequences, T tokens, N = B * T, V vocabulary, E hidden size.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.errors import ModelError, SetupError
from forgather_cli.labels import IGNORED, label_shift, shifted
from forgather_cli.loss.base import Loss, check_fusable, head_and_hidden
from forgather_cli.loss.sums import product_dtype


class Liger(Loss):
    """``LigerFusedLinearCrossEntropyLoss``: logits of N E / V tokens at a time (Hsu et al. 2024, arXiv:2410.10989).

    Follows autocast by itself; sums gradients of weight and bias in fp32. Raises SetupError without liger-kernel, and
    on a ``device`` that its kernels do not run on.
    """

    compiles = True
    is_separable = False  # its backward scales what the forward kept, in place

    def __init__(
        self, *, z_loss: float = 0.0, label_smoothing: float = 0.0, device: torch.device | None = None
    ) -> None:
        if device is not None and device.type != "cuda":
            raise SetupError(
                f"loss=liger: needs a CUDA GPU and Triton, got device {device.type}; set loss=linear_cross_entropy"
            )
        module = _imported("loss=liger", "liger_kernel.transformers", "liger-kernel")
        self.kernel = module.LigerFusedLinearCrossEntropyLoss(
            ignore_index=IGNORED,
            lse_square_scale=z_loss,
            label_smoothing=label_smoothing,
            reduction="sum",
            accum_dtype=torch.float32,
        )
        self.is_likelihood = not (z_loss or label_smoothing)

    def check(self, model: nn.Module) -> None:
        check_fusable(model, "loss=liger")

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        head, hidden = head_and_hidden(model, inputs, labels, self.eval_metrics)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # below a trained head all may be frozen: liger-kernel 0.8.5 makes no gradient without the hidden states'
            hidden = hidden.detach().requires_grad_()
        total: Tensor = self.kernel(head.weight, hidden.flatten(0, 1), shifted(labels, label_shift(inputs)), head.bias)
        return total


class CutCrossEntropy(Loss):
    """``linear_cross_entropy`` of cut-cross-entropy (Wijmans et al. 2024, arXiv:2411.09009).

    On CUDA no logits exist; elsewhere torch compiles the plain computation. The paper's filter, which leaves out the
    gradients of tokens that are less likely than 2^-12, stays off: with 32,000 equally likely ones, as at the start of
    pretraining, it leaves out all but the target's, and the norm is 16 % off (25.1.1, H100). Products and sums of
    gradients are in the autocast dtype, since 25.1.1 offers no other. Raises SetupError without the package.
    """

    compiles = True
    is_separable = False

    def __init__(self) -> None:
        module = _imported("loss=cut_cross_entropy", "cut_cross_entropy", "cut-cross-entropy")
        self.kernel = module.linear_cross_entropy
        self.is_likelihood = True

    def check(self, model: nn.Module) -> None:
        what, head = "loss=cut_cross_entropy", getattr(model, "head", None)
        check_fusable(model, what)
        if getattr(head, "bias", None) is not None:
            raise ModelError(
                f"{what}: takes no bias, and the output layer of {type(model).__name__} has one; set loss=liger or "
                "loss=linear_cross_entropy"
            )

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        head, hidden = head_and_hidden(model, inputs, labels, self.eval_metrics)
        kind, dtype = hidden.device.type, product_dtype(hidden)
        if kind == "cuda" and dtype == torch.float32 and torch.is_grad_enabled():
            raise ModelError(
                "loss=cut_cross_entropy: its backward takes hidden states in bf16 or fp16, got fp32; set "
                "precision=bf16 or loss=linear_cross_entropy"
            )
        flat, targets = hidden.flatten(0, 1), shifted(labels, label_shift(inputs))
        if not (targets != IGNORED).any():  # nobody says what kernels make of no rows; they wait for the count anyway
            nothing: Tensor = flat[:0].float().sum() + head.weight[:0].float().sum()
            return nothing
        with torch.autocast(kind, enabled=False):
            total: Tensor = self.kernel(
                flat.to(dtype),
                head.weight.to(dtype),
                targets,
                ignore_index=IGNORED,
                reduction="sum",
                filter_eps=None,
                impl="cce" if kind == "cuda" else "torch_compile",
            )
        return total.float()


def _imported(what: str, module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing == module.split(".")[0]:
            raise SetupError(f"{what}: needs the package {package}; pip install 'forgather[kernels]'") from error
        raise SetupError(f"{what}: {package} cannot be imported: {error}; pip install 'forgather[kernels]'") from error
