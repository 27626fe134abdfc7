"""What rank 0 leaves when training has ended: ``exit.json``, and where the run and its checkpoints are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from forgather_cli.config.schema import Config
from forgather_cli.errors import TrainingError
from forgather_cli.launch import outcome
from forgather_cli.launch.ending import done
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from forgather_cli.checkpoint.retention import CheckpointInfo
    from forgather_cli.trainer.trainer import Trainer


def finish(config: Config, run: RunDir, trainer: Trainer) -> None:
    """Write ``exit.json`` and print the places.

    Raises TrainingError when its last checkpoint could not be written.
    """
    step = trainer.state.global_step
    ending = done(0, trainer.stopped_by)
    wanted = trainer.stopped_by is not None or config.save_strategy != "no"
    if wanted and not trainer.control.should_abort_without_save and step not in run.checkpoint_steps():
        raise TrainingError(_not_saved(run, ending.message, step))
    if ending.code == outcome.DONE and 0 < step == trainer.state.resumed_step:
        print(f"\nnothing left to train: step {step} is the last; raise max_steps to go on")
    outcome.write_outcome(run, ending.code, ending.message, step)
    _print_places(run)


def _not_saved(run: RunDir, reason: str, step: int) -> str:
    """Why a stop is a failure: the log above says what kept the checkpoint from being written."""
    kept = run.checkpoint_steps()
    remedy = f"{outcome.resume_command(run)} goes on from step {kept[-1]}" if kept else "the run has no checkpoint"
    return f"{reason} at step {step}, but that step could not be saved (see above); {remedy}"


def _print_places(run: RunDir) -> None:
    """Where the run and its checkpoints are, as paths to copy."""
    from forgather_cli.checkpoint.retention import list_checkpoints

    found = list_checkpoints(run)
    best = next((info for info in found if info.best), None)
    newest = found[-1] if found else None
    print(f"\nrun      {run.root}")
    if newest is not None:
        print(f"newest   {_place(newest, ' (best)' if newest is best else '')}")
    if best is not None and best is not newest:
        print(f"best     {_place(best)}")
    sys.stdout.flush()


def _place(info: CheckpointInfo, note: str = "") -> str:
    """``RUN/checkpoints/step-00000060  eval_loss 2.7729``; the training loss where that was not measured."""
    rule = info.best_by
    name, value = (rule.metric, rule.value(info.metrics)) if rule else ("loss", None)
    if value is None:
        name, value = "loss", info.metrics.get("loss")
    return f"{info.path}  {name} {value:.4f}{note}" if value is not None else f"{info.path}{note}"
