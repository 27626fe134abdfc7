"""Losses of pairs: what the model says of the chosen side of each against the rejected one.

Legend: B rows of T tokens, V vocabulary, E hidden size, P pairs of a row at most, N = B * P; C tokens of a chunk.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forgather_cli.config.schema import Target
from forgather_cli.distributed import gather
from forgather_cli.errors import DataError, ModelError
from forgather_cli.hardware import chunk_tokens, gpu_of
from forgather_cli.labels import IGNORED, UNITS, shifted
from forgather_cli.loss.base import Loss, head_and_hidden
from forgather_cli.loss.model_io import logits_of
from forgather_cli.preference.rows import REFERENCE
from forgather_cli.preference.settings import DPOSettings


class DPO(Loss):
    """A sum over pairs. ``reference``: the directory of another model than the policy at step 0."""

    names = DPOSettings.metrics
    without_dropout = True

    def __init__(
        self, *, variant: str | Target, beta: float | None, gamma: float, label_smoothing: float,
        length_normalized: bool, sft_weight: float, reference: str | None, device: Any,
    ) -> None:  # fmt: skip
        self.variant, self.extras = variant, {}
        self._function = variant.bound("loss.variant") if isinstance(variant, Target) else None
        self.beta = beta or (2.0 if variant == "simpo" else 0.1)
        self._gamma, self._smoothing = gamma, label_smoothing
        self.has_reference = variant not in ("orpo", "simpo")
        self.per_token = length_normalized or variant in ("ipo", "orpo", "simpo")
        self._sft_weight = 1.0 if variant == "orpo" else sft_weight
        self.reference = reference
        self._chunk = chunk_tokens(gpu_of(str(device)))
        self.seen: list[tuple[Tensor, Tensor, Tensor]] | None = None
        """Where set, of each batch the log-probabilities (B, P, 2), the reference's, and how many targets they have."""

    def check(self, model: nn.Module) -> None:
        """Any model will do."""

    def data(self, dataset: Any, *known: Any) -> Any:
        from forgather_cli.preference.reference import PairsWithReference, values_of_checkpoint

        made = dataset if isinstance(dataset, PairsWithReference) else PairsWithReference(dataset)
        if known and self.has_reference:
            made.values[:] = values_of_checkpoint(self.reference, *known)
        return made

    def before_training(self, loop: Any, reader: Any) -> None:
        from forgather_cli.preference.reference import find_or_compute

        if self.has_reference:
            find_or_compute(self, loop, reader)

    def before_evaluation(self, dataset: Any) -> None:
        values = getattr(dataset, "values", None)  # a loader of one's own has none
        if self.has_reference and (values is None or values.isnan().any()):
            raise DataError(
                "loss=dpo: what the reference says of these pairs is not known; train() computes it at its beginning, "
                "of the Trainer's train_dataset and eval_dataset alone: evaluate these, and after train()"
            )

    def check_first_step(self) -> None:
        """Have the first step compare what the model says with what it has said before: all its code is the same.
        Raises ModelError then.
        """
        self.seen, self.before_update = [], self._compare

    def _compare(self, run: Any) -> None:
        seen, self.seen, self.before_update = self.seen or [], None, None
        fp32 = run.config.precision.is_fp32 and getattr(run.config.trainer, "param_dtype", None) in (None, "fp32")
        found: list[tuple[float, float]] = []
        for sums, reference, lengths in seen:
            allowed = 1e-5 * reference.abs().clamp(min=1) if fp32 else 5e-3 * lengths
            wrong = (lengths > 0) & ~((sums - reference).abs() <= allowed)
            found += [*zip(sums[wrong].tolist(), reference[wrong].tolist(), strict=True)]
        every = [each for of_rank in gather(found, run.cpu_group) for each in of_rank]
        if every:
            raise ModelError(
                f"loss=dpo: the model says something else in the first step than it said of the same pairs before it "
                f"(a log-probability of {every[0][0]:.6g}, and {every[0][1]:.6g} before; of {len(every)} sides), so "
                "training does not begin; look for what it does in training alone (dropout of a class of yours), or "
                "remove the references from the data cache (forgather cache list)"
            )

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        batch = self.extras or {}
        sums, lengths, reference = self.log_probs(model, inputs, labels, batch)
        if self.seen is not None and (self.before_update is None or torch.is_grad_enabled()):
            self.seen.append((sums.detach(), reference, lengths))
            if self.before_update is None:  # the reference itself, which is compared with nothing
                return sums.sum()
        is_pair = torch.arange(sums.shape[1], device=sums.device) < batch[UNITS][:, None]
        # what stands in for a pair that is none has finite gradients, whatever the function
        policy = torch.where(is_pair[..., None], sums, -1.0).flatten(0, 1)
        before = torch.where(is_pair[..., None], reference.float(), -1.0).flatten(0, 1)
        sizes = torch.where(is_pair[..., None], lengths, 1).clamp(min=1).flatten(0, 1)
        losses = self.of_pairs(*policy.unbind(-1), *before.unbind(-1), *sizes.unbind(-1))
        if self.sums is not None:
            with torch.no_grad():
                told = self._metrics(policy, before, sizes) * is_pair.flatten()
                self.sums.add(self.names, told.sum(-1), batch[UNITS].sum())
        return torch.where(is_pair.flatten(), losses, 0.0).sum()

    def log_probs(
        self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, batch: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of each side the sum of the log-probabilities of its targets (B, P, 2) fp32, how many these are, and what the
        reference says. Logits are made of some tokens at a time, again in the backward pass.
        """
        head: Any = nn.Identity()
        hidden: Tensor | None = None
        if getattr(model, "has_plain_head", False) is not False:
            with suppress(ModelError):  # of a class whose head turns out not to be plain
                head, hidden = head_and_hidden(model, inputs, labels, self.eval_metrics)
        if hidden is None:
            hidden = logits_of(model(**inputs), model)
            if self.eval_metrics is not None:
                self.eval_metrics.add(hidden, labels)
        targets, parts = shifted(labels), list[Tensor]()
        chunks = (torch.split(each, self._chunk) for each in (hidden.flatten(0, 1), targets))
        for x, y in zip(*chunks, strict=True):
            if torch.is_grad_enabled():
                options: Any = {"use_reentrant": False, "preserve_rng_state": False}
                parts.append(checkpoint(_of_targets, head, x, y, **options))
            else:
                parts.append(_of_targets(head, x, y))
        found, is_target = torch.cat(parts).view(labels.shape), (targets != IGNORED).view(labels.shape)
        if REFERENCE not in batch:
            if UNITS not in batch:
                raise DataError(f"loss=dpo: the batch has no {UNITS}, only {', '.join(inputs)}; set data=preference")
            reference = found.new_zeros(len(found), 1, 2)  # a batch of nothing
            return found.sum() * reference, reference, reference
        reference = batch[REFERENCE]
        sides = torch.arange(2 * reference.shape[1], device=found.device)
        # not by index_add_, which adds in any order on a GPU
        is_of = inputs["document_ids"].roll(-1, 1)[..., None] == sides
        sums = torch.where(is_of, found[..., None], 0.0).sum(1)
        return sums.view_as(reference), (is_of & is_target[..., None]).sum(1).view_as(reference), reference

    def of_pairs(
        self, chosen: Tensor, rejected: Tensor, before_chosen: Tensor, before_rejected: Tensor, *lengths: Tensor
    ) -> Tensor:
        """The loss of each pair (N,), from the log-probabilities of its sides, the reference's, and their lengths."""
        num_chosen, num_rejected = lengths
        if self._function is not None:
            losses: Tensor = self._function(chosen, rejected, before_chosen, before_rejected, *lengths)
        else:
            sides = [chosen, rejected]
            if self.has_reference:
                sides = [chosen - before_chosen, rejected - before_rejected]
            if self.per_token:
                sides = [sides[0] / num_chosen, sides[1] / num_rejected]
            margin = sides[0] - sides[1]
            if self.variant == "ipo":  # Azar et al. 2023, arXiv:2310.12036, eq. 17, per token as its authors have it
                losses = (margin - 1 / (2 * self.beta)).square()
            elif self.variant == "hinge":  # Zhao et al. 2023, arXiv:2305.10425
                losses = F.relu(1 - self.beta * margin)
            elif self.variant == "orpo":  # Hong et al. 2024, arXiv:2403.07691, eqs. 4 and 7
                # not of a probability that fp32 rounds to 1
                not_chosen, not_rejected = ((-side.clamp(max=-1e-6).expm1()).log() for side in sides)
                losses = -self.beta * F.logsigmoid(margin - not_chosen + not_rejected)
            else:  # Rafailov et al. 2023, arXiv:2305.18290, eq. 7; Meng et al. 2024, arXiv:2405.14734, eq. 6
                logit = self.beta * margin - (self._gamma if self.variant == "simpo" else 0.0)
                losses = -F.logsigmoid(logit) * (1 - self._smoothing) - F.logsigmoid(-logit) * self._smoothing
        return losses - self._sft_weight * chosen / num_chosen if self._sft_weight else losses

    def _metrics(self, policy: Tensor, before: Tensor, sizes: Tensor) -> Tensor:
        """(6, N) of what ``names`` says; without a reference per token, as in TRL."""
        logps = policy if self.has_reference else policy / sizes
        rewards = self.beta * (policy - before if self.has_reference else logps)
        margins = rewards[:, 0] - rewards[:, 1]
        return torch.stack([*rewards.unbind(-1), margins, (margins > 0).float(), *logps.unbind(-1)])


def _of_targets(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of targets (C,) fp32, 0 where there is none, of what ``head`` is applied to, (C, E)."""
    return -F.cross_entropy(head(hidden).float(), targets, ignore_index=IGNORED, reduction="none")
