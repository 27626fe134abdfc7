"""From a run's directory back to its config: for going on with it, and for looking at it with other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgather_cli.config.load import Loaded, load_resumed
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir, step_of


def reload_config(
    run_dir: Path,
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    edited: Mapping[str, Any] | None = None,
) -> Loaded:
    """The config of a run's newest start with overrides, set to go on from its newest valid checkpoint.

    ``edited``: what that checkpoint was given by ``forgather checkpoint edit``; overrides win.
    Strict as ``load_config``; a group override replaces that group by the option. Raises ConfigError.
    """
    run = RunDir(run_dir)
    _check_run(run)
    loaded = load_resumed(run.newest_config(), overrides, config_dir=config_dir, edited=edited)
    if "output_dir" in loaded.given:
        raise ConfigError(
            f"output_dir: resume goes on in {run_dir}; for a new run from its weights use "
            f"forgather train output_dir=... resume_from_checkpoint={run_dir}/checkpoints/step-..."
        )
    if "overwrite_output_dir" in loaded.given and loaded.config.overwrite_output_dir:
        raise ConfigError("overwrite_output_dir: resume goes on with the run, it deletes nothing; leave it out")
    changes = _resumption(run, loaded)
    config = replace(loaded.config, **changes)
    return replace(loaded, config=config, tree={**loaded.tree, **changes}, given=loaded.given | set(changes))


def recompose(run: RunDir, overrides: Sequence[str], *, config_dir: Path | None = None) -> Loaded:
    """The config of a run's newest start with overrides, otherwise as it was. Raises ConfigError."""
    return load_resumed(run.newest_config(), overrides, config_dir=config_dir)


def _resumption(run: RunDir, loaded: Loaded) -> dict[str, Any]:
    """Settings that make a start go on with the run.

    A run that itself began from another's checkpoint begins there again as long as it has none of its own.
    """
    changes: dict[str, Any] = {"output_dir": str(run.root), "overwrite_output_dir": False}
    if run.checkpoint_steps() or not isinstance(loaded.config.resume_from_checkpoint, str):
        again = {"resume_from_checkpoint": True, "resume_components": "all"}
        changes |= {key: value for key, value in again.items() if key not in loaded.given}
    return changes


def _check_run(run: RunDir) -> None:
    """Raise ConfigError for what cannot be gone on with."""
    if not run.root.is_dir():
        raise ConfigError(f"{run.root}: no such directory; give the directory of a run")
    if run.config.is_file():
        return
    if step_of(run.root) is not None:
        root = run.root.resolve().parent.parent
        raise ConfigError(f"{run.root}: is a checkpoint; give its run, forgather resume {root}")
    raise ConfigError(f"{run.root}: is not a run's directory (no config.yaml); start one with forgather train")
