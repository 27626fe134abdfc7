"""``forgather train``: compose, check, launch."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.output import AsJson, only_json, print_json
from forgather_cli.cli.words import ConfigDir, Words, load, split_words
from forgather_cli.errors import ConfigError
from forgather_cli.launch.place import joined
from forgather_cli.run_dir import RunDir
from forgather_cli.terminal.folding import tell

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded


def train(
    words: Words = None,
    config_dir: ConfigDir = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show plan, command and config; train nothing, write nothing.")
    ] = False,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="One run for each combination of [cyan]key=a,b,c[/].")
    ] = False,
    at_once: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, metavar="N", help="With -m: runs at once, on GPUs or shares of the cores of their own."
        ),
    ] = None,
    print_sbatch: Annotated[
        bool, typer.Option("--print-sbatch", help="Print the file with which Slurm trains this, and train nothing.")
    ] = False,
    limit: Annotated[
        str | None,
        typer.Option("--time", metavar="HH:MM:SS", help="With --print-sbatch: the job's time limit (24:00:00)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe, with your settings.

    Without RECIPE the [cyan]default[/] one, or with [cyan]model.path[/] the one called
    [cyan]finetune[/]. A run in its place, by its directory or a
    config.yaml of it, is trained again from the start, beside it. The run goes to
    [cyan]output_dir[/], or to outputs/RECIPE/DATE_TIME. The exit code is 0 when done, 2 for a
    mistake in the settings or in what they name, 75 after a signal, with a checkpoint to
    resume from.
    """
    if as_json and not dry_run:
        raise ConfigError("--json: training prints no document; use it with --dry-run, or see RUN/metrics.jsonl")
    if print_sbatch and (multirun or dry_run):
        raise ConfigError("--print-sbatch: prints the file of one run; leave out --multirun and --dry-run")
    if limit is not None and not print_sbatch:
        raise ConfigError("--time: is the limit of a Slurm job; add --print-sbatch, or leave it out")
    if at_once is not None and not multirun:
        raise ConfigError("--jobs: says how many runs of a sweep train at once; add --multirun, or leave it out")
    place = joined(words or [])
    if multirun and place is not None and place.size > 1:
        raise ConfigError(
            f"--multirun: starts runs of its own, but {place.by} has started ranks of one; use one of them"
        )
    if (dry_run or print_sbatch) and place is not None and place.rank > 0:
        return
    if print_sbatch:
        from forgather_cli.cli.sbatch import LIMIT, sbatch_file

        loaded = load(words, config_dir, trust_config=True)
        typer.echo(sbatch_file(loaded, train_command(loaded, words, config_dir)[1:], limit or LIMIT))
        return
    if multirun:
        from forgather_cli.sweeps.run import run_sweep

        recipe, overrides = split_words(words)
        raise typer.Exit(
            run_sweep(recipe, overrides, config_dir, at_once=at_once or 1, dry_run=dry_run, as_json=as_json)
        )
    if dry_run:
        loaded = load(words, config_dir, trust_config=True)
        _show(loaded, train_command(loaded, words, config_dir), as_json)
        return
    named = [word.partition("=")[2].strip("'\"") for word in words or [] if word.startswith("output_dir=")]
    run = RunDir(Path(named[-1]).expanduser()) if named else None
    from forgather_cli.launch.start import launch
    from forgather_cli.worker import work

    raise typer.Exit(launch(partial(load, words, config_dir, trust_config=True), work, place, run))


def train_command(loaded: Loaded, words: list[str] | None, config_dir: Path | None) -> list[str]:
    """The command that starts this run in a shell, as a list of words, with the recipe that was taken."""
    recipe, overrides = split_words(words)
    extra = ["--config-dir", str(config_dir)] if config_dir else []
    return ["forgather", "train", recipe or loaded.recipe, *overrides, *extra]


def _show(loaded: Loaded, command: list[str], as_json: bool) -> None:
    """Print the plan, the command and the config, for ``--dry-run``."""
    from forgather_cli.cli.config import print_config
    from forgather_cli.hub import check_model
    from forgather_cli.launch.layout import plan_layout
    from forgather_cli.launch.start import check_best_metric, output_dir
    from forgather_cli.plan.command import plan_document, print_plan
    from forgather_cli.plan.run import make_plan

    check_best_metric(loaded.config)
    check_model(loaded.config)
    layout = plan_layout(loaded.config, loaded.given)
    with only_json(as_json):
        made = make_plan(loaded.config)
    if as_json:
        document: dict[str, Any] = {"config": loaded.tree, "plan": plan_document(made), "command": command}
        print_json(
            {**document, "output_dir": str(output_dir(loaded)), "launch": {**asdict(layout), "world": layout.world}}
        )
        return
    print_plan(made)
    tell(f"\nwould train in  {output_dir(loaded)}\nby the command  {shlex.join(command)}")
    tell(f"ranks           {layout.describe()}\n")
    for note in loaded.notes:
        tell(note)
    print_config(loaded)
