"""Kill training runs of random strategy and settings at random instants, resume them, and compare what they compute.

    scripts/crash_campaign 100                        # 100 trials, seeds 0 to 99
    scripts/crash_campaign 1 --seed 17                # the trial of seed 17, exactly as drawn
    scripts/crash_campaign 20 --layouts single,ddp2 --jobs 2 optimizer.eps=1e-6
    scripts/crash_campaign 20 --busy                  # while other processes take every core
    scripts/crash_campaign 40 --adapters              # runs that train adapters
    scripts/crash_campaign 20 --mixtures              # runs on mixtures of sources, also killed where weights change
    scripts/crash_campaign 12 --preferences           # runs on pairs, also killed while the reference is computed

A trial draws a layout and settings (``crash_draw.py``), with the default callbacks. It kills a rank, the launcher, a
data worker or all of them by a signal, mostly SIGKILL, inside a save more often than not, or within a second after a
resume, or twice in a row before the first checkpoint; and it resumes the run: once to three times, in the same layout
or in another one. What is left of a killed job must end within 30 s, times the processes that share each core. A run
resumed in its layout must end with the losses, norms, samples, weights, moments and random states of an uninterrupted
one, bit by bit; in another layout with its losses and norms within 1e-5 and 1e-4. What it has read of a mixture must be
what the uninterrupted one has, by ``forgather data audit``, and what a reference says of pairs the same. Other
arguments are overrides for every run. Exit code 1 if a trial fails; each failure is printed with its seed, and its run
is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from crash_check import (
    Before,
    after_end,
    after_kill,
    compare,
    last_step,
    lost_steps,
    other_values,
    read_as,
    saved_steps,
)
from crash_draw import (
    ADAPTERS,
    COMMON,
    LAYOUTS,
    MAX_STEPS,
    MIXTURES,
    MODEL,
    PREFERENCES,
    RECIPES,
    TEXT,
    Plan,
    Recipe,
    draw,
    reference_words,
)
from crash_job import LEFT_OVER, Job, Member, Struck, patience, reached, send, strike

_LIMIT = 300.0  # seconds that a start takes at most which nothing disturbs
_STACKS = 2.0  # seconds in which a process that hangs writes its stacks to its log


@dataclass
class Trial:
    """What one trial did."""

    plan: Plan
    kills: list[Struck] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Steps computed again after each kill."""
    problems: list[str] = field(default_factory=list)
    moved_after: int | None = None
    """Step at which another layout went on."""
    discarded: set[int] = field(default_factory=set)
    """Steps at which a signal stopped the run, or at which the run says that one stopped its evaluation."""

    def __str__(self) -> str:
        inside = sum(kill.inside_save for kill in self.kills)
        verdict = "; ".join(self.problems) or f"{len(self.kills)} kills, {inside} inside a save, {sum(self.lost)} lost"
        return f"seed {self.plan.seed}: {self.plan}: {'FAILED: ' if self.problems else ''}{verdict}"


def uninterrupted(words: Sequence[str], environment: dict[str, str], output: Path) -> int:
    """``forgather WORDS`` as a process that writes to ``output``; returns its exit code."""
    command, everything = [sys.executable, "-m", "forgather_cli", *words], {**os.environ, **environment}
    with output.open("ab") as stream:
        everything["OMP_NUM_THREADS"] = "1"
        return subprocess.run(
            command, stdout=stream, stderr=stream, env=everything, timeout=patience(_LIMIT)
        ).returncode


