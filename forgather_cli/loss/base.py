"""What a loss is to a strategy, and what losses that apply the head themselves share.

Legend: B sequences, T tokens, V vocabulary, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.errors import ModelError
from forgather_cli.labels import FOR_LOSS, SOURCES, TASKS, UNITS, label_shift
from forgather_cli.loss.eval_metrics import EvalMetrics
from forgather_cli.loss.model_io import MISFITS, ignores_documents, model_kwargs


@dataclass
class NamedSums:
    """This rank's shares since the last log, on the device; a loss adds to them, and the log sums those of all ranks.

    Legend: K names, B sequences, T tokens.
    """

    names: Sequence[str]
    table: Tensor
    """(2, K) float64: sums, and what they are divided by."""
    places: Any = None
    """(B,): which name each row of the batch that comes next belongs to; None: its rows are not told apart."""

    def add_rows(self, values: Tensor, counted: Tensor) -> None:
        """``values`` (B * T,) of a batch's positions, to be divided by the number of those that are ``counted``."""
        sums = torch.stack([values, counted.to(values.dtype)]).view(2, len(self.places), -1).sum(-1)
        self.table.index_add_(1, self.places, sums.to(self.table.dtype))

    def add(self, names: Sequence[str], sums: Tensor, count: Tensor) -> None:
        """``sums`` (n,) under names that stand one behind another, to be divided by ``count``."""
        first = self.names.index(names[0])
        columns = self.table[:, first : first + len(names)]
        columns += torch.stack([sums, count.expand(len(names))]).to(columns.dtype)


