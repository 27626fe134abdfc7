"""What becomes of a run that diverges: it ends as failed, or goes back to a checkpoint and skips the data since."""

from __future__ import annotations

import base64
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load, save
from torch import Tensor

from forgather_cli.callbacks.base import Divergence
from forgather_cli.checkpoint.encoding import Encoded, decode
from forgather_cli.checkpoint.gather import gather, on_rank_0
from forgather_cli.checkpoint.load import Reader, healthy_ones, whole_ones
from forgather_cli.checkpoint.retention import delete_abandoned, list_checkpoints
from forgather_cli.checkpoint.rollbacks import Rollback, append_rollback, read_rollbacks
from forgather_cli.errors import CheckpointError, DivergenceError
from forgather_cli.precision.scaling import LossScaler
from forgather_cli.run_dir import step_of
from forgather_cli.trainer.metrics import LateReader
from forgather_cli.trainer.resume import COMPONENTS

if TYPE_CHECKING:
    from forgather_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


class Recovery:
    """A Trainer's rollbacks. What they go by is equal on all ranks, which therefore act alike without a word.

    Weights, moments, schedule, counters, random states and callbacks go back; the data goes on, with what was fetched
    ahead. ``RUN/rollbacks.jsonl`` is written first: whenever the job is killed, a resume does the same.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Collective."""
        self._trainer = trainer
        self.records = on_rank_0(lambda: read_rollbacks(trainer.run_dir), trainer.cpu_group)
        self.behind = max((each.number for each in self.records), default=0)
        """The number of the last rollback; checkpoints keep it."""
        self._norms = LateReader(trainer.strategy.device)
        self._foreign: set[int] = set()  # steps of checkpoints that are not of this run's past

    # ------------------------------------------------------------------------------------------------------ at start

    def begin(self, reader: Reader | None) -> None:
        """Collective. Training goes on from a checkpoint, or begins: then there is nothing to go back to yet."""
        run, group = self._trainer.run_dir, self._trainer.cpu_group
        if reader is None and self.records:
            on_rank_0(lambda: run.rollbacks.unlink(missing_ok=True), group)
            self.records, self.behind = [], 0
        elif reader is not None:
            self.behind = max(self.behind, reader.manifest.rollbacks)
            on_rank_0(lambda: delete_abandoned(run), group)
        past = reader.step if reader is not None and self._is_own(reader) else 0
        self._foreign = on_rank_0(lambda: {step for step in run.checkpoint_steps() if step > past}, group)
        if reader is not None and (unknown := self._unknown_to(reader)):
            self._trainer.emit("on_rollback", rollback=unknown[-1])

    def position(self, reader: Reader) -> Any:
        """Where the data goes on behind a checkpoint: behind what rollbacks have skipped since, on this rank."""
        rank = self._trainer.world.rank
        if unknown := self._unknown_to(reader):
            last = unknown[-1]
            log.info("behind the data that rollback %d has skipped at step %d", last.number, last.from_step)
            return _position(last, rank)
        # read by every rank, also of another number of them: the loader knows which positions it can go on from
        return reader.state("data", rank % reader.manifest.world_size)

    def _unknown_to(self, reader: Reader) -> list[Rollback]:
        """The rollbacks that came after a checkpoint of this run was saved."""
        if not self._is_own(reader):
            return []
        return [each for each in self.records if each.number > reader.manifest.rollbacks]

    def _is_own(self, reader: Reader) -> bool:
        return reader.path.resolve().parent == self._trainer.run_dir.checkpoints.resolve()

    def published(self, path: Path) -> None:
        """This training has saved a checkpoint."""
        self._foreign.discard(step_of(path) or 0)

    # ------------------------------------------------------------------------------------------------------ what ends

    def watch(self, norm: Tensor) -> None:
        """Look at the gradient norm of two steps ago. Raises DivergenceError where it is not finite and nobody asks
        for a rollback.
        """
        self._check(self._norms.push(norm))

    def watch_last(self) -> None:
        """Look at the norms that are left; waits for the device."""
        for norm in self._norms.drain():
            self._check(norm)

    def not_finite(self, what: str) -> None:
        """What was to be saved is void. Raises DivergenceError where nobody asks for a rollback."""
        reason = f"the weights or moments became void by step {self._trainer.state.global_step}: {what}"
        self._diverged(reason, "they were not saved")

    def overflowed(self, scaler: LossScaler) -> None:
        """A step has been skipped under fp16. Raises DivergenceError where the scale of the loss cannot be made smaller
        and nobody asks for a rollback.
        """
        t = self._trainer
        if t.world.rank == 0:
            log.info("step %d overflowed in fp16 and is skipped; loss scale %g", t.state.global_step, scaler.scale)
        if scaler.is_stuck and t.control.divergence is None:
            self._diverged(
                f"precision=fp16: the gradients of {scaler.skipped} steps in a row overflowed, by step "
                f"{t.state.global_step}, with a loss scale down to {scaler.scale:g}",
                "precision=bf16 has the range of fp32",
            )

    def _check(self, norm: float | None) -> None:
        t = self._trainer
        if norm is None or norm < float("inf") or t.control.divergence is not None:
            return
        reason = f"the gradient norm became {norm} by step {t.state.global_step}"
        self._diverged(reason, "the weights are void and were not saved")

    def _diverged(self, reason: str, note: str) -> None:
        """Raises DivergenceError where nobody asks for a rollback."""
        t = self._trainer
        t.emit("on_divergence", reason=reason)
        asked = t.control.divergence
        if asked is None or asked.action != "rollback" or self._is_over(asked):
            limit = "" if asked is None or not self._is_over(asked) else _used_up(asked)
            raise DivergenceError(f"{reason}{limit}; {note}; {self._remedy()}")
        if t.strategy.averaging is not None:  # a norm of this rank alone: the logged loss tells all of them
            t.control.divergence = None

    def is_due(self) -> bool:
        """True if a callback asks for a rollback and there may be one more; else the run is to end."""
        control = self._trainer.control
        asked = control.divergence
        if asked is None or asked.action != "rollback":
            return False
        if self._is_over(asked):
            control.divergence = Divergence(f"{asked.reason}{_used_up(asked)}")
            control.should_training_stop = True
            return False
        return True

    def _is_over(self, asked: Divergence) -> bool:
        return len(self.records) >= asked.max_rollbacks

    def raise_if_diverged(self) -> None:
        """Raises DivergenceError where a callback has ended the run because of that."""
        if (divergence := self._trainer.control.divergence) is not None:
            raise DivergenceError(f"{divergence.reason}; {self._remedy()}")

    def _remedy(self) -> str:
        with contextlib.suppress(CheckpointError, OSError):
            healthy = [each for each in list_checkpoints(self._trainer.run_dir) if each.usable and each.healthy]
            if healthy:
                return (
                    f"forgather resume {self._trainer.run_dir.root} goes on from the newest healthy checkpoint, "
                    f"{healthy[-1].path.name}: give it a lower learning_rate or a smaller max_grad_norm"
                )
        return "the run has no healthy checkpoint: start again with a lower learning_rate or a smaller max_grad_norm"

    # --------------------------------------------------------------------------------------------------- the rollback

    def roll_back(self) -> Rollback:
        """Collective. Go back, as the callback asked for that has set ``control.divergence``; no save is in flight.

        Raises DivergenceError where there is no checkpoint to go back to, or the rollback cannot be recorded.
        """
        t, asked = self._trainer, self._trainer.control.divergence
        assert asked is not None
        reader = self._target(asked)
        record = self._record(reader, asked.reason)
        self._write(record)
        t.optimizer.forget_changes()
        t.persistence.put_back(reader, set(COMPONENTS) - {"data"})
        self._norms = LateReader(t.strategy.device)
        t.metrics.restart_clock()
        t.epochs.reckon()
        t.state.healthy, t.control.divergence = True, None
        for entry in t.state.log_history:
            if entry["step"] > record.to_step:
                entry["abandoned"] = True
        if t.world.rank == 0:
            delete_abandoned(t.run_dir)
            _tell(record, reader, asked)
        t.emit("on_rollback", rollback=record)
        return record

    def _target(self, asked: Divergence) -> Reader:
        """Collective. The newest healthy and whole checkpoint of the time when all looked well."""
        t = self._trainer
        now = t.state.global_step
        found = [
            reader for reader in healthy_ones(t.run_dir, t.cpu_group) if reader.step <= now and self._is_past(reader)
        ]
        by_trust = self._by_trust(found, now if asked.sound_step is None else asked.sound_step)
        for reader in whole_ones(by_trust, t.args.verify_checkpoint, t.cpu_group):
            return reader
        raise DivergenceError(
            f"{asked.reason}; there is no healthy checkpoint to roll back to: lower save_steps, or start again with a "
            "lower learning_rate or a smaller max_grad_norm"
        )

    def _is_past(self, reader: Reader) -> bool:
        return reader.step not in self._foreign

    def _by_trust(self, newest_first: list[Reader], sound: int) -> list[Reader]:
        """First those of before ``sound``, where the newest is best; of the others the oldest is least suspicious.

        Suspicious, too, is what the last rollback went to, if nothing has looked well since.
        """
        below = sound + 1
        if self.records and sound <= self.records[-1].to_step:
            below = self.records[-1].to_step
        trusted = [reader for reader in newest_first if reader.step < below]
        return trusted + [reader for reader in reversed(newest_first) if reader.step >= below]

    def _record(self, reader: Reader, reason: str) -> Rollback:
        """Collective."""
        t = self._trainer
        assert t.train_loader is not None
        now = t.epochs.state_dict()
        states = gather(_encoded(now), t.cpu_group) if t.train_loader.state_is_per_rank else [_encoded(now)]
        told = Counter(i for each in self._unknown_to(reader) for i in each.skipped_sample_ids or ())
        data, tensors = zip(*states, strict=True)
        return Rollback(
            number=self.behind + 1,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            reason=reason,
            from_step=t.state.global_step,
            to_step=reader.step,
            num_skipped_samples=t.metrics.total_samples - t.metrics.samples_of(reader.state("trainer")["metrics"]),
            skipped_sample_ids=_without(told, t.train_loader.samples_between(reader.state("data"), now)),
            data=list(data),
            tensors=list(tensors) if any(tensors) else [],
        )

    def _write(self, record: Rollback) -> None:
        """Collective."""
        run = self._trainer.run_dir
        try:
            on_rank_0(lambda: append_rollback(run, record), self._trainer.cpu_group)
        except OSError as error:
            raise DivergenceError(
                f"{record.reason}; no rollback, since {run.rollbacks} cannot be written ({error.strerror}): "
                f"make room; {self._remedy()}"
            ) from error
        self.records.append(record)
        self.behind = record.number


