"""``forgather runs``: list the runs of a directory, and remove some. No torch here."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, get_args

import typer

from forgather_cli.callbacks.console import TIME
from forgather_cli.checkpoint.files import size_of
from forgather_cli.cli.output import AsJson, Col, Yes, ask, check_answerable, human_bytes, print_json, print_table
from forgather_cli.cli.style import Command, Group
from forgather_cli.cli.words import or_latest
from forgather_cli.errors import ConfigError, SetupError, did_you_mean
from forgather_cli.launch.exit_status import State
from forgather_cli.launch.run_lock import is_held, remove_run
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.find import OUTPUTS, last_change, runs_below
from forgather_cli.runs.summary import holder_of, state_of, summarize_or_state
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import tell

_ENDED = get_args(State)
_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_STYLES = {"running": "bold", "failed": "red", "diverged": "red"}

app = typer.Typer(cls=Group, help="List runs and remove some.", no_args_is_help=True)


@app.command("list", cls=Command)
@doing("reading the runs")
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
        kept = ("run", "state", "reason", "step", "max_steps", "best_eval_loss", "best_eval_step",
                "best_eval_bits_per_byte")  # fmt: skip
        rows_ = ({key: asdict(each)[key] for key in kept} | {"size_bytes": size, "changed": datetime.fromtimestamp(
            changed, UTC).isoformat(timespec="seconds")} for each, size, changed in found)  # fmt: skip
        print_json(list(rows_))
        return
    if not found:
        tell(f"no runs below {directory}")
        return
    columns = (Col("run", copied=True), Col("state"), Col("step", right=True),
               Col("best eval", right=True, droppable=1), Col("bits/byte", right=True, droppable=3),
               Col("size", right=True), Col("changed", droppable=2))  # fmt: skip
    rows = []
    for each, size, changed in found:
        steps = f"{each.step}/{each.max_steps}" if each.max_steps else str(each.step)
        lowest = each.best_eval_loss, each.best_eval_bits_per_byte
        best = ("-" if value is None else f"{value:.4f}" for value in lowest)
        when = datetime.fromtimestamp(changed).strftime(TIME)
        rows.append((each.run, each.state, steps, *best, human_bytes(size), when))
    print_table(columns, rows, [_STYLES.get(each.state, "") for each, _, _ in found])


@app.command(cls=Command)
def remove(
    run_dirs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Runs, or latest; with --state or --older-than directories in which to look for runs (outputs).",
            callback=or_latest,
            show_default=False,
        ),
    ] = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state", metavar="STATE", help=f"Those that ended so ({', '.join(_ENDED)}); may be given several times."
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Those in which nothing has changed for so long: 90m, 12h, 30d, 8w."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete runs with their checkpoints, metrics and logs. Files that are not of a run stay where they are.

    Without RUN, [cyan]--state[/] and [cyan]--older-than[/] choose among the runs below outputs: never one in which a
    job runs, nor one without an end that another machine has written to in the last day.
    """
    if states or older_than is not None:
        with doing("reading the runs"):
            runs = _chosen(run_dirs or [OUTPUTS], states or _ENDED, older_than)
    elif run_dirs:
        runs = [*{path.resolve(): RunDir(path) for path in run_dirs}.values()]  # each once
    else:
        raise ConfigError("runs remove: names no run; give runs, or choose some with --state or --older-than")
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
    if runs and not yes:
        check_answerable("runs remove", "--yes", as_json=as_json)
        for run, size in zip(runs, sizes, strict=True):
            tell(f"{run.root}: {human_bytes(size)}")
        ask(f"Delete {'this run' if len(runs) == 1 else f'these {len(runs)} runs'}?")
    removed = []
    for run, size in zip(runs, sizes, strict=True):
        with doing(f"removing {run.root}"):
            kept = [path.name for path in remove_run(run)]
        removed.append({"run": str(run.root), "freed_bytes": size, "kept": kept})
        if not as_json:
            tell(f"{run.root}: removed" + (f" but for what is not of the run: {', '.join(kept)}" if kept else ""))
    if as_json:
        print_json(removed)
    else:
        tell(f"freed {human_bytes(sum(sizes))}" if runs else "there is no such run; nothing was removed")


def _chosen(places: Sequence[Path], states: Sequence[str], older_than: str | None) -> list[RunDir]:
    """Runs in or below ``places`` that ended as one of ``states`` says, ``older_than`` ago; none in which a job runs.

    Raises ConfigError for another state, or an age that is none.
    """
    for state in states:
        if state not in _ENDED:
            near = did_you_mean(state, _ENDED)
            raise ConfigError(f"--state: must be one of {', '.join(_ENDED)}, got {state!r};{near} give one of them")
    found = re.fullmatch(r"(\d{1,6})([mhdw])", older_than or "0m")
    if found is None:
        raise ConfigError(f"--older-than: must be a number of m, h, d or w, such as 12h or 30d, got {older_than!r}")
    before = time.time() - int(found[1]) * _SECONDS[found[2]]
    if missing := next((path for path in places if not path.is_dir() and path != OUTPUTS), None):
        raise SetupError(f"{missing}: no such directory; give runs, or directories that hold runs")
    chosen = {}
    for run in (run for path in places if path.is_dir() for run in runs_below(path)):
        holder, state, changed = holder_of(run), state_of(run)[0], last_change(run)
        if holder is None or is_held(run) or state not in states or changed > before:
            continue
        if state == "cut" and holder.is_running is None and changed > time.time() - _SECONDS["d"]:
            continue  # of another machine, where it may still run
        chosen[run.root.resolve()] = run
    return [*chosen.values()]
