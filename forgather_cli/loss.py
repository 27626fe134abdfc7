"""Losses of language models: sums over targets, to be divided by the number of targets of a whole step.

Labels are aligned with ``input_ids`` as in Hugging Face; every loss here shifts them by one, so the counted targets are
``labels[:, 1:] != -100``.

Legend: B sequences, T tokens, N = B * T, V vocabulary, E hidden size, C tokens of a chunk.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgather_cli.config.schema import CrossEntropySettings, LinearCrossEntropySettings, LossOption, Target
from forgather_cli.errors import ModelError
from forgather_cli.targets import accepts, import_target

IGNORED = -100
"""The label of a position without a target."""

LossFn = Callable[..., Tensor]
"""``(logits (B, T, V), labels (B, T)) -> mean over its own targets``, or with ``num_items_in_batch``: used as it is."""


def num_targets(labels: Tensor) -> Tensor:
    """Counted targets of ``labels`` (B, T), 0-dim int64 on the same device."""
    return (labels[:, 1:] != IGNORED).sum()


def model_kwargs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a batch goes to the model: everything but the labels."""
    return {key: value for key, value in batch.items() if key != "labels"}


def shifted(labels: Tensor) -> Tensor:
    """The target of each position (N,): the next label; the last position of a sequence has none."""
    # shifting labels instead of logits saves a copy of N x V numbers
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()


def model_logits(model: nn.Module, inputs: dict[str, Tensor], *, last_only: bool = False, cache: Any = None) -> Tensor:
    """Logits (B, T, V), or (B, 1, V) of the last position, of any model: a tensor, a tuple's first, or ``.logits``.

    ``last_only`` and ``cache`` are passed to a model whose forward names them; another one computes everything, and
    leaves the cache empty. In generation a model without ``attention_mask`` sees the padding of shorter prompts. Raises
    ModelError for any other output.
    """
    if not last_only and cache is None:
        return _logits_of(model(**inputs), model)
    names, masks = _forward_of(getattr(model.forward, "__func__", model.forward))
    extra = {key: value for key, value in (("last_only", last_only), ("cache", cache)) if key in names}
    known = {key: value for key, value in inputs.items() if key != "attention_mask" or masks}
    logits = _logits_of(model(**known, **extra), model)
    return logits[:, -1:] if last_only else logits


