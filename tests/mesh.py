"""Tensor parallel x FSDP2 by torch's own functions, as a strategy of a user's: a mesh of (shard, tensor) ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from forgather_cli.distributed import gather, rank_in
from forgather_cli.loss import CrossEntropy, ModelWithLoss, model_kwargs, model_logits, num_targets
from forgather_cli.models.init import allocate
from forgather_cli.shards import box_of
from forgather_cli.strategies.base import Batch, ModelSpec, Strategy

PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}


def held_elsewhere(parameters: Mapping[str, nn.Parameter], group: Any) -> frozenset[nn.Parameter]:
    """Collective. Of parameters by their names in the model those of which a lower rank of ``group`` holds the same
    box: tied weights, and what a mesh dimension that others are cut along leaves whole. That rank counts them in norms.
    """
    mine = {name: (box_of(p).offsets, box_of(p).sizes) for name, p in parameters.items()}
    lower = gather(mine, group)[: rank_in(group)]
    return frozenset(p for name, p in parameters.items() if any(other.get(name) == mine[name] for other in lower))


class TensorParallelFSDP2(Strategy):
    """Every rank is given all data and takes the sequences of its place along ``shard``."""

    name = "mesh"
    data_rank, data_size = 0, 1

    def __init__(self, shard: int, tensor: int) -> None:
        """Collective."""
        self.device, self._loss = torch.device("cpu"), CrossEntropy()
        self.mesh = init_device_mesh("cpu", (shard, tensor), mesh_dim_names=("shard", "tensor"))
        self.model_group = dist.group.WORLD
        self.batch_multiple = shard
        self._units: list[Any] = []

    def materialize(self, spec: ModelSpec) -> None:
        model: Any = spec.whole()
        for layer in model.model.layers.values():
            parallelize_module(layer, self.mesh["tensor"], PLAN)
            self._shard(layer)
        self._with_loss = ModelWithLoss(model, self._loss)
        self._root = _Root(self._with_loss)
        self._shard(self._root)
        allocate(model, self.device)
        if spec.init is not None:
            spec.init(model)
        self.parts = [model]
        self.duplicates = held_elsewhere(dict(model.named_parameters()), self.model_group)

    def _shard(self, module: nn.Module) -> None:
        unit = fully_shard(module, mesh=self.mesh["shard"])
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        self._units.append(unit)

    def _mine(self, batch: Batch) -> Batch:
        return {key: value[self.mesh.get_local_rank("shard") :: self.batch_multiple] for key, value in batch.items()}

    def _share(self, total: Tensor) -> Tensor:
        """Ranks along ``tensor`` have the same loss, which the first of them tells."""
        return total.detach() if self.mesh.get_local_rank("tensor") == 0 else torch.zeros_like(total)

    def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        share = torch.zeros(())
        for batch in microbatches:
            total = self._root(lambda batch=batch: self._with_loss(self._mine(batch), step_targets))
            (total / step_targets).backward()
            share += self._share(total / step_targets)
        return share

    @torch.no_grad()
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        mine = self._mine(batch)
        total = self._evaluated(lambda: self._with_loss(mine))
        return self._share(total), self._share(num_targets(mine["labels"]))

    @torch.no_grad()
    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        found: Tensor = self._evaluated(lambda: model_logits(self.parts[0], model_kwargs(batch), last_only=last_only))
        return found

    def _evaluated(self, run: Callable[[], Any]) -> Any:
        """Weights are freed again, which otherwise a backward does."""
        found = self._root(run)
        for unit in self._units:
            unit.reshard()
        return found


class _Root(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()