def _used_up(asked: Divergence) -> str:
    return f"; max_rollbacks={asked.max_rollbacks} are used up"


def _tell(record: Rollback, reader: Reader, asked: Divergence) -> None:
    log.warning(
        "rollback %d of %d: %s; back from step %d to %s, the %d samples since then are not seen again",
        record.number, asked.max_rollbacks, record.reason, record.from_step, reader.path, record.num_skipped_samples,
    )  # fmt: skip


def _without(told: Counter[int], ids: Sequence[int] | None) -> list[int] | None:
    """``ids`` without as many of each as are told already."""
    if ids is None or not told:
        return None if ids is None else list(ids)
    left, kept = Counter(told), []
    for each in ids:
        if left[each] > 0:
            left[each] -= 1
        else:
            kept.append(each)
    return kept


def _encoded(state: Any) -> tuple[Any, str | None]:
    """A data position as JSON, and the tensors it refers to."""
    encoded = Encoded()
    encoded.add("data", state)
    tensors = base64.b64encode(save(encoded.tensors)).decode() if encoded.tensors else None
    return encoded.documents["data"], tensors


def _position(record: Rollback, rank: int) -> Any:
    """The position for ``rank``, also in a job of another size: the loader knows which it can go on from."""
    place = rank % len(record.data)
    packed = record.tensors[place] if record.tensors else None
    tensors = load(base64.b64decode(packed)) if packed else {}
    return decode(record.data[place], tensors.__getitem__)
