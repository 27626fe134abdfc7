"""WeightNormLogger: the norm of all weights in the log record."""

from __future__ import annotations

import math
from typing import Any

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.norms import FullParameters
from forgather_cli.config.schema import WeightNormSettings


class WeightNormLogger(BuiltIn[WeightNormSettings]):
    """Adds ``weight_norm`` to each training log: the L2 norm over all parameters of the model, tied ones once."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._parameters = FullParameters(kwargs["trainer"])

    def on_log_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if kwargs.get("interval") is not None:  # not of the final record
            kwargs["logs"]["weight_norm"] = math.sqrt(float(self._parameters.weights().sum()))
