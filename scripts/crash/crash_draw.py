"""What a trial of the crash campaign does: layout, settings, kills, all of it drawn from its seed before it begins."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")

MAX_STEPS = 30
BATCH = 24
"""Sequences of one step in every layout: what 2 and 3 ranks, 2 micro-steps and 4 micro-batches divide."""

COMMON = (
    f"max_steps={MAX_STEPS}", f"global_batch_size={BATCH}", "deterministic=true",
    "precision=fp32", "data.seq_len=32",
    "eval_steps=12", "max_eval_samples=8", "verify_checkpoint=full",
    "callbacks.textgen.prompts=[a,the]", "callbacks.textgen.max_new_tokens=3",
)  # fmt: skip
"""With the default callbacks."""
TEXT = ("data=text", "data.eval_fraction=0.1", "data.files=[CORPUS/*.txt]")
"""The data of every run but those of mixtures. CORPUS stands for where the files lie."""
MODEL = ("model=nano", "model.num_hidden_layers=4")
"""The model of every run; with adapters it is their base."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask for a save and an end."""

_SIGNALS = {
    signal.SIGKILL: 55, signal.SIGTERM: 12, signal.SIGINT: 7, signal.SIGHUP: 5, signal.SIGUSR1: 7,
    signal.SIGABRT: 7, signal.SIGSEGV: 7,
}  # fmt: skip
_TARGETS = {"rank": 4, "launcher": 3, "group": 3}


@dataclass(frozen=True)
class Layout:
    """A strategy, its ranks and settings of it."""

    name: str
    trainer: str
    ranks: int = 1
    settings: tuple[str, ...] = ()
    readers: int | None = None
    """How many of the ranks read different data; None: all."""

    def words(self, accumulation: int) -> list[str]:
        """The overrides that train ``BATCH`` sequences per step with so many micro-steps."""
        each = BATCH // accumulation // (self.readers or self.ranks)
        ranks = [f"nproc_per_node={self.ranks}"] if self.ranks > 1 else []
        return [f"trainer={self.trainer}", f"per_device_train_batch_size={each}", *ranks, *self.settings]


@dataclass(frozen=True)
class Recipe:
    """The settings that, with the layout, decide what an uninterrupted run computes."""

    name: str
    overrides: tuple[str, ...]
    accumulation: int = 1
    logging_steps: int = 1
    exact: bool = True
    """Another layout computes the same within 1e-5: no dropout, no muon."""
    change: int | None = None
    """Step at which a mixture's weights jump; many of the first kills are one step from it at most."""
    compared: bool = False
    """With a reference, which is computed before the first step; a third of the first kills are there."""


@dataclass(frozen=True)
class Instant:
    """``delay`` seconds after the ``count``-th ``event`` of a start (see ``crash_job.Watch``)."""

    event: str
    count: int
    delay: float

    def __str__(self) -> str:
        number = f" {self.count}" if self.count > 1 else ""
        return f"{self.event}{number}+{1000 * self.delay:.1f} ms"


@dataclass(frozen=True)
class Kill:
    """A signal to a process of the job: to rank ``rank``, the launcher, a data worker of the rank, or all at once."""

    instant: Instant
    signum: signal.Signals
    target: str
    rank: int = 0
    then: float | None = None
    """Seconds after which all are killed with SIGKILL, as an impatient scheduler does."""

    def __str__(self) -> str:
        number = f" {self.rank}" if self.target in ("rank", "worker") else ""
        then = "" if self.then is None else f" (SIGKILL to all {1000 * self.then:.0f} ms later)"
        return f"{self.signum.name} to {self.target}{number} at {self.instant}{then}"


@dataclass(frozen=True)
class Plan:
    """One trial. It is killed and resumed as often as ``kills`` says, and then runs to its end."""

    seed: int
    layout: Layout
    recipe: Recipe
    save_steps: int
    keep: int
    async_save: bool
    workers: int
    by_resume: bool
    """Resumed by ``forgather resume``, not by the first command again."""
    kills: tuple[Kill, ...]
    moved_to: Layout | None
    """Where it is resumed after the first kill, if not in the same layout."""

    def layout_of(self, start: int) -> Layout:
        """Of the ``start``-th start, from 0."""
        return self.moved_to if self.moved_to is not None and start > 0 else self.layout

    def words(self, start: int) -> list[str]:
        """The overrides of a start by the command ``train``."""
        saving = [f"save_steps={self.save_steps}", f"save_total_limit={self.keep}"]
        saving += [f"async_save={str(self.async_save).lower()}", f"dataloader_num_workers={self.workers}"]
        return [*reference_words(self.layout_of(start), self.recipe), *saving]

    def __str__(self) -> str:
        mode = "async" if self.async_save else "sync"
        text = f"{self.layout.name} {self.recipe.name}, saved every {self.save_steps} ({mode}, {self.keep} kept)"
        text += f", {self.workers} workers" if self.workers else ""
        moved = f"; resumed as {self.moved_to.name}" if self.moved_to else ""
        return f"{text}: {'; '.join(map(str, self.kills))}{moved}"


