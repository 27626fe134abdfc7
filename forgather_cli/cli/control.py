"""``forgather control``: look at running jobs and tell them what to do. No torch here."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from forgather_cli.cli.output import AsJson, Col, console, human_seconds, print_facts, print_json, print_table
from forgather_cli.cli.style import Command, Group
from forgather_cli.control import client, records, registry
from forgather_cli.control.records import ABORT, DONE, SAVE, SAVE_AND_STOP, STOP
from forgather_cli.control.registry import Entry
from forgather_cli.errors import ConfigError, ControlError
from forgather_cli.launch.exit_status import read_exit_record, resume_command
from forgather_cli.launch.stacks import Standing, table
from forgather_cli.report.summary import holder_of, state_of
from forgather_cli.run_dir import RunDir

_LOOK_PATIENCE = 2.0  # seconds that a listed job gets to say what it is at
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


@app.command("list", cls=Command)
def list_(as_json: AsJson = False) -> None:
    """List the jobs that run, and what ended ones have left behind."""
    found = [(entry, _glance(entry)) for entry in registry.entries()]
    if as_json:
        rows_ = ({**asdict(e), "running": e.is_running, "state": _standing(e, s), "status": s} for e, s in found)
        print_json(list(rows_))
        return
    if not found:
        typer.echo("no jobs")
        return
    columns = (Col("job"), Col("state"), Col("step", right=True), Col("loss", right=True), Col("left", right=True),
               Col("run directory", droppable=1))  # fmt: skip
    rows = [(entry.job_id, _standing(entry, status), *_cells(status), entry.run_dir) for entry, status in found]
    print_table(columns, rows, ["dim" if entry.is_running is False else "" for entry, _ in found])


def _glance(entry: Entry) -> dict[str, Any] | None:
    """A job's status; None if it does not tell."""
    if entry.is_running is False:
        return None
    try:
        return client.status(entry, patience=_LOOK_PATIENCE)
    except ControlError:
        return None


def _standing(entry: Entry, status: dict[str, Any] | None) -> str:
    if status is not None:
        return str(status["state"])
    if entry.is_running is False:
        state = state_of(RunDir(Path(entry.run_dir)))[0]
        return "cut" if state == "running" else state  # another job has the directory by now
    return "does not answer" if entry.is_running else f"on {entry.hostname}"


