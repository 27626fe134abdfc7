"""What flows through the stages: training by torch's pipeline schedules, and a forward pass without one.

Legend: B sequences, T tokens, E hidden size; b = B / n_microbatches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from forgather_cli.config.pipeline_layout import Stage
from forgather_cli.config.schema import PipelineSettings
from forgather_cli.errors import ForgatherError
from forgather_cli.loss.base import Loss, take_batch
from forgather_cli.loss.model_io import model_kwargs
from forgather_cli.models.stages import hidden_states
from forgather_cli.models.transform import recomputes
from forgather_cli.strategies.base import Batch


@dataclass(frozen=True)
class Boundary:
    """What passes from stage to stage: hidden states (B, T, E)."""

    hidden_size: int
    dtype: torch.dtype

    def empty(self, input_ids: Tensor, device: torch.device, *, requires_grad: bool = False) -> Tensor:
        """Room for the hidden states of ``input_ids`` (B, T)."""
        shape = (*input_ids.shape, self.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=device, requires_grad=requires_grad)


class StageModule(nn.Module):
    """The module that runs a stage: its layers; in the last stage the head and the loss too. With ``shard``
    ``fully_shard`` wraps it as a whole: whatever runs in its forward has weights gathered, the head's too.
    """

    def __init__(self, model: nn.Module, stage: Stage, boundary: Boundary, loss: Loss) -> None:
        super().__init__()
        self.model, self.stage, self.boundary, self.loss = model, stage, boundary, loss
        self.step_targets = torch.ones(())
        """Targets of the optimizer step, set before each run of the schedule."""

    def forward(self, x: Tensor, run: Callable[[StageModule, Batch], Any] | None = None, **batch: Tensor) -> Any:
        """Hidden states (b, T, E), or of the last stage the 0-dim share of the step's loss.

        ``x`` is token ids (b, T) in the first stage, else hidden states; ``batch`` holds masks and, on the rank of the
        last stage, ``labels``. With ``run``: ``run(self, batch)``, ``x`` being its ``input_ids``.
        """
        if run is not None:
            return run(self, {**batch, "input_ids": x})
        if self.stage.has_head:
            own = take_batch(self.loss, {**batch, "input_ids": x})
            return self.loss.total(self.model, *own, self.step_targets) / self.step_targets
        out = self.passed_on({"input_ids": x, **model_kwargs(batch)})
        # a stage of frozen parameters alone: the schedules want something to go backward from
        return out if out.requires_grad else out.requires_grad_(torch.is_grad_enabled())

    def passed_on(self, inputs: Mapping[str, Any]) -> Tensor:
        """What the next stage gets, (b, T, E)."""
        return hidden_states(self.model, inputs, self.boundary.hidden_size, self.boundary.dtype)


class _Stage(PipelineStage):
    """A stage that keeps the gradients of earlier micro-batches of the optimizer step when the shape changes."""

    def _post_metadata_inference_cleanup(self) -> None:
        """torch sets gradients of sharded parameters to None here, as it would leave some from finding shapes by a
        backward of its own (2.13, ``pipelining/stage.py``); it has been given the shapes.
        """


class TrainingSchedule:
    """One of torch's schedules over this rank's stages, made anew when the shape of the micro-batches changes.

    A schedule freezes its receive buffers at its first step, and a later step of another shape ends the process with
    SIGABRT (torch 2.13, ``pipelining/stage.py``). Making one takes 1 to 20 ms, and all ranks see the same shapes.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        modules: Sequence[StageModule],
        num_stages: int,
        device: torch.device,
        group: Any,
    ) -> None:
        """``group``: the ranks of the pipeline."""
        self._settings, self._modules, self._num_stages = settings, modules, num_stages
        self._device, self._group = device, group
        self._has_first = any(module.stage.has_embedding for module in modules)
        self._has_last = any(module.stage.has_head for module in modules)
        self.whole_backward: str | None = None
        """The setting for which a schedule that splits the backward computes gradients of weights and inputs together,
        since its layers do; None: there is none, or the schedule does not split it."""
        if settings.splits_backward and any(recomputes(module.model) for module in modules):
            # split, each of the two, and each group of weights by itself, would recompute a block: 13 times the forward
            self.whole_backward = "gradient_checkpointing"
        elif settings.splits_backward and any(
            type(layer).__name__ == "Float8Linear" for module in modules for layer in module.model.modules()
        ):
            # torchao 0.18 has one autograd.Function for both products of a layer's backward
            self.whole_backward = "precision=fp8"
        self._shape: torch.Size | None = None
        self._schedule: Any = None
        # at an error it logs a screen full of schedule, above the traceback
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

    def step(self, batch: Batch, step_targets: Tensor) -> list[Tensor]:
        """Collective. Gradients of ``batch``, whose rows n_microbatches divides, are added to ``.grad``.

        Returns the shares of the loss, one per micro-batch, on the rank of the last stage; nothing elsewhere.
        """
        input_ids, labels = batch["input_ids"], batch["labels"]
        if input_ids.shape != self._shape:
            self._schedule = self._made_for(input_ids)
            self._shape = input_ids.shape
        for module in self._modules:
            module.step_targets = step_targets
        args = (input_ids,) if self._has_first else ()
        given = batch if self._has_last else model_kwargs(batch)
        kwargs: dict[str, Any] = {k: v for k, v in given.items() if k != "input_ids"}
        losses: list[Tensor] = []
        if self._has_last:
            kwargs |= {"target": labels, "losses": losses}
        try:
            self._schedule.step(*args, return_outputs=False, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, ForgatherError | RuntimeError):
                # torch wraps what a stage raises into one that tells the arguments' shapes, and hides running out of
                # memory and our own messages
                raise error.__cause__ from None
            raise
        return losses

    def _made_for(self, input_ids: Tensor) -> Any:
        self._schedule = None  # its buffers first
        part = input_ids[: len(input_ids) // self._settings.n_microbatches]
        stages = [self._stage(module, part) for module in self._modules]
        if (own := self._settings.own_schedule) is not None:
            made = own.made(stages, self._settings.n_microbatches)
        else:
            kind = get_schedule_class(str(self._settings.schedule))
            made = kind(
                stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,
                self._settings.n_microbatches,
                loss_fn=lambda loss, labels: loss,  # the last stage has made it already
            )
        # it would divide all of .grad at each step, wrong for a sum over several; ``step_targets`` divides the loss
        made.scale_grads = False
        return made

    def _stage(self, module: StageModule, part: Tensor) -> _Stage:
        """With shapes given: torch would otherwise find them by a forward and backward of its own."""
        meta = torch.device("meta")
        hidden = module.boundary.empty(part, meta, requires_grad=True)
        return _Stage(
            module,
            module.stage.index,
            self._num_stages,
            self._device,
            input_args=part.to(meta) if module.stage.has_embedding else hidden,
            output_args=torch.empty((), device=meta, requires_grad=True) if module.stage.has_head else hidden,
            group=self._group,
            # what remains to be done for the weights where the backward is not split: nothing
            dw_builder=None if self.whole_backward is None else lambda: lambda: None,
        )


def forward_through(
    modules: Mapping[int, StageModule],
    owners: Sequence[int],
    batches: Sequence[Batch],
    device: torch.device,
    group: Any,
    run: Callable[[StageModule, Batch], Any],
) -> list[Any]:
    """Collective. ``run`` on every stage in turn, for each of ``batches``; what the last stage returns, on its rank.

    Without a schedule, of any shapes, no gradient: torch's own ``schedule.eval()`` hangs with V schedules (torch 2.13:
    ``get_local_bwd_output`` raises in a stage without backward) and wants n_microbatches equal parts.

    ``modules`` are this rank's stages by index, ``owners`` the rank of each stage, ``group`` theirs. ``run`` gets the
    batch with the stage's input as ``input_ids``. At tick t stage s has batch t - s: stages work at the same time, and
    all that is sent after a tick goes in one batch, in which no order of sends and receives can block.
    """
    rank, last = dist.get_rank(), len(owners) - 1
    waiting = {(0, index): batch["input_ids"] for index, batch in enumerate(batches)}
    results: list[Any] = []
    for tick in range(last + len(batches)):
        moving = [(stage, tick - stage) for stage in range(last + 1) if 0 <= tick - stage < len(batches)]
        made: dict[int, Tensor] = {}
        for stage, index in moving:
            if stage in modules:
                others = {key: value for key, value in batches[index].items() if key != "input_ids"}
                made[stage] = modules[stage](waiting.pop((stage, index)), run, **others)
        if last in made:
            results.append(made.pop(last))
        operations: list[dist.P2POp] = []
        for stage, index in moving:
            if stage == last or rank not in (owners[stage], owners[stage + 1]):
                continue
            if owners[stage] == owners[stage + 1]:
                waiting[stage + 1, index] = made[stage]
            elif rank == owners[stage]:
                operations.append(dist.P2POp(dist.isend, made[stage].contiguous(), owners[stage + 1], group))
            else:
                received = modules[stage + 1].boundary.empty(batches[index]["input_ids"], device)
                operations.append(dist.P2POp(dist.irecv, received, owners[stage], group))
                waiting[stage + 1, index] = received
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    return results