class Loss(ABC):
    """What is minimised: a sum over the targets of a batch."""

    eval_metrics: EvalMetrics | None = None
    """Set by an evaluation that counts more than the loss."""
    sums: NamedSums | None = None
    """Set by a training that logs more than the loss."""
    sums_rows: bool = False
    """It adds its values to ``sums`` row by row, where these are told apart; else it gives one sum of all."""
    names: Sequence[str] = ()
    """Of what it adds to ``sums`` beside the loss, in training and in evaluation."""
    extras: Mapping[str, Tensor] | None = None
    """Of the batch that comes next its units, and the tensors for the loss alone; None of a loss that reads none."""
    without_dropout: bool = False
    """It compares what the model says with what it has said before, so nothing may be dropped."""
    data: Callable[..., Any] | None = None
    """Makes of a dataset the one whose batches have what the loss alone reads: once it is computed
    (``before_training``), or of the evaluation split of a checkpoint, which is given the data's option and fingerprint
    and the checkpoint's identity (empty of a model directory). Raises SetupError.
    """
    before_training: Callable[[Any, Any], None] | None = None
    """Collective, before the first step, with the loop and the reader of the checkpoint that it goes on from, if any.
    """
    before_evaluation: Callable[[Any], None] | None = None
    """On all ranks, before a dataset that ``data`` has made is evaluated. Raises SetupError where it cannot be."""
    before_update: Callable[[Any], None] | None = None
    """Collective, with the run, when a step has its gradients."""
    is_likelihood: bool = False
    """True if the sum is the negative log-likelihood in nats, and nothing is added to it."""
    is_separable: bool = True
    """False if gradients of inputs and weights come from one backward, which no schedule can split in two."""

    compiles: bool = False
    """True if torch can compile it together with the model."""
    kernel: Any = None
    """What multiplies with the head's weight in place of the head, if it does; it stays out of graphs."""
    piece: Callable[..., Any] | None = None
    """What of it ``compile`` compiles."""
    compiled: Any = None

    def compile(self, **options: Any) -> None:
        """Compile what no graph of the model holds. ``options``: of ``torch.compile``."""
        self.compiled = self.piece and torch.compile(self.piece, **options)

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Raise ModelError, by name, for what ``model`` lacks for this loss."""

    @abstractmethod
    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        """Sum over targets, 0-dim fp32. ``step_targets`` counts the targets of the whole step; None: of this batch."""


def check_fusable(model: nn.Module, what: str) -> None:
    """Raise ModelError if ``model`` does not let a loss apply its head; ``what`` is the setting that wants to."""
    lacking = [name for name in ("hidden_states()", "head") if not hasattr(model, name.removesuffix("()"))]
    if lacking:
        raise ModelError(
            f"{what}: {type(model).__name__} has no {' and no '.join(lacking)}; the model must return hidden states "
            f"from hidden_states(...) and have its output layer as head, or set loss=cross_entropy"
        )


def head_and_hidden(
    model: nn.Module,
    inputs: dict[str, Tensor],
    labels: Tensor,
    eval_metrics: EvalMetrics | None,
    *,
    chunk_size: int = 256,
) -> tuple[Any, Tensor]:
    """The output layer and what it is applied to, (B, T, E); ``eval_metrics`` get to see both."""
    fusable: Any = model
    head, hidden = fusable.head, fusable.hidden_states(**inputs)
    if eval_metrics is not None:
        eval_metrics.add_hidden(head, hidden, labels, label_shift(inputs), chunk_size=chunk_size)
    return head, hidden


def take_batch(loss: Loss, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """(what of a batch the model gets, the labels), for ``loss.total``; the loss has what else is its own."""
    labels = batch.get("labels")
    if labels is None:
        raise ModelError(f"the batch has no labels, only {', '.join(batch) or 'nothing'}; add labels (B, T)")
    if loss.eval_metrics is not None:
        loss.eval_metrics.task_ids = batch.get(TASKS)
    if loss.sums is not None:
        loss.sums.places = batch[SOURCES][:, 0] if SOURCES in batch and torch.is_grad_enabled() else None
    if loss.extras is not None:
        loss.extras = {key: value for key, value in batch.items() if key == UNITS or key.startswith(FOR_LOSS)}
    return model_kwargs(batch), labels


class ModelWithLoss(nn.Module):
    """Model and loss as one module, so that a wrapper around it (FSDP2, DDP) sees head and loss in one forward."""

    def __init__(self, model: nn.Module, loss: Loss, compile_options: dict[str, Any] | None = None) -> None:
        """``compile_options``: arguments of ``torch.compile``, for both as one; names stay, and so does ``model``."""
        super().__init__()
        loss.check(model)
        self.model = model
        self.loss = loss
        self._mixes_documents = ignores_documents(model)
        if compile_options is not None:
            if loss.kernel is not None:
                loss.kernel = torch.compiler.disable(loss.kernel)  # type: ignore[no-untyped-call]
            for name in ("forward", "evaluate"):
                vars(self)[name] = self._compiled(getattr(self, name), compile_options)

    def _compiled(self, function: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
        fast = torch.compile(function, **options)

        def call(*args: Any) -> Tensor:
            if self.loss.eval_metrics is not None:  # which count in Python
                return function(*args)
            try:
                return fast(*args)
            except MISFITS:  # only outside of a graph it is told by name what does not fit
                with torch.no_grad():
                    function(*args)
                raise

        return call

    def forward(self, batch: dict[str, Tensor], step_targets: Tensor | None = None) -> Tensor:
        """Sum over targets, 0-dim fp32. ``step_targets``: targets of the whole step."""
        if self._mixes_documents and "document_ids" in batch:
            raise ModelError(
                f"isolate_documents: {type(self.model).__name__} of transformers, as it is, lets documents of a row "
                "see each other; have forgather_cli.compose(...) make the trainer, whose model.path names its directory"
            )
        return self.loss.total(self.model, *take_batch(self.loss, batch), step_targets)

    def evaluate(self, batch: dict[str, Tensor]) -> Tensor:
        """``forward`` of a batch whose gradient nobody wants. A function of its own, since torch compiles one for any
        shape once a second shape has come (2.13): training after an evaluation would get that code.
        """
        return ModelWithLoss.forward(self, batch)
