"""Pipeline parallel: every rank holds some of the layers, and a batch flows through them in parts.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forgather_cli import distributed
from forgather_cli.config.pipeline_layout import Stage, layout_lines, stage_layout
from forgather_cli.config.schema import FSDP2Settings, PipelineSettings, PrecisionOption
from forgather_cli.distributed import gather
from forgather_cli.errors import ConfigError, DataError, ModelError
from forgather_cli.labels import FOR_LOSS, IGNORED, STARTS, UNITS, targets_of
from forgather_cli.loss.base import Loss, take_batch
from forgather_cli.loss.model_io import inputs_of_generation, model_kwargs, model_logits
from forgather_cli.models.stages import (
    fresh_models,
    hidden_size_of,
    num_layers_of,
    replace_parameter,
    splitter_of,
    stage_of,
    tied_names,
)
from forgather_cli.models.transform import shared_halves
from forgather_cli.precision.dtypes import autocast_for, stream_dtype
from forgather_cli.shards import local
from forgather_cli.strategies.base import Batch, ModelSpec, Strategy
from forgather_cli.strategies.mesh import Degrees, mesh_of
from forgather_cli.strategies.parallelize import EvenMicrobatches, Sharding, parallelize, precision_policy
from forgather_cli.strategies.pipeline_schedule import Boundary, StageModule, TrainingSchedule, forward_through

log = logging.getLogger(__name__)

MASKS = ("attention_mask", "document_ids", STARTS, "position_ids")
"""Keys that a batch may have beside ``input_ids`` and ``labels``; each stage computes mask and angles from them."""


class Pipeline(Strategy):
    """Trains with one of torch's pipeline schedules; evaluates and generates with a plain pass through the stages.

    With ``shard`` there are that many pipelines, each of ranks that are ``shard`` apart and with its own slice of the
    data. The ranks of a stage are neighbours and each hold some rows of its parameters. Weights are gathered once for
    all micro-batches of a schedule step, and gradients are summed at its end.
    """

    name = "pipeline"

    def __init__(
        self, settings: PipelineSettings, device: torch.device, loss: Loss, precision: PrecisionOption | None = None
    ) -> None:
        """Collective. Raises ModelError for a loss that the schedule would have to split."""
        if settings.splits_backward and not loss.is_separable:
            raise ModelError(
                f"loss: {type(loss).__name__} has one backward for inputs and weights, which "
                f"schedule={settings.schedule} splits; set loss=linear_cross_entropy or schedule=1F1B"
            )
        self.device = device
        self.supports_compile = not settings.splits_backward
        self.batch_multiple = settings.n_microbatches
        self._settings, self._loss = settings, loss
        self._autocast, self._stream_dtype = autocast_for(precision, device), stream_dtype(precision)
        self._sharding: Sharding | None = None
        self._tied: list[nn.Parameter] = []
        self._tied_group: Any = None
        self._vocab_size: int | None = None
        world = distributed.world()
        self.data_rank, self.data_size = world.rank % settings.shard, settings.shard
        self.pp_group = world.group
        if settings.shard > 1:
            if problems := list(settings.layout_problems(None, world.size)):
                raise ConfigError(problems)
            mesh = mesh_of(device, Degrees(pipeline=world.size // settings.shard, shard=settings.shard))
            self.pp_group, self.ddp_group = mesh.get_group("pipeline"), mesh.get_group("shard")
            self._autocast = nullcontext  # instead there is a policy
            # weights stay gathered from forward to backward: a stage has many forwards before its first backward
            gathering = FSDP2Settings(reshard_after_forward=False)
            policy = precision_policy(gathering, precision)
            self._sharding = Sharding(mesh["shard"], self.ddp_group, device, gathering, policy)
        self._even_microbatches = EvenMicrobatches(distributed.cpu_group() if settings.shard > 1 else None, device)

    # ------------------------------------------------------------------------------------------------------- building

    def materialize(self, spec: ModelSpec) -> None:
        world, shard = distributed.world(), self._settings.shard
        self.model_group = world.group
        models = fresh_models(spec.whole)
        whole = next(models)
        split = None if self._settings.split == "auto" else self._settings.split
        self._splitter = splitter_of(whole, self._settings.splitter)
        layout = stage_layout(self._settings, num_layers_of(whole, split), world.size)
        names = [name for name, _ in whole.named_parameters()]
        dtype = self._stream_dtype if self._sharding is None else self._sharding.policy.param_dtype
        dtype = dtype or next(p.dtype for p in whole.parameters() if p.is_floating_point())
        boundary = Boundary(hidden_size_of(whole), dtype)
        models = chain([whole], models)
        del whole  # a splitter leaves it as large as it was
        self._modules: list[StageModule] = []
        self._units: list[FSDPModule] = []
        for stage in (stage for stage in layout if stage.rank == world.rank // shard):
            part = stage_of(next(models), layout, stage.index, self._splitter, self._loss.check)
            self._modules.append(self._stage(part, stage, boundary, spec))
        self.parts = [module.model for module in self._modules]
        self._owners = [stage.rank * shard + self.data_rank for stage in layout]
        self._schedule = TrainingSchedule(self._settings, self._modules, len(layout), self.device, self.pp_group)

        # all ranks learn what each stage holds: they find tied parameters, and rank 0 logs the layout
        mine = {m.stage.index: {name: p.numel() for name, p in m.model.named_parameters()} for m in self._modules}
        held = gather(mine, dist.group.WORLD)
        sizes = [held[stage.rank * shard][stage.index] for stage in layout]
        tied = tied_names(sizes, names)
        if world.rank == 0:
            for line in layout_lines(self._settings, layout, [sum(size.values()) for size in sizes]):
                log.info("%s", line)
            if self._schedule.whole_backward is not None:
                log.info(
                    "%s: schedule=%s does not split the backward, which would compute the same several times over, so "
                    "its bubble is nearer to that of Interleaved1F1B",
                    self._schedule.whole_backward,
                    self._settings.schedule,
                )
        if tied:
            self._tie(tied, world.rank)
        if self.data_rank > 0:  # parameters that cannot be cut are held by all ranks of a stage
            scalars = (p for part in self.parts for p in part.parameters() if not p.ndim)
            self.duplicates |= frozenset(scalars)

    def _stage(self, model: nn.Module, stage: Stage, boundary: Boundary, spec: ModelSpec) -> StageModule:
        """Collective. One stage, with memory and weights."""
        model = spec.transformed(model)
        module = StageModule(model, stage, boundary, self._loss)
        if self._sharding is None:
            spec.fill(model, self.device)
        else:
            self._units += parallelize(module, model, spec, self._sharding)
        return module

    def _tie(self, names: list[str], rank: int) -> None:
        """Collective. First and last stage share these parameters, or on two ranks the sum of their gradients."""
        first, last = self._owners[0], self._owners[-1]
        if first == last:
            for name in names if rank == first else ():
                replace_parameter(self.parts[-1], name, self.parts[0].get_parameter(name))
            return
        for place in range(self._settings.shard):  # one pair in each pipeline, with the same rows; all ranks make all
            pair = [owner - self.data_rank + place for owner in (first, last)]
            group = dist.new_group(pair)
            if rank in pair:
                self._tied_group = group
        if rank in (first, last):
            part = self.parts[0] if rank == first else self.parts[-1]
            self._tied = [part.get_parameter(name) for name in names]
        if rank == last:
            self.duplicates = frozenset(self._tied)

    # ------------------------------------------------------------------------------------------------------- training

    def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        share = torch.zeros((), device=self.device)
        ran = False
        with shared_halves(self.parts, self._autocast, self._loss.kernel):
            for batch in self._even_microbatches.of(microbatches):
                labels_of(batch)
                if len(batch["input_ids"]) == 0:
                    if self._sharding is None:
                        continue
                    # the other pipelines wait for this one at the end of a schedule step
                    batch = self._even_microbatches.empty()
                with self._autocast():
                    losses = self._schedule.step(padded(stage_inputs(batch), self.batch_multiple), step_targets)
                for loss in losses:
                    share += loss.detach()
                ran = True
        if ran:
            # over the first and the last stage: each has the gradient of its own use of the weight
            for parameter in self._tied:
                if parameter.requires_grad:
                    assert parameter.grad is not None
                    dist.all_reduce(local(parameter.grad), group=self._tied_group)
        return share

    # ----------------------------------------------------------------------------------------- evaluation, generation

    @torch.no_grad()
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        labels_of(batch)
        batches = chunks(stage_inputs(batch), self.batch_multiple)
        total = torch.zeros((), device=self.device)
        count = torch.zeros((), dtype=torch.int64, device=self.device)

        def run(module: StageModule, inputs: Batch) -> Any:
            if module.stage.has_head:
                return self._loss.total(module.model, *take_batch(self._loss, inputs), None), targets_of(inputs)
            return module.passed_on(model_kwargs(inputs))

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
            if last_only or cache is not None:
                inputs = inputs_of_generation(module.model, inputs, cache=cache)
            return module.passed_on(inputs)

        inputs = model_kwargs(stage_inputs(batch))
        found = self._forward([inputs], run)
        logits = found[0] if found else None
        if not last_only:
            return logits
        # broadcast to all ranks of the pipeline, (B, 1, V) in fp32
        source = self._owners[-1]
        if self._vocab_size is None:
            size = torch.tensor(0 if logits is None else logits.shape[-1], device=self.device)
            dist.broadcast(size, source, group=self.pp_group)
            self._vocab_size = int(size)
        if logits is None:
            logits = torch.empty(len(inputs["input_ids"]), 1, self._vocab_size, device=self.device)
        logits = logits.float().contiguous()
        dist.broadcast(logits, source, group=self.pp_group)
        return logits

    def _forward(self, batches: list[Batch], run: Callable[[StageModule, Batch], Any]) -> list[Any]:
        modules = {module.stage.index: module for module in self._modules}
        with self._gathered(), self._autocast():
            return forward_through(modules, self._owners, batches, self.device, self.pp_group, run)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Collective with ``shard``. Inside, the weights of this rank's stages are gathered, so that pipelines may run
        different numbers of forwards.
        """
        for unit in self._units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()


