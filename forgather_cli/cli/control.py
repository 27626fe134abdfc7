"""``forgather control``: look at running jobs and give them commands. No torch here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from forgather_cli.callbacks.columns import STEP_COLUMNS, duration, format_value
from forgather_cli.callbacks.display import evaluation_entries
from forgather_cli.cli.output import (
    AsJson,
    Col,
    ask,
    check_answerable,
    console,
    interruptible,
    print_facts,
    print_json,
    print_table,
)
from forgather_cli.cli.style import Command, Group
from forgather_cli.control import client, command_record, listing, registry
from forgather_cli.control.command_record import ABORT, DONE, SAVE, SAVE_AND_STOP, STOP
from forgather_cli.control.registry import Entry
from forgather_cli.errors import ConfigError, ControlError
from forgather_cli.launch.exit_status import read_exit_record
from forgather_cli.launch.stacks import Standing, table
from forgather_cli.run_dir import RunDir, shown
from forgather_cli.runs.summary import holder_of, how_it_ended
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import escaped, tell

_REDRAW = 1.0  # seconds

app = typer.Typer(
    cls=Group,
    help="Look at running jobs and tell them what to do.\n\nA job is named by its id, the beginning of its id, its run "
    "directory, or [cyan]latest[/]; where only one runs, it need not be named.",
    no_args_is_help=True,
)

Job = Annotated[
    str | None,
    typer.Argument(metavar="[JOB]", help="Id, beginning of an id, run directory, or latest.", show_default=False),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Leave when the job has the command, not when it is done.")]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0.0, help="Wait no longer than that.", show_default=False)
]

All = Annotated[bool, typer.Option("--all", help="Also what ended jobs have left behind.")]


@app.command("list", cls=Command)
def list_(everything: All = False, as_json: AsJson = False) -> None:
    """List the jobs that run."""
    with doing("asking the jobs"):
        known = listing.jobs()
    found = [job for job in known if everything or job[0].is_running is not False]  # None: of another machine
    if as_json:
        print_json([listing.document(entry, status) for entry, status in found])
        return
    if not found:
        tell(f"no job runs; forgather control list --all shows {len(known)} that ended" if known else "no jobs")
        return
    columns = (
        Col("job", copied=True),
        Col("state"),
        Col("step", right=True),
        Col("loss", right=True, droppable=1),
        Col("eta", right=True, droppable=2),
        Col("run directory", copied=True),
    )
    rows = [
        (entry.job_id, listing.state(entry, status), *_cells(status), shown(entry.run_dir)) for entry, status in found
    ]
    print_table(columns, rows, ["dim" if entry.is_running is False else "" for entry, _ in found])


def _cells(status: dict[str, Any] | None) -> tuple[str, str, str]:
    """Step, loss and eta, as training shows them."""
    if status is None:
        return "-", "-", "-"
    steps = f"{status['step']}/{status['max_steps']}" if status["max_steps"] else str(status["step"])
    loss = status["metrics"].get("loss")
    left = status["eta_seconds"]
    return steps, "-" if loss is None else f"{loss:.4f}", "-" if left is None else duration(left)


# -------------------------------------------------------------------------------------------------------------- status


@app.command(cls=Command)
def status(
    job: Job = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until the job ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a job is at: step, eta, newest metrics and evaluation, checkpoints."""
    if watch and as_json:
        raise ConfigError("--watch: shows many states, --json prints one document; use one of them")
    entry = _find_job(job)
    if watch:
        _watch(entry)
        return
    with doing(f"waiting for an answer of {entry.job_id}"):
        document = client.status(entry)
    if as_json:
        print_json(document)
    else:
        print_facts(_facts(document))


