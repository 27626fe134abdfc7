"""Cross entropy as a sum over targets: of logits, and of hidden states, chunk by chunk.

Legend: B sequences, T tokens, N = B * T, V vocabulary, E hidden size, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forgather_cli.labels import IGNORED, shifted


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, shift: int = 1, z_loss: float = 0.0, label_smoothing: float = 0.0,
    sums: Any = None,
) -> Tensor:  # fmt: skip
    """Sum over targets, 0-dim fp32, of cross entropy of ``logits`` (B, T, V) with ``labels`` (B, T), which stand
    ``shift`` positions behind those that predict them.

    ``label_smoothing`` as in ``F.cross_entropy``; ``z_loss`` times log(Z)^2 is added per target (PaLM, Chowdhery et al.
    2022, arXiv:2204.02311, section 5). ``sums`` (``NamedSums``) get the values too.
    """
    flat, targets = logits.flatten(0, 1).float(), shifted(labels, shift)
    kind, apart = ("none", sums) if sums is not None and sums.places is not None else ("sum", None)
    total = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction=kind, label_smoothing=label_smoothing)
    if z_loss:
        squares = flat.logsumexp(-1).square() * (targets != IGNORED)
        total = total + z_loss * (squares.sum() if apart is None else squares)
    if apart is not None:
        apart.add_rows(total.detach(), targets != IGNORED)
        total = total.sum()
    return total


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shift: int = 1,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk_size: int = 256,
    chunk: Any = None,
) -> Tensor:
    """``cross_entropy_sum`` of ``hidden @ weight.T + bias``, with logits of only ``chunk_size`` tokens at a time.

    hidden (B, T, E), weight (V, E). Multiplies in the autocast dtype where autocast is on, sums in fp32. Gradients are
    computed in the forward pass, chunk by chunk, so that logits are made once (Hsu et al. 2024, arXiv:2410.10989);
    without gradient mode only the loss is. Memory beside inputs and gradients: C x V numbers. ``chunk`` is
    ``chunk_sum`` as torch compiles it, which on a GPU takes two fifths of the time (measured.md).
    """
    kind, dtype = hidden.device.type, product_dtype(hidden)
    flat, targets = hidden.flatten(0, 1), shifted(labels, shift)
    options = (z_loss, label_smoothing, chunk_size, dtype, chunk)
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return _LinearCrossEntropy.apply(flat, weight, bias, targets, *options)  # type: ignore[no-any-return, no-untyped-call]
    with torch.autocast(kind, enabled=False):
        return _in_chunks(flat, weight, bias, targets, None, *options)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which ``hidden`` is multiplied: autocast's where that is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss with its gradients, kept until the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *options: Any
    ) -> Tensor:
        """``options``: of ``_in_chunks``, from ``z_loss`` on."""
        needed = ctx.needs_input_grad
        grads = _Gradients(
            torch.empty_like(hidden) if needed[0] else None,
            # fp32 sums over chunks, whatever the dtype of the products
            torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None,
        )
        with torch.autocast(hidden.device.type, enabled=False):
            total = _in_chunks(hidden, weight, bias, targets, grads, *options)
        ctx.grads, ctx.dtypes = grads, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        (scale,) = outputs
        grads = ctx.grads
        # zero-bubble schedules keep the graph: first comes the gradient of a stage's inputs, later that of its weights
        keep: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        if grads is None:
            raise RuntimeError("linear_cross_entropy: its gradients are gone after one backward pass")
        if not keep:
            ctx.grads = None  # not through save_for_backward: its reference would make accumulation copy the weight's
        scaled = [
            None if g is None else (g * scale if keep else g.mul_(scale)).to(d)
            for g, d in zip((grads.hidden, grads.weight, grads.bias), ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None, None, None


class _Gradients:
    """Buffers the chunks write their gradients into; None where none is wanted."""

    def __init__(self, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias

    def add(self, dlogits: Tensor, x: Tensor, w: Tensor, rows: slice) -> None:
        """Chain rule of one chunk: dlogits (C, V), x (C, E), w (V, E)."""
        if self.hidden is not None:
            if self.hidden.dtype == w.dtype:
                torch.mm(dlogits, w, out=self.hidden[rows])
            elif self.hidden.dtype == torch.float32 and _has_wide_sums(w):
                torch.mm(dlogits, w, out_dtype=torch.float32, out=self.hidden[rows])
            else:
                self.hidden[rows] = dlogits @ w
        if self.weight is not None:
            if x.dtype == self.weight.dtype:
                self.weight.addmm_(dlogits.t(), x)
            elif _has_wide_sums(x):
                torch.addmm(self.weight, dlogits.t(), x, out_dtype=torch.float32, out=self.weight)
            else:
                self.weight.add_(dlogits.t() @ x)
        if self.bias is not None:
            self.bias.add_(dlogits.sum(0, dtype=torch.float32))


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    grads: _Gradients | None,
    z_loss: float,
    smoothing: float,
    chunk_size: int,
    dtype: torch.dtype,
    chunk: Any,
) -> Tensor:
    """The loss over all chunks; with ``grads`` their gradients too."""
    w = weight.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(targets), chunk_size):
        rows = slice(start, start + chunk_size)
        x = hidden[rows].to(dtype)
        # compiled code reads half as many bytes of half-width logits, and has them in fp32 inside
        wide: Any = {"out_dtype": torch.float32} if chunk is None and _has_wide_sums(x) else {}
        into = None if grads is None else dtype
        # logits have no name here, so that they are gone before the gradient is made, and that before the next chunk
        loss, dlogits = (chunk or chunk_sum)(torch.mm(x, w.t(), **wide), bias, targets[rows], z_loss, smoothing, into)
        total += loss
        if grads is not None and dlogits is not None:
            grads.add(dlogits, x, w, rows)
        del dlogits
    return total


def _has_wide_sums(x: Tensor) -> bool:
    """Whether products of half-width numbers can come out in fp32, in which tensor cores sum them.

    torch has it for CUDA alone, from sm80 on (2.11, 2.13: ``mm.dtype``, and ``addmm.dtype`` with an fp32 accumulator);
    inductor cannot lower the latter (2.11, pytorch#163880).
    """
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16) or torch.compiler.is_compiling():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 0)


def chunk_sum(
    logits: Tensor, bias: Tensor | None, targets: Tensor, z_loss: float, smoothing: float, into: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Sum over the targets of one chunk, and its gradient by ``logits`` (C, V) in the dtype ``into`` (None: none).
    Logits in fp32 are used up.

    Per target y, with lse = log(Z): lse - (1 - s) logits[y] - s mean(logits) + z lse^2, whose gradient is
    softmax (1 + 2 z lse) - (1 - s) [y] - s / V.
    """
    logits = logits.float()
    if bias is not None:
        logits += bias
    counted = targets != IGNORED
    index = targets.clamp(min=0)[:, None]
    loss = (smoothing - 1) * logits.gather(1, index)[:, 0]
    if smoothing:
        loss -= smoothing * logits.mean(-1)
    # by hand and in place: torch.logsumexp makes a second C x V tensor
    highest = logits.amax(-1, keepdim=True)
    normalizer = logits.sub_(highest).exp_().sum(-1)
    lse = highest[:, 0] + normalizer.log()
    loss += lse
    if z_loss:
        loss += z_loss * lse.square()
    if into is not None:
        logits.mul_((counted * (1 + 2 * z_loss * lse) / normalizer)[:, None])
        logits.scatter_add_(1, index, (smoothing - 1) * counted[:, None].to(logits.dtype))
        if smoothing:
            logits.sub_((smoothing / logits.shape[1]) * counted[:, None])
    return torch.where(counted, loss, 0.0).sum(), None if into is None else logits.to(into)
