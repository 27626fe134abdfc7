"""The model that a server holds: built and filled as training does it, on one CPU; its rounds, saves and restarts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgather_cli.checkpoint.components import Component, LocalShard, Sharing, ToCompare
from forgather_cli.checkpoint.files import hash_range
from forgather_cli.checkpoint.load import Reader, healthy_ones, named, newest_valid, whole_ones
from forgather_cli.checkpoint.manifest import DamagedError
from forgather_cli.checkpoint.save import Checkpointer
from forgather_cli.checkpoint.tensors import TensorReader
from forgather_cli.config.decode import written_tree
from forgather_cli.config.schema import (
    CallbackSettings,
    Config,
    DilocoServerSettings,
    FP32Settings,
    SingleSettings,
    Target,
)
from forgather_cli.data.loaders.map_style import is_map_style
from forgather_cli.data.order import Order
from forgather_cli.diloco.ledger import Closed, Line, unusable, versions
from forgather_cli.diloco.outer_step import OuterStep, Published, square_of_all
from forgather_cli.diloco.rounds import LARGEST
from forgather_cli.diloco.samples import Range, total
from forgather_cli.diloco.submissions import Submissions
from forgather_cli.errors import CheckpointError, SetupError, TrainingError
from forgather_cli.models.parts import trainable_parameters
from forgather_cli.run_dir import RunDir, shown, step_of
from forgather_cli.trainer.checkpoints import fingerprint_of, identity_of, kept_tensors, load_model, stem_of, stored
from forgather_cli.worker import build

log = logging.getLogger(__name__)

_ASIDE = ".spoiled-"
"""Behind the name of a checkpoint that was set aside, before the time."""
_MOMENTUM, _DELAYED, _PUBLISHED = ".momentum_buffer", ".delayed", ".published"
"""Behind the name of a parameter, among a checkpoint's optimizer tensors."""


