"""From a checked config to a finished run: the directory, the rank's log, signals and the exit code."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import traceback
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli import outcome, signals
from forgather_cli.claim import Claim, claim, prepare
from forgather_cli.config.schema import Config, Target
from forgather_cli.errors import CallbackError, ConfigError, ForgatherError, TrainingError
from forgather_cli.rank_log import rank_log
from forgather_cli.report import report_error
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from forgather_cli.checkpoint.retention import CheckpointInfo
    from forgather_cli.config.load import Loaded

AVAILABLE_TRAINERS = ("single",)


def require_available(config: Config) -> None:
    """Raise ConfigError if the selected trainer is not built yet."""
    if not isinstance(config.trainer, Target) and config.trainer.type not in AVAILABLE_TRAINERS:
        raise ConfigError(
            f"trainer={config.trainer.type} is not available in this version; use trainer={AVAILABLE_TRAINERS[0]}"
        )


def output_dir(loaded: Loaded) -> Path:
    """Where the run goes; the directory made up from date and time gets a number where another run has that name."""
    base = Path(loaded.config.output_dir or "outputs")
    if "output_dir" in loaded.given:
        return base
    candidates = [base, *(base.with_name(f"{base.name}_{n}") for n in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def launch(loaded: Loaded) -> int:
    """Train in this process; returns the exit code (0, 1, 2, 75).

    Raises ConfigError and SetupError for what is found before the run directory is taken; later ones are shown and
    logged here.
    """
    require_available(loaded.config)
    root = output_dir(loaded)
    config = replace(loaded.config, output_dir=str(root))
    with claim(root) as held:
        prepare(
            held,
            _config_text({**loaded.tree, "output_dir": str(root)}),
            _origin(loaded),
            overwrite=config.overwrite_output_dir and config.resume_from_checkpoint is not True,
            resume=config.resume_from_checkpoint is not False,
        )
        code = _run_logged(config, held)
    if code == outcome.STOPPED:
        print(f"\nto go on:\n{resume_command(root)}", flush=True)
    return code


def resume_command(root: Path) -> str:
    """The command that goes on with a run."""
    return f"forgather resume {shlex.quote(str(root))}"


def _config_text(tree: dict[str, Any]) -> str:
    from forgather_cli.config.decode import dump_tree

    return dump_tree(tree)


def _origin(loaded: Loaded) -> dict[str, Any]:
    """What ``origin.yaml`` tells besides versions."""
    return {
        "recipe": loaded.recipe,
        "recipe_path": str(loaded.recipe_path) if loaded.recipe_path else None,
        "overrides": list(loaded.overrides),
        "started_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "recipe_text": loaded.recipe_text,
    }


def _run_logged(config: Config, held: Claim) -> int:
    """Run the worker with its output in the rank's log; errors become a message (or a traceback) and an exit code."""
    run = held.run
    with rank_log(run.rank_log(0)):
        try:
            return _run_worker(config, held)
        except ForgatherError as error:
            if isinstance(error, CallbackError) and error.__cause__ is not None:
                traceback.print_exception(error.__cause__)  # of the user's code, who will want to mend it
            report_error(error)
            code, reason = error.exit_code, str(error)
        except Exception as error:
            traceback.print_exc()
            code, reason = outcome.FAILED, f"{type(error).__name__}: {error}"
    if (code == outcome.MISTAKE or held.has_set_aside()) and not held.has_trained():
        held.undo()
    else:
        outcome.write_outcome(run, code, reason)
    return code


def _run_worker(config: Config, held: Claim) -> int:
    """Train and write ``exit.json``; returns 0, or 75 when a signal ended it.

    Raises TrainingError when its last checkpoint could not be written.
    """
    run = held.run
    with signals.watching() as stop:
        stop.at_once = lambda signum, early: _end_at_once(run, signum, early)
        stop.hung = lambda signum, where: _end_hung(run, signum, where)
        from forgather_cli import worker

        trainer = worker.run(config, run, should_stop=lambda: stop.signum, on_begin=held.begin_training)
    step = trainer.state.global_step
    code, reason = outcome.DONE, "done"
    if trainer.stopped_by is not None:
        code, reason = outcome.STOPPED, f"stopped by {signal.Signals(trainer.stopped_by).name}"
    wanted = code == outcome.STOPPED or config.save_strategy != "no"
    if wanted and not trainer.control.should_abort_without_save and step not in run.checkpoint_steps():
        raise TrainingError(_not_saved(run, reason, step))
    if code == outcome.DONE and 0 < step == trainer.state.resumed_step:
        print(f"\nnothing left to train: step {step} is the last; raise max_steps to go on")
    outcome.write_outcome(run, code, reason, step)
    _print_places(run)
    return code


def _not_saved(run: RunDir, reason: str, step: int) -> str:
    """Why a stop is a failure: the log above says what kept the checkpoint from being written."""
    kept = run.checkpoint_steps()
    remedy = f"{resume_command(run.root)} goes on from step {kept[-1]}" if kept else "the run has no checkpoint"
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


def _end_at_once(run: RunDir, signum: int, early: bool) -> int:
    """A second signal, or one before the first step: note the end; a run with a checkpoint of its own can go on."""
    _close_bars()
    name = signal.Signals(signum).name
    kept = run.checkpoint_steps()
    resumable = early and bool(kept)
    code = outcome.STOPPED if resumable else 128 + signum
    reason = f"ended at once by {name}{' before the first step' if early else ''}"
    outcome.write_outcome(run, code, reason)
    _last_line(f"{reason}; {f'the newest checkpoint is step {kept[-1]}' if kept else 'there is no checkpoint'}")
    if resumable:
        _last_line(resume_command(run.root), out=True)
    return code


def _end_hung(run: RunDir, signum: int, where: str) -> int:
    """A signal that training did not get to: what it stands in, with the stack printed before."""
    _close_bars()
    reason = f"{signal.Signals(signum).name} was not acted on within {signals.GRACE:g} s: rank 0 stands at {where}"
    _last_line(f"error: {reason}")
    return outcome.write_outcome(run, outcome.FAILED, reason).code


def _close_bars() -> None:
    """Take a progress bar off the terminal; given up where the main thread holds the terminal."""
    display = sys.modules.get("forgather_cli.callbacks.display")
    if display is not None:
        thread = threading.Thread(target=display.close_bars, daemon=True)
        thread.start()
        thread.join(0.5)


def _last_line(text: str, *, out: bool = False) -> None:
    print(text, file=sys.stdout if out else sys.stderr, flush=True)
