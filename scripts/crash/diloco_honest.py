"""Honest workers of all kinds, none of whom may be rejected: ``diloco_campaign.py --honest``.

A trial draws how whole weights or 2 to 8 fragments are exchanged, how many workers there are, how often they meet, the
wire, learning rate and warm-up, who has longer batches, rows of equal or different length, a rate that rises 20-fold
for all (sync mode), and a short last round; in async mode rounds that follow each worker's speed. A worker whose loss
ends above its start has diverged, and may be rejected.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from crash_job import patience
from diloco_campaign import MODES, Launch, Trial, cold, ended, free_port, stop, team, thrown_out

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.diloco.ledger import read_ledger

TEXT = Path(__file__).parents[2] / "docs"
RECIPE = [
    "model=nano", "hidden_size=32", "precision=fp32", "optimizer=adamw", "lr_scheduler=constant", "data=text",
    f"data.files=[{TEXT}/*.md]", "data.tokenizer=bpe", "data.seq_len=32", "callbacks=minimal", "device=cpu",
    "eval_strategy=no", "logging_steps=5", "save_steps=1000",
]  # fmt: skip
_LIMIT = 280.0  # seconds for a trial
_STEPS = 720  # of a worker, at most, where that is three times what lies between two exchanges


class Rise(TrainerCallback):
    """The learning rate is ``by`` times as high from a step on."""

    def __init__(self, after: int, by: float) -> None:
        self._after, self._by = after, by

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self._after:
            for group in kwargs["optimizer"].param_groups:  # the schedule sets it anew for each step
                group["lr"] *= self._by


class HonestCampaign:
    """Trials under ``work``."""

    def __init__(self, work: Path, *, mode: str = "", launch: Launch = cold) -> None:
        self._work, self._mode, self._launch = work, mode, launch

    def trial(self, seed: int, sync_every: int | None = None) -> Trial:
        """``sync_every``: steps between two exchanges, of which a short trial has three; else both are drawn."""
        rng = random.Random(seed)
        mode, compression = self._mode or rng.choice(MODES), rng.choice(("int4", "fp32", "bf16"))
        count = rng.randint(2, 8) if mode == "fragments" else 1
        length = sync_every or rng.choice((60, 60, 120, 240, 500))
        every = math.ceil(length / count) * count
        rounds = 3 if sync_every else max(3, min(6, _STEPS // every))  # of all fragments
        steps = (rounds - 1) * every + rng.choice((every, every // 3, every // count))
        rate, warmup = 10 ** rng.uniform(-4, -2), min(rng.choice((0, 10, every)), steps)  # a short trial has few
        rises = mode != "async" and rng.random() < 0.4
        workers = {}
        for name in "abc"[: rng.choice((2, 3))]:
            own = [f"max_steps={steps}", f"learning_rate={rate / 20 if rises else rate}", f"warmup_steps={warmup}",
                   f"global_batch_size={rng.choice((2, 4, 8))}"]  # fmt: skip
            own += [f"+callbacks.rise={{_target_:diloco_honest.Rise,after:{every * (rounds // 2)},by:20}}"] * rises
            own += ["callbacks.diloco.dylu=true"] * (mode == "async" and rng.random() < 0.5)
            workers[name] = own
        facts = [mode, f"{len(workers)} workers", compression, f"{count} fragments", f"H {every}", f"{steps} steps",
                 f"rate {rate:.2g}", f"warm-up {warmup}", "x 20" if rises else ""]  # fmt: skip
        trial = Trial(seed, ("", ""), ", ".join(filter(None, facts)))
        root = self._work / f"honest-{seed}"
        shutil.rmtree(root, ignore_errors=True)
        shape = [*RECIPE, f"num_hidden_layers={max(2, count)}", f"data.packing={rng.choice(('concat', 'pad'))}"]
        server = [*shape, f"diloco.workers={len(workers)}", f"diloco.sync_every={every}", "diloco.save_every=100",
                  f"diloco.compression={compression}", f"diloco.num_fragments={count}"]  # fmt: skip
        server += ["diloco.mode=async"] if mode == "async" else []
        try:
            self._run(root, free_port(seed), server, {name: [*shape, *own] for name, own in workers.items()})
            problems = thrown_out(root / "server")
            diverged = [name for name in workers if _has_diverged(root / name)]
            trial.done += [f"{name} diverges" for name in diverged]
            trial.problems += problems if not diverged else []
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            trial.problems.append(f"{type(error).__name__}: {error}; see {root}")
        trial.done.append(f"{len(read_ledger(root / 'server' / 'rounds.jsonl')) - 1} rounds")
        if not trial.problems:
            shutil.rmtree(root)
        return trial

    def _run(self, root: Path, port: int, server: list[str], workers: dict[str, list[str]]) -> None:
        members = team(root, port, server, workers, self._launch)
        with ended(members.values()):
            for member in members.values():
                member.start()
            began, left = time.monotonic(), set(workers)
            while left or members["server"].process.poll() is None:
                left = {name for name in workers if members[name].process.poll() is None}
                if not left:
                    stop(port, "stop")
                if time.monotonic() - began > patience(_LIMIT):
                    raise RuntimeError(f"{', '.join(left) or 'the server'} did not come to an end")
                time.sleep(0.1)
            if any(codes := {name: member.process.poll() for name, member in members.items()}.values()):
                raise RuntimeError(f"exit codes {list(codes)}")


def _has_diverged(run: Path) -> bool:
    """Whether a worker's loss ends above its start."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    with contextlib.suppress(IndexError):
        return not losses[-1] <= losses[0]
    return False
