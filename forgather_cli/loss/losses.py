"""The losses that torch alone computes: cross entropy, with the head or without it, and the user's functions.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.labels import label_shift, num_targets
from forgather_cli.loss.base import Loss, check_fusable, head_and_hidden
from forgather_cli.loss.model_io import model_logits
from forgather_cli.loss.sums import cross_entropy_sum, linear_cross_entropy_sum

LossFn = Callable[..., Tensor]
"""``(logits (B, T, V), labels (B, T)) -> mean over its own targets``, or with ``num_items_in_batch``: used as it is."""


class CrossEntropy(Loss):
    """Cross entropy of the model's logits. Smoothing and z_loss count in evaluation too."""

    def __init__(self, *, z_loss: float = 0.0, label_smoothing: float = 0.0) -> None:
        self._z_loss, self._label_smoothing = z_loss, label_smoothing
        self.is_likelihood = not (z_loss or label_smoothing)

    def check(self, model: nn.Module) -> None:
        """Any model will do."""

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        logits = model_logits(model, inputs)
        if self.eval_metrics is not None:
            self.eval_metrics.add(logits, labels, label_shift(inputs))
        options = {"z_loss": self._z_loss, "label_smoothing": self._label_smoothing}
        return cross_entropy_sum(logits, labels, shift=label_shift(inputs), **options)


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
        check_fusable(model, "loss=linear_cross_entropy")

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        head, hidden = head_and_hidden(model, inputs, labels, self.eval_metrics, chunk_size=self._options["chunk_size"])
        options = {"shift": label_shift(inputs), **self._options}
        return linear_cross_entropy_sum(hidden, head.weight, labels, bias=head.bias, **options)


class UserLoss(Loss):
    """A user's ``loss_fn(logits, labels)``; it shifts the labels itself where the model is causal, as Hugging
    Face's loss functions do.
    """

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        self._counted = "num_items_in_batch" in inspect.signature(loss_fn).parameters

    def check(self, model: nn.Module) -> None:
        """Any model will do."""

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        logits = model_logits(model, inputs)
        if self.eval_metrics is not None:
            self.eval_metrics.add(logits, labels, label_shift(inputs))
        count = num_targets(labels, label_shift(inputs))
        return _weighted(self._loss_fn, self._counted, logits, labels, count, step_targets)


class UserFusedLoss(Loss):
    """A user's ``factory(head)``, which makes a ``loss_fn(hidden_states, labels)`` that applies the head itself."""

    def __init__(self, factory: Callable[[nn.Module], LossFn]) -> None:
        self._factory = factory

    def check(self, model: nn.Module) -> None:
        check_fusable(model, "fused_loss_factory")

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        head, hidden = head_and_hidden(model, inputs, labels, self.eval_metrics)
        loss_fn = self._factory(head)
        counted = "num_items_in_batch" in inspect.signature(loss_fn).parameters
        count = num_targets(labels, label_shift(inputs))
        return _weighted(loss_fn, counted, hidden, labels, count, step_targets)


def _weighted(
    loss_fn: LossFn, counted: bool, output: Tensor, labels: Tensor, count: Tensor, step_targets: Tensor | None
) -> Tensor:
    """A user's loss as a sum over ``count`` targets."""
    if counted:
        items = count.clamp(min=1) if step_targets is None else step_targets
        return loss_fn(output, labels, num_items_in_batch=items).float() * items
    # a mean over no targets is NaN: give it some, and weigh them with 0
    labels = torch.where(count > 0, labels, 0)
    return loss_fn(output, labels).float() * count
