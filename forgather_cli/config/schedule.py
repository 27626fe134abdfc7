"""When scheduled work is due. Everything counts absolute optimizer steps, so the cadence survives a resume."""

from __future__ import annotations

from forgather_cli.config.schema import RunSettings


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