def _facts(status: dict[str, Any]) -> dict[str, str | Path]:
    """Newest metrics and evaluation in the words and units of the training table, others behind them as they are."""
    metrics, saved = {"epoch": status["epoch"], **status["metrics"]}, status["checkpoints"]
    known = {name: column for name, column in STEP_COLUMNS.items() if name != "step" and metrics.get(name) is not None}
    prefix, evaluation = evaluation_entries(metrics)
    shown_above = {*STEP_COLUMNS, *(column.label for column in known.values())}
    others = {n: each for n, each in metrics.items() if n not in shown_above and not n.startswith(f"{prefix}_")}
    steps, _, eta = _cells(status)
    waiting = ", ".join(f"{command['command']} ({command['state']})" for command in status["commands"])
    facts: dict[str, str | Path] = {
        "job": status["job_id"],
        "state": status["state"],
        "step": steps,
        "eta": eta,
        **{column.label: column.text(metrics[name]) for name, column in known.items()},
        prefix: "  ".join(f"{label} {value}" for label, value in evaluation),
        "others": ", ".join(f"{name} {format_value(value, 'si')}" for name, value in others.items()
                            if isinstance(value, int | float)),
        "commands": waiting,
        "checkpoint": Path(saved[-1]["path"]) if saved else "none yet",
        "not saved": f"{status['steps_since_checkpoint']} steps",
        "run": Path(status["run_dir"]),
        "ranks": f"{status['world_size']} ({status['strategy']}), process {status['pid']} on {status['hostname']}",
    }  # fmt: skip
    return {label: text for label, text in facts.items() if text}


def _watch(entry: Entry) -> None:
    """Every second until the job has ended, redraw on a terminal, else a line for each new state."""
    last = ""
    while True:
        try:
            document = client.status(entry)
            steps, loss, eta = _cells(document)
            line = f"step {steps}  loss {loss}  eta {eta}  {document['state']}"
            if sys.stdout.isatty():
                console().clear()
                print_facts(_facts(document))
            elif line != last:
                tell(line)
            last = line
        except ControlError:
            if entry not in registry.entries() or entry.is_running is False:
                break
            if entry.is_running is None:
                raise
        time.sleep(_REDRAW)
    tell(f"{entry.job_id}: {how_it_ended(RunDir(Path(entry.run_dir)))}")


# -------------------------------------------------------------------------------------------------------------- stacks


@app.command(cls=Command)
def stacks(job: Job = None, as_json: AsJson = False) -> None:
    """Show where each rank stands: its line of code, its last collective, and for how long. The odd one comes first."""
    entry = _find_job(job)
    with doing(f"waiting for an answer of {entry.job_id}"):
        document = client.stacks(entry)
    if as_json:
        print_json(document)
        return
    try:
        standings = [Standing.from_document(raw) for raw in document["ranks"]]
    except (KeyError, TypeError):
        raise ControlError(f"{entry.job_id}: answered something else than where its ranks stand") from None
    typer.echo(escaped("\n".join(table(standings))))
    for each in standings:
        if each.odd:
            tell(f"rank {each.rank} {each.odd}")


def _find_job(job: str | None) -> Entry:
    """The job that was named. Raises ControlError, which for a run directory says why no job takes commands there."""
    try:
        return registry.resolve(job)
    except ControlError as error:
        if job is None or job == "latest" or not RunDir(Path(job)).newest_config().is_file():
            raise
        raise ControlError(f"{job}: {_without_commands(RunDir(Path(job)))}") from error


def _job_to_command(job: str | None, command: str, as_json: bool) -> Entry:
    """The job that was named. One of another folder that was not, but found, is asked about; ConfigError where nobody
    can answer.
    """
    entry = _find_job(job)
    if job in (None, "latest") and not entry.is_below:
        where = f"{entry.job_id} trains in {entry.run_dir}, not below {Path.cwd()}"
        if as_json or not sys.stdin.isatty():
            raise ConfigError(f"{where}; to {command} it, name it: forgather control {command} {entry.job_id}")
        ask(f"{where}; {command} it?")
    return entry


def _without_commands(run: RunDir) -> str:
    """Why no job takes commands for a run directory."""
    holder, has_ended = holder_of(run), read_exit_record(run) is not None
    if has_ended or holder is None or holder.is_running is False:
        return f"no job runs there; the last one {how_it_ended(run)}"
    if holder.is_running is None:
        return f"no job is known there; the last one {how_it_ended(run)}"
    return (
        f"process {holder.pid} runs there but takes no commands: it is still starting or already ending, or has no "
        f"callbacks.control with enable_http; wait, or stop it with a checkpoint by SIGTERM (kill {holder.pid})"
    )


