"""Train a small model under any layout of ranks and compare what came out, step by step and tensor by tensor.

``result = train(LAYOUTS["ddp 3"], settings, path)`` runs the real worker on real ranks: data, optimizer, schedule,
clipping, evaluation, checkpoints and generation all take part. Weights and moments are read from the final checkpoint.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import crash_draw
import tiny
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.models.generate import generate
from forgather_cli.models.parts import evaluation_mode, named_tensors
from forgather_cli.run_dir import RunDir
from forgather_cli.shards import box_of, local

SEQ_LEN = 16


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of ranks; ``layers``: how many it needs at least."""

    ranks: int
    overrides: tuple[str, ...]
    layers: int = 2
    data_ranks: int | None = None
    """How many of the ranks read different data; None: all."""


def _pipeline(ranks: int, schedule: str, layers: int = 4, shard: int = 1) -> Layout:
    layers = layers if ranks // shard > 2 or schedule not in ("1F1B", "GPipe") else 2  # a stage on each rank
    by_rank = f"n_microbatches={4 // shard}", f"schedule={schedule}", f"shard={shard}"
    return Layout(ranks, ("trainer=pipeline", *by_rank), layers, data_ranks=shard)


SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SHARDED = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
"""Those whose stages may be sharded."""
LAYOUTS: dict[str, Layout] = {
    "single": Layout(1, ("trainer=single",)),
    "ddp 2": Layout(2, ("trainer=ddp",)),
    "ddp 3": Layout(3, ("trainer=ddp",)),
    "ddp 4": Layout(4, ("trainer=ddp",)),
    "fsdp2 2": Layout(2, ("trainer=fsdp2",)),
    "fsdp2 3": Layout(3, ("trainer=fsdp2",)),
    "fsdp2 4": Layout(4, ("trainer=fsdp2",)),
    "hsdp 2x2": Layout(4, ("trainer=fsdp2", "replicate=2")),
    **{f"{schedule} 2": _pipeline(2, schedule) for schedule in SCHEDULES},
    "1F1B 3": _pipeline(3, "1F1B"),
    "1F1B 4": _pipeline(4, "1F1B"),
    "GPipe 4": _pipeline(4, "GPipe"),
    "Interleaved1F1B 4": _pipeline(4, "Interleaved1F1B", layers=8),
    **{f"{schedule} 2x2": _pipeline(4, schedule, shard=2) for schedule in SHARDED},
}


def trainer_of(layout: Layout) -> str:
    """Its option of the group ``trainer``."""
    return layout.overrides[0].removeprefix("trainer=")


LAYOUTS |= {
    row.name: Layout(row.ranks, (f"trainer={row.trainer}", *row.settings), data_ranks=row.readers)
    for row in crash_draw.LAYOUTS
    if row.trainer not in set(map(trainer_of, LAYOUTS.values()))
}


def with_others(*names: str) -> tuple[str, ...]:
    """``names``, and a layout of each option that none of them has."""
    known = {trainer_of(LAYOUTS[name]) for name in names}
    others = {trainer_of(layout): name for name, layout in LAYOUTS.items() if trainer_of(layout) not in known}
    return (*names, *others.values())


BASE = (
    "model=nano", "precision=fp32", "model.hidden_size=32", "model.intermediate_size=64", "model.num_key_value_heads=1",
    f"data.seq_len={SEQ_LEN}", "callbacks=minimal", "callbacks.progress=null", "callbacks.json=null",
    "callbacks.metrics=null", "+callbacks.probe._target_=parity.Probe", "max_steps=20", "warmup_steps=3",
    "optimizer=adamw", "learning_rate=1e-3", "eval_steps=10",
    "per_device_eval_batch_size=4", "max_eval_samples=11", "save_steps=1000",
)  # fmt: skip


@dataclass
class Share:
    """What one rank saw of a run."""

    data_rank: int = 0
    losses: list[float] = field(default_factory=list)
    """This rank's shares of the steps' losses."""
    norms: list[float] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    samples: list[Tensor] = field(default_factory=list)
    """Token ids (sequences, tokens) that this rank trained on in each step."""
    begin: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """(first row, rows) of weights, and of moments as ``<parameter>.<state>``, before this process's first step."""
    tokens: Tensor | None = None
    """Prompts and greedily chosen tokens."""
    gaps: list[list[float]] = field(default_factory=list)
    """Best minus second-best logit of each chosen token."""