class Campaign:
    """Trials under ``work``, which share the runs that they are compared with: ``reference`` makes each of those, and
    ``job`` starts those that are killed."""

    def __init__(
        self,
        work: Path,
        overrides: Sequence[str] = (),
        layouts: Sequence[str] = (),
        reference: Callable[[Sequence[str], dict[str, str], Path], int] = uninterrupted,
        *,
        job: type[Job] = Job,
        recipes: Sequence[Recipe] = RECIPES,
    ) -> None:
        self._work, self._layouts, self._make_reference, self._start = work, layouts, reference, job
        self._recipes = recipes
        self._corpus = work / "corpus"
        write_corpus(self._corpus)
        self._overrides = [*(TEXT if recipes in (RECIPES, ADAPTERS) else ()), *overrides]
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._environment = {name: str(work / name.lower()) for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
        self._model: Sequence[str] = MODEL
        if recipes == ADAPTERS:
            base = self._uninterrupted("base", [*self._here(COMMON), "learning_rate=1e-2"])
            self._model = ("model=pretrained", f"model.path={base}/checkpoints/step-{MAX_STEPS:08}/model")

    def trial(self, seed: int) -> Trial:
        """Start, kill and resume as the seed says, go on to the end, and compare."""
        trial = Trial(draw(seed, self._layouts, self._recipes))
        run = self.run_of(seed)
        shutil.rmtree(run.parent, ignore_errors=True)
        run.mkdir(parents=True)
        try:
            reference = self.reference(trial.plan)
            starts = range(len(trial.plan.kills))
            going_on = all(self._killed(trial, run, start) for start in starts)
            if not trial.problems:
                self._finished(trial, run, len(trial.plan.kills) if going_on else len(trial.kills))
            if not trial.problems:
                trial.problems += after_end(run)
                trial.problems += compare(run, reference, moved_after=trial.moved_after, discarded=trial.discarded)
                trial.problems += read_as(run, reference) if (reference / "mixture.jsonl").exists() else []
                if trial.plan.recipe.compared and trial.moved_after is None:
                    trial.problems += other_values(run, reference)
        except Exception as error:  # one trial's failure, whatever it is
            trial.problems.append(f"{type(error).__name__}: {error}")
        if not trial.problems:
            shutil.rmtree(run.parent)
        return trial

    def run_of(self, seed: int) -> Path:
        return self._work / f"trial-{seed}" / "run"

    # ------------------------------------------------------------------------------------------------------- one start

    def _killed(self, trial: Trial, run: Path, start: int) -> bool:
        """Start, wait for the instant, kill, and wait for the rest to end. False if it ended by itself before."""
        kill, before = trial.plan.kills[start], Before.of(run)
        with self._job(trial, run, start) as job:
            if not reached(job, kill.instant, _LIMIT):
                trial.problems += _ended_by_itself(job)
                return False
            trained = last_step(run) > before.step
            struck = strike(job, kill)
            left = job.wait(LEFT_OVER)
            if left:
                trial.problems.append(f"after {kill}: still there are {', '.join(map(str, left))}")
                show_stacks(left)
            code = job.process.poll()
        if code is not None:
            trial.kills.append(struck)
            trial.lost.append(lost_steps(run, before))
            writing = struck.inside_save and struck.event != "retention"
            trial.problems += after_kill(run, trial.plan, kill, struck.target, code, trained, before, writing=writing)
            trial.problems += says_how_to_go_on(job.output, run) if code == 75 else []
            trial.discarded |= {max(saved_steps(run), default=0)} if code in (75, 0) else set()
            trial.discarded |= set(map(int, re.findall(r"evaluation at step (\d+) was stopped", job.output)))
        return not trial.problems

    def _finished(self, trial: Trial, run: Path, start: int) -> None:
        """Start once more, and let the run come to its end."""
        with self._job(trial, run, start) as job:
            if left := job.wait(_LIMIT):
                trial.problems.append(f"the resumed run goes on after {_LIMIT:g} s: {', '.join(map(str, left))}")
                show_stacks(left)
            elif job.process.returncode != 0:
                trial.problems.append(f"the resumed run ends with exit code {job.process.returncode}")

    def _job(self, trial: Trial, run: Path, start: int) -> Job:
        plan = trial.plan
        if start > 0 and plan.moved_to is not None and trial.moved_after is None:
            trial.moved_after = max(saved_steps(run), default=0)
        changes = [*self._here(plan.words(start)), f"data.cache_dir={run.parent}/cache"]
        if start > 0 and plan.by_resume and (run / "config.yaml").exists():
            moved = plan.layout_of(start).words(plan.recipe.accumulation) if plan.moved_to is not None else []
            words = ["resume", str(run), *moved]
        else:
            words = ["train", *changes, f"output_dir={run}", "resume_from_checkpoint=true"]
        return self._start(run, words, self._environment, run.parent / "output.txt")

    def reference(self, plan: Plan) -> Path:
        """The uninterrupted run of a plan's layout and settings, which is made when it is first asked for."""
        name = f"{plan.layout.name}-{plan.recipe.name}".replace(", ", "-").replace(" ", "-")
        words = [*self._here(reference_words(plan.layout, plan.recipe)), "save_steps=1000"]
        with self._locks[name]:
            return self._uninterrupted(name, words)

    def _here(self, words: Sequence[str]) -> list[str]:
        """The overrides of a run with this campaign's model and files."""
        every = [*words, *self._model, *self._overrides]
        return [word.replace("CORPUS", str(self._corpus)) for word in every]

    def _uninterrupted(self, name: str, words: Sequence[str]) -> Path:
        """The run of this name, which is made where it is not there yet."""
        run, output = self._work / "references" / name / "run", self._work / f"{name}.txt"
        if not (run / "exit.json").exists():
            shutil.rmtree(run, ignore_errors=True)
            words = ["train", *words, f"data.cache_dir={run.parent}/cache", f"output_dir={run}"]
            if self._make_reference(words, self._environment, output) != 0:
                raise RuntimeError(f"the uninterrupted run fails; see {output}")
        return run


def _ended_by_itself(job: Job) -> list[str]:
    """What is wrong with a start that did not get to the instant of its kill."""
    left = job.wait(LEFT_OVER) if job.process.poll() is not None else job.members()
    if left:
        show_stacks(left)
        return [f"undisturbed, it does not come to an end: {', '.join(map(str, left))}"]
    code = job.process.returncode
    return [f"undisturbed, it ends with exit code {code}"] if code != 0 else []


def says_how_to_go_on(output: str, run: Path) -> list[str]:
    """The run is named from the working directory on, where it lies below that."""
    last = output.rstrip().rpartition("\n")[2]
    *command, named = shlex.split(last) if last.startswith("forgather resume ") else [""]
    is_right = command == ["forgather", "resume"] and Path(named).resolve() == run.resolve()
    return [] if is_right else [f"exit code 75 with {last!r} as the last line"]


def show_stacks(members: Sequence[Member]) -> None:
    """Have ranks that hang write where they stand to their logs."""
    for member in members:
        if member.role in ("launcher", "rank"):
            send(member.pid, signal.SIGUSR2)
    time.sleep(_STACKS)


def write_corpus(directory: Path) -> None:
    """40 short documents of made-up words: some 12 steps to an epoch, so that runs go through several; and pairs, of
    10 steps.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(200)]
    for number in range(40):
        text = " ".join(rng.choices(words, k=rng.randint(20, 60)))
        (directory / f"{number:02}.txt").write_text(text)
    pairs = [{key: " ".join(rng.choices(words, k=2)) for key in ("prompt", "chosen", "rejected")} for _ in range(266)]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


# --------------------------------------------------------------------------------------------------------------- report


@dataclass
class Report:
    """What a campaign did."""

    trials: list[Trial] = field(default_factory=list)

    @property
    def kills(self) -> list[Struck]:
        return [kill for trial in self.trials for kill in trial.kills]

    @property
    def failures(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.problems]

    def __str__(self) -> str:
        kills, lost = self.kills, [lost for trial in self.trials for lost in trial.lost]
        moved = sum(trial.moved_after is not None for trial in self.trials)
        whole = sum(not trial.kills and not trial.problems for trial in self.trials)
        head = (
            f"{len(self.trials)} trials ({moved} resumed in another layout, {whole} ended before their kill), "
            f"{len(kills)} kills ({sum(kill.inside_save for kill in kills)} inside a save), {sum(lost)} steps computed "
            f"again (at most {max(lost, default=0)} after one kill), {len(self.failures)} failures"
        )
        signals = [(kill.signum.name + ("+SIGKILL" if kill.followed else ""), kill.target) for kill in kills]
        events = [(kill.event, kill.target) for kill in kills]
        layouts = Counter(trial.plan.layout.name for trial in self.trials)
        counts = ", ".join(f"{name} {count}" for name, count in layouts.most_common())
        tables = [_table("signal", signals), _table("instant", events), f"layouts: {counts}"]
        return "\n\n".join([head, *tables, *map(str, self.failures)])


def _table(title: str, cells: Sequence[tuple[str, str]]) -> str:
    """Counts of (row, column) with their sums."""
    rows, columns = (list(Counter(cell[side] for cell in cells)) for side in (0, 1))
    counts = Counter(cells)
    lines = [[title, *columns, "all"]]
    lines += [[r, *(str(counts[r, c]) for c in columns), str(sum(counts[r, c] for c in columns))] for r in rows]
    lines.append(["all", *(str(sum(counts[r, c] for r in rows)) for c in columns), str(len(cells))])
    return "\n".join(
        "".join(f"{cell:<16}" if i == 0 else f"{cell:>10}" for i, cell in enumerate(line)) for line in lines
    )


def campaign(seeds: Sequence[int], runs: Campaign, jobs: int = 1) -> Report:
    """Run the trials of ``seeds``, ``jobs`` at a time."""
    report, start = Report(), time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(runs.trial, seed) for seed in seeds]
        for future in as_completed(futures):
            report.trials.append(future.result())
            minutes = (time.monotonic() - start) / 60
            print(f"{len(report.trials)}/{len(seeds)} {minutes:.1f} min  {report.trials[-1]}", flush=True)
    return report


@contextmanager
def busy_cores() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Inside, a process of normal priority computes for each core. Each ends with this process, however that ends: it
    asks for its parent in between.
    """
    compute = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(1000000))"
    others = [subprocess.Popen([sys.executable, "-c", compute]) for _ in os.sched_getaffinity(0)]
    try:
        yield others
    finally:
        for other in others:
            other.kill()
            other.wait()


