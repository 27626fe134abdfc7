"""Fully sharded data parallel (FSDP2): every rank holds some rows of each parameter and reads its slice of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forgather_cli.config.schema import FSDP2Settings, PrecisionOption
from forgather_cli.distributed import cpu_group, world
from forgather_cli.errors import SetupError
from forgather_cli.labels import targets_of
from forgather_cli.loss.base import Loss, ModelWithLoss
from forgather_cli.loss.model_io import model_kwargs, model_logits
from forgather_cli.strategies.base import Batch, ModelSpec, Strategy
from forgather_cli.strategies.mesh import Degrees, have_a_group, mesh_of
from forgather_cli.strategies.parallelize import EvenMicrobatches, Sharding, parallelize, precision_policy


class FullyShard(Strategy):
    """PyTorch's ``fully_shard``, block by block, over all ranks of the default process group.

    With ``replicate`` the ranks form so many groups of neighbours that each hold the whole model (HSDP). Gradients are
    reduced after every micro-batch: a rank never holds more of them than its rows, for one reduce-scatter more per
    micro-batch. Evaluation and generation gather the weights too: all ranks take part in each of their calls.
    """

    name = "fsdp2"
    supports_fp16 = FSDP2Settings.supports_fp16
    supports_compile = True
    supports_optimizer_in_backward = FSDP2Settings.supports_optimizer_in_backward

    def __init__(
        self, settings: FSDP2Settings, device: torch.device, loss: Loss, precision: PrecisionOption | None = None
    ) -> None:
        """Collective. Raises SetupError if ``replicate`` does not divide the number of ranks."""
        have_a_group(device)
        everybody = world()
        shards, rest = divmod(everybody.size, settings.replicate)
        if rest:
            raise SetupError(
                f"replicate: {everybody.size} ranks cannot be divided into {settings.replicate} copies of the model; "
                f"set it to a divisor of {everybody.size}"
            )
        self.data_rank, self.data_size = everybody.rank, everybody.size
        self.ddp_group = everybody.group
        self.device = device
        self._loss = loss
        mesh = mesh_of(device, Degrees(replicate=settings.replicate, shard=shards))
        self.model_group = mesh.get_group("shard") if shards > 1 else None
        self._sharding = Sharding(mesh, everybody.group, device, settings, precision_policy(settings, precision))
        self._even_microbatches = EvenMicrobatches(cpu_group(), device)

    def materialize(self, spec: ModelSpec) -> None:
        model = spec.transformed(spec.whole())
        self.parts = [model]
        self._with_loss = ModelWithLoss(model, self._loss)
        self._root = _Root(self._with_loss)
        self._units = parallelize(self._root, model, spec, self._sharding)
        if self.model_group is not None and dist.get_rank(self.model_group) > 0:
            self.duplicates = frozenset(p for p in model.parameters() if not p.ndim)  # which every rank holds

    def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        share = torch.zeros((), device=self.device)
        for batch in self._even_microbatches.of(microbatches):
            loss: Tensor = self._root(lambda batch=batch: self._with_loss(batch, step_targets)) / step_targets
            if self._sharding.settings.replicate > 1:
                # between copies of the model, which are further apart, gradients are summed once per step
                cast(FSDPModule, self._root).set_requires_all_reduce(self._even_microbatches.is_last)
            loss.backward()  # type: ignore[no-untyped-call]
            share += loss.detach()
        return share

    @torch.no_grad()
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._evaluate(lambda: self._with_loss(batch)), targets_of(batch)

    @torch.no_grad()
    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        model, inputs = self.parts[0], model_kwargs(batch)
        found: Tensor = self._evaluate(lambda: model_logits(model, inputs, last_only=last_only, cache=cache))
        return found

    def _evaluate(self, run: Callable[[], Any]) -> Any:
        """Collective. ``run()`` with the weights gathered. Frees them afterwards, since no backward will."""
        found = self._root(run)
        for unit in self._units:
            unit.reshard()
        return found


class _Root(nn.Module):
    """The module that ``fully_shard`` wraps as a whole: in its forward all weights are gathered, the head's too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()
