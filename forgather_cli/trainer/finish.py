"""How training has ended, and what rank 0 leaves then: ``exit.json``, and where the run and its checkpoints are."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import TrainingError
from forgather_cli.launch.exit_status import DONE, FAILED, STOPPED, ExitStatus, Kind, done, write_exit_record
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from forgather_cli.checkpoint.retention import CheckpointInfo
    from forgather_cli.trainer.trainer import Trainer


def finish(config: RunSettings, run: RunDir, trainer: Trainer) -> ExitStatus:
    """How training has ended on this rank; rank 0 writes ``exit.json`` and prints the places.

    Raises TrainingError where its last checkpoint was asked for, or ``exit.json``, and could not be written.
    """
    step, rank = trainer.state.global_step, trainer.world.rank
    status = _status(trainer)
    told = ", ".join(
        f"{count} of callback {each} in {event}" for (each, event), count in trainer.callbacks.lost.items()
    )
    reason = f"{status.message} at step {step}"
    if told:
        told = f"the disk was full, and records were lost: {told}"
        status = replace(status, message=f"{status.message}; {told}")
    if rank != 0:
        return status
    failed = any(unsaved == step for unsaved, _ in trainer.persistence.failures)
    wanted = trainer.stopped_by is not None or config.save_strategy != "no" or failed
    if wanted and status.state != "aborted" and step not in run.checkpoint_steps():
        raise TrainingError(_but(run, reason, "that step could not be saved (see above)", told))
    if status.state == "done" and 0 < step == trainer.state.resumed_step:
        setting = "max_steps" if config.max_steps > 0 else "num_train_epochs"
        print(f"\nnothing left to train: step {step} is the last; raise {setting} to go on")
    try:
        write_exit_record(run, status.state, status.code, status.message, step)
    except OSError as error:
        what = f"{run.exit} cannot be written ({error.strerror}): make room, and go on with the run to have it written"
        raise TrainingError(_but(run, reason, what, told)) from error
    _print_places(run)
    if told:
        print(told, flush=True)
    return status


def _status(trainer: Trainer) -> ExitStatus:
    """What has ended training. A callback of the user's that stops it is a rule of the run, so the run is done."""
    rank, step, last = trainer.world.rank, trainer.state.global_step, trainer.state.max_steps
    told, callback = trainer.stopping.obeyed, trainer.callbacks.stopped
    if trainer.control.should_abort_without_save:
        by = " by a command" if told.aborts else f" by {callback}" if callback else ""
        return ExitStatus(rank, Kind.ABORTED, FAILED, f"aborted{by} at step {step}; nothing was saved")
    if trainer.stopped_by is not None:
        return ExitStatus(rank, Kind.STOPPED, STOPPED, f"stopped by {signal.Signals(trainer.stopped_by).name}")
    if 0 < last <= step:
        return done(rank)
    if told.stops:
        return ExitStatus(rank, Kind.STOPPED, DONE, f"stopped by a command at step {step}")
    return done(rank, f"stopped by {callback} at step {step}" if callback else "done")


def _but(run: RunDir, reason: str, problem: str, lost: str) -> str:
    """Why an end is a failure all the same."""
    kept = run.checkpoint_steps()
    remedy = f"the newest checkpoint is step {kept[-1]}" if kept else "the run has no checkpoint"
    return "; ".join(filter(None, (f"{reason}, but {problem}", lost, remedy)))


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
