"""From a run's directory back to its config: for going on with it, and for looking at it with other settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgather_cli.config.decode import load_tree
from forgather_cli.config.load import Loaded, load_resumed
from forgather_cli.config.overrides import parse_lines
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir, is_model_directory, step_of


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
    _check_overrides(run_dir, overrides)
    changes = _resumption(run)
    loaded = load_resumed(run.newest_config(), overrides, config_dir=config_dir, edited={**changes, **(edited or {})})
    return replace(loaded, given=loaded.given | set(changes))


def recompose(
    run: RunDir, overrides: Sequence[str], *, config_dir: Path | None = None, reads: Collection[str] | None
) -> Loaded:
    """The config of a run's newest start with overrides, otherwise as it was; ``reads`` as for ``load_resumed``.

    Raises ConfigError.
    """
    return load_resumed(run.newest_config(), overrides, config_dir=config_dir, reads=reads)


def _resumption(run: RunDir) -> dict[str, Any]:
    """Settings that make a start go on with the run, where the command line does not say otherwise.

    A run that itself began from another's checkpoint begins there again as long as it has none of its own.
    """
    changes: dict[str, Any] = {"output_dir": str(run.root), "overwrite_output_dir": False}
    began = load_tree(run.newest_config()).get("resume_from_checkpoint")
    if run.checkpoint_steps() or not isinstance(began, str):
        changes |= {"resume_from_checkpoint": True, "resume_components": "all"}
    return changes


def _check_overrides(run_dir: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError for settings that only a new run has."""
    remedies = {
        "output_dir": f"resume goes on in {run_dir}; for a new run from its weights use "
        f"forgather train output_dir=... resume_from_checkpoint={run_dir}/checkpoints/step-...",
        "overwrite_output_dir": "resume goes on with the run, it deletes nothing; leave it out",
    }
    typed = {item.key_or_group for item in parse_lines(overrides)[0]}
    if problems := [f"{name}: {remedy}" for name, remedy in remedies.items() if name in typed]:
        raise ConfigError(problems)


def _check_run(run: RunDir) -> None:
    """Raise ConfigError for what cannot be gone on with."""
    if not run.root.is_dir():
        raise ConfigError(f"{run.root}: no such directory; give the directory of a run")
    if run.config.exists() and not is_model_directory(run.root):
        return
    if is_model_directory(run.root):
        raise ConfigError(f"{run.root}: is a model directory (config.json); give a run, or train model=pretrained")
    if step_of(run.root) is not None:
        root = run.root.resolve().parent.parent
        raise ConfigError(f"{run.root}: is a checkpoint; give its run, forgather resume {root}")
    raise ConfigError(f"{run.root}: is not a run's directory (no config.yaml); start one with forgather train")