class GlobalModel:
    """Master weights and momentum, fp32, and what is made of them on disk. Not for several threads at once."""

    def __init__(self, config: Config, run: RunDir, settings: DilocoServerSettings) -> None:
        """Build the model as a run of ``config`` begins. Raises SetupError."""
        self.run, self.settings = run, settings
        tree = written_tree(config, run.newest_config())
        # of the workers' choices only those count here that tell which parameters there are
        config = replace(
            config, output_dir=str(run.root), trainer=SingleSettings(), device="cpu", precision=FP32Settings(),
            callbacks=CallbackSettings(), torch_compile=False, gradient_checkpointing=False,
            fuse_optim_with_backward=False, async_save=False, save_strategy="steps", save_total_limit=settings.keep,
            preserve_n_best=0, load_best_model_at_end=False,
        )  # fmt: skip
        trainer = build(config, run, tree)
        self._run, self._config = trainer.run, config
        self.seed = trainer.run.seed
        facts = trainer.run.data_description
        self._row = int(facts.get("row_tokens") or facts["seq_len"])  # tokens of a sample
        self._own_rows: Any = trainer.train_dataset if isinstance(config.data, Target) else None
        self._tensors = kept_tensors(trainer.run)
        trained = dict(trainable_parameters(trainer.run.strategy.parts))
        self.master: dict[str, Tensor] = {name: trained[name].detach() for name in sorted(trained)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.master.items()}
        self.outer = OuterStep(settings, self.shapes)
        self._made_by = dict.fromkeys(self.master, 0)
        """By name, the round whose step has made the weights as they are."""
        self._arrivals = 0
        """Submissions that have been counted."""
        self._squares: dict[str, float] = {}
        """Of the norm of each of the weights."""
        initial, count = self.outer.squares(self.master, self.master) or {}, sum(map(torch.numel, self.master.values()))
        self._usual = max(math.sqrt(sum(initial.values())), 0.02 * math.sqrt(count))
        """A norm that weights may well have, also those that begin at zero."""
        self.published = Published(run.weights)
        self.submissions = Submissions(run.submissions, self.shapes, settings.compression)
        self._checkpointer = Checkpointer(run, args=config)
        self.saved = -1
        """Round of the newest checkpoint."""

    @property
    def sizes(self) -> list[tuple[float, int]]:
        """Of the global weights, for each fragment: their norm, and how many they are."""
        fragments = [self.outer.names([each]) for each in range(self.settings.num_fragments)]
        norms = [math.sqrt(sum(self._squares[name] for name in names)) for names in fragments]
        counts = [sum(self.master[name].numel() for name in names) for names in fragments]
        return list(zip(norms, counts, strict=True))

    def most_targets(self, ranges: Sequence[Range], stated: int) -> int:
        """That these samples can have. Data of the user's own may have longer rows than they say, or than their first
        one: where more targets are ``stated``, the rows themselves are looked at.
        """
        most = total(ranges) * self._row
        rows, found = self._own_rows, 0
        for start, stop in ranges if stated > most and is_map_style(rows) else ():
            while start < stop:
                epoch, begin = divmod(start, len(rows))
                numbers = Order(len(rows), self.seed, epoch)[begin : begin + stop - start]
                found += sum(_length(rows[number]) for number in numbers)
                start += len(numbers)
        return max(most, found)

    # ------------------------------------------------------------------------------------------------------- beginnings

    def begin(self, ledger: Sequence[Line]) -> tuple[str, Sequence[Line]]:
        """Bring the weights to where the ledger ends, from the newest checkpoint or those that the run begins with;
        returns the SHA-256 of the initial weights, and the ledger without what cannot be gone on from: rounds that
        have counted what they must not (as versions before 0.3 have), and all behind them. At the server's start a
        checkpoint with such a round is set aside. Raises SetupError where something is missing.
        """
        self._checkpointer.clean()
        begins_at, starts = self._config.resume_from_checkpoint, self.saved < 0
        at, ledger = self._restore_newest(ledger, looks=starts)
        if at is None:
            if len(ledger) > 1:
                what = f"no checkpoint is whole, so round {ledger[-1].round} cannot be made again"
                raise SetupError(f"{self.run.checkpoints}: {what}")
            if isinstance(begins_at, str):
                load_model(named(Path(begins_at), self._config.verify_checkpoint), self._tensors)
            self._checkpointer.trial(self._components(0, ""), rows=self._rows(), num_bytes=sum(
                tensor.nbytes for tensor in self.master.values()))  # fmt: skip
            self.published.publish(0, self.master, "fp32", {})
        self.saved, at = -1 if at is None else at, at or 0
        self._squares = self.outer.squares(self.master, self.master) or {}
        for line in ledger[at + 1 :]:
            assert line.closed is not None
            log.info("round %d is computed again from its submissions", line.round - 1)
            is_right = _bounded(line, self.most_targets) == line and math.isfinite(self.step(line.closed, line.round))
            if not is_right or (starts and self._why_spoiled([line])):
                log.warning(
                    "%s: round %d has counted a submission of %s that it must not: more targets than its samples have, "
                    "or a change that is far too large; the run goes on without it from that round, and workers that "
                    "stand on later ones go back", self.run.rounds, line.round - 1,
                    " or ".join(sent.worker for sent, _ in line.closed.submissions),
                )  # fmt: skip
                return self.begin(ledger[: line.round])
        kept = [_bounded(line, self.most_targets) for line in ledger]
        for number in [line.round - 1 for line, as_read in zip(kept, ledger, strict=True) if line != as_read]:
            log.warning(
                "%s: round %d has counted more targets than its samples have; its weights stay, those targets go",
                self.run.rounds, number,
            )  # fmt: skip
        if ledger:
            return ledger[0].parent, kept
        path = self.published.weights(0)
        return hash_range(path, 0, path.stat().st_size), kept

    def _restore_newest(self, ledger: Sequence[Line], *, looks: bool) -> tuple[int | None, Sequence[Line]]:
        """Weights and momentum of the newest checkpoint, if it ``looks`` of the newest healthy one; returns its round,
        None where there is no checkpoint, and the ledger as far as it can be made again from there. Newer checkpoints
        are set aside. Raises SetupError where none is healthy.
        """
        at, spoiled, level = None, dict[Path, str](), self._config.verify_checkpoint
        newest = newest_valid(self.run, level)  # the others, newest first, are verified as they are asked for
        older = [reader for reader in healthy_ones(self.run) if reader.step < newest.step] if newest else []
        for reader in chain([newest] if newest else [], whole_ones(older, level)):
            try:
                at = self._restore(reader, ledger)
                why = self._why_spoiled(ledger[1 : at + 1]) if looks else ""
            except DamagedError as error:
                why = str(error)
            if not why:
                break
            at, spoiled[reader.path] = None, why
        told = "; ".join(f"{shown(path)}: {why}" for path, why in spoiled.items())
        if at is None:
            if spoiled:
                remedy = "restore an older copy of the run, or begin a new one"
                raise SetupError(f"no checkpoint is healthy: {told}; {remedy}")
            return None, ledger
        steps = {path: step_of(Path(path.name.partition(_ASIDE)[0])) for path in self.run.checkpoints.glob("step-*")}
        newer = {path: step for path, step in steps.items() if step is not None and step > at}
        if not newer or not looks:
            return at, ledger
        # workers' parts are kept for the newest checkpoint, so that those of the rounds before it may be gone
        kept = [*ledger[: at + 1], *takewhile(self._can_be_made, ledger[at + 1 :])]
        for path, step in newer.items():
            if _ASIDE not in path.name and (path in spoiled or step >= len(kept)):
                path.rename(path.with_name(f"{path.name}{_ASIDE}{time.time_ns()}"))
        back = ", and workers that stand on later ones go back to it" if len(kept) < len(ledger) else ""
        if spoiled or back:
            why = told or f"{self.run.checkpoints}: newer ones than that of round {at} are damaged"
            log.warning("%s; set aside: the run goes on from round %d%s", why, len(kept) - 1, back)
        return at, kept

    def _why_spoiled(self, lines: Sequence[Line]) -> str:
        """What cannot be right of the weights as they are, of their momentum, or of what these lines have counted;
        empty if all may be.
        """
        state = {"weights": self.master, "momentum": self.outer.momentum, "delayed changes": self.outer.delayed}
        for what, held in state.items():  # ten of the largest changes may make so much
            if not (norm := math.sqrt(sum(map(square_of_all, held.values())))) <= 10 * LARGEST * self._usual:
                return f"{what} of the norm {norm:.3g}"
        return next(filter(None, map(self._too_large, lines)), "")

    def _too_large(self, line: Line) -> str:
        """Which change that a line has counted is too large; empty if none is."""
        most = LARGEST * max(self._usual, math.sqrt(sum(self._squares.values())))
        for sent, weight in line.closed.submissions if line.closed else ():
            if not (norm := math.hypot(*sent.norms) * weight) <= most:
                return f"round {sent.round} has counted a change of {sent.worker} of the norm {norm:.3g}"
        return ""

    def _can_be_made(self, line: Line) -> bool:
        """Whether what a line has counted is there, and may be counted."""
        parts = [part for sent, _ in line.closed.submissions for part in sent.parts] if line.closed else []
        return all(self.submissions.part(part).exists() for part in parts) and not self._too_large(line)

    def _restore(self, reader: Reader, ledger: Sequence[Line]) -> int:
        """Weights and momentum of a checkpoint; returns its round."""
        if "diloco" not in reader.components():
            raise CheckpointError(f"{reader.path}: is of no DiLoCo server; restore the checkpoints of this run")
        state = reader.state("diloco")
        at = int(state["round"])
        known = ledger[at].hash if at < len(ledger) else "" if at == 0 else None
        if known is None or (known and state["hash"] and known != state["hash"]):
            raise unusable(self.run.rounds, f"has no round {at} as {reader.path.name} knows it")
        load_model(reader, self._tensors)
        self.outer.momentum.clear()
        self.outer.delayed.clear()
        names = set(reader.optimizer_names())
        for what, held in ((_MOMENTUM, self.outer.momentum), (_DELAYED, self.outer.delayed)):
            held |= {name: reader.read(name + what, "optimizer") for name in self.master if name + what in names}
        self._arrivals = sum(len(line.closed.submissions) for line in ledger[1 : at + 1] if line.closed)
        for fragment, made_by in enumerate(versions(ledger, at, self.settings.num_fragments)):
            self._made_by |= dict.fromkeys(self.outer.names([fragment]), made_by)
        for number in sorted(set(self._made_by.values())):
            if self.published.weights(number).exists():
                continue
            self.run.weights.mkdir(exist_ok=True)
            of_it = [name for name, made_by in self._made_by.items() if made_by == number]
            kept = {
                name: reader.read(name + _PUBLISHED, "optimizer") if name + _PUBLISHED in names else self.master[name]
                for name in of_it
            }
            self.published.write(self.published.weights(number), kept)
        return at

    # ---------------------------------------------------------------------------------------------------------- rounds

    def step(self, closed: Closed, number: int) -> float:
        """Compute what round ``number`` starts from and put it where workers fetch it; returns the norm of the mean
        change. NaN where fp32 cannot hold what comes of it, and TrainingError: what is on disk is as it was then, but
        the weights in memory are void until ``begin``.
        """
        names = self.outer.names(closed.fragments)
        try:
            norm = self.outer.step(self.master, closed, self.submissions, self._arrivals)
            if (squares := self.outer.squares(self.master, names)) is None:
                return math.nan
            self._squares |= squares
            if names:
                changed, before = {name: self.master[name] for name in names}, self._made_by
                self.published.publish(
                    number, changed, self.settings.compression_down, {name: before[name] for name in names}
                )
        except (OSError, CheckpointError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error)
            raise TrainingError(f"round {number - 1} cannot be computed: {what}; mend that, then resume") from error
        self._arrivals += len(closed.submissions)
        self._made_by |= dict.fromkeys(names, number)
        return norm

    # ---------------------------------------------------------------------------------------------------------- saving

    def save(self, number: int, hash: str, oldest: int, opened: float, metrics: dict[str, float]) -> None:
        """A checkpoint of what round ``number`` starts from; then the submissions of rounds before ``oldest`` go.

        ``oldest``: the first round that a member still trains for; ``opened``: when that was, in seconds since the
        epoch. Raises TrainingError.
        """
        if self.saved == number:
            return
        fingerprint = fingerprint_of([identity_of(self._run), hash])
        if self._checkpointer.save(
            number,
            model=self._rows(),
            stem=stem_of(self._run),
            optimizer=self._optimizer_rows(),
            components=self._components(number, hash),
            write_model_files=self._run.write_model_files,
            metrics=metrics,
            info={"strategy": "diloco", "round": number, "config_fingerprint": fingerprint},
        ):
            self.saved = number  # else it is logged, and the one before stands, and the submissions since then
            self.submissions.clean(oldest, opened, keep=self.settings.keep_submissions)

    def _rows(self) -> dict[str, LocalShard]:
        held = {name: LocalShard(tensor, must_be_finite=name in self.master) for name, tensor in self._tensors.items()}
        return stored(self._run, held)

    def _optimizer_rows(self) -> dict[str, LocalShard]:
        rows = {name + _MOMENTUM: LocalShard(tensor) for name, tensor in self.outer.momentum.items()}
        rows |= {name + _DELAYED: LocalShard(tensor) for name, tensor in self.outer.delayed.items()}
        if self.settings.compression_down != "fp32":  # a change is made against it, and its file does not stay
            files = {number: TensorReader(self.published.weights(number)) for number in set(self._made_by.values())}
            rows |= {name + _PUBLISHED: LocalShard(files[at].read(name)) for name, at in self._made_by.items()}
        return rows

    def _components(self, number: int, hash: str) -> list[Component]:
        identity = {"config": self._run.config_tree, "data": self._run.data_description}
        states: dict[str, dict[str, Any]] = {"diloco": {"round": number, "hash": hash}, "identity": identity}
        return [Component(key, ToCompare(state), Sharing.GLOBAL) for key, state in states.items()]


