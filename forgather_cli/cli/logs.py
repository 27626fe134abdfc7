"""``forgather logs``: what runs have measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from forgather_cli.cli.common import AsJson, console, human, human_seconds, print_json
from forgather_cli.cli.style import Command, Group
from forgather_cli.cli.summary import Summary, summarize
from forgather_cli.run_dir import RunDir

app = typer.Typer(cls=Group, help="Tables of what runs have measured.", no_args_is_help=True)


@app.callback()
def _group() -> None: ...


@app.command(cls=Command)
def summary(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Directories of runs.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """First, last and best loss, speed and time of runs."""
    summaries = [summarize(RunDir(path)) for path in run_dirs]
    if as_json:
        print_json([asdict(each) for each in summaries])
    else:
        print_summaries(summaries)


def print_summaries(summaries: list[Summary]) -> None:
    """One row per run."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    for title in ("step", "loss first", "last", "best", "eval last", "best", "tokens", "tok/s", "time", "state"):
        table.add_column(title, justify="right" if title != "state" else "left", no_wrap=True)
    for each in summaries:
        table.add_row(each.run, *_cells(each))
    console().print(table)


def _cells(each: Summary) -> list[str]:
    steps = f"{each.step}/{each.max_steps}" if each.max_steps else str(each.step)
    losses = (each.first_loss, each.last_loss, each.best_loss, each.last_eval_loss, each.best_eval_loss)
    shown = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
    return [steps, *shown, human(each.tokens), human(each.tokens_per_second), human_seconds(each.seconds), each.state]