class Probe(TrainerCallback):
    """Notes everything that layouts are compared by; saves after the steps ``save_at``, ends the run, with a
    checkpoint, after step ``stop_after``."""

    def __init__(self, stop_after: int | None = None, save_at: Sequence[int] = ()) -> None:
        self._stop_after, self._save_at = stop_after, save_at
        self.share = Share()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = kwargs["trainer"]
        strategy, share = trainer.strategy, self.share
        share.data_rank = strategy.data_rank
        held = {**named_tensors(strategy.parts), **trainer.optimizer.state_tensors()}
        share.begin = {name: (box_of(t).rows[0], local(t.detach()).clone()) for name, t in held.items()}
        self._steps = tiny.note_batches(strategy)

    def on_train_metrics(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.share.losses.append(float(kwargs["loss"]))
        self.share.norms.append(float(kwargs["grad_norm"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self._stop_after
        control.should_save |= state.global_step in self._save_at

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.share.eval_losses.append(kwargs["metrics"]["eval_loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        strategy, share, none = kwargs["trainer"].strategy, self.share, torch.empty(0, SEQ_LEN, dtype=torch.int64)
        share.samples = [torch.cat([batch["input_ids"] for batch in step] or [none]) for step in self._steps]

        def logits(batch: Any, **options: Any) -> Any:
            found = strategy.logits(batch, **options)
            best = found[:, -1].topk(2).values
            share.gaps.append((best[:, 0] - best[:, 1]).tolist())
            return found

        prompts = torch.tensor([[65, 66, 67, 68], [0, 0, 97, 98]])  # the second one is padded on the left
        with evaluation_mode(strategy.parts):
            real = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
            share.tokens = generate(logits, prompts, real, max_new_tokens=8, do_sample=False)


def run_rank(config: Config, path: Path) -> Share:
    """One rank of a run; the process is left as it was."""
    try:
        trainer = tiny.train(config, RunDir(path))
        return trainer.callbacks.by_name["probe"].share
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Result:
    """What all ranks saw together, in the full model's names and shapes."""

    path: Path
    losses: list[float]
    norms: list[float]
    eval_losses: list[float]
    samples: list[Tensor]
    """Token ids of each step's global batch, in its order."""
    begin: dict[str, Tensor]
    tokens: Tensor
    gaps: list[list[float]]

    def tensors(self, step: int | None = None) -> dict[str, Tensor]:
        """Weights, and moments as ``<parameter>.<state>``, of a checkpoint: the newest, or that of ``step``."""
        return checkpoint_tensors(RunDir(self.path), step)


def checkpoint_tensors(run: RunDir, step: int | None = None) -> dict[str, Tensor]:
    """Read with safetensors alone."""
    folder = run.checkpoint(run.checkpoint_steps()[-1] if step is None else step)
    files = [*folder.glob("model/*.safetensors"), *folder.glob("optimizer/*.safetensors")]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def train(
    layout: Layout, settings: Sequence[str], path: Path, *, resume: bool = False, base: tuple[str, ...] = BASE
) -> Result:
    """Train under ``layout`` with overrides of ``base``, on the ranks of the pool, or in this process for one rank.

    ``resume``: from the newest checkpoint in ``path``.
    """
    composed = composed_of((*settings, *layout.overrides), base)
    config = dataclasses.replace(composed, output_dir=str(path), resume_from_checkpoint=resume)
    shares = [run_rank(config, path)] if layout.ranks == 1 else run_ranks(layout.ranks, run_rank, config, path)
    return merged(shares, path)


@functools.cache
def composed_of(overrides: tuple[str, ...], base: tuple[str, ...] = BASE) -> Config:
    return load_config(None, [*base, *overrides]).config


def merged(shares: list[Share], path: Path) -> Result:
    """Losses are sums over ranks; what all ranks must know alike is compared."""
    first = shares[0]
    for share in shares[1:]:
        assert repr(share.norms) == repr(first.norms)  # to the last bit; NaN, of a step skipped under fp16, is NaN
        assert share.eval_losses == first.eval_losses
        assert torch.equal(share.tokens, first.tokens)
    by_data_rank = {share.data_rank: share for share in reversed(shares)}
    slices = [by_data_rank[rank].samples for rank in sorted(by_data_rank)]
    return Result(
        path=path,
        losses=[sum(step) for step in zip(*(share.losses for share in shares), strict=True)],
        norms=first.norms,
        eval_losses=first.eval_losses,
        samples=[torch.cat(step) for step in zip(*slices, strict=True)],
        begin=assembled([share.begin for share in shares]),
        tokens=first.tokens if first.tokens is not None else torch.empty(0),
        gaps=first.gaps,
    )


def assembled(shares: list[dict[str, tuple[int, Tensor]]]) -> dict[str, Tensor]:
    """Full tensors from the rows of all ranks; rows that several ranks hold must be equal."""
    pieces: dict[str, dict[int, Tensor]] = {}
    for name, (start, rows) in (item for share in shares for item in share.items()):
        held = pieces.setdefault(name, {})
        if start in held and len(held[start].shape) and not len(held[start]):
            del held[start]  # an empty shard stands where the next one begins
        if start in held and rows.shape == held[start].shape:
            assert torch.equal(rows, held[start]), f"{name}: ranks hold different rows from {start}"
        elif start not in held:
            held[start] = rows
    joined = ((name, [held[start] for start in sorted(held)]) for name, held in pieces.items())
    return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in joined}


def go_on(
    layout: Layout, settings: Sequence[str], checkpoint: Path, path: Path, *, base: tuple[str, ...] = BASE
) -> Result:
    """Go on from another run's checkpoint in a run directory of its own."""
    shutil.copytree(checkpoint, RunDir(path).checkpoints / checkpoint.name)
    return train(layout, settings, path, resume=True, base=base)


@functools.cache
def scratch() -> Path:
    """A folder for runs that several tests compare with; gone with the process."""
    folder = Path(tempfile.mkdtemp(prefix="parity-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def corpus() -> tuple[str, ...]:
    """Overrides of ``data=text`` for 400 documents of 4 to 40 letters, about 550 sequences."""
    file, numbers = scratch() / "documents.jsonl", random.Random(0)
    words = ["".join(numbers.choices("abcdefgh ", k=numbers.randrange(4, 40))) for _ in range(400)]
    file.write_text("".join(f'{{"text": "{word}"}}\n' for word in words))
    return ("data=text", f"data.files=[{file}]", "eval_fraction=0.1", f"data.cache_dir={scratch() / 'cache'}")


LOSS, WEIGHT, TOKEN_GAP = 1e-5, 1e-5, 1e-3
"""SPEC 3: relative for losses and norms; for weights both relative and absolute; logits that decide on a token."""


def assert_parity(found: Result, reference: Result) -> None:
    """As the table of guarantees says for fp32, dropout 0, adamw or sgd."""
    assert_same_samples(found, reference)
    assert_near(found.losses, reference.losses, "loss")
    assert_near(found.norms, reference.norms, "gradient norm")
    assert_near(found.eval_losses, reference.eval_losses, "eval loss")
    ours, theirs = found.tensors(), reference.tensors()
    assert ours.keys() == theirs.keys()
    for name in reference.begin:
        apart = (ours[name] - theirs[name]).abs() - WEIGHT * theirs[name].abs()
        assert apart.max() <= WEIGHT, f"{name}: up to {apart.max():.2e} apart"
    prompt = reference.tokens.shape[1] - len(reference.gaps)
    for row in range(len(reference.tokens)):  # up to the first token that was a close choice
        close = (n for n, gaps in enumerate(reference.gaps) if gaps[row] <= TOKEN_GAP)
        stop = prompt + next(close, len(reference.gaps))
        assert torch.equal(found.tokens[row, :stop], reference.tokens[row, :stop])


def assert_update_within(share: float, found: Result, reference: Result, step: int) -> None:
    """Where both came from one checkpoint at ``step``: the next step's changes are apart by at most ``share`` of them.

    Of all weights together: bf16 rounds a single matrix now and then to twice as much, on one device too.
    """
    before, ours, theirs = reference.tensors(step), found.tensors(step + 1), reference.tensors(step + 1)
    assert ours.keys() == theirs.keys()
    update, apart = ({n: t - other[n] for n, t in theirs.items() if n in reference.begin} for other in (before, ours))
    assert _norm(apart) <= share * _norm(update), f"{_norm(apart) / _norm(update):.2%} of the update apart"


def _norm(tensors: dict[str, Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors.values()]).norm()


def assert_same_samples(found: Result, reference: Result, *, first: int | None = None) -> None:
    """Exactly the same sequences in the same order, from step ``first`` on; None: the last steps of the reference."""
    start = len(reference.samples) - len(found.samples) if first is None else first - 1
    steps = reference.samples[start : start + len(found.samples)]
    for step, (ours, theirs) in enumerate(zip(found.samples, steps, strict=True), start + 1):
        assert torch.equal(ours, theirs), f"step {step} trained other samples"


def assert_near(found: list[float], reference: list[float], what: str) -> None:
    """Relative ``LOSS``, of the last steps of the reference if ``found`` is shorter."""
    assert found
    for step, (ours, theirs) in enumerate(zip(found, reference[len(reference) - len(found) :], strict=True), 1):
        assert abs(ours - theirs) <= LOSS * abs(theirs), f"{what} {step} of {len(found)}: {ours!r}, not {theirs!r}"
