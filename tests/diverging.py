"""Callbacks that make a run diverge, for ``+callbacks.NAME._target_=diverging.CLASS``, and one that notes what it saw.

Each acts once in the life of a run directory, wherever that is gone on with: a file there says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny import Noted

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.strategies.base import Batch


class _Once(TrainerCallback):
    def __init__(self, at: int, times: int = 1) -> None:
        """Before step ``at`` + 1, the first ``times`` times that the run comes there."""
        self._at, self._times = at, times

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self._at:
            return
        trainer = kwargs["trainer"]
        done = trainer.run_dir.root / f"{type(self).__name__}-{trainer.run.world.rank}"
        count = int(done.read_text()) if done.exists() else 0
        if count < self._times:
            done.write_text(str(count + 1))
            self.act(trainer)

    def act(self, trainer: Any) -> None: ...


class Spike(_Once):
    """Multiplies the learning rate of one step, and of all later ones too unless the groups are put back."""

    def __init__(self, at: int, times: int = 1, factor: float = 1000.0) -> None:
        super().__init__(at, times)
        self._factor = factor

    def act(self, trainer: Any) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] *= self._factor
            group["initial_lr"] *= self._factor


class Poison(_Once):
    """Makes the weights of this rank NaN."""

    def act(self, trainer: Any) -> None:
        with torch.no_grad():
            for part in trainer.strategy.parts:
                for parameter in part.parameters():
                    parameter.fill_(float("nan"))


class Notes(TrainerCallback):
    """Appends each step's token ids to ``notes-<rank>.jsonl`` in the working directory as it is trained on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = kwargs["trainer"]
        plain, path = trainer.strategy.forward_backward, Path(f"notes-{trainer.run.world.rank}.jsonl")

        def noted(microbatches: Any, step_targets: Any) -> Any:
            taken: list[Batch] = []
            loss = plain(Noted(microbatches, taken), step_targets)
            rows = [row for batch in taken for row in batch["input_ids"].tolist()]
            with path.open("a") as file:
                file.write(json.dumps([state.global_step + 1, rows]) + "\n")
            return loss

        trainer.strategy.forward_backward = noted


class Seek(TrainerCallback):
    """Begins at sample ``sample`` of the first epoch, whatever the checkpoint says."""

    def __init__(self, sample: int) -> None:
        self._sample = sample

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["trainer"].run.epochs.load_state_dict({"epoch": 0, "sample": self._sample})
