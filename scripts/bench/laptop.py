#!/usr/bin/env python
"""The record to beat: bits per byte of held-out text that two cores reach in 2, 5 and 10 minutes, from nothing.

    python scripts/bench/laptop.py pace ours llama_adamw nanochat_muon [--rounds 2]
    python scripts/bench/laptop.py run ours llama_adamw nanochat_muon [--minutes 2 5 10] [--corpora stdlib prose]
        [--seeds 11 12 13] [--jobs 2] [--device cpu]
    python scripts/bench/laptop.py run 'mine: model=nano learning_rate=2e-2 tokenizer=bpe bpe_vocab_size=2048'
    python scripts/bench/laptop.py clock ours --minutes 2
    python scripts/bench/laptop.py table [--base ours] [--tuning]

An entry is a name of the table below, or a name of your own, a colon and overrides of ``forgather train``. All commands
take ``--out FILE``, by default laptop.jsonl. Rules:

- The time is a process's from its start to its end, on two threads, with an empty cache, on a machine that does nothing
  else: imports, training a tokenizer, tokenizing, training and the last checkpoint count; measuring does not.
- ``pace`` measures seconds of a start and of a step, all entries in turns, and how many steps fit follows from it, so
  that schedules end in time. ``run`` then trains so many, two runs at once on a thread each or, with ``--device cuda``,
  on a GPU; how long that takes counts nothing. ``clock`` trains one on two threads and says how long it took.
- Nothing comes from elsewhere: no weights, no tokenizer, no other text.
- Every model is measured by the same function, from its Hugging Face directory: bits per byte of all targets.
- Seeds below 11 are for choosing settings. They are measured on every other held-out document (``table --tuning``), and
  those from 11 on on the documents between, by which nothing has been chosen.
- Two entries are compared by the differences of runs with equal seeds: Student's t-test, Holm's correction.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import quality
from quality import Job

ENTRIES = {  # all of the shape of model=tiny
    "ours": "tokenizer=bpe learning_rate=5e-3",
    # transformers' models in its Trainer, on the same tokens (quality.py's _rival)
    "llama_adamw": "tokenizer=bpe learning_rate=2e-3",
    "nanochat_muon": "tokenizer=bpe learning_rate=4e-2",
}
FRESH = 11  # seeds from here on choose nothing
SHORT, LONGER = 21, 40  # steps of a probe (the warmup has 20), and how many more the second one has


def timed(name: str, words: str, corpus: str, steps: int) -> float:
    """Train in a process of its own on two threads; returns the seconds from its start to its end."""
    job = Job(name, words, "tiny", corpus, 1, steps, "fp32")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, quality.__file__, "train", json.dumps(vars(job)), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        seconds = time.perf_counter() - start
    if ended.returncode:
        raise SystemExit(f"{name} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return seconds


def pace(arguments: argparse.Namespace) -> None:
    """Add a line for each entry and round: seconds of a start on each corpus, and of a step."""
    quality.prose(Path(tempfile.gettempdir()))
    for _, text in itertools.product(range(arguments.rounds), arguments.entries):
        name, words = quality.named(text, ENTRIES)
        short = {corpus: timed(name, words, corpus, SHORT) for corpus in arguments.corpora}
        first = arguments.corpora[0]
        step = (timed(name, words, first, SHORT + LONGER) - short[first]) / LONGER
        starts = {corpus: seconds - SHORT * step for corpus, seconds in short.items()}
        found = {"name": name, "words": _but_rate(words), "start": starts, "step": step}
        with arguments.out.open("a") as file:
            file.write(json.dumps({"pace": found, "processor": quality.processor_name()}) + "\n")
        print(
            f"{name}: {step:.2f} s a step; start " + ", ".join(f"{s:.1f} s {c}" for c, s in starts.items()), flush=True
        )


def _but_rate(words: str) -> str:
    return " ".join(word for word in words.split() if not word.startswith("learning_rate="))


def steps_in(minutes: float, name: str, words: str, corpus: str, out: Path) -> int:
    """How many steps fit: as many as its runs have had, else by the medians of this processor's paces."""
    records = quality.read(out)
    for job in (quality.job_of(record) for record in records if "job" in record):
        if (job.recipe, _but_rate(job.words), job.corpus, job.as_long_as) == (
            name, _but_rate(words), corpus, f"{minutes:g} minutes",
        ):  # fmt: skip
            return job.steps
    processor = quality.processor_name()
    paces = [record["pace"] for record in records if "pace" in record and record["processor"] == processor]
    own = [found for found in paces if (found["name"], found["words"]) == (name, _but_rate(words))]
    if not own:
        raise SystemExit(f"no pace of {name} on this processor in {out}; measure it first: laptop.py pace '{name}...'")
    start = statistics.median(found["start"][corpus] for found in own)
    return int((60 * minutes - start) / statistics.median(found["step"] for found in own))