def _pipeline(name: str, schedule: str) -> Layout:
    return Layout(name, "pipeline", 2, (f"schedule={schedule}", "n_microbatches=4"), readers=1)


LAYOUTS = {
    Layout("single", "single"): 5,
    Layout("ddp2", "ddp", 2): 3,
    Layout("ddp3", "ddp", 3): 1,
    Layout("fsdp2", "fsdp2", 2): 3,
    Layout("fsdp3", "fsdp2", 3): 1,
    _pipeline("1f1b", "1F1B"): 1,
    _pipeline("gpipe", "GPipe"): 1,
    _pipeline("interleaved", "Interleaved1F1B"): 1,
    _pipeline("zbv", "ZBVZeroBubble"): 1,
}
"""With the weights they are drawn by. Each option of ``trainer`` has a row, with settings under which it computes what
one device does: tests of parity and of resuming take from here the options that they have no row for.
"""

RECIPES = (
    # no higher rate: at 2e-3 a token's hidden state is after 22 steps no larger behind two layers than its embedding
    # (RMS 0.02); RMSNorms' gradients multiply, the norm jumps to 6, and last bits make a thousandth of it
    Recipe("adamw", ("optimizer=adamw", "learning_rate=1e-3", "data.packing=concat")),
    Recipe(
        "sgd, 2 micro-steps",
        ("optimizer=sgd", "optimizer.momentum=0.9", "learning_rate=0.05", "data.packing=best_fit"),
        accumulation=2,
        logging_steps=3,
    ),
    Recipe(
        "muon, dropout",
        ("optimizer=muon", "model.residual_dropout=0.1", "data.packing=pad"),
        exact=False,
    ),
    Recipe(
        "adamw, dropout, 2 micro-steps",
        ("optimizer=adamw", "learning_rate=1e-3", "model.residual_dropout=0.1", "data.packing=concat"),
        accumulation=2,
        exact=False,
    ),
)

ADAPTERS = (
    Recipe("lora", ("adapter=lora", "optimizer=adamw", "optimizer.eps=1e-6", "data.packing=concat")),
    Recipe(
        "dora and norms, 2 micro-steps",
        ("adapter=dora", "trainable=[norm]", "optimizer=adamw", "optimizer.eps=1e-6", "data.packing=pad"),
        accumulation=2,
        logging_steps=3,
    ),
    Recipe(
        "lora, dropout",
        ("adapter=lora", "adapter.lora_dropout=0.1", "optimizer=muon", "data.packing=best_fit"),
        exact=False,
    ),
)
"""Drawn from in place of RECIPES where the runs are to have adapters."""

_PROSE, _NOTES, _CODE = (
    f"{name}: {{type: text, files: ['CORPUS/{files}.txt'], {more}}}"
    for name, files, more in (
        ("prose", "[0-2]*", "weight: 0.6"),
        ("notes", "3*", "weight: 0.1, packing: pad, max_samples: 7"),
        ("code", "1*", "weight: 0.3, packing: best_fit, max_epochs: 4"),
    )
)


def _mixture(change: int) -> tuple[str, ...]:
    """A line, then a jump at a step."""
    line, jump = "{prose: 0.2, code: 0.7, notes: 0.1}", "{prose: 0.5, code: 0.5, notes: 0}"
    entries = f"{{at: 0.1, weights: {{prose: 0.6, code: 0.3, notes: 0.1}}}}, {{at: {change}, weights: {line}}}"
    return (
        "data=mixture",
        f"data.sources={{{_PROSE}, {_NOTES}, {_CODE}}}",
        f"data.weight_schedule=[{entries}, {{at: {change}, weights: {jump}}}]",
    )


MIXTURES = (
    Recipe("mixture, adamw", (*_mixture(8), "optimizer=adamw", "learning_rate=1e-3"), change=8),
    Recipe(
        "mixture, sgd, 2 micro-steps",
        (*_mixture(17), "optimizer=sgd", "optimizer.momentum=0.9", "learning_rate=0.05"),
        accumulation=2,
        change=17,
    ),
    Recipe(
        "mixture, muon, dropout",
        (*_mixture(17), "optimizer=muon", "model.residual_dropout=0.1"),
        exact=False,
        change=17,
    ),
)
"""Of mixtures of sources."""

_PAIRS = (
    "data=preference", "data.files=[CORPUS/pairs.jsonl]", "data.eval_fraction=0.1", "data.tokenizer=bytes",
    "data.chat_template=chatml", "data.add_tokens=true", "data.seq_len=64", "loss=dpo",
)  # fmt: skip

