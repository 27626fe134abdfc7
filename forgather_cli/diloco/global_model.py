"""The model that a server holds: built and filled as training does it, on one CPU; its rounds, saves and restarts."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgather_cli.checkpoint.components import Component, LocalShard, Sharing
from forgather_cli.checkpoint.files import hash_range
from forgather_cli.checkpoint.load import Reader, named, newest_valid
from forgather_cli.checkpoint.save import Checkpointer
from forgather_cli.checkpoint.tensors import TensorReader
from forgather_cli.config.decode import written_tree
from forgather_cli.config.schema import Config, DilocoServerSettings, FP32Settings, SingleSettings, Target
from forgather_cli.data.build import load_data
from forgather_cli.diloco.outer_step import Published, outer_step
from forgather_cli.diloco.rounds import Closed, Line
from forgather_cli.diloco.submissions import Submissions
from forgather_cli.errors import CheckpointError, SetupError, TrainingError
from forgather_cli.hub import with_local_model
from forgather_cli.models.build import construct, fill
from forgather_cli.models.parts import named_tensors, trainable_parameters
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.checkpoints import load_model
from forgather_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_MOMENTUM, _PUBLISHED = ".momentum_buffer", ".published"
"""Behind the name of a parameter, among a checkpoint's optimizer tensors."""


class GlobalModel:
    """Master weights and momentum, fp32, and what is made of them on disk. Not for several threads at once."""

    def __init__(self, config: Config, run: RunDir, settings: DilocoServerSettings) -> None:
        """Build the model as a run of ``config`` begins. Raises SetupError."""
        self.run, self.settings = run, settings
        tree, config = written_tree(config, run.newest_config()), with_local_model(config)
        # of the workers' choices only those count here that tell which parameters there are
        config = replace(
            config, output_dir=str(run.root), trainer=SingleSettings(), device="cpu", precision=FP32Settings(),
            torch_compile=False, gradient_checkpointing=False, fuse_optim_with_backward=False, async_save=False,
            save_strategy="steps", save_total_limit=settings.keep, preserve_n_best=0, load_best_model_at_end=False,
        )  # fmt: skip
        cpu, path = torch.device("cpu"), getattr(config.model, "path", None)
        data = load_data(config.data, seed=max(config.seed, 0), model_path=path)
        trainer = Trainer(
            model_init=lambda: construct(config, cpu, vocab_size=data.vocab_size, seq_len=data.seq_len),
            init_weights=None if isinstance(config.model, Target) else partial(fill, config, cpu),
            args=config,
            processing_class=data.tokenizer,
            config_tree=tree,
            data_description={**data.description, "seq_len": data.seq_len, "fingerprint": data.fingerprint},
        )
        self._run, self._config = trainer.run, config
        self.seed = trainer.run.seed
        self._tensors = named_tensors(trainer.run.strategy.parts)
        trained = dict(trainable_parameters(trainer.run.strategy.parts))
        self.master: dict[str, Tensor] = {name: trained[name].detach() for name in sorted(trained)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.master.items()}
        self.momentum: dict[str, Tensor] = {}
        self.published = Published(run.weights)
        self.submissions = Submissions(run.submissions, self.shapes, settings.compression)
        self._checkpointer = Checkpointer(run, args=config)
        self.saved = -1
        """Round of the newest checkpoint."""

    # ------------------------------------------------------------------------------------------------------- beginnings

    def begin(self, ledger: Sequence[Line]) -> str:
        """Bring the weights to where the ledger ends, from the newest checkpoint or those that the run begins with;
        returns the SHA-256 of the initial weights. Raises SetupError where something is missing for it.
        """
        self._checkpointer.clean()
        begins_at = self._config.resume_from_checkpoint
        reader = newest_valid(self.run, self._config.verify_checkpoint)
        at = 0
        if reader is not None:
            at = self._restore(reader, ledger)
        elif ledger and len(ledger) > 1:
            raise SetupError(
                f"{self.run.checkpoints}: no checkpoint is whole, so round {ledger[-1].round} cannot be made again"
            )
        else:
            if isinstance(begins_at, str):
                load_model(named(Path(begins_at), self._config.verify_checkpoint), self._tensors)
            self._checkpointer.trial(self._components(0, ""), rows=self._rows(), num_bytes=sum(
                tensor.nbytes for tensor in self.master.values()))  # fmt: skip
            self.published.publish(0, self.master, "fp32")
        self.saved = -1 if reader is None else at
        for line in ledger[at + 1 :]:
            assert line.closed is not None
            log.info("round %d is computed again from its submissions", line.round - 1)
            self.step(line.closed, line.round)
        if ledger:
            self.published.forget(ledger[-1].round, first=self.settings.keep_submissions)
            return ledger[0].parent
        path = self.published.weights(0)
        return hash_range(path, 0, path.stat().st_size)

    def _restore(self, reader: Reader, ledger: Sequence[Line]) -> int:
        """Weights and momentum of a checkpoint; returns its round."""
        if "diloco" not in reader.components():
            raise CheckpointError(f"{reader.path}: is of no DiLoCo server; restore the checkpoints of this run")
        state = reader.state("diloco")
        at = int(state["round"])
        known = ledger[at].hash if at < len(ledger) else "" if at == 0 else None
        if known is None or (known and state["hash"] and known != state["hash"]):
            raise SetupError(f"{self.run.rounds}: has no round {at} as {reader.path.name} knows it; restore the file")
        load_model(reader, self._tensors)
        names = set(reader.optimizer_names())
        self.momentum = {
            name: reader.read(name + _MOMENTUM, "optimizer") for name in self.master if name + _MOMENTUM in names
        }
        if not self.published.weights(at).exists():
            if next(iter(self.master)) + _PUBLISHED in names:
                self.run.weights.mkdir(exist_ok=True)
                made = {name: reader.read(name + _PUBLISHED, "optimizer") for name in self.master}
                self.published.write(self.published.weights(at), made)
            else:
                self.published.publish(at, self.master, "fp32")
        return at

    # ---------------------------------------------------------------------------------------------------------- rounds

    def step(self, closed: Closed, number: int) -> float:
        """Compute what round ``number`` starts from and put it where workers fetch it; returns the norm of the mean
        change. Raises TrainingError; what is on disk is as it was then, but the weights in memory are void.
        """
        try:
            norm = outer_step(self.master, self.momentum, closed, self.submissions, self.settings.outer)
            self.published.publish(number, self.master, self.settings.compression_down)
        except (OSError, CheckpointError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error)
            raise TrainingError(f"round {number - 1} cannot be computed: {what}; mend that, then resume") from error
        return norm

    # ---------------------------------------------------------------------------------------------------------- saving

    def save(self, number: int, hash: str, opened: float, metrics: dict[str, float]) -> None:
        """A checkpoint of what round ``number`` starts from; the submissions that it covers go. Raises TrainingError.

        ``opened``: when the round was opened, in seconds since the epoch.
        """
        if self.saved == number:
            return
        identity = {"config": self._run.config_tree, "data": self._run.data_description}
        fine = self._checkpointer.save(
            number,
            model=self._rows(),
            optimizer=self._optimizer_rows(number),
            components=self._components(number, hash),
            write_model_files=self._run.write_model_files,
            info={
                "strategy": "diloco",
                "round": number,
                "config_fingerprint": hashlib.sha256(
                    json.dumps([identity, hash], sort_keys=True, default=str).encode()
                ).hexdigest()[:16],
            },
            metrics=metrics,
        )
        if not fine:
            return  # logged as an error; the one before stands, and the submissions since then
        self.saved = number
        self.submissions.clean(number, opened, keep=self.settings.keep_submissions)

    def _rows(self) -> dict[str, LocalShard]:
        return {name: LocalShard(tensor, must_be_finite=name in self.master) for name, tensor in self._tensors.items()}

    def _optimizer_rows(self, number: int) -> dict[str, LocalShard]:
        rows = {name + _MOMENTUM: LocalShard(tensor) for name, tensor in self.momentum.items()}
        if self.settings.compression_down != "fp32":  # a change is made against it, and its file does not stay
            published = TensorReader(self.published.weights(number))
            rows |= {name + _PUBLISHED: LocalShard(published.read(name)) for name in self.master}
        return rows

    def _components(self, number: int, hash: str) -> list[Component]:
        identity = {"config": self._run.config_tree, "data": self._run.data_description}
        states: dict[str, dict[str, Any]] = {"diloco": {"round": number, "hash": hash}, "identity": identity}
        return [Component(key, _State(state), Sharing.GLOBAL) for key, state in states.items()]