@lru_cache(maxsize=64)
def _forward_of(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Names of the parameters, and whether it takes an attention_mask. Remembered: generation asks for each token."""
    return frozenset(inspect.signature(function).parameters), accepts(function, "attention_mask")


def _logits_of(output: Any, model: nn.Module) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, dict):
        found = output.get("logits")
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.dim() != 3:
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
        raise ModelError(
            f"{type(model).__name__}: forward must return logits (sequences, tokens, vocabulary), a tuple that starts "
            f"with them, or an object with .logits, got {got}"
        )
    return found


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    """Sum over targets, 0-dim fp32, of cross entropy of ``logits`` (B, T, V) with ``labels`` (B, T).

    ``label_smoothing`` as in ``F.cross_entropy``; ``z_loss`` times log(Z)^2 is added per target (PaLM, Chowdhery et al.
    2022, arXiv:2204.02311, section 5).
    """
    flat, targets = logits.flatten(0, 1).float(), shifted(labels)
    total = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        total = total + z_loss * (flat.logsumexp(-1).square() * (targets != IGNORED)).sum()
    return total


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk_size: int = 256,
) -> Tensor:
    """``cross_entropy_sum`` of ``hidden @ weight.T + bias``, with logits of only ``chunk_size`` tokens at a time.

    hidden (B, T, E), weight (V, E). Multiplies in the autocast dtype where autocast is on, sums in fp32. Gradients are
    computed in the forward pass, chunk by chunk, so that logits are made once (Hsu et al. 2024, arXiv:2410.10989);
    without gradient mode only the loss is. Memory beside inputs and gradients: C x V numbers.
    """
    kind, dtype = hidden.device.type, product_dtype(hidden)
    flat, targets = hidden.flatten(0, 1), shifted(labels)
    options = (z_loss, label_smoothing, chunk_size, dtype)
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return _LinearCrossEntropy.apply(flat, weight, bias, targets, *options)  # type: ignore[no-any-return, no-untyped-call]
    with torch.autocast(kind, enabled=False):
        return _in_chunks(flat, weight, bias, targets, *options, grads=None)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which ``hidden`` is multiplied: autocast's where that is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss with its gradients, kept until the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        z_loss: float,
        label_smoothing: float,
        chunk_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        needed = ctx.needs_input_grad
        grads = _Gradients(
            torch.empty_like(hidden) if needed[0] else None,
            # fp32 sums over chunks, whatever the dtype of the products
            torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None,
        )
        with torch.autocast(hidden.device.type, enabled=False):
            total = _in_chunks(hidden, weight, bias, targets, z_loss, label_smoothing, chunk_size, dtype, grads)
        ctx.grads, ctx.dtypes = grads, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        (scale,) = outputs
        grads, keep = ctx.grads, _graph_is_kept()
        if grads is None:
            raise RuntimeError("linear_cross_entropy: its gradients are gone after one backward pass")
        if not keep:
            ctx.grads = None  # not through save_for_backward: its reference would make accumulation copy the weight's
        scaled = [
            None if g is None else (g * scale if keep else g.mul_(scale)).to(d)
            for g, d in zip((grads.hidden, grads.weight, grads.bias), ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None, None


def _graph_is_kept() -> bool:
    """Whether the backward pass that runs now keeps its graph for another one, as zero-bubble schedules do: first comes
    the gradient of a stage's inputs, later that of its weights.
    """
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


class _Gradients:
    """Buffers the chunks write their gradients into; None where none is wanted."""

    def __init__(self, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias

    def add(self, dlogits: Tensor, x: Tensor, w: Tensor, rows: slice) -> None:
        """Chain rule of one chunk: dlogits (C, V), x (C, E), w (V, E)."""
        if self.hidden is not None:
            if self.hidden.dtype == w.dtype:
                torch.mm(dlogits, w, out=self.hidden[rows])
            else:
                self.hidden[rows] = dlogits @ w
        if self.weight is not None:
            if x.dtype == self.weight.dtype:
                self.weight.addmm_(dlogits.t(), x)
            else:
                self.weight.add_(dlogits.t() @ x)
        if self.bias is not None:
            self.bias.add_(dlogits.sum(0, dtype=torch.float32))


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    z_loss: float,
    label_smoothing: float,
    chunk_size: int,
    dtype: torch.dtype,
    grads: _Gradients | None,
) -> Tensor:
    """The loss over all chunks; with ``grads`` their gradients too."""
    w = weight.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(targets), chunk_size):
        rows = slice(start, start + chunk_size)
        x = hidden[rows].to(dtype)
        logits = (x @ w.t()).float()
        if bias is not None:
            logits += bias
        total += _chunk(logits, targets[rows], z_loss, label_smoothing, into_gradient=grads is not None)
        if grads is not None:
            grads.add(logits.to(dtype), x, w, rows)
        del logits  # before the next chunk's are made, not after
    return total


def _chunk(logits: Tensor, targets: Tensor, z_loss: float, smoothing: float, *, into_gradient: bool) -> Tensor:
    """Sum over the targets of one chunk; ``logits`` (C, V) fp32 become their own gradient, or are used up.

    Per target y, with lse = log(Z): lse - (1 - s) logits[y] - s mean(logits) + z lse^2, whose gradient is
    softmax (1 + 2 z lse) - (1 - s) [y] - s / V.
    """
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
    if into_gradient:
        logits.mul_((counted * (1 + 2 * z_loss * lse) / normalizer)[:, None])
        logits.scatter_add_(1, index, (smoothing - 1) * counted[:, None].to(logits.dtype))
        if smoothing:
            logits.sub_((smoothing / logits.shape[1]) * counted[:, None])
    return torch.where(counted, loss, 0.0).sum()


class Counter(Protocol):
    """What looks at predictions in passing: see ``tally.py``."""

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Logits (B, T, V) of a batch with labels (B, T)."""

    def add_hidden(self, head: Any, hidden: Tensor, labels: Tensor, *, chunk_size: int = 256) -> None:
        """What ``head`` is applied to, (B, T, E); logits of only ``chunk_size`` tokens may be made at a time."""


class Loss(ABC):
    """What is minimised: a sum over the targets of a batch."""

    tally: Counter | None = None
    """Set by an evaluation that counts more than the loss."""
    is_likelihood: bool = False
    """True if the sum is the negative log-likelihood in nats, and nothing is added to it."""

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Raise ModelError, by name, for what ``model`` lacks for this loss."""

    @abstractmethod
    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, num_items: Tensor | None) -> Tensor:
        """Sum over targets, 0-dim fp32. ``num_items`` counts the targets of the whole step; None: of this batch."""


class CrossEntropy(Loss):
    """Cross entropy of the model's logits. Smoothing and z_loss count in evaluation too."""

    def __init__(self, *, z_loss: float = 0.0, label_smoothing: float = 0.0) -> None:
        self._z_loss, self._label_smoothing = z_loss, label_smoothing
        self.is_likelihood = not (z_loss or label_smoothing)

    def check(self, model: nn.Module) -> None:
        """Any model will do."""

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, num_items: Tensor | None) -> Tensor:
        logits = model_logits(model, inputs)
        if self.tally is not None:
            self.tally.add(logits, labels)
        return cross_entropy_sum(logits, labels, z_loss=self._z_loss, label_smoothing=self._label_smoothing)


