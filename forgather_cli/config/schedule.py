"""When scheduled work is due. Everything counts absolute optimizer steps, so the cadence survives a resume."""

from __future__ import annotations

import math

from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import DataError


def log_due(args: RunSettings, step: int) -> bool:
    """True if metrics are logged after optimizer step ``step`` (1-based)."""
    if args.logging_strategy != "steps":
        return False
    return step % args.logging_steps == 0 or (step == 1 and args.logging_first_step)


def eval_due(args: RunSettings, step: int) -> bool:
    """True if evaluation is due after ``step``; ``eval_delay`` counts steps here."""
    return args.eval_strategy == "steps" and step % args.eval_steps == 0 and step >= args.eval_delay


def eval_due_at_epoch(args: RunSettings, epoch: float) -> bool:
    """True if evaluation is due at the end of an epoch; ``eval_delay`` counts epochs here, as in Hugging Face."""
    return args.eval_strategy == "epoch" and epoch >= args.eval_delay


def evaluates(args: RunSettings) -> bool:
    """Whether a run may evaluate at all."""
    return args.eval_strategy != "no" or args.eval_on_start or args.eval_on_save or args.load_best_model_at_end


def save_due(args: RunSettings, step: int) -> bool:
    return args.save_strategy == "steps" and step % args.save_steps == 0


def check_epochs(args: RunSettings, steps_per_epoch: int | None) -> None:
    """Raise DataError where the end of training cannot be told: a part of an epoch of unknown length."""
    epochs = args.num_train_epochs
    if steps_per_epoch is None and args.max_steps <= 0 and epochs >= 0 and not epochs.is_integer():
        raise DataError(
            f"num_train_epochs: {epochs:g} is no whole number, and the training data does not tell its length; "
            "set whole epochs, max_steps, or epoch_train_steps"
        )


def total_steps(args: RunSettings, *, steps_per_epoch: int | None, done: int, epochs_done: float) -> int:
    """Optimizer step at which training ends, 0 for "when the data has ended as often as there are epochs".

    ``done`` steps and ``epochs_done`` epochs lie behind. ``max_steps`` wins over epochs. A fraction of an epoch is
    rounded up to whole steps, as in Hugging Face.
    """
    if args.max_steps > 0:
        return args.max_steps
    left = max(0.0, args.num_train_epochs - epochs_done)
    if steps_per_epoch is None:
        return 0 if left else done
    return done + math.ceil(left * steps_per_epoch - 1e-9)