# ------------------------------------------------------------------------------------- batches on their way to stages


def stage_inputs(batch: Batch) -> Batch:
    """``batch`` with masks of one row, or without rows, expanded to (B, T). Raises DataError for what stages lack."""
    others = sorted(k for k in batch.keys() - {"input_ids", "labels", UNITS, *MASKS} if not k.startswith(FOR_LOSS))
    if others:
        raise DataError(
            f"trainer=pipeline: of a batch stages get {', '.join(MASKS)} and no other tensors, got "
            f"{', '.join(others)}; leave them out in data_collator, or choose trainer=ddp or fsdp2"
        )
    rows = len(batch["input_ids"])
    return {k: v.reshape(-1, v.shape[-1]).expand(rows, -1) if k in MASKS else v for k, v in batch.items()}


def labels_of(batch: Batch) -> Tensor:
    """The labels (B, T). Raises DataError."""
    labels = batch.get("labels")
    if labels is None:
        raise DataError(f"the batch has no labels, only {', '.join(batch) or 'nothing'}; add labels (B, T)")
    return labels


def padded(batch: Batch, multiple: int) -> Batch:
    """``batch`` with its last row repeated, without targets and units, until B is a multiple of ``multiple``."""
    rows = len(batch["input_ids"])
    extra = -rows % multiple
    if not extra:
        return batch
    filled = {key: torch.cat([value, value[-1:].expand(extra, *value.shape[1:])]) for key, value in batch.items()}
    filled["labels"][rows:] = IGNORED
    if UNITS in filled:
        filled[UNITS][rows:] = 0
    return filled


def chunks(batch: Batch, number: int) -> list[Batch]:
    """``batch`` cut by rows into up to ``number`` parts, none of them empty."""
    rows = len(batch["input_ids"])
    split = {key: value.tensor_split(min(number, rows)) for key, value in batch.items()}
    return [dict(zip(split, part, strict=True)) for part in zip(*split.values(), strict=True)]