# ------------------------------------------------------------------------------------------------------------ commands


@app.command(cls=Command)
def save(job: Job = None, no_wait: NoWait = False, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Write a checkpoint now, and train on."""
    _run_command(SAVE, _job_to_command(job, SAVE, as_json), no_wait, timeout, as_json)


@app.command(cls=Command)
def stop(job: Job = None, no_wait: NoWait = False, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """End training after the current step, with the last checkpoint that save_strategy asks for."""
    _run_command(STOP, _job_to_command(job, STOP, as_json), no_wait, timeout, as_json)


@app.command("save_and_stop", cls=Command)
def save_and_stop(job: Job = None, no_wait: NoWait = False, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Write a checkpoint, then end training. [cyan]forgather resume[/] continues from it."""
    _run_command(SAVE_AND_STOP, _job_to_command(job, SAVE_AND_STOP, as_json), no_wait, timeout, as_json)


@app.command(cls=Command)
def abort(
    job: Job = None,
    force: Annotated[bool, typer.Option("--force", help="Do not ask.")] = False,
    no_wait: NoWait = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """End training at once and save nothing: what was trained since the newest checkpoint is lost."""
    entry = _job_to_command(job, ABORT, as_json)
    if not force:
        check_answerable("abort", "--force", as_json=as_json)
        now = client.status(entry)
        ask(f"Abort {entry.job_id} at step {now['step']}? The last {now['steps_since_checkpoint']} steps are lost.")
    _run_command(ABORT, entry, no_wait, timeout, as_json)


@app.command("set", cls=Command, hidden=True)
def set_(words: Annotated[list[str], typer.Argument(metavar="[JOB] KEY=VALUE...", show_default=False)]) -> None:
    """What a job trains with stays: it is resumed with other settings."""
    change = "forgather control save_and_stop JOB, then forgather resume RUN learning_rate=..."
    raise ConfigError(f"set: a job keeps its settings while it runs; {change}")


def _run_command(name: str, entry: Entry, no_wait: bool, timeout: float | None, as_json: bool) -> None:
    """Give a job a command, wait until it is done, and print the result: the checkpoint's path where there is one.

    Exit code 1 if it failed, or is not done within ``timeout``.
    """
    with doing(f"waiting for an answer of {entry.job_id}"):
        command = client.submit(entry, name)
    later = f"its answer will be in {shown(RunDir(Path(entry.run_dir)).command(command.id))}"
    if not no_wait:
        with interruptible(), doing(f"waiting until {entry.job_id} has done {name}"):
            try:
                command = client.wait(entry, command, timeout=timeout)
            except KeyboardInterrupt:
                tell(f"\n{entry.job_id} continues with {name}; {later}", sys.stderr)
                raise typer.Exit(130) from None
    if as_json:
        print_json(command.document())
    elif command.state == DONE and command.checkpoint is not None:
        tell(shown(command.checkpoint))
    elif command.state == DONE and name == ABORT:
        tell(f"{entry.job_id} is aborted, nothing was saved")
    elif command.state == DONE:
        tell(f"{entry.job_id} is stopped; no checkpoint was saved, since save_strategy=no")
    elif no_wait:
        tell(f"{entry.job_id} has the command; {later}")
    if not command.is_finished and not no_wait:
        raise ControlError(f"{entry.job_id}: {name} is {command.state} after {timeout:g} s, and stays so; {later}")
    if command.state == command_record.FAILED:
        raise ControlError(f"{entry.job_id}: {name} failed: {command.reason}")


Everywhere = Annotated[bool, typer.Option("--yes", "-y", help="Those of runs elsewhere, too.")]


@app.command(cls=Command)
def cleanup(yes: Everywhere = False, as_json: AsJson = False) -> None:
    """Remove what killed jobs of this machine have left behind, whose runs lie below the working directory."""
    removed = registry.cleanup(everywhere=yes)
    if as_json:
        print_json(removed)
        return
    tell("\n".join(f"removed {name}" for name in removed) or "nothing to remove")
    if left := [place.name for place, _ in registry.abandoned()]:
        tell(f"{len(left)} of runs that do not lie below {Path.cwd()} stay ({', '.join(left)}); --yes removes them")