def _length(row: Any) -> int:
    """Tokens of a sample, or labels; 0 where nobody can tell."""
    try:
        return max(len(row[key]) for key in ("input_ids", "labels") if key in row)
    except (TypeError, ValueError):
        return 0


def _bounded(line: Line, most: Callable[[Sequence[Range], int], int]) -> Line:
    """The line with at most as many targets for a submission as its samples can have."""
    if line.closed is None:
        return line
    sent = ((replace(s, targets=min(s.targets, most(s.ranges, s.targets))), w) for s, w in line.closed.submissions)
    return replace(line, closed=replace(line.closed, submissions=tuple(sent)))


def replay(run: RunDir, settings: DilocoServerSettings, ledger: Sequence[Line]) -> tuple[int, list[str]]:
    """Compute the global weights again from the first round on; returns the round of the newest checkpoint, and the
    tensors of it that differ in any bit. Raises SetupError where something is missing for it.
    """
    first = run.weights / Published(run.weights).weights(0).name
    if not settings.keep_submissions or not first.exists():
        what = "cannot be replayed: its submissions were not kept; serve with keep_submissions=true"
        raise SetupError(f"{run.root}: {what}")
    reader = newest_valid(run)
    if reader is None:
        raise SetupError(f"{run.root}: has no checkpoint to compare with; wait for the first one")
    weights = TensorReader(first)
    master = {name: weights.read(name) for name in sorted(weights.specs)}
    shapes = {name: tuple(tensor.shape) for name, tensor in master.items()}
    submissions = Submissions(run.submissions, shapes, settings.compression)
    outer, arrivals = OuterStep(settings, shapes), 0
    at = int(reader.state("diloco")["round"])
    for line in ledger[1 : at + 1]:
        assert line.closed is not None
        for sent, _ in line.closed.submissions:
            if lacking := [part for part in sent.parts if not submissions.part(part).exists()]:
                what = f"round {line.round - 1} lacks the part {lacking[0]} of {sent.worker}"
                raise SetupError(f"{run.submissions}: {what}")
        outer.step(master, line.closed, submissions, arrivals)
        arrivals += len(line.closed.submissions)
    made = {name: (tensor, reader.read(name)) for name, tensor in master.items()} | {
        name + _MOMENTUM: (tensor, reader.read(name + _MOMENTUM, "optimizer"))
        for name, tensor in outer.momentum.items()
    }
    return at, [name for name, both in made.items() if not torch.equal(*(each.view(torch.int32) for each in both))]
