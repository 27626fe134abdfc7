"""Pipeline parallel: every rank holds some of the layers, and a batch flows through them in parts.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather_cli import distributed
from forgather_cli.checkpoint.gather import gather
from forgather_cli.config.pipeline_layout import Stage, layout_lines, stage_layout
from forgather_cli.config.schema import PipelineSettings, PrecisionOption
from forgather_cli.errors import ModelError
from forgather_cli.loss import Loss, model_kwargs, model_logits, num_targets
from forgather_cli.models.init import allocate
from forgather_cli.models.stages import cuttable, fresh_models, hidden_states, replace_parameter, tied_names
from forgather_cli.precision import Autocast, autocast_for
from forgather_cli.strategies.base import Batch, Strategy
from forgather_cli.strategies.pipeline_batch import chunks, labels_of, padded, stage_inputs
from forgather_cli.strategies.pipeline_forward import forward_through
from forgather_cli.strategies.pipeline_schedule import Boundary, StageModule, TrainingSchedule

log = logging.getLogger(__name__)


class Pipeline(Strategy):
    """Trains with one of torch's pipeline schedules; evaluates and generates with a plain pass through the stages."""

    name = "pipeline"
    data_rank = 0
    data_size = 1

    def __init__(self, settings: PipelineSettings, device: torch.device, loss: Loss, autocast: Autocast) -> None:
        """Raises ModelError for a loss that the schedule would have to split."""
        if settings.splits_backward and not loss.is_separable:
            raise ModelError(
                f"loss: {type(loss).__name__} has one backward for inputs and weights, which "
                f"schedule={settings.schedule} splits; set loss=linear_cross_entropy or schedule=1F1B"
            )
        self.device = device
        self.supports_compile = not settings.splits_backward
        self.batch_multiple = settings.n_microbatches
        self._settings, self._loss, self._autocast = settings, loss, autocast
        self._tied: list[nn.Parameter] = []
        self._tied_group: Any = None
        self._vocab_size: int | None = None

    @classmethod
    def from_settings(
        cls, option: PipelineSettings, device: torch.device, loss: Loss, precision: PrecisionOption | None
    ) -> Pipeline:
        """As the config's options say."""
        return cls(option, device, loss, autocast_for(precision, device))

    # ------------------------------------------------------------------------------------------------------- building

    def materialize(self, build: Callable[[], nn.Module], init: Callable[[nn.Module], None] | None) -> None:
        world = distributed.world()
        self.model_group = world.group
        models = fresh_models(build)
        whole = next(models)
        self._loss.check(whole)
        cut = cuttable(whole)
        layout = stage_layout(self._settings, cut.num_hidden_layers, world.size)
        boundary = Boundary(cut.hidden_size, next(p.dtype for p in whole.parameters() if p.is_floating_point()))
        names = [name for name, _ in whole.named_parameters()]
        mine = [stage for stage in layout if stage.rank == world.rank]
        self.parts = [self._part(whole, mine[0], init)]
        self.parts += [self._part(next(models), stage, init) for stage in mine[1:]]
        self._owners = [stage.rank for stage in layout]
        self._modules = [StageModule(m, s, boundary, self._loss) for m, s in zip(self.parts, mine, strict=True)]
        self._schedule = TrainingSchedule(self._settings, self._modules, len(layout), self.device)
        self._meet(layout, names, world.rank)

    def _part(self, model: nn.Module, stage: Stage, init: Callable[[nn.Module], None] | None) -> nn.Module:
        """One stage of ``model``, with memory and weights."""
        cuttable(model).cut(stage.first_layer, stage.last_layer, is_first=stage.has_embedding, is_last=stage.has_head)
        if allocate(model, self.device) and init is None:
            raise AssertionError("a model built on meta needs an init")
        model.to(self.device)
        if init is not None:
            init(model)
        return model

    def _meet(self, layout: list[Stage], names: list[str], rank: int) -> None:
        """Collective. What each stage holds, told to all: ties are found, and rank 0 logs the layout."""
        mine = {m.stage.index: {name: p.numel() for name, p in m.model.named_parameters()} for m in self._modules}
        held = gather(mine, dist.group.WORLD)
        sizes = [held[stage.rank][stage.index] for stage in layout]
        tied = tied_names(sizes, names)
        if rank == 0:
            self._tell(layout_lines(self._settings, layout, [sum(size.values()) for size in sizes]))
        if tied:
            self._tie(tied, rank)

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            log.info("%s", line)
        if self._schedule.whole_backward is not None:
            log.info(
                "%s: schedule=%s does not split the backward, which would compute the same several times over, so its "
                "bubble is nearer to that of Interleaved1F1B",
                self._schedule.whole_backward,
                self._settings.schedule,
            )

    def _tie(self, names: list[str], rank: int) -> None:
        """Collective. First and last stage share these parameters, or on two ranks the sum of their gradients."""
        first, last = self._owners[0], self._owners[-1]
        if first == last:
            for name in names if rank == first else ():
                replace_parameter(self.parts[-1], name, self.parts[0].get_parameter(name))
            return
        self._tied_group = dist.new_group([first, last])
        if rank in (first, last):
            part = self.parts[0] if rank == first else self.parts[-1]
            self._tied = [part.get_parameter(name) for name in names]
        if rank == last:
            self.duplicates = frozenset(self._tied)

    # ------------------------------------------------------------------------------------------------------- training

    def forward_backward(self, microbatches: Iterable[Batch], num_tokens: Tensor) -> Tensor:
        share = torch.zeros((), device=self.device)
        ran = False
        for batch in microbatches:
            labels_of(batch)
            if len(batch["input_ids"]) == 0:
                continue
            with self._autocast():
                losses = self._schedule.step(padded(stage_inputs(batch), self.batch_multiple), num_tokens)
            for loss in losses:
                share += loss.detach()
            ran = True
        if ran:
            self._sum_tied_gradients()
        return share

    def _sum_tied_gradients(self) -> None:
        """Over the first and the last stage: each has the gradient of its own use of the weight."""
        for parameter in self._tied:
            if parameter.requires_grad:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=self._tied_group)

    # ----------------------------------------------------------------------------------------- evaluation, generation

    @torch.no_grad()
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        labels_of(batch)
        batches = chunks(stage_inputs(batch), self.batch_multiple)
        total = torch.zeros((), device=self.device)
        count = torch.zeros((), dtype=torch.int64, device=self.device)

        def run(module: StageModule, inputs: Batch) -> Any:
            if module.stage.has_head:
                labels = inputs["labels"]
                return self._loss.total(module.model, model_kwargs(inputs), labels, None), num_targets(labels)
            return _passed_on(module, model_kwargs(inputs))

        with self._autocast():
            for part_total, part_count in self._forward(batches, run):
                total += part_total
                count += part_count
        return total, count

    @torch.no_grad()
    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        past = 0 if cache is None else cache.length

        def run(module: StageModule, inputs: Batch) -> Tensor:
            if cache is not None:
                cache.length = past  # a stage of this rank that ran before has moved it
            if module.stage.has_head:
                return model_logits(module.model, inputs, last_only=last_only, cache=cache)
            return _passed_on(module, inputs if cache is None else {**inputs, "cache": cache})

        inputs = model_kwargs(stage_inputs(batch))
        with self._autocast():
            found = self._forward([inputs], run)
        logits = found[0] if found else None
        return self._told_all(logits, len(inputs["input_ids"])) if last_only else logits

    def _forward(self, batches: list[Batch], run: Callable[[StageModule, Batch], Any]) -> list[Any]:
        modules = {module.stage.index: module for module in self._modules}
        return forward_through(modules, self._owners, batches, self.device, run)

    def _told_all(self, logits: Tensor | None, rows: int) -> Tensor:
        """Collective. The last stage's logits (B, 1, V), fp32, on every rank."""
        source = self._owners[-1]
        if self._vocab_size is None:
            size = torch.tensor(0 if logits is None else logits.shape[-1], device=self.device)
            dist.broadcast(size, source)
            self._vocab_size = int(size)
        if logits is None:
            logits = torch.empty(rows, 1, self._vocab_size, device=self.device)
        logits = logits.float().contiguous()
        dist.broadcast(logits, source)
        return logits


def _passed_on(module: StageModule, inputs: dict[str, Any]) -> Tensor:
    return hidden_states(module.model, inputs, module.boundary.hidden_size, module.boundary.dtype)
