"""ParameterNormLogger: L2 and spectral norm of every parameter."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from forgather_cli.callbacks.base import TrainerCallback, TrainerControl, TrainerState
from forgather_cli.callbacks.json_logger import RecordFile
from forgather_cli.callbacks.norms import FullParameters
from forgather_cli.callbacks.spectral import SpectralNorms
from forgather_cli.config.schema import ParameterNormSettings
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir

logger = logging.getLogger(__name__)


class ParameterNormLogger(TrainerCallback):
    """Writes the L2 norms of the full parameters, and the spectral norms of those that are matrices, at each
    evaluation to ``parameter_norms.jsonl``.

    Spectral norms take ``power_iter_steps`` steps from where the last evaluation ended, the first time twice as many.
    Where they ended is part of the checkpoint, and serves under every strategy.
    """

    def __init__(self, settings: ParameterNormSettings, run: RunDir) -> None:
        """Raises ConfigError if there is nothing to write."""
        if not (settings.log_norms or settings.log_spectral_norms):
            raise ConfigError(
                "callbacks.parameter_norms: log_norms and log_spectral_norms are both false, got nothing to log; set "
                "one of them to true or leave the callback out (~callbacks.parameter_norms)"
            )
        self.settings = settings
        self._file = RecordFile(run.parameter_norms)
        self._parameters: FullParameters | None = None
        self._spectral: SpectralNorms | None = None
        self._vectors: dict[str, Tensor] = {}  # where the next measurement begins, until there are spectral norms
        self._is_warm = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._begin(kwargs["trainer"])
        if state.is_world_process_zero:
            self._file.begin(state.resumed_step)
            if args.eval_strategy == "no" and not args.eval_on_save:
                logger.warning("parameter_norms: written at evaluations, of which eval_strategy=no leaves none")

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._parameters is None:  # an evaluation without training
            self._begin(kwargs["trainer"])
        values = self._measure()
        if state.is_world_process_zero:
            self._file.add(values, step=state.global_step, epoch=state.epoch)

    def on_rollback(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._file.abandon(state.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"vectors": self._vectors if self._spectral is None else self._spectral.vectors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._vectors = state["vectors"]
        if self._spectral is not None:
            self._is_warm = self._spectral.load(self._vectors)

    def _begin(self, trainer: Any) -> None:
        """Collective."""
        self._parameters = FullParameters(trainer)
        if self.settings.log_spectral_norms:
            self._vectors = self.state_dict()["vectors"]
            self._spectral = SpectralNorms(self._parameters)
            self._is_warm = self._spectral.load(self._vectors)

    def _measure(self) -> dict[str, dict[str, float]]:
        """Collective. The norms by name."""
        assert self._parameters is not None
        found: dict[str, tuple[list[str], Tensor]] = {}
        if self.settings.log_norms:
            found["norms"] = list(self._parameters.shapes), self._parameters.weights().sqrt_()
        if self._spectral is not None:
            steps = self.settings.power_iter_steps
            found["spectral_norms"] = (
                self._spectral.names,
                self._spectral.measure(steps if self._is_warm else 2 * steps),
            )
            self._is_warm = True
        numbers = iter(torch.cat([values for _, values in found.values()]).tolist())
        return {key: {name: next(numbers) for name in names} for key, (names, _) in found.items()}
