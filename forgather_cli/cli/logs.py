"""``forgather logs``: what runs have measured."""

from __future__ import annotations

import sys
import time
from codecs import getincrementaldecoder
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from forgather_cli.callbacks.columns import TIMES, time_shares
from forgather_cli.cli.output import AsJson, Col, human, human_seconds, interruptible, print_json, print_table, show
from forgather_cli.cli.style import Command, Group
from forgather_cli.cli.words import RunPath, or_latest
from forgather_cli.documents.regular_files import open_file
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.find import find_runs
from forgather_cli.runs.summary import Summary, how_it_ended, ordered, summarize_all
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import escaped, tell

_LOOK = 0.2  # seconds between two looks at a log that grows

app = typer.Typer(cls=Group, help="What runs have measured, and what they print.", no_args_is_help=True)

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="Runs, directories that hold runs, patterns in quotes, or latest.",
        callback=or_latest,
        show_default=False,
    ),
]


@app.command(cls=Command)
@doing("reading the runs")
def summary(
    run_dirs: Runs,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="NAME", help="Smallest first: eval_loss, loss, time, a setting.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Largest first.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a text in Markdown.")] = False,
    as_json: AsJson = False,
) -> None:
    """First, last and best loss, speed and time of runs.

    Of several runs the settings that differ are shown too, and a run that has measured
    nothing is a row with its state. The eval loss to sort by is the best one. A loss is
    the mean of the steps since the log before; [cyan]checkpoint list[/] has that of the
    saved step alone.
    """
    if as_json and markdown:
        raise ConfigError("--markdown: got --json too; use one of them")
    if reverse and sort is None:
        raise ConfigError("--reverse: needs --sort NAME")
    runs = find_runs(run_dirs)
    summaries = summarize_all(runs)
    for note in filter(None, (run.note_set_aside() for run in runs)):
        tell(note, sys.stderr)
    if sort is not None:
        summaries = ordered(summaries, sort)
        summaries = summaries[::-1] if reverse else summaries
    if as_json:
        print_json([asdict(each) for each in summaries])
    else:
        print_summaries(summaries, markdown=markdown)
        for what, numbers in (("by source", summaries[0].sources), ("tasks", summaries[0].tasks)):
            if len(summaries) == 1 and numbers:
                tell(f"{what}: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
        if len(summaries) == 1 and (shares := time_shares(summaries[0].times)):
            tell(f"the time went to: {shares} (forgather logs slow {summaries[0].run})")


@app.command(cls=Command)
@doing("reading the run")
def slow(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run, which may still train, or latest.", callback=or_latest, show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Where the time of a run went, and the setting to try.

    Steps, waiting for data, evaluation, saving, the first step, which compiles, and waiting for
    other ranks. Of a run that still trains, what its logs tell.
    """
    from forgather_cli.runs.slow import explain

    runs = find_runs([run_dir])
    if len(runs) > 1:
        raise ConfigError(f"RUN: {run_dir} holds {len(runs)} runs; give one of them, such as {runs[-1].root}")
    report = explain(runs[0])
    if as_json:
        print_json(asdict(report))
        return
    total = sum(report.times.values())
    rows = [(TIMES[name], human_seconds(each), f"{100 * each / total:.1f} %")
            for name, each in sorted(report.times.items(), key=lambda pair: -pair[1])]  # fmt: skip
    print_table((Col("the time went to"), Col("time", right=True), Col("share", right=True)), rows)
    if report.attention is not None:
        tell(f"attention: {report.attention}")
    for finding in report.findings:
        tell(f"{finding.what}\n  try: {finding.remedy}")
    if not report.findings:
        tell("Nothing beside the steps takes much, and nothing here makes steps slow.")


@app.command(cls=Command)
@doing("drawing")
def plot(
    run_dirs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="A .png or .svg; else RUN/plots/metrics.png, of several runs ./plot.png.",
        ),
    ] = None,
    x: Annotated[str, typer.Option("--x", metavar="step|tokens|time", help="The horizontal axis.")] = "step",
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME", help="A panel for this metric alone; repeatable.")
    ] = None,
    smooth: Annotated[
        float, typer.Option("--smooth", metavar="WEIGHT", help="Running mean as in TensorBoard: 0 none, 0.9 much.")
    ] = 0.0,
    log_y: Annotated[bool, typer.Option("--log-y", help="Logarithmic axes, where all values are above 0.")] = False,
    heatmap: Annotated[
        str | None,
        typer.Option(
            "--heatmap",
            metavar="grad_norms|parameter_norms|spectral",
            help="Every parameter by steps, as the norm loggers have measured it.",
        ),
    ] = None,
) -> None:
    """Draw loss, gradient norm, learning rate, throughput and memory of runs.

    Several runs, such as all of a sweep's directory, are compared in one picture, named by
    the settings that differ. Needs matplotlib: pip install 'forgather\\[plot]'.
    """
    from forgather_cli.pictures.curves import Look
    from forgather_cli.pictures.picture import draw

    runs = find_runs(run_dirs)
    silent = [run for run in runs if not run.metrics.is_file() or not run.metrics.stat().st_size]
    if heatmap is None and 0 < len(silent) < len(runs):
        tell(f"left out, nothing was logged there: {', '.join(str(run.root) for run in silent)}", sys.stderr)
        runs = [run for run in runs if run not in silent]
    typer.echo(draw(runs, Look(x, tuple(metric or ()), smooth, log_y), heatmap, out))


@app.command(cls=Command)
def follow(run_dir: RunPath) -> None:
    """Print a run's log, while it runs as it grows, then how it ended.

    It is what rank 0 prints ([cyan]RUN/logs/rank-0.log[/]; other ranks' logs lie beside it). Ctrl-C leaves the job
    alone.
    """
    from forgather_cli.launch.run_lock import is_held

    run = RunDir(run_dir)
    if not run.rank_log(0).is_file():
        raise SetupError(f"{run.root}: has no log ({run.rank_log(0)}); name a run that forgather train has started")
    decoder = getincrementaldecoder("utf-8")("replace")
    with interruptible(), open_file(run.rank_log(0)) as log:
        while True:
            runs = is_held(run)  # asked first: what was written until the end is read after it
            while part := log.read1(65536):
                show(decoder.decode(part))
            if not runs:
                break
            time.sleep(_LOOK)
    tell(f"{run.root}: {how_it_ended(run)}")


def print_summaries(summaries: list[Summary], *, markdown: bool = False) -> None:
    """One row per run, below each other for people or as a table in Markdown; last the settings that not all have."""
    counts = Counter(key for each in summaries for key in each.settings)
    common = [key for key, count in counts.items() if count == len(summaries)]
    keys = [*common, *(key for key in counts if key not in common)]
    settings = [Col(key, right=True, fold=True, droppable=2 if n < 2 else n + 5) for n, key in enumerate(keys)]
    columns = (
        Col("run", copied=True),
        *settings[: len(common)],
        Col("step", right=True),
        Col("first loss", right=True, droppable=5),
        Col("loss", right=True, droppable=1),
        Col("best loss", right=True, droppable=6),
        Col("eval", right=True, droppable=3),
        Col("best eval", right=True),
        Col("bits/byte", right=True, droppable=3),
        Col("tokens", right=True, droppable=4),
        Col("tok/s", right=True, droppable=4),
        Col("time", right=True, droppable=4),
        Col("state"),
        *settings[len(common) :],
    )
    rows = []
    for each in summaries:
        values = [each.settings.get(key, "-") for key in keys]
        rows.append((each.run, *values[: len(common)], *_cells(each), *values[len(common) :]))
    if markdown:
        lines = [[column.title for column in columns], ["---:" if column.right else "---" for column in columns]]
        for line in [*lines, *rows]:
            print(escaped("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"))
    else:
        print_table(columns, rows)


def _cells(each: Summary) -> list[str]:
    steps = f"{each.step}/{each.max_steps}" if each.max_steps else str(each.step)
    losses = (
        each.first_loss, each.last_loss, each.best_loss, each.last_eval_loss, each.best_eval_loss,
        each.best_eval_bits_per_byte,
    )  # fmt: skip
    shown = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
    return [steps, *shown, human(each.tokens), human(each.tokens_per_second), human_seconds(each.seconds), each.state]