def _take_signals() -> None:
    """Ignored signals (``nohup``, ``&``) would be ignored in the runs too; caught ones start there as by default."""
    signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others' follow")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--layouts", default="", help=f"only these: {','.join(layout.name for layout in LAYOUTS)}")
    parser.add_argument("--adapters", action="store_true", help="runs that train adapters beside a frozen base")
    parser.add_argument("--mixtures", action="store_true", help="runs on mixtures of sources")
    parser.add_argument("--preferences", action="store_true", help="runs on pairs with a reference")
    parser.add_argument("--busy", action="store_true", help="other processes take every core meanwhile")
    parser.add_argument("--work", type=Path, help="directory to work in and to keep, with the uninterrupted runs")
    arguments, overrides = parser.parse_known_args()
    _take_signals()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="crash-campaign-"))
    seeds = range(arguments.seed, arguments.seed + arguments.trials)
    layouts = [name for name in arguments.layouts.split(",") if name]
    with busy_cores() if arguments.busy else nullcontext():
        recipes = ADAPTERS if arguments.adapters else MIXTURES if arguments.mixtures else RECIPES
        recipes = PREFERENCES if arguments.preferences else recipes
        runs = Campaign(work.resolve(), overrides, layouts, recipes=recipes)
        report = campaign(seeds, runs, arguments.jobs)
    print(f"\n{report}")
    if report.failures:
        print(f"\nkept in {work}")
    elif arguments.work is None:
        shutil.rmtree(work)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
