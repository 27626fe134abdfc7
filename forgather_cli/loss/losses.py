"""The losses that torch alone computes: cross entropy, with the head or without it, and the user's functions.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.errors import ConfigError, ModelError, PartError
from forgather_cli.hardware import chunk_tokens, gpu_of
from forgather_cli.labels import label_shift, num_targets
from forgather_cli.loss.base import Loss, check_fusable, head_and_hidden
from forgather_cli.loss.model_io import MISFITS, explain_misfit, logits_of, model_kwargs, model_logits
from forgather_cli.loss.sums import chunk_sum, cross_entropy_sum, linear_cross_entropy_sum
from forgather_cli.targets import accepts

LossFn = Callable[..., Tensor]
"""``(logits (B, T, V), labels (B, T)) -> mean over its own targets``, or with ``num_items_in_batch``: used as it is."""


class CrossEntropy(Loss):
    """Cross entropy of the model's logits. Smoothing and z_loss count in evaluation too.

    Behind compiled blocks, output layer and sum are compiled as one, in which logits in fp32 never reach memory.
    """

    compiles = sums_rows = True

    def __init__(self, *, z_loss: float = 0.0, label_smoothing: float = 0.0) -> None:
        self._options: dict[str, Any] = {"z_loss": z_loss, "label_smoothing": label_smoothing}
        self.is_likelihood = not (z_loss or label_smoothing)
        self.piece = self._of_hidden

    def check(self, model: nn.Module) -> None:
        """Any model will do."""

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        head: Any = None
        if self.compiled and torch.is_grad_enabled() and getattr(model, "has_plain_head", False) is not False:
            with suppress(ModelError):  # of a class whose head turns out not to be plain
                head, output = head_and_hidden(model, inputs, labels, None)
        if head is None:
            output = logits_of(model(**inputs), model)
            if self.eval_metrics is not None:
                self.eval_metrics.add(output, labels, label_shift(inputs))
        try:
            if head is None:
                return cross_entropy_sum(output, labels, shift=label_shift(inputs), sums=self.sums, **self._options)
            total: Tensor = self.compiled(head, output, labels, label_shift(inputs))
            return total
        except MISFITS as error:
            explain_misfit(error, model, output, inputs, labels, 0 if head is None else len(head.weight))
            raise

    def _of_hidden(self, head: nn.Module, hidden: Tensor, labels: Tensor, shift: int) -> Tensor:
        return cross_entropy_sum(head(hidden), labels, shift=shift, sums=self.sums, **self._options)


class LinearCrossEntropy(Loss):
    """Head and cross entropy together, in chunks of tokens: None of those that suit ``device``."""

    compiles = True

    def __init__(
        self, *, z_loss: float = 0.0, label_smoothing: float = 0.0, chunk_size: int | None = 256, device: Any = None
    ) -> None:
        size = chunk_size or chunk_tokens(gpu_of(str(device)))
        self._options: dict[str, Any] = {"z_loss": z_loss, "label_smoothing": label_smoothing, "chunk_size": size}
        self.is_likelihood = not (z_loss or label_smoothing)
        self.kernel: Any = linear_cross_entropy_sum
        self.piece = chunk_sum

    def check(self, model: nn.Module) -> None:
        check_fusable(model, "loss=linear_cross_entropy")

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        head, hidden = head_and_hidden(model, inputs, labels, self.eval_metrics, chunk_size=self._options["chunk_size"])
        options = {"shift": label_shift(inputs), "chunk": self.compiled, **self._options}
        try:
            total: Tensor = self.kernel(hidden, head.weight, labels, bias=head.bias, **options)
            return total
        except MISFITS as error:
            explain_misfit(error, model, hidden, inputs, labels, len(head.weight))
            raise


class UserLoss(Loss):
    """A user's ``loss_fn(logits, labels)``; it shifts the labels itself where the model is causal, as Hugging
    Face's loss functions do.
    """

    def __init__(self, loss_fn: LossFn) -> None:
        self.function, self._is_new = loss_fn, True
        self._counted = "num_items_in_batch" in inspect.signature(loss_fn).parameters

    def check(self, model: nn.Module) -> None:
        """Any model will do."""

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        logits = model_logits(model, inputs)
        if self.eval_metrics is not None:
            self.eval_metrics.add(logits, labels, label_shift(inputs))
        count = num_targets(labels, label_shift(inputs))
        is_new, self._is_new = self._is_new, False
        try:
            return _weighted(self.function, self._counted, logits, labels, count, step_targets, is_new)
        except MISFITS as error:
            explain_misfit(error, model, logits, inputs, labels)
            raise


class UserFusedLoss(Loss):
    """A user's ``factory(head)``, which makes a ``loss_fn(hidden_states, labels)`` that applies the head itself."""

    def __init__(self, factory: Callable[[nn.Module], LossFn]) -> None:
        self.kernel, self._is_new = factory, True

    def check(self, model: nn.Module) -> None:
        check_fusable(model, "fused_loss_factory")

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        head, hidden = head_and_hidden(model, inputs, labels, self.eval_metrics)
        loss_fn = self.kernel(head)
        counted = "num_items_in_batch" in inspect.signature(loss_fn).parameters
        count = num_targets(labels, label_shift(inputs))
        is_new, self._is_new = self._is_new, False
        return _weighted(loss_fn, counted, hidden, labels, count, step_targets, is_new)