class _State:
    """A component that is read by ``Reader.state`` alone."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("never restored as a whole")


def replay(run: RunDir, settings: DilocoServerSettings, ledger: Sequence[Line]) -> tuple[int, list[str]]:
    """Compute the global weights again from the first round on; returns the round of the newest checkpoint, and the
    tensors of it that differ in any bit. Raises SetupError where something is missing for it.
    """
    first = run.weights / Published(run.weights).weights(0).name
    if not settings.keep_submissions or not first.exists():
        raise SetupError(
            f"{run.root}: cannot be replayed: its submissions were not kept; serve with keep_submissions=true"
        )
    reader = newest_valid(run)
    if reader is None:
        raise SetupError(f"{run.root}: has no checkpoint to compare with; wait for the first one")
    weights = TensorReader(first)
    master = {name: weights.read(name) for name in sorted(weights.specs)}
    momentum: dict[str, Tensor] = {}
    submissions = Submissions(run.submissions, {n: tuple(t.shape) for n, t in master.items()}, settings.compression)
    at = int(reader.state("diloco")["round"])
    for line in ledger[1 : at + 1]:
        assert line.closed is not None
        for sent, _ in line.closed.submissions:
            if lacking := [part for part in sent.parts if not submissions.part(part).exists()]:
                raise SetupError(
                    f"{run.submissions}: round {line.round - 1} lacks the part {lacking[0]} of {sent.worker}"
                )
        outer_step(master, momentum, line.closed, submissions, settings.outer)
    differ = [name for name, tensor in master.items() if not _same_bits(tensor, reader.read(name))]
    return at, differ + [
        name + _MOMENTUM
        for name, tensor in momentum.items()
        if not _same_bits(tensor, reader.read(name + _MOMENTUM, "optimizer"))
    ]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
