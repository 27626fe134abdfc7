"""``forgather logs``: what runs have measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from forgather_cli.cli.common import AsJson, Col, human, human_seconds, print_json, print_table
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
    columns = (
        Col("run"),
        Col("step", right=True),
        Col("first", right=True, droppable=4),
        Col("loss", right=True),
        Col("best", right=True, droppable=5),
        Col("eval", right=True),
        Col("best", right=True),
        Col("tokens", right=True, droppable=3),
        Col("tok/s", right=True, droppable=2),
        Col("time", right=True, droppable=1),
        Col("state"),
    )
    print_table(columns, [(each.run, *_cells(each)) for each in summaries])


def _cells(each: Summary) -> list[str]:
    steps = f"{each.step}/{each.max_steps}" if each.max_steps else str(each.step)
    losses = (each.first_loss, each.last_loss, each.best_loss, each.last_eval_loss, each.best_eval_loss)
    shown = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
    return [steps, *shown, human(each.tokens), human(each.tokens_per_second), human_seconds(each.seconds), each.state]