PREFERENCES = (
    Recipe("pairs, adamw", (*_PAIRS, "optimizer=adamw", "learning_rate=1e-4"), compared=True),
    Recipe(
        "pairs, ipo, sgd, 2 micro-steps",
        (*_PAIRS, "loss.variant=ipo", "data.packing=best_fit", "optimizer=sgd", "optimizer.momentum=0.9",
         "learning_rate=1e-3"),
        accumulation=2,
        compared=True,
    ),
    Recipe(
        "pairs, muon",
        (*_PAIRS, "loss.length_normalized=true", "loss.sft_weight=0.1", "optimizer=muon"),
        logging_steps=3,
        exact=False,
        compared=True,
    ),
)  # fmt: skip
"""Of pairs that are compared with a reference."""


def reference_words(layout: Layout, recipe: Recipe) -> list[str]:
    """The overrides that decide what is computed."""
    logging = f"logging_steps={recipe.logging_steps}"
    return [*COMMON, *recipe.overrides, logging, *layout.words(recipe.accumulation)]


def draw(seed: int, layouts: Sequence[str] = (), recipes: Sequence[Recipe] = RECIPES) -> Plan:
    """The trial of a seed, among the named layouts or all. Nothing else that a trial does is random."""
    rng = random.Random(seed)
    choice = {layout: weight for layout, weight in LAYOUTS.items() if not layouts or layout.name in layouts}
    layout = _weighted(rng, choice)
    recipe = rng.choice(recipes)
    save_steps, keep, workers = rng.choice([3, 5, 8]), rng.choice([1, 2]), rng.choice([0, 0, 2])
    async_save, by_resume, moves = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.4
    others = [other for other in choice if other != layout] or [layout]
    other = rng.choice(others)
    plan = Plan(
        seed=seed, layout=layout, recipe=recipe, save_steps=save_steps, keep=keep, async_save=async_save,
        workers=workers, by_resume=by_resume, kills=(),
        moved_to=other if moves and recipe.exact and other != layout else None,
    )  # fmt: skip
    kills = [_draw_kill(rng, plan, start) for start in range(_weighted(rng, {1: 5, 2: 3, 3: 2}))]
    if rng.random() < 0.2:  # twice in a row, before there is a checkpoint
        plan = replace(plan, save_steps=15)
        instants = Instant("sample", 1, rng.uniform(0.0, 0.03)), Instant("trial", 1, rng.uniform(0.0, 1.0))
        kills = [
            replace(kill, instant=at, signum=signal.SIGKILL if kill.signum in STOPS else kill.signum, then=None)
            for kill, at in zip((_draw_kill(rng, plan, start) for start in range(2)), instants, strict=True)
        ]
    return replace(plan, kills=tuple(kills))


def _draw_kill(rng: random.Random, plan: Plan, start: int) -> Kill:
    instant = _draw_instant(rng, plan, start)
    target, signum = _weighted(rng, _TARGETS), _weighted(rng, _SIGNALS)
    rank, then = rng.randrange(plan.layout_of(start).ranks), rng.uniform(0.0, 0.3)
    followed = rng.random() < 0.2 and signum in STOPS
    if plan.workers and rng.random() < 0.15:  # what the kernel does to the process that needs too much memory
        target, signum, followed = "worker", signal.SIGKILL, False
    return Kill(instant, signum, target, rank, then if followed else None)


def _draw_instant(rng: random.Random, plan: Plan, start: int) -> Instant:
    """Two of three are inside a save or close to one. A start that goes on may get through few of them; one of nine
    comes within a second of it.
    """
    saves, records = -(-MAX_STEPS // plan.save_steps), MAX_STEPS // plan.recipe.logging_steps - 2
    deletions = max(1, saves - plan.keep - 1)
    if start > 0:
        saves, records, deletions = max(1, saves // 3), records // 3, 1
    instants = {
        Instant("start", 1, rng.uniform(0.0, 4.0)): 6,
        Instant("trial", 1, rng.uniform(0.0, 1.0 if start > 0 else 0.002)): 12 if start > 0 else 3,
        Instant("record", rng.randint(1, records), rng.uniform(0.0, 0.03)): 17,
        Instant("sample", 1, rng.uniform(0.0, 0.03)): 5,
        Instant("temporary", rng.randint(1, saves), rng.uniform(0.0, 0.04)): 26,
        Instant("manifest", rng.randint(1, saves), rng.uniform(0.0, 0.003)): 15,
        Instant("rename", rng.randint(1, saves), rng.uniform(0.0, 0.003)): 15,
        Instant("retention", rng.randint(1, deletions), rng.uniform(0.0, 0.003)): 12,
        Instant("final", 1, rng.uniform(0.0, 0.3)): 6,
    }
    if start == 0 and plan.recipe.change is not None:
        near = plan.recipe.change + rng.choice([-1, 0, 1])
        instants[Instant("record", near, rng.uniform(0.0, 0.03))] = 100
    if start == 0 and plan.recipe.compared:
        instants[Instant("reference", rng.randint(1, 6), rng.uniform(0.0, 0.01))] = 70
    return _weighted(rng, instants)


def _weighted(rng: random.Random, weights: dict[T, int]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]