def _cells(status: dict[str, Any] | None) -> tuple[str, str, str]:
    """Step, loss and time left."""
    if status is None:
        return "-", "-", "-"
    steps = f"{status['step']}/{status['max_steps']}" if status["max_steps"] else str(status["step"])
    return steps, _number(status["metrics"].get("loss")), human_seconds(status["eta_seconds"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


# -------------------------------------------------------------------------------------------------------------- status


@app.command(cls=Command)
def status(
    job: Job = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until the job ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a job is at: step, newest metrics, time left, checkpoints."""
    if watch and as_json:
        raise ConfigError("--watch: shows many states, --json prints one document; use one of them")
    entry = _find(job)
    if as_json:
        print_json(client.status(entry))
    elif watch:
        _watch(entry)
    else:
        print_facts(_facts(client.status(entry)))


def _facts(status: dict[str, Any]) -> dict[str, str]:
    metrics, saved = status["metrics"], status["checkpoints"]
    epoch = f", epoch {status['epoch']:.2f}" if status["epoch"] else ""
    waiting = ", ".join(f"{command['command']} ({command['state']})" for command in status["commands"])
    facts = {
        "job": status["job_id"],
        "state": status["state"],
        "step": f"{_cells(status)[0]}{epoch}",
        "time left": human_seconds(status["eta_seconds"]),
        "metrics": ", ".join(f"{key} {value:.5g}" for key, value in metrics.items() if isinstance(value, int | float)),
        "commands": waiting,
        "checkpoint": saved[-1]["path"] if saved else "none yet",
        "run": status["run_dir"],
        "ranks": f"{status['world_size']} ({status['strategy']}), process {status['pid']} on {status['hostname']}",
    }
    return {label: text for label, text in facts.items() if text}


def _watch(entry: Entry) -> None:
    """Redraw on a terminal, else a line for each new state."""
    if sys.stdout.isatty():
        for document in _states(entry):
            console().clear()
            print_facts(_facts(document))
    else:
        last = ""
        for document in _states(entry):
            steps, loss, left = _cells(document)
            line = f"step {steps}  loss {loss}  left {left}  {document['state']}"
            if line != last:
                typer.echo(line)
            last = line
    typer.echo(f"{entry.job_id}: {_ended(RunDir(Path(entry.run_dir)))}")


def _states(entry: Entry) -> Iterator[dict[str, Any]]:
    """The job's status every second, until it has ended."""
    while True:
        try:
            yield client.status(entry)
        except ControlError:
            if entry not in registry.entries() or entry.is_running is False:
                return
            if entry.is_running is None:
                raise
        time.sleep(_REDRAW)


def _ended(run: RunDir) -> str:
    """What has become of a job that takes no commands any more."""
    outcome, holder = read_exit_record(run), holder_of(run)
    if outcome is not None:
        return f"ended at step {outcome.step}, {outcome.state}, with exit code {outcome.code}: {outcome.reason}"
    if holder is not None and holder.is_running is None:
        return f"was started on {holder.hostname} and has not told of its end; ask there"
    if holder is not None and holder.is_running:
        return "is ending"
    return f"was cut: it told nothing of its end; {resume_command(run)} goes on"


# -------------------------------------------------------------------------------------------------------------- stacks


@app.command(cls=Command)
def stacks(job: Job = None, as_json: AsJson = False) -> None:
    """Show where each rank stands: its line of code, its last collective, and for how long. The odd one comes first."""
    entry = _find(job)
    document = client.stacks(entry)
    if as_json:
        print_json(document)
        return
    try:
        standings = [Standing.from_document(raw) for raw in document["ranks"]]
    except (KeyError, TypeError):
        raise ControlError(f"{entry.job_id}: answered something else than where its ranks stand") from None
    typer.echo("\n".join(table(standings)))
    for each in standings:
        if each.odd:
            typer.echo(f"rank {each.rank} {each.odd}")


def _find(job: str | None) -> Entry:
    """The job that is meant. Raises ControlError, which tells of a run directory what goes on there."""
    try:
        return registry.resolve(job)
    except ControlError as error:
        if job is None or job == "latest" or not RunDir(Path(job)).newest_config().is_file():
            raise
        raise ControlError(f"{job}: {_without_commands(RunDir(Path(job)))}") from error


def _without_commands(run: RunDir) -> str:
    """Why nobody takes commands for a run directory."""
    holder, has_ended = holder_of(run), read_exit_record(run) is not None
    if has_ended or holder is None or holder.is_running is False:
        return f"no job runs there; the last one {_ended(run)}"
    if holder.is_running is None:
        return f"no job is known there; the last one {_ended(run)}"
    return (
        f"process {holder.pid} runs there but takes no commands: it is still starting or already ending, or has no "
        f"callbacks.control with enable_http; wait, or stop it with a checkpoint by SIGTERM (kill {holder.pid})"
    )


# ------------------------------------------------------------------------------------------------------------ commands


@app.command(cls=Command)
def save(job: Job = None, no_wait: NoWait = False, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Have a checkpoint written now, and go on training."""
    _tell(SAVE, _find(job), no_wait, timeout, as_json)


@app.command(cls=Command)
def stop(job: Job = None, no_wait: NoWait = False, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """End training after the current step, with the last checkpoint that save_strategy asks for."""
    _tell(STOP, _find(job), no_wait, timeout, as_json)


@app.command("save-and-stop", cls=Command)
def save_and_stop(job: Job = None, no_wait: NoWait = False, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Have a checkpoint written, then end training. [cyan]forgather resume[/] goes on from it."""
    _tell(SAVE_AND_STOP, _find(job), no_wait, timeout, as_json)


@app.command(cls=Command)
def abort(
    job: Job = None,
    force: Annotated[bool, typer.Option("--force", help="Do not ask.")] = False,
    no_wait: NoWait = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """End training at once and save nothing: what was trained since the newest checkpoint is lost."""
    entry = _find(job)
    if not force and not _agreed_to(entry, as_json):
        typer.echo("not aborted", err=True)
        raise typer.Exit(1)
    _tell(ABORT, entry, no_wait, timeout, as_json)


def _agreed_to(entry: Entry, as_json: bool) -> bool:
    if as_json or not sys.stdin.isatty():
        raise ConfigError("abort: asks first, and nobody can answer here; use --force")
    now = client.status(entry)
    saved = now["checkpoints"][-1]["step"] if now["checkpoints"] else 0
    lost = now["step"] - saved
    return typer.confirm(f"Abort {entry.job_id} at step {now['step']}? The last {lost} steps are lost.")


def _tell(command: str, entry: Entry, no_wait: bool, timeout: float | None, as_json: bool) -> None:
    """Give a command, wait for its answer, and print it. Exit code 1 if it failed or has no answer yet."""
    told = client.submit(entry, command)
    if not no_wait:
        told = _waited(entry, told, timeout)
    if as_json:
        print_json(told.document())
    elif told.state == DONE or no_wait:
        typer.echo(_answer(entry, told))
    if not told.is_finished and not no_wait:
        waited = f"{command} is {told.state} after {timeout:g} s, and stays so"
        raise ControlError(f"{entry.job_id}: {waited}; {_later(entry, told)}")
    if told.state == records.FAILED:
        raise ControlError(f"{entry.job_id}: {command} failed: {told.reason}")


def _waited(entry: Entry, told: records.Command, timeout: float | None) -> records.Command:
    try:
        return client.wait(entry, told, timeout=timeout)
    except KeyboardInterrupt:
        typer.echo(f"\n{entry.job_id} goes on with {told.command}; {_later(entry, told)}", err=True)
        raise typer.Exit(130) from None


def _later(entry: Entry, told: records.Command) -> str:
    return f"its answer will be in {RunDir(Path(entry.run_dir)).command(told.id)}"


def _answer(entry: Entry, told: records.Command) -> str:
    if told.state != DONE:
        return f"{entry.job_id} has the command; {_later(entry, told)}"
    if told.checkpoint is not None:
        return told.checkpoint
    if told.command == ABORT:
        return f"{entry.job_id} is aborted, nothing was saved"
    return f"{entry.job_id} is stopped; no checkpoint was saved, since save_strategy=no"


@app.command(cls=Command)
def cleanup(as_json: AsJson = False) -> None:
    """Remove what jobs of this machine have left behind that were killed."""
    removed = registry.cleanup()
    if as_json:
        print_json(removed)
    else:
        typer.echo("\n".join(f"removed {name}" for name in removed) or "nothing to remove")
