"""``forgather runs``: list the runs of a directory, and remove some. No torch here."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from forgather_cli.callbacks.console import TIME
from forgather_cli.checkpoint.files import size_of
from forgather_cli.cli.output import (
    AsJson,
    Col,
    Yes,
    ask,
    check_answerable,
    human_bytes,
    print_json,
    print_table,
)
from forgather_cli.cli.style import Command, Group
from forgather_cli.cli.words import or_latest
from forgather_cli.errors import SetupError
from forgather_cli.launch.run_lock import is_held, remove_run
from forgather_cli.report.runs import OUTPUTS, last_change, runs_below
from forgather_cli.report.summary import holder_of, summarize_or_state
from forgather_cli.run_dir import RunDir

_STYLES = {"running": "bold", "failed": "red", "diverged": "red"}

app = typer.Typer(cls=Group, help="List runs and remove some.", no_args_is_help=True)


@app.command("list", cls=Command)
def list_(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to look, up to four directories deep.")
    ] = OUTPUTS,
    as_json: AsJson = False,
) -> None:
    """List the runs below a directory, the one that changed last first.

    The best loss is the lowest of its evaluations.
    """
    if not directory.is_dir() and directory != OUTPUTS:
        raise SetupError(f"{directory}: no such directory; give one that holds runs")
    runs = sorted(runs_below(directory) if directory.is_dir() else [], key=last_change, reverse=True)
    found = [(summarize_or_state(run), size_of(run.root), last_change(run)) for run in runs]
    if as_json:
        kept = ("run", "state", "reason", "step", "max_steps", "best_eval_loss", "best_eval_step")
        rows_ = ({key: asdict(each)[key] for key in kept} | {"size_bytes": size, "changed": datetime.fromtimestamp(
            changed, UTC).isoformat(timespec="seconds")} for each, size, changed in found)  # fmt: skip
        print_json(list(rows_))
        return
    if not found:
        typer.echo(f"no runs below {directory}")
        return
    columns = (Col("run", fold=True), Col("state"), Col("step", right=True), Col("best eval", right=True, droppable=1),
               Col("size", right=True), Col("changed", droppable=2))  # fmt: skip
    rows = []
    for each, size, changed in found:
        steps = f"{each.step}/{each.max_steps}" if each.max_steps else str(each.step)
        best = "-" if each.best_eval_loss is None else f"{each.best_eval_loss:.4f}"
        when = datetime.fromtimestamp(changed).strftime(TIME)
        rows.append((each.run, each.state, steps, best, human_bytes(size), when))
    print_table(columns, rows, [_STYLES.get(each.state, "") for each, _, _ in found])


@app.command(cls=Command)
def remove(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Runs, or latest.", callback=or_latest, show_default=False),
    ],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete runs with their checkpoints, metrics and logs. Files that are not of a run stay where they are."""
    runs = [*{path.resolve(): RunDir(path) for path in run_dirs}.values()]  # each once
    for run in runs:
        holder = holder_of(run)
        if holder is None:  # every job of ours writes that, and a config.yaml may be anybody's
            raise SetupError(f"{run.root}: is no run (no job has left a {run.lock.name} there); nothing was removed")
        if is_held(run):
            where = f"process {holder.pid} on {holder.hostname}"
            raise SetupError(
                f"{run.root}: {where} runs there, nothing was removed; stop it first: forgather control stop {run.root}"
            )
    sizes = [sum(size_of(path) for path in run.own_files() if not path.is_symlink()) for run in runs]
    if not yes:
        check_answerable("runs remove", "--yes", as_json=as_json)
        for run, size in zip(runs, sizes, strict=True):
            typer.echo(f"{run.root}: {human_bytes(size)}")
        ask(f"Delete {'this run' if len(runs) == 1 else f'these {len(runs)} runs'}?")
    removed = []
    for run, size in zip(runs, sizes, strict=True):
        kept = [path.name for path in remove_run(run)]
        removed.append({"run": str(run.root), "freed_bytes": size, "kept": kept})
        if not as_json:
            typer.echo(f"{run.root}: removed" + (f" but for what is not of the run: {', '.join(kept)}" if kept else ""))
    if as_json:
        print_json(removed)
    else:
        typer.echo(f"freed {human_bytes(sum(sizes))}")