def run(arguments: argparse.Namespace) -> None:
    jobs = []
    for minutes, seed, corpus, text in itertools.product(
        arguments.minutes, arguments.seeds, arguments.corpora, arguments.entries
    ):
        name, words = quality.named(text, ENTRIES)
        steps = steps_in(minutes, name, words, corpus, arguments.out)
        jobs.append(Job(name, words, "tiny", corpus, seed, steps, "fp32", f"{minutes:g} minutes"))
    quality.run_jobs(jobs, arguments.out, arguments.jobs, arguments.device)


def clock(arguments: argparse.Namespace) -> None:
    for text, minutes in itertools.product(arguments.entries, arguments.minutes):
        name, words = quality.named(text, ENTRIES)
        steps = steps_in(minutes, name, words, arguments.corpora[0], arguments.out)
        seconds = timed(name, words, arguments.corpora[0], steps)
        print(
            f"{name}: {steps} steps in {seconds:.0f} s, {seconds / 60 / minutes:.2f} of {minutes:g} minutes", flush=True
        )


def table(arguments: argparse.Namespace) -> None:
    """Every entry on every corpus and for each time, best first, beside ``--base`` by equal seeds."""
    cells: dict[tuple[bool, str, float], dict[tuple[str, str], dict[int, dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for record in quality.read(arguments.out):
        if "job" in record and (record["job"]["seed"] < FRESH) == arguments.tuning:
            job = quality.job_of(record)
            cell = job.corpus != "stdlib", job.corpus, float(job.as_long_as.split()[0])
            cells[cell][job.recipe, job.words][job.seed] = record
    rows, claims = [], quality.Claims()
    for (_, corpus, minutes), entries in sorted(cells.items()):
        bits = {key: {seed: _bits(record) for seed, record in runs.items()} for key, runs in entries.items()}
        bases = [runs for (name, _), runs in bits.items() if name == arguments.base]
        for (name, words), found in sorted(bits.items(), key=lambda item: statistics.mean(item[1].values())):
            base = bases[0] if len(bases) == 1 and name != arguments.base else {}
            records = entries[name, words].values()
            steps = statistics.median(record["job"]["steps"] for record in records)
            rows.append(
                [corpus, f"{minutes:g}", name, words, f"{steps:.0f}", f"{next(iter(records))['parameters'] / 1e6:.2f}",
                 " ".join(map(str, sorted(found))), f"{statistics.mean(found.values()):.3f}", *claims.made(found, base)]
            )  # fmt: skip
    claims.correct(rows, -1)
    columns = "corpus, minutes, entry, settings, steps, M parameters, seeds, bits per byte, minus base ± 95 %, p (Holm)"
    quality.print_table(columns.split(", "), rows)


def _bits(record: dict[str, Any]) -> float:
    """Bits per byte of the half of the held-out documents that runs with such a seed are measured on."""
    nats, size = record["halves"][record["job"]["seed"] >= FRESH]
    return nats / size / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    by_name = {name: commands.add_parser(name) for name in ("pace", "run", "clock", "table")}
    for name in ("pace", "run", "clock"):
        by_name[name].add_argument("entries", nargs="+")
        by_name[name].add_argument("--corpora", nargs="+", default=["stdlib", "prose"], choices=quality.CORPORA)
        if name != "pace":
            by_name[name].add_argument("--minutes", type=float, nargs="+", default=[2, 5, 10])
    by_name["pace"].add_argument("--rounds", type=int, default=2)
    by_name["run"].add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    by_name["run"].add_argument("--jobs", type=int, default=2)
    by_name["run"].add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    by_name["table"].add_argument("--base", default="ours")
    by_name["table"].add_argument("--tuning", action="store_true")
    for each in by_name.values():
        each.add_argument("--out", type=Path, default=Path("laptop.jsonl"))
    arguments = parser.parse_args()
    {"pace": pace, "run": run, "clock": clock, "table": table}[arguments.command](arguments)


if __name__ == "__main__":
    main()
