"""``forgather train -m``: a run for each combination, in a process of its own, one after another or several at once.

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
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

import typer

from forgather_cli.callbacks.console import is_terminal, timestamp
from forgather_cli.cli.output import Col, console, human, human_seconds, print_json, print_table, table_of
from forgather_cli.cli.words import load_config_of, quoted
from forgather_cli.errors import ConfigError
from forgather_cli.launch.exit_status import DONE, FAILED, MISTAKE, STOPPED
from forgather_cli.launch.processes import available_cores, end_with_parent
from forgather_cli.launch.rank_log import lasting_output
from forgather_cli.launch.signals import STOP_SIGNALS
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.summary import Summary, state_of, summarize, summarize_or_state
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import escaped, tell

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_SIGNALLED = (STOPPED, *(128 + signum for signum in STOP_SIGNALS))
_LOOK = 0.1  # seconds between two looks at the jobs that run
_REDRAW = 1.0  # seconds
_LAST_LINES = 40  # of what a job that failed has told


@dataclass(frozen=True)
class SweepJob:
    """One run of a sweep."""

    name: str
    overrides: list[str]
    run: RunDir
    own: Sequence[str] = ()
    """The overrides in which it differs from other jobs."""
    ranks: int = 1
    takes_gpus: bool = False
    """One for each rank, by CUDA_VISIBLE_DEVICES, where jobs run at once."""

    @property
    def is_done(self) -> bool:
        return state_of(self.run)[0] == "done"


@lasting_output()
def run_sweep(
    recipe: str | None, overrides: list[str], config_dir: Path | None, *, at_once: int, dry_run: bool, as_json: bool
) -> int:
    """Run what is left of a sweep, ``at_once`` jobs at a time; returns 0 if all jobs are done or were stopped by
    commands, 75 after a signal, else 1. The next call resumes the jobs that are not done.

    Every job's config is checked before the first starts; raises ConfigError with the problems of all.
    """
    from forgather_cli.launch.layout import gpus

    jobs = plan_jobs(recipe, overrides, config_dir)
    at_once = min(at_once, len(jobs))
    each, there = max((job.ranks for job in jobs if job.takes_gpus), default=0), gpus()
    if at_once > 1 and at_once * each > len(there):
        raise ConfigError(
            f"--jobs: {at_once} at once with {each} GPUs each (nproc_per_node) need {at_once * each}, and this machine "
            f"has {len(there)}; give --jobs {max(1, len(there) // each)}, or a smaller nproc_per_node"
        )
    if dry_run:
        _show(jobs, recipe, config_dir, as_json)
        return DONE
    sweep = _Sweep(jobs, [_command(job, recipe, config_dir) for job in jobs], at_once, there)
    sweep.run()
    _print_table(jobs, sweep.codes)
    if sweep.stopped_by:
        _print_resume_command()
        return next((code for code in sweep.last_codes if code not in (STOPPED, DONE)), STOPPED)
    if not all(job.is_done for job in jobs):
        _print_resume_command()
    return DONE if all(state_of(job.run)[0] in ("done", "stopped") for job in jobs) else FAILED


def _print_resume_command() -> None:
    tell(f"not all jobs are done; the same command resumes them:\n{shlex.join(['forgather', *sys.argv[1:]])}")


@doing("composing the jobs")
def plan_jobs(recipe: str | None, overrides: list[str], config_dir: Path | None) -> list[SweepJob]:
    """The jobs of a sweep with their directories, all checked. Raises ConfigError with the problems of all."""
    from forgather_cli.config.decode import load_tree
    from forgather_cli.launch.layout import gpus, plan_layout
    from forgather_cli.sweeps.expand import expand, job_name

    there = bool(gpus())
    jobs: list[SweepJob] = []
    undated: list[SweepJob] = []
    problems: dict[str, None] = {}
    expanded = expand(overrides, config_dir=config_dir)
    for job_overrides in expanded:
        try:
            loaded = load_config_of(recipe, job_overrides, config_dir, trust_config=True)
            layout = plan_layout(loaded.config, loaded.given)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        fixed = [word for word in job_overrides if all(word in other for other in expanded)]
        own = [word for word in job_overrides if word not in fixed]
        if loaded.config.output_dir and "output_dir" in loaded.given:
            root = Path(loaded.config.output_dir)
        else:  # named by what all jobs share: a sweep that is given more values later keeps the jobs it has
            content = "\0".join([loaded.recipe_text, *fixed])
            root = Path("outputs") / loaded.recipe / f"sweep-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
        name = job_name(loaded.recipe_text, own)
        if not (root / name).exists():  # one begun before 0.3 goes on where it is
            name = name.replace("=", "-")
        of = loaded.config  # by an evaluation at the end jobs are compared
        if of.eval_strategy == "steps" and of.data.nothing_held_out is None and 0 < of.max_steps < of.eval_steps:
            job_overrides.append(f"eval_steps={of.max_steps}")
        takes_gpus = there and loaded.config.device in ("auto", "cuda")
        jobs.append(SweepJob(name, job_overrides, RunDir(root / name), own, layout.ranks_per_node, takes_gpus))
        if loaded.tree["data"].get("template_date", "no chats") is None and not jobs[-1].run.config.exists():
            undated.append(jobs[-1])
    if problems:
        raise ConfigError(list(problems))
    begun = [load_tree(each.run.config)["data"] for each in jobs if undated and each.run.config.exists()]
    days = (data["template_date"] for data in begun if data.get("template_date"))
    day = min(days, default=time.strftime("%Y-%m-%d"))[:10]
    for job in undated:  # in all jobs a template writes the day on which the sweep began
        job.overrides.append(f"data.template_date={day}")
    return jobs


def _command(job: SweepJob, recipe: str | None, config_dir: Path | None) -> list[str]:
    """The command that starts or resumes one job."""
    own = [f"output_dir={quoted(job.run.root)}", "overwrite_output_dir=false"]
    own += ["resume_from_checkpoint=true"] if job.run.is_used() else []
    extra = ["--config-dir", str(config_dir)] if config_dir else []
    return [sys.executable, "-m", "forgather_cli", "train", *([recipe] if recipe else []), *job.overrides, *own, *extra]


@dataclass(frozen=True)
class _Running:
    """A job that runs."""

    number: int
    process: subprocess.Popen[bytes]
    gpus: list[str]
    told: IO[bytes] | None
    """What it writes to standard error, where jobs run at once; the log of its rank 0 has the rest."""


class _Sweep:
    """Runs jobs in their own process groups, shows how they stand, and forwards every signal to each of them once.

    In the same group a job would get Ctrl-C from the terminal and again from here, and two signals end it at once.
    """

    def __init__(self, jobs: list[SweepJob], commands: list[list[str]], at_once: int, gpus: list[str]) -> None:
        self._jobs, self._commands, self._at_once, self._free_gpus = jobs, commands, at_once, gpus
        self._running: list[_Running] = []
        self._live: Live | None = None
        self.codes: dict[str, int] = {}
        """Exit codes by name, 128 + signal where one killed a job."""
        self.stopped_by = 0
        """The first signal that came here or ended a job."""
        self.last_codes: list[int] = []
        """Of the jobs that have ended since then."""
        for signum in STOP_SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # under nohup it is ignored
                signal.signal(signum, self._stop)

    def _stop(self, signum: int, frame: FrameType | None = None) -> None:
        self.stopped_by = self.stopped_by or signum
        for each in self._running:
            if each.process.poll() is None:
                each.process.send_signal(signum)

    def run(self) -> None:
        """Run all jobs to their end, or after a signal those that run."""
        queue = list(range(len(self._jobs)))
        with ExitStack() as stack:
            if self._at_once > 1 and is_terminal("stdout"):
                from rich.live import Live

                # drawn from here: it is not safe to fork beside a thread
                self._live = stack.enter_context(Live(console=console(), auto_refresh=False, transient=True))
            drawn, told_of_stop = 0.0, self._at_once == 1  # a job alone says itself that it was told to stop
            while self._running or (queue and not self.stopped_by):
                while queue and len(self._running) < self._at_once and not self.stopped_by:
                    self._start(queue.pop(0))
                if self._live is not None and time.monotonic() > drawn + _REDRAW:
                    drawn = time.monotonic()
                    self._live.update(self._table(), refresh=True)
                time.sleep(_LOOK)
                for each in list(self._running):
                    if each.process.poll() is not None:
                        self._running.remove(each)
                        self._end(each)
                if self.stopped_by and not told_of_stop:
                    told_of_stop = True
                    name = signal.Signals(self.stopped_by).name
                    print(f"{name}: each job saves after its step; a second signal ends them at once", file=sys.stderr)

    def _head(self, number: int) -> str:
        return f"[{number + 1}/{len(self._jobs)}] {self._jobs[number].name}"

    def _start(self, number: int) -> None:
        """Start a job, unless it is done."""
        job, alone = self._jobs[number], self._at_once == 1
        if job.is_done:
            self.codes[job.name] = DONE
        if alone:
            typer.secho(f"{self._head(number)}{' is done' if job.is_done else ''}", bold=True)
        elif self._live is None:
            print(f"{timestamp()} {self._head(number)} {'is done' if job.is_done else 'begins'}", flush=True)
        if job.is_done:
            return
        environment, gpus = dict(os.environ), []
        if not alone:
            threads = available_cores() // self._at_once // job.ranks
            environment.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
            if job.takes_gpus:
                gpus, self._free_gpus = self._free_gpus[: job.ranks], self._free_gpus[job.ranks :]
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        told = None if alone else tempfile.TemporaryFile()  # noqa: SIM115 (closed in _end)
        process = subprocess.Popen(
            self._commands[number],
            env=environment,
            stdin=None if alone else subprocess.DEVNULL,
            stdout=None if alone else subprocess.DEVNULL,
            stderr=told,
            process_group=0,
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        )
        self._running.append(_Running(number, process, gpus, told))
        if self.stopped_by:  # arrived between the check and the start
            process.send_signal(self.stopped_by)

    def _end(self, ended: _Running) -> None:
        """Note how a job has ended, and show it."""
        job, code = self._jobs[ended.number], ended.process.returncode
        code = self.codes[job.name] = code if code >= 0 else 128 - code
        self._free_gpus += ended.gpus
        if code in _SIGNALLED and not self.stopped_by:  # somebody has sent it to the job alone
            self._stop(signal.SIGTERM if code == STOPPED else code - 128)
        if self.stopped_by:
            self.last_codes.append(code)
        if ended.told is None:
            return
        state, step, loss, _, best, _, seconds = _cells(job, code)
        if self._live is None:
            numbers = f": step {step}, loss {loss}, best eval {best}, {seconds}" if job.run.metrics.exists() else ""
            print(f"{timestamp()} {self._head(ended.number)} {state}{numbers}", flush=True)
        with ended.told as stream:
            stream.seek(0)
            lines = stream.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        if code not in (DONE, *_SIGNALLED):
            print(escaped("\n".join([f"{self._head(ended.number)} {state}:", *lines])), file=sys.stderr)

    def _table(self) -> RenderableType:
        """How all jobs stand; only those that run where the screen is too low for all."""
        from rich.console import Group

        columns = (
            Col("job", right=True),
            Col("settings", copied=True),
            Col("state"),
            Col("step", right=True),
            Col("loss", right=True),
            Col("best eval", right=True),
            Col("tok/s", right=True, droppable=1),
        )
        running = {each.number for each in self._running}
        rows, counts = [], Counter[str]()
        for number, job in enumerate(self._jobs):
            code = self.codes.get(job.name)
            state = "running" if number in running else "waiting" if code is None else _state(job, code)
            counts[state] += 1
            shown = ["-"] * 4
            if state != "waiting" and job.run.metrics.exists():
                now = _summary_at(job.run, job.run.metrics.stat().st_mtime_ns)
                steps = f"{now.step}/{now.max_steps}" if now.max_steps else str(now.step)
                shown = [steps, _loss(now.last_loss), _loss(now.best_eval_loss), human(now.tokens_per_second)]
            rows.append((number, [str(number + 1), " ".join(job.own) or job.name, state, *shown]))
        screen, table = console(), table_of(columns, [row for _, row in rows])
        if len(screen.render_lines(table)) > screen.height - 4:
            table = table_of(columns, [row for number, row in rows if number in running])
        return Group(table, ", ".join(f"{count} {state}" for state, count in counts.items()))


def _show(jobs: list[SweepJob], recipe: str | None, config_dir: Path | None, as_json: bool) -> None:
    """Print the jobs of ``--dry-run``."""
    commands = [shlex.join(["forgather", *_command(job, recipe, config_dir)[3:]]) for job in jobs]
    if as_json:
        shown = zip(jobs, commands, strict=True)
        print_json([{"name": j.name, "dir": str(j.run.root), "done": j.is_done, "command": c} for j, c in shown])
        return
    for job, command in zip(jobs, commands, strict=True):
        typer.secho(f"{job.name}{' (done)' if job.is_done else ''}", bold=True)
        typer.echo(f"  {command}")


def _print_table(jobs: list[SweepJob], codes: dict[str, int]) -> None:
    """The summary at the end, with the job of the best evaluation in bold. ``codes``: of the jobs that were started."""
    columns = (
        Col("job", copied=True),
        Col("state"),
        Col("step", right=True),
        Col("loss", right=True, droppable=1),
        Col("eval", right=True, droppable=2),
        Col("best eval", right=True),
        Col("bits/byte", right=True, droppable=4),
        Col("time", right=True, droppable=3),
    )
    rows = [(job.name, *_cells(job, codes.get(job.name))) for job in jobs]
    by = 6 if all(row[6] != "-" for row in rows if row[5] != "-") else 5  # tokenizers may differ
    best = min((row[by] for row in rows if row[by] != "-"), default=None, key=float)
    marked = [(row[0], f"{row[1]}, best" if row[by] == best else row[1], *row[2:]) for row in rows]
    print_table(columns, marked, ["bold green" if row[by] == best else "" for row in rows])
    sweep = jobs[0].run.root.parent
    tell(f"runs are in {sweep}; a picture of them: {shlex.join(['forgather', 'logs', 'plot', str(sweep)])}")


def _cells(job: SweepJob, code: int | None) -> list[str]:
    """What a job has measured, after how it stands."""
    state = _state(job, code)
    if not job.run.metrics.exists():
        return [state, *["-"] * 6]
    each = summarize(job.run)
    numbers = each.last_loss, each.last_eval_loss, each.best_eval_loss, each.best_eval_bits_per_byte
    losses = [_loss(number) for number in numbers]
    return [state, str(each.step), *losses, human_seconds(each.seconds)]


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _state(job: SweepJob, code: int | None) -> str:
    """How a job that does not run stands: what it has left tells nothing of a start that was refused."""
    has_run = job.run.metrics.exists() or job.run.exit.exists()
    state = state_of(job.run)[0] if has_run else "not run"
    if code == MISTAKE:
        return "refused"
    if code == FAILED and state not in ("aborted", "diverged"):
        return "failed"  # maybe before it wrote anything, on top of an earlier start's end
    return "cut" if code is not None and not has_run else state


@lru_cache(maxsize=256)
def _summary_at(run: RunDir, changed: int) -> Summary:
    """Of a run that runs, made again when its metrics have changed."""
    return summarize_or_state(run)
