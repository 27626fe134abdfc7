"""When scheduled work is due. Everything counts absolute optimizer steps, so the cadence survives a resume."""

from __future__ import annotations

import math

from forgather_cli.config.schema import RunSettings


def in_steps(every: float, total: int) -> int:
    """``logging_steps`` and the like of a run of ``total`` steps, of which a value below 1 is a share, rounded up as in
    transformers (5.24, ``TrainerState.compute_steps``).
    """
    return int(every) if every >= 1 else math.ceil(total * every)


def shares(args: RunSettings, total: int = 0) -> dict[str, str]:
    """Those of them that count and are shares of the run, and what each comes to, for people. ``total`` 0: unknown."""
    kinds = {"logging": args.logging_steps, "eval": args.eval_steps, "save": args.save_steps}
    return {
        f"{kind}_steps": f"every {in_steps(every, total):,} steps" if total > 0 else f"{every:g} of all steps"
        for kind, every in kinds.items()
        if every < 1 and getattr(args, f"{kind}_strategy") == "steps"
    }


def log_due(args: RunSettings, step: int, every: int) -> bool:
    """True if metrics are logged after optimizer step ``step`` (1-based); ``every``: ``logging_steps`` in steps."""
    if args.logging_strategy != "steps":
        return False
    return step % every == 0 or (step == 1 and args.logging_first_step)


def eval_due(args: RunSettings, step: int, every: int) -> bool:
    """True if evaluation is due after ``step``; ``eval_delay`` counts steps here."""
    return args.eval_strategy == "steps" and step % every == 0 and step >= args.eval_delay


def eval_due_at_epoch(args: RunSettings, epoch: float) -> bool:
    """True if evaluation is due at the end of an epoch; ``eval_delay`` counts epochs here, as in Hugging Face."""
    return args.eval_strategy == "epoch" and epoch >= args.eval_delay


def evaluates(args: RunSettings) -> bool:
    """Whether a run may evaluate at all."""
    return args.eval_strategy != "no" or args.eval_on_start or args.eval_on_save or args.load_best_model_at_end


def save_due(args: RunSettings, step: int, every: int) -> bool:
    return args.save_strategy == "steps" and step % every == 0