def _weighted(
    loss_fn: LossFn,
    counted: bool,
    output: Tensor,
    labels: Tensor,
    count: Tensor,
    step_targets: Tensor | None,
    is_new: bool,
) -> Tensor:
    """A user's loss as a sum over ``count`` targets. The first one (``is_new``) is looked at: PartError."""
    if counted:
        items = count.clamp(min=1) if step_targets is None else step_targets
        loss = loss_fn(output, labels, num_items_in_batch=items)
    else:
        items = count
        # a mean over no targets is NaN: give it some, and weigh them with 0
        loss = loss_fn(output, torch.where(count > 0, labels, 0))
    if is_new:
        _check_loss(loss_fn, loss, output)
    return loss.float() * items


def _check_loss(loss_fn: LossFn, loss: Any, output: Tensor) -> None:
    """Raise PartError for what no gradient can be computed of."""
    if not isinstance(loss, Tensor):
        problem = f"it returned a {type(loss).__name__}, and no tensor; return one number as torch computes it"
    elif loss.numel() != 1:
        problem = f"it returned a tensor of shape {tuple(loss.shape)}; return one number, the mean over the targets"
    elif output.requires_grad and not loss.requires_grad:
        kind = str(loss.dtype).removeprefix("torch.")
        problem = f"it returned a tensor of {kind} without a gradient; leave out detach(), item() and no_grad()"
    else:
        return
    called = getattr(loss_fn, "func", loss_fn)  # of a partial
    raise PartError("loss", getattr(called, "__qualname__", type(called).__qualname__), problem)


# ------------------------------------------------------------------------------------------- a subclass's compute_loss

ComputeLoss = Callable[..., Any]
"""``(model, batch, return_outputs=, num_items_in_batch=)`` -> the loss, or with ``return_outputs`` (loss, outputs), as
Hugging Face's ``Trainer.compute_loss`` (transformers 5.23)."""


class ComputedLoss(Loss):
    """What an overridden ``compute_loss`` says: the mean over a micro-batch's targets, or, where it has read
    ``num_items_in_batch``, its share of the step's.
    """

    def __init__(self, compute_loss: ComputeLoss) -> None:
        self._compute_loss = compute_loss
        self._takes_count = accepts(compute_loss, "num_items_in_batch")

    def check(self, model: nn.Module) -> None:
        """Any model will do."""

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        count, evaluates = num_targets(labels, label_shift(inputs)), step_targets is None
        items = count.clamp(min=1) if step_targets is None else step_targets
        seen = items.as_subclass(_Count)
        options: dict[str, Any] = {"num_items_in_batch": seen} if self._takes_count else {}
        # a mean over no targets is NaN: give it some, and weigh them with 0
        batch = {**inputs, "labels": torch.where(count > 0, labels, 0)}
        answer = self._compute_loss(model, batch, **options, **({"return_outputs": True} if evaluates else {}))
        loss = answer[0] if evaluates and isinstance(answer, tuple) else answer
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(
                f"compute_loss: must return a tensor of one number, the mean over the batch (with return_outputs a "
                f"pair of it and the outputs), got {got}"
            )
        return loss.float().reshape(()) * (items * (count > 0) if seen.is_read else count)


class _Count(Tensor):
    """A number that notes whether somebody has computed with it; what comes out are plain tensors."""

    is_read = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in (*args, *(kwargs or {}).values()):
            if isinstance(each, cls):
                each.is_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def loss_and_outputs(
    loss: Loss, model: nn.Module, batch: dict[str, Tensor], num_items: Tensor | None, *, return_outputs: bool
) -> Any:
    """``loss`` of a batch divided by ``num_items`` (None: by the batch's own targets), as ``compute_loss`` returns it.

    The outputs are those that the loss was computed from; where it applies the head itself, of a second forward.
    """
    inputs, labels, seen = model_kwargs(batch), batch["labels"], list[Any]()
    with ExitStack() as stack:
        if return_outputs:
            stack.callback(model.register_forward_hook(lambda module, args, output: seen.append(output)).remove)
        total = loss.total(model, inputs, labels, num_items)
    mean = total / (num_targets(labels, label_shift(inputs)).clamp(min=1) if num_items is None else num_items)
    return (mean, seen[0] if seen else model(**inputs)) if return_outputs else mean
