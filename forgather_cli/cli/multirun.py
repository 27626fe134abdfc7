"""``forgather train -m``: one run for each combination, one after another, each a process of its own.

Directories are named by the content of recipe and overrides, so the same command again resumes the sweep: jobs
that are done are skipped, others are resumed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import typer

from forgather_cli.cli.output import Col, human_seconds, print_json, print_table
from forgather_cli.cli.words import load_config_of, quoted
from forgather_cli.errors import ConfigError
from forgather_cli.launch.exit_status import DONE, FAILED, MISTAKE, STOPPED
from forgather_cli.launch.processes import end_with_parent
from forgather_cli.launch.signals import STOP_SIGNALS
from forgather_cli.report.summary import state_of, summarize
from forgather_cli.run_dir import RunDir

_SIGNALLED = (STOPPED, *(128 + signum for signum in STOP_SIGNALS))


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str
    overrides: list[str]
    run: RunDir

    @property
    def is_done(self) -> bool:
        return state_of(self.run)[0] == "done"


def run_sweep(recipe: str, overrides: list[str], *, config_dir: Path | None, dry_run: bool, as_json: bool) -> int:
    """Run what is left of a sweep; returns 0 if all jobs are done or were stopped by commands, 75 after a signal, else
    1. The next call resumes the jobs that are not done.

    Every job's config is checked before the first starts; raises ConfigError with the problems of all.
    """
    jobs = plan_jobs(recipe, overrides, config_dir)
    if dry_run:
        _show(jobs, recipe, config_dir, as_json)
        return DONE
    forward = _Forward()
    codes: dict[str, int] = {}
    for number, job in enumerate(jobs, start=1):
        typer.secho(f"[{number}/{len(jobs)}] {job.name}{' is done' if job.is_done else ''}", bold=True)
        code = codes[job.name] = DONE if job.is_done else forward.run(_command(job, recipe, config_dir))
        if forward.signum is not None or code in _SIGNALLED:
            _print_table(jobs, codes)
            _print_resume_command()
            return STOPPED if code in (STOPPED, DONE) else code
    _print_table(jobs, codes)
    if not all(job.is_done for job in jobs):
        _print_resume_command()
    return DONE if all(state_of(job.run)[0] in ("done", "stopped") for job in jobs) else FAILED


def _print_resume_command() -> None:
    typer.echo(f"not all jobs are done; the same command resumes them:\n{shlex.join(['forgather', *sys.argv[1:]])}")


def plan_jobs(recipe: str, overrides: list[str], config_dir: Path | None) -> list[Job]:
    """The jobs of a sweep with their directories, all checked. Raises ConfigError with the problems of all."""
    from forgather_cli.config.overrides import expand, job_name
    from forgather_cli.launch.layout import plan_layout

    jobs: list[Job] = []
    problems: dict[str, None] = {}
    expanded = expand(overrides, config_dir=config_dir)
    for job_overrides in expanded:
        try:
            loaded = load_config_of(recipe, job_overrides, config_dir, trust_config=True)
            plan_layout(loaded.config, loaded.given)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        fixed = [word for word in job_overrides if all(word in other for other in expanded)]
        own = [word for word in job_overrides if word not in fixed]
        name = job_name(loaded.recipe_text, own)
        if loaded.config.output_dir and "output_dir" in loaded.given:
            root = Path(loaded.config.output_dir)
        else:  # named by what all jobs share: a sweep that is given more values later keeps the jobs it has
            content = "\0".join([loaded.recipe_text, *fixed])
            root = Path("outputs") / loaded.recipe / f"sweep-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
        jobs.append(Job(name, job_overrides, RunDir(root / name)))
    if problems:
        raise ConfigError(list(problems))
    return jobs


def _command(job: Job, recipe: str, config_dir: Path | None) -> list[str]:
    """The command that starts or resumes one job."""
    own = [f"output_dir={quoted(job.run.root)}", "overwrite_output_dir=false"]
    own += ["resume_from_checkpoint=true"] if job.run.is_used() else []
    extra = ["--config-dir", str(config_dir)] if config_dir else []
    return [sys.executable, "-m", "forgather_cli", "train", recipe, *job.overrides, *own, *extra]


class _Forward:
    """Runs jobs in their own process groups and forwards every signal once.

    In the same group a job would get Ctrl-C from the terminal and again from here, and two signals end it at once.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._job: subprocess.Popen[bytes] | None = None

        def received(signum: int, frame: FrameType | None) -> None:
            self.signum = self.signum or signum
            if self._job is not None and self._job.poll() is None:
                self._job.send_signal(signum)

        for signum in STOP_SIGNALS:
            signal.signal(signum, received)

    def run(self, command: list[str]) -> int:
        """Run one job to its end; returns its exit code, 128 + signal if one killed it."""
        if self.signum is not None:
            return 128 + self.signum
        end_with_us = partial(end_with_parent, os.getpid(), signal.SIGTERM)
        self._job = subprocess.Popen(command, process_group=0, preexec_fn=end_with_us)
        if self.signum is not None:  # arrived between the check and the start
            self._job.send_signal(self.signum)
        code = self._job.wait()
        return code if code >= 0 else 128 - code


def _show(jobs: list[Job], recipe: str, config_dir: Path | None, as_json: bool) -> None:
    """Print the jobs of ``--dry-run``."""
    commands = [shlex.join(["forgather", *_command(job, recipe, config_dir)[3:]]) for job in jobs]
    if as_json:
        shown = zip(jobs, commands, strict=True)
        print_json([{"name": j.name, "dir": str(j.run.root), "done": j.is_done, "command": c} for j, c in shown])
        return
    for job, command in zip(jobs, commands, strict=True):
        typer.secho(f"{job.name}{' (done)' if job.is_done else ''}", bold=True)
        typer.echo(f"  {command}")


def _print_table(jobs: list[Job], codes: dict[str, int]) -> None:
    """The summary at the end, with the job of the best evaluation in bold. ``codes``: of the jobs that were started."""
    columns = (
        Col("job", fold=True),
        Col("state"),
        Col("step", right=True),
        Col("mean loss", right=True, droppable=1),
        Col("eval", right=True, droppable=2),
        Col("best eval", right=True),
        Col("time", right=True, droppable=3),
    )
    rows = [(job.name, *_cells(job, codes.get(job.name))) for job in jobs]
    best = min((row[5] for row in rows if row[5] != "-"), default=None, key=float)
    print_table(columns, rows, ["bold green" if row[5] == best else "" for row in rows])
    sweep = jobs[0].run.root.parent
    typer.echo(f"runs are in {sweep}; a picture of them: {shlex.join(['forgather', 'logs', 'plot', str(sweep)])}")


def _cells(job: Job, code: int | None) -> list[str]:
    """What a job has measured, after how it stands: what it has left tells nothing of a start that was refused."""
    has_run = job.run.metrics.exists() or job.run.exit.exists()
    state = state_of(job.run)[0] if has_run else "not run"
    if code == MISTAKE:
        state = "refused"
    elif code == FAILED and state not in ("aborted", "diverged"):
        state = "failed"  # maybe before it wrote anything, on top of an earlier start's end
    elif code is not None and not has_run:
        state = "cut"
    if not job.run.metrics.exists():
        return [state, *["-"] * 5]
    each = summarize(job.run)
    losses = [each.last_loss, each.last_eval_loss, each.best_eval_loss]
    shown = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
    return [state, str(each.step), *shown, human_seconds(each.seconds)]
