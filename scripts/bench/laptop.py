#!/usr/bin/env python
"""The record to beat: bits per byte of held-out text that two cores reach in 2, 5 and 10 minutes, from nothing.

    python scripts/bench/laptop.py run ours llama_adamw nanochat_muon [--minutes 2 5 10] [--corpora stdlib prose]
        [--seeds 1] [--rates 5e-3 1e-2] [--out laptop.jsonl]
    python scripts/bench/laptop.py run 'mine: model=nano learning_rate=2e-2 tokenizer=bpe bpe_vocab_size=2048'
    python scripts/bench/laptop.py table [--base ours] [--out laptop.jsonl]

An entry is a name of the table below, or a name of your own, a colon and overrides of ``forgather train``. Rules:

- The clock runs from the start of a process to its end, with an empty cache and two threads, on an idle machine:
  imports, training a tokenizer, tokenizing, training and the checkpoint count; measuring does not.
- Nothing comes from elsewhere: no weights, no tokenizer, no other text.
- How many steps fit is told before a run by two short ones of the same settings, so that schedules end in time. A run
  that ends late does not count, one that ends before 0.93 of its time neither; it is made again with other steps.
- Every model is measured by the same function, from its Hugging Face directory: bits per byte of all targets.
- Seeds below 11 are for choosing settings. They are measured on every other held-out document, and those from 11 on,
  which the table shows, on the documents between, by which nothing has been chosen.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import quality

LLAMA = "model=tiny tokenizer=bpe"
ENTRIES = {
    "ours": f"{LLAMA} learning_rate=5e-3",
    # transformers' models in its Trainer, of the same shape and on the same tokens (``quality.train_rival``)
    "llama_adamw": f"{LLAMA} learning_rate=2e-3",
    "nanochat_muon": f"{LLAMA} learning_rate=1e-2",
}
FRESH = 11
THREADS = 2
PROBES = (4, 24)  # steps
MARGIN = 0.97
SHORTEST = 0.93


@dataclass(frozen=True)
class Entry:
    """One run. ``words`` are overrides."""

    name: str
    words: str
    corpus: str
    minutes: float
    seed: int

    @property
    def rate(self) -> float:
        return float([word.partition("=")[2] for word in self.words.split() if word.startswith("learning_rate=")][-1])

    def all_words(self, steps: int, folder: Path) -> list[str]:
        """What ``forgather train`` gets, and what tells a rival its data and shape."""
        data = quality.data_words(self.corpus)
        common = [word for word in quality.COMMON if not word.startswith(("device=", "tokenizer="))]
        place = [f"output_dir={folder}/run", f"cache_dir={folder}/cache", "device=cpu"]
        return [*data, *common, f"max_steps={steps}", f"seed={self.seed}", *self.words.split(), *place]


def environment() -> dict[str, str]:
    root = str(quality.ROOT)
    return {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "PYTHONPATH": root}


def timed(entry: Entry, steps: int, folder: Path) -> float:
    """Train in a process of its own; returns the seconds from its start to its end."""
    if entry.name in quality.RIVALS:
        command = [sys.executable, __file__, "rival", json.dumps(asdict(entry)), str(steps), str(folder)]
    else:
        command = [sys.executable, "-m", "forgather_cli", "train", *entry.all_words(steps, folder)]
    start = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, env=environment())
    seconds = time.perf_counter() - start
    if ended.returncode:
        raise SystemExit(f"{entry.name} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return seconds


def rival(entry: Entry, steps: int, folder: Path) -> None:
    """The process of a rival."""
    from forgather_cli.config.load import load_config
    from forgather_cli.data.build import load_data

    config = load_config(None, entry.all_words(steps, folder)).config
    data = load_data(config.data, seed=entry.seed)
    job = quality.Job(entry.name, entry.words, "", entry.corpus, entry.seed, steps, precision_of(config))
    model, _ = quality.train_rival(job, config, data, folder)
    model.save_pretrained(folder / "model")


def precision_of(config: Any) -> str:
    from forgather_cli.hardware import without_auto

    return str(without_auto(config.precision, config.device)[0].type)


def measure(entry: Entry, steps: int, folder: Path) -> None:
    """The process that measures a model: prints a line of JSON."""
    import torch
    from transformers import AutoModelForCausalLM

    from forgather_cli.config.load import load_config
    from forgather_cli.data.build import load_data
    from forgather_cli.run_dir import RunDir

    torch.set_num_threads(THREADS)
    config = load_config(None, entry.all_words(steps, folder)).config
    data = load_data(config.data, seed=entry.seed)
    directory = folder / "model" if entry.name in quality.RIVALS else RunDir(folder / "run").checkpoint(steps) / "model"
    model = AutoModelForCausalLM.from_pretrained(directory)
    documents = quality.nats_of_documents(model, data, precision_of(config))[entry.seed >= FRESH :: 2]
    nats, size = (sum(column) for column in zip(*documents, strict=True))
    found = {
        "bits_per_byte": nats / size / math.log(2),
        "documents": len(documents),
        "bytes": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "processor": quality.processor_name(),
    }
    print("\n" + json.dumps(found))


def run_one(entry: Entry, pace: tuple[float, float]) -> dict[str, Any]:
    """``pace``: seconds of a start, and of a step."""
    limit, (start, step) = 60 * entry.minutes, pace
    steps = int((MARGIN * limit - start) / step)
    for _ in range(4):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            seconds = timed(entry, steps, folder)
            if SHORTEST * limit <= seconds <= limit:
                command = [sys.executable, __file__, "measure", json.dumps(asdict(entry)), str(steps), name]
                ended = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
                return {"steps": steps, "seconds": seconds, **json.loads(ended.stdout.splitlines()[-1])}
        print(f"{entry.name}: {steps} steps took {seconds:.0f} s of {limit:.0f}; again", flush=True)
        steps = int(steps * (MARGIN * limit - start) / max(seconds - start, 1.0))
    raise SystemExit(f"{entry.name}: this machine's pace changes too much; let nothing else run")


def probe(entry: Entry) -> tuple[float, float]:
    """Seconds of a start and of a step, by the difference of two short runs."""
    seconds = []
    for steps in PROBES:
        with tempfile.TemporaryDirectory() as name:
            seconds.append(timed(entry, steps, Path(name)))
    step = (seconds[1] - seconds[0]) / (PROBES[1] - PROBES[0])
    return seconds[0] - PROBES[0] * step, step


def run(arguments: argparse.Namespace) -> None:
    known = {json.dumps(record["entry"], sort_keys=True) for record in quality.read(arguments.out)}
    quality.prose(Path(tempfile.gettempdir()))
    paces: dict[tuple[str, str, str], tuple[float, float]] = {}
    every = itertools.product(arguments.seeds, arguments.corpora, arguments.minutes, arguments.rates or [None])
    for (seed, corpus, minutes, rate), text in itertools.product(every, arguments.entries):
        name, colon, own = text.partition(":")
        words = own.strip() if colon else ENTRIES[name]
        words = words if rate is None else f"{words} learning_rate={rate:g}"
        entry = Entry(name.strip(), words, corpus, minutes, seed)
        if json.dumps(asdict(entry), sort_keys=True) in known:
            continue
        kind = (entry.name, words, corpus)
        if kind not in paces:
            paces[kind] = probe(entry)
        found = run_one(entry, paces[kind])
        with arguments.out.open("a") as file:
            file.write(json.dumps({"entry": asdict(entry), **found}) + "\n")
        print(
            f"{entry.name:14} {corpus:7} {minutes:g} min seed {seed:2} rate {entry.rate:.1e}: {found['steps']} steps "
            f"in {found['seconds']:.0f} s, {found['bits_per_byte']:.4f} bits per byte",
            flush=True,
        )


def table(arguments: argparse.Namespace) -> None:
    """Every entry at the rate that did best with seeds below 11; of its runs those with other seeds, if any."""
    cells: dict[tuple[str, float], dict[str, dict[str, dict[int, dict[str, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for record in quality.read(arguments.out):
        entry = Entry(**record["entry"])
        cells[entry.corpus, entry.minutes][entry.name][entry.words][entry.seed] = record
    rows, claims = [], []
    for (corpus, minutes), entries in sorted(cells.items(), key=lambda item: (item[0][0] != "stdlib", item[0])):
        best = {name: _of_best_words(by_words) for name, by_words in entries.items()}
        base = best.get(arguments.base, {})
        for name, runs in sorted(best.items(), key=lambda item: _mean(item[1])):
            pairs = [runs[s]["bits_per_byte"] - base[s]["bits_per_byte"] for s in sorted(runs.keys() & base.keys())]
            difference, claim = "", None
            if name != arguments.base and len(pairs) > 1:
                claim = len(claims)
                claims.append(quality.paired_t(pairs))
                difference = f"{statistics.mean(pairs):+.3f} ± {quality.half_interval(pairs):.3f}"
            some = next(iter(runs.values()))
            size = f"{some['parameters'] / 1e6:.2f} M"
            steps = statistics.median(record["steps"] for record in runs.values())
            rows.append(
                [corpus, f"{minutes:g}", name, some["entry"]["words"], f"{steps:.0f}", size,
                 " ".join(map(str, sorted(runs))), f"{_mean(runs):.3f}", difference, claim]
            )  # fmt: skip
    corrected = quality.holm(claims)
    for row in rows:
        row[9] = "" if row[9] is None else f"{corrected[row[9]]:.2g}"
    columns = "corpus, minutes, entry, settings, steps, parameters, seeds, bits per byte, minus base ± 95 %, p (Holm)"
    quality.print_table(columns.split(", "), rows)


def _of_best_words(by_words: dict[str, dict[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    def tuned(runs: dict[int, dict[str, Any]]) -> float:
        return _mean({seed: record for seed, record in runs.items() if seed < FRESH})

    runs = min(by_words.values(), key=tuned)
    return {seed: record for seed, record in runs.items() if seed >= FRESH} or runs


def _mean(runs: dict[int, dict[str, Any]]) -> float:
    return statistics.mean(record["bits_per_byte"] for record in runs.values()) if runs else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("entries", nargs="+")
    runner.add_argument("--minutes", type=float, nargs="+", default=[2, 5, 10])
    runner.add_argument("--corpora", nargs="+", default=["stdlib", "prose"], choices=quality.CORPORA)
    runner.add_argument("--seeds", type=int, nargs="+", default=[1])
    runner.add_argument("--rates", type=float, nargs="+", default=[])
    tabulator = commands.add_parser("table")
    tabulator.add_argument("--base", default="ours")
    for each in (runner, tabulator):
        each.add_argument("--out", type=Path, default=Path("laptop.jsonl"))
    for name in ("rival", "measure"):
        single = commands.add_parser(name)
        single.add_argument("entry", type=json.loads)
        single.add_argument("steps", type=int)
        single.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command in ("rival", "measure"):
        do = rival if arguments.command == "rival" else measure
        do(Entry(**arguments.entry), arguments.steps, arguments.folder)
    else:
        {"run": run, "table": table}[arguments.command](arguments)


if __name__ == "__main__":
    main()
