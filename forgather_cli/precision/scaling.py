"""Loss scaling for fp16: small gradients are kept from vanishing, and steps whose gradients overflow are left out.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2. The rules are those of ``torch.amp.GradScaler``, whose
scale lives on the device and whose optimizer step asks for it; here the flag that must be read anyway is the global
gradient norm, which all ranks have already, so that unscaling costs no pass over the gradients and no collective.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from forgather_cli.documents.fields import AMOUNT, COUNT, check_fields
from forgather_cli.loss.base import Loss

_GROWTH, _BACKOFF = 2.0, 0.5  # GradScaler's


class LossScaler:
    """The factor of the loss: halved by a step that overflows, doubled after ``growth_interval`` that do not.

    The same on all ranks, since it goes by the global gradient norm. Its state is part of checkpoints.
    """

    def __init__(self, *, init_scale: float, growth_interval: int) -> None:
        self.scale = init_scale
        self.floor = min(1.0, init_scale)
        """Below it there would be no scaling: what overflows still is too large for fp16, or not finite at all."""
        self._growth_interval = growth_interval
        self._sound = 0  # steps in a row without overflow, since the last growth
        self.skipped = 0
        """Steps in a row that overflowed, the newest one included."""
        self.is_stuck = False
        """True if the newest step overflowed at the least scale: smaller ones would not help."""

    def scaled(self, loss: Tensor) -> Tensor:
        """``loss`` itself, with gradients that are ``scale`` times as large."""
        if loss.requires_grad:
            loss.register_hook(self._times)  # type: ignore[no-untyped-call]
        return loss

    def _times(self, gradient: Tensor) -> Tensor:
        return gradient * self.scale

    def overflowed(self, norm: Tensor) -> bool:
        """Whether a step with this global gradient norm is to be skipped; waits for the device. Adapts the scale.

        The norm is not finite if and only if some gradient is not, but for gradients above 1e19, no less an overflow.
        """
        if not math.isfinite(float(norm)):
            self.is_stuck = self.scale <= self.floor
            self.scale = max(self.scale * _BACKOFF, self.floor)
            self.skipped += 1
            self._sound = 0
            return True
        self.skipped = 0
        self._sound += 1
        if self._sound == self._growth_interval:
            self.scale *= _GROWTH
            self._sound = 0
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "sound": self._sound, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_fields(state, {"scale": AMOUNT, "sound": COUNT, "skipped": COUNT})
        self.scale, self._sound, self.skipped = state["scale"], state["sound"], state["skipped"]
        self.is_stuck = False


class ScaledLoss(Loss):
    """Another loss, whose gradients come multiplied by a scaler's factor. Its value stays."""

    def __init__(self, loss: Loss, scaler: LossScaler) -> None:
        self._loss, self._scaler = loss, scaler
        self.is_likelihood, self.kernel, self.sums_rows = loss.is_likelihood, loss.kernel, loss.sums_rows
        self.names, self.extras, self.without_dropout = loss.names, loss.extras, loss.without_dropout

    def check(self, model: nn.Module) -> None:
        self._loss.check(model)

    def total(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, step_targets: Tensor | None) -> Tensor:
        self._loss.eval_metrics, self._loss.sums, self._loss.extras = self.eval_metrics, self.sums, self.extras
        return self._scaler.scaled(self._loss.total(model, inputs, labels, step_targets))
