"""One device: the whole model, the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from forgather_cli.config.schema import PrecisionOption, SingleSettings
from forgather_cli.labels import targets_of
from forgather_cli.loss.base import Loss, ModelWithLoss
from forgather_cli.loss.model_io import model_kwargs, model_logits
from forgather_cli.models.transform import shared_halves
from forgather_cli.precision.dtypes import Autocast, autocast_for
from forgather_cli.strategies.base import Batch, ModelSpec, Strategy


class SingleDevice(Strategy):
    """Trains in this process on one device; the reference for all other strategies."""

    name = "single"
    supports_fp16 = SingleSettings.supports_fp16
    supports_compile = True
    compiles_with_loss = SingleSettings.compiles_with_loss
    supports_optimizer_in_backward = SingleSettings.supports_optimizer_in_backward
    data_rank = 0
    data_size = 1
    model_group = None

    def __init__(self, device: torch.device, loss: Loss, autocast: Autocast) -> None:
        self.device = device
        self._loss = loss
        self._autocast = autocast

    @classmethod
    def from_settings(
        cls, option: SingleSettings, device: torch.device, loss: Loss, precision: PrecisionOption | None
    ) -> SingleDevice:
        """Called by ``build_strategy`` with the options of the config."""
        return cls(device, loss, autocast_for(precision, device))

    def materialize(self, spec: ModelSpec) -> None:
        model = spec.transformed(spec.whole())
        spec.fill(model, self.device)
        self.parts = [model]
        self._with_loss = ModelWithLoss(model, self._loss, spec.compile_with_loss)

    def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        share: Tensor | None = None
        several = isinstance(microbatches, Sized) and len(microbatches) > 1
        with shared_halves(self.parts, self._autocast, self._loss.kernel) if several else nullcontext():
            for batch in microbatches:
                with self._autocast():
                    total = self._with_loss(batch, step_targets)
                loss = total / step_targets
                loss.backward()
                share = loss.detach() if share is None else share + loss.detach()
        return torch.zeros((), device=self.device) if share is None else share

    @torch.no_grad()
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            return self._with_loss.evaluate(batch), targets_of(batch)

    @torch.no_grad()
    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        with self._autocast():
            return model_logits(self.parts[0], model_kwargs(batch), last_only=last_only, cache=cache)
