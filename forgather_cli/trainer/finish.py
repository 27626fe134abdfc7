"""The end of training: ``exit.json`` says how it ended, and the paths of the run and its checkpoints are printed."""

from __future__ import annotations

import signal
from dataclasses import replace

from forgather_cli.callbacks.base import CallbackList
from forgather_cli.checkpoint.retention import CheckpointInfo, better_unsaved, list_checkpoints
from forgather_cli.errors import TrainingError
from forgather_cli.launch.exit_status import DONE, FAILED, STOPPED, ExitStatus, Kind, done, write_exit_record
from forgather_cli.run_dir import RunDir, shown
from forgather_cli.terminal.folding import tell
from forgather_cli.trainer.checkpoints import Checkpoints
from forgather_cli.trainer.run import TrainingRun


def finish(run: TrainingRun, callbacks: CallbackList, checkpoints: Checkpoints) -> ExitStatus:
    """How training ended on this rank; rank 0 writes ``exit.json`` and prints the paths.

    Raises TrainingError if ``exit.json``, or a last checkpoint that was due, could not be written.
    """
    args, run_dir, step = run.config, run.run_dir, run.state.global_step
    status = _status(run, callbacks.stopped)
    told = ", ".join(f"{count} of callback {each} in {event}" for (each, event), count in callbacks.lost.items())
    reason = f"{status.message} at step {step}"
    if told:
        told = f"the disk was full, and records were lost: {told}"
        status = replace(status, message=f"{status.message}; {told}")
    if run.world.rank != 0:
        return status
    failed = any(unsaved == step for unsaved, _ in checkpoints.failures)
    wanted = run.sync.signum is not None or args.save_strategy != "no" or failed
    if wanted and status.state != "aborted" and step not in run_dir.checkpoint_steps():
        raise TrainingError(_but(run_dir, reason, "that step could not be saved (see above)", told))
    if checkpoints.average_failure is not None:
        raise TrainingError(_but(run_dir, reason, checkpoints.average_failure, told))
    if status.state == "done" and 0 < step == run.state.resumed_step:
        setting = "max_steps" if args.max_steps > 0 else "num_train_epochs"
        tell(f"\nnothing left to train: step {step} is the last; raise {setting} to train further")
    try:
        write_exit_record(run_dir, status.state, status.code, status.message, step)
    except OSError as error:
        what = f"{run_dir.exit} cannot be written ({error.strerror}): make room, and resume the run to have it written"
        raise TrainingError(_but(run_dir, reason, what, told)) from error
    _print_paths(run_dir)
    if args.average_last is not None and (average := run_dir.average(step, args.average_last)).is_dir():
        tell(f"average  {shown(average)}")
    if told:
        tell(told)
    return status


def _status(run: TrainingRun, callback: str) -> ExitStatus:
    """How training ended. ``callback``: the one that stopped it, or empty; a run stopped by a callback is done."""
    rank, step, signum = run.world.rank, run.state.global_step, run.sync.signum
    if run.outer is not None and run.outer.ended is not None:
        return run.outer.ended
    if run.control.should_abort_without_save:
        by = " by a command" if run.sync.applied.aborts else f" by {callback}" if callback else ""
        return ExitStatus(rank, Kind.ABORTED, FAILED, f"aborted{by} at step {step}; nothing was saved")
    if signum is not None:
        return ExitStatus(rank, Kind.STOPPED, STOPPED, f"stopped by {signal.Signals(signum).name}")
    if 0 < run.state.max_steps <= step:
        return done(rank)
    if run.sync.applied.stops:
        return ExitStatus(rank, Kind.STOPPED, DONE, f"stopped by a command at step {step}")
    return done(rank, f"stopped by {callback} at step {step}" if callback else "done")


def _but(run: RunDir, reason: str, problem: str, lost: str) -> str:
    """The message of a failure at the end of training."""
    kept = run.checkpoint_steps()
    remedy = f"the newest checkpoint is step {kept[-1]}" if kept else "the run has no checkpoint"
    return "; ".join(filter(None, (f"{reason}, but {problem}", lost, remedy)))


def _print_paths(run: RunDir) -> None:
    """Where the run and its checkpoints are, as paths to copy."""
    found = list_checkpoints(run)
    better = better_unsaved(found)
    note = f" ({better})" if better else ""
    tell(f"\nrun      {shown(run.root)}")
    for info in found[-1:]:
        tell(f"newest   {_place(info, (note or ' (best)') if info.best else '')}")
    for info in (each for each in found[:-1] if each.best):
        tell(f"best     {_place(info, note)}")


def _place(info: CheckpointInfo, note: str = "") -> str:
    """``RUN/checkpoints/step-00000060  eval_loss 2.7729``; the loss of that step alone where that was not measured."""
    rule = info.best_by
    name, value = (rule.metric, rule.value(info.metrics)) if rule else ("", None)
    if value is None:
        name, value = "step loss", info.metrics.get("loss")
    return f"{shown(info.path)}  {name} {value:.4f}{note}" if value is not None else f"{shown(info.path)}{note}"
