"""From a checked config to a finished run: the directory, the rank's log, signals and the exit code."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli import outcome, signals
from forgather_cli.claim import Claim, claim, prepare
from forgather_cli.config.schema import Config, Target
from forgather_cli.errors import ConfigError, ForgatherError
from forgather_cli.rank_log import rank_log
from forgather_cli.report import report_error
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
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
            overwrite=config.overwrite_output_dir,
            resume=config.resume_from_checkpoint is not False,
        )
        code = _run_logged(config, held)
    if code == outcome.STOPPED:
        print(resume_command(root), flush=True)
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
            return _run_worker(config, run)
        except ForgatherError as error:
            report_error(error)
            code, reason = error.exit_code, str(error)
        except Exception as error:
            traceback.print_exc()
            code, reason = outcome.FAILED, f"{type(error).__name__}: {error}"
    if code == outcome.MISTAKE and not held.has_trained():
        held.undo()
    else:
        outcome.write_outcome(run, code, reason)
    return code


def _run_worker(config: Config, run: RunDir) -> int:
    """Train and write ``exit.json``; returns 0, or 75 when a signal ended it."""
    with signals.watching() as stop:
        stop.at_once = lambda signum, early: _end_at_once(run, signum, early)
        from forgather_cli import worker

        trainer = worker.run(config, run, should_stop=lambda: stop.signum)
    code, reason = outcome.DONE, "done"
    if trainer.stopped_by is not None:
        code, reason = outcome.STOPPED, f"stopped by {signal.Signals(trainer.stopped_by).name}"
    return outcome.write_outcome(run, code, reason, trainer.state.global_step).code


def _end_at_once(run: RunDir, signum: int, early: bool) -> int:
    """A second signal, or one before the first step: note the end; a run with a checkpoint of its own can go on."""
    name = signal.Signals(signum).name
    resumable = early and bool(run.checkpoint_steps())
    code = outcome.STOPPED if resumable else 128 + signum
    outcome.write_outcome(run, code, f"ended at once by {name}{' before the first step' if early else ''}")
    if resumable:
        os.write(sys.__stdout__.fileno() if sys.__stdout__ else 1, f"{resume_command(run.root)}\n".encode())
    return code