def _check_fusable(model: nn.Module, what: str) -> None:
    lacking = [name for name in ("hidden_states()", "head") if not hasattr(model, name.removesuffix("()"))]
    if lacking:
        raise ModelError(
            f"{what}: {type(model).__name__} has no {' and no '.join(lacking)}; the model must return hidden states "
            f"from hidden_states(...) and have its output layer as head, or set loss=cross_entropy"
        )


class LinearCrossEntropy(Loss):
    """Head and cross entropy together, in chunks of tokens."""

    def __init__(self, *, z_loss: float = 0.0, label_smoothing: float = 0.0, chunk_size: int = 256) -> None:
        self._options: dict[str, Any] = {
            "z_loss": z_loss,
            "label_smoothing": label_smoothing,
            "chunk_size": chunk_size,
        }
        self.is_likelihood = not (z_loss or label_smoothing)

    def check(self, model: nn.Module) -> None:
        _check_fusable(model, "loss=linear_cross_entropy")

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, num_items: Tensor | None) -> Tensor:
        fused: Any = model
        head = fused.head
        hidden = fused.hidden_states(**inputs)
        if self.tally is not None:
            self.tally.add_hidden(head, hidden, labels, chunk_size=self._options["chunk_size"])
        return linear_cross_entropy_sum(hidden, head.weight, labels, bias=head.bias, **self._options)


class UserLoss(Loss):
    """A user's ``loss_fn(logits, labels)``; it shifts the labels itself, as Hugging Face's loss functions do."""

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        self._counted = "num_items_in_batch" in inspect.signature(loss_fn).parameters

    def check(self, model: nn.Module) -> None:
        """Any model will do."""

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, num_items: Tensor | None) -> Tensor:
        logits = model_logits(model, inputs)
        if self.tally is not None:
            self.tally.add(logits, labels)
        return _weighted(self._loss_fn, self._counted, logits, labels, num_items)


class UserFusedLoss(Loss):
    """A user's ``factory(head)``, which makes a ``loss_fn(hidden_states, labels)`` that applies the head itself."""

    def __init__(self, factory: Callable[[nn.Module], LossFn]) -> None:
        self._factory = factory

    def check(self, model: nn.Module) -> None:
        _check_fusable(model, "fused_loss_factory")

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, num_items: Tensor | None) -> Tensor:
        fused: Any = model
        loss_fn = self._factory(fused.head)
        counted = "num_items_in_batch" in inspect.signature(loss_fn).parameters
        hidden = fused.hidden_states(**inputs)
        if self.tally is not None:
            self.tally.add_hidden(fused.head, hidden, labels)
        return _weighted(loss_fn, counted, hidden, labels, num_items)


def _weighted(loss_fn: LossFn, counted: bool, output: Tensor, labels: Tensor, num_items: Tensor | None) -> Tensor:
    """A user's loss as a sum over targets."""
    count = num_targets(labels)
    if counted:
        items = count.clamp(min=1) if num_items is None else num_items
        return loss_fn(output, labels, num_items_in_batch=items).float() * items
    # a mean over no targets is NaN: give it some, and weigh them with 0
    labels = torch.where(count > 0, labels, 0)
    return loss_fn(output, labels).float() * count


def build_loss(
    option: LossOption | None = None,
    *,
    loss_fn: LossFn | None = None,
    fused_loss_factory: Callable[[nn.Module], LossFn] | None = None,
) -> Loss:
    """The loss of a config option, or of the user's function, which takes precedence; cross entropy by default.

    A ``_target_`` is a function (its arguments are bound) or a class whose instances are called. Raises ModelError.
    """
    if fused_loss_factory is not None:
        return UserFusedLoss(fused_loss_factory)
    if loss_fn is not None:
        return UserLoss(loss_fn)
    if isinstance(option, Target):
        return UserLoss(_from_target(option))
    if isinstance(option, LinearCrossEntropySettings):
        return LinearCrossEntropy(
            z_loss=option.z_loss, label_smoothing=option.label_smoothing, chunk_size=option.chunk_size
        )
    option = option or CrossEntropySettings()
    return CrossEntropy(z_loss=option.z_loss, label_smoothing=option.label_smoothing)


def _from_target(target: Target) -> LossFn:
    found = import_target(target.path, "loss")
    if isinstance(found, type):
        made: LossFn = found(**target.kwargs)
        return made
    return partial(found, **target.kwargs)


class ModelWithLoss(nn.Module):
    """Model and loss as one module, so that a wrapper around it (FSDP2, DDP) sees head and loss in one forward."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        loss.check(model)
        self.model = model
        self.loss = loss

    def forward(self, batch: dict[str, Tensor], num_items: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(sum over targets fp32, number of targets), both 0-dim. ``num_items``: targets of the whole step."""
        labels = batch.get("labels")
        if labels is None:
            raise ModelError(f"the batch has no labels, only {', '.join(batch) or 'nothing'}; add labels (B, T)")
        total = self.loss.total(self.model, model_kwargs(batch), labels, num_items)
        return total, num_targets(labels)
