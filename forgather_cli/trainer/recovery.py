"""A run that diverges: it ends as failed, or rolls back to a checkpoint and skips the data since."""

from __future__ import annotations

import base64
import logging
import math
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from forgather_cli.callbacks.base import Divergence
from forgather_cli.checkpoint.choice import would_resume
from forgather_cli.checkpoint.load import Reader, healthy_ones, whole_ones
from forgather_cli.checkpoint.retention import delete_abandoned
from forgather_cli.checkpoint.rollbacks import Rollback, append_rollback, read_rollbacks
from forgather_cli.distributed import gather, on_rank_0
from forgather_cli.documents.encoding import Encoded, decode
from forgather_cli.documents.fields import FieldError
from forgather_cli.errors import DivergenceError
from forgather_cli.precision.scaling import LossScaler
from forgather_cli.run_dir import resume_command, step_of
from forgather_cli.trainer.checkpoints import COMPONENTS, Checkpoints
from forgather_cli.trainer.metrics import LateReader
from forgather_cli.trainer.run import TrainingRun

log = logging.getLogger(__name__)


class Recovery:
    """A run's rollbacks. They depend on values that are equal on all ranks, which therefore need no agreement.

    Weights, moments, schedule, counters, random states and callbacks return to the checkpoint; the data position stays
    where it is. ``RUN/rollbacks.jsonl`` is written first, so that a resume after a kill at any moment does the same.
    """

    def __init__(self, run: TrainingRun, checkpoints: Checkpoints) -> None:
        """Collective."""
        self._run, self._checkpoints = run, checkpoints
        self.records = on_rank_0(lambda: read_rollbacks(run.run_dir, mends=True), run.cpu_group)
        self.behind = max((each.number for each in self.records), default=0)
        """The number of the last rollback; checkpoints keep it."""
        self.saved_step: int | None = None
        """The step at which training resumes, if its checkpoint is this run's own; one of another run is none here."""
        self._norms = LateReader(run.strategy.device)
        self._foreign: set[int] = set()  # steps of checkpoints that are not of this run's past

    # ------------------------------------------------------------------------------------------------------ at start

    def begin(self, reader: Reader | None) -> None:
        """Collective. Training resumes from ``reader``'s checkpoint, or begins: then there are no rollbacks yet."""
        directory, group = self._run.run_dir, self._run.cpu_group
        if reader is None and self.records:
            on_rank_0(lambda: directory.rollbacks.unlink(missing_ok=True), group)
            self.records, self.behind = [], 0
        elif reader is not None:
            self.behind = max(self.behind, reader.manifest.rollbacks)
            on_rank_0(lambda: delete_abandoned(directory), group)
        past = reader.step if reader is not None and self._is_own(reader) else 0
        self.saved_step = self._run.state.resumed_step or None if past else None
        self._foreign = on_rank_0(lambda: {step for step in directory.checkpoint_steps() if step > past}, group)
        if reader is not None and (unknown := self._unknown_to(reader)):
            self._run.emit("on_rollback", rollback=unknown[-1])

    def position(self, reader: Reader) -> tuple[Any, str]:
        """This rank's data position for a resume from a checkpoint, and the file it is from: after the data that later
        rollbacks skipped.
        """
        rank = self._run.world.rank
        if unknown := self._unknown_to(reader):
            last = unknown[-1]
            log.info("behind the data that rollback %d has skipped at step %d", last.number, last.from_step)
            file = str(self._run.run_dir.rollbacks.resolve())
            with reader.loading(file, "data"):
                return _position(last, rank), file
        # every rank reads one, with another number of ranks too: the loader refuses positions that it cannot resume
        rank %= reader.manifest.world_size
        return reader.state("data", rank), reader.file_of("data", rank)

    def _unknown_to(self, reader: Reader) -> list[Rollback]:
        """The rollbacks that came after a checkpoint of this run was saved."""
        if not self._is_own(reader):
            return []
        return [each for each in self.records if each.number > reader.manifest.rollbacks]

    def _is_own(self, reader: Reader) -> bool:
        return reader.path.resolve().parent == self._run.run_dir.checkpoints.resolve()

    def published(self, path: Path) -> None:
        """Note that this training has published the checkpoint at ``path``."""
        self._foreign.discard(step_of(path) or 0)

    # ------------------------------------------------------------------------------------------------------ what ends

    def watch(self, norm: Tensor) -> None:
        """Check the gradient norm of two steps ago. Raises DivergenceError if it is not finite and no callback asks for
        a rollback.
        """
        late = self._norms.push(norm)
        if late is not None and not late < math.inf:
            self._norm_diverged(late)

    def watch_last(self) -> None:
        """Check the norms that are left; waits for the device."""
        for norm in self._norms.drain():
            if not norm < math.inf:
                self._norm_diverged(norm)

    def _norm_diverged(self, norm: float) -> None:
        if self._run.control.divergence is None:
            reason = f"the gradient norm became {norm} by step {self._run.state.global_step}"
            self._diverged(reason, "the weights are void and were not saved")

    def not_finite(self, what: str) -> None:
        """Weights or moments of a save are not finite. Raises DivergenceError if no callback asks for a rollback."""
        reason = f"the weights or moments became void by step {self._run.state.global_step}: {what}"
        self._diverged(reason, "they were not saved")

    def overflowed(self, scaler: LossScaler) -> None:
        """A step was skipped under fp16. Raises DivergenceError if the loss scale cannot be made smaller and no
        callback asks for a rollback.
        """
        run = self._run
        if run.world.rank == 0:
            log.info("step %d overflowed in fp16 and is skipped; loss scale %g", run.state.global_step, scaler.scale)
        if scaler.is_stuck and run.control.divergence is None:
            self._diverged(
                f"precision=fp16: the gradients of {scaler.skipped} steps in a row overflowed, by step "
                f"{run.state.global_step}, with a loss scale down to {scaler.scale:g}",
                "precision=bf16 has the range of fp32",
            )

    def _diverged(self, reason: str, note: str) -> None:
        """Raise DivergenceError if no callback asks for a rollback."""
        run = self._run
        run.emit("on_divergence", reason=reason)
        asked = run.control.divergence
        if asked is None or asked.action != "rollback" or self._is_over(asked):
            limit = "" if asked is None or not self._is_over(asked) else _used_up(asked)
            raise DivergenceError(f"{reason}{limit}; {note}; {self._remedy()}")
        if run.ranks_differ:  # a norm of this rank alone: the logged loss tells all of them
            run.control.divergence = None

    def is_due(self) -> bool:
        """True if a callback asks for a rollback and there may be one more; else the run is to end."""
        control = self._run.control
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
        if (divergence := self._run.control.divergence) is not None:
            raise DivergenceError(f"{divergence.reason}; {self._remedy()}")

    def _remedy(self) -> str:
        run_dir = self._run.run_dir
        if (chosen := would_resume(run_dir)) is not None and chosen.healthy:
            return (
                f"{resume_command(run_dir)} resumes from the newest healthy checkpoint, {chosen.path.name}: give it a "
                "lower learning_rate or a smaller max_grad_norm"
            )
        return "the run has no healthy checkpoint: start again with a lower learning_rate or a smaller max_grad_norm"

    # --------------------------------------------------------------------------------------------------- the rollback

    def roll_back(self) -> Rollback:
        """Collective. Go back, as the callback asked for that has set ``control.divergence``; no save is in flight.

        Raises DivergenceError where there is no checkpoint to go back to, or the rollback cannot be recorded.
        """
        run, asked = self._run, self._run.control.divergence
        assert asked is not None
        reader = self._target(asked)
        record = self._record(reader, asked.reason)
        self._checkpoints.note_data()
        try:
            on_rank_0(lambda: append_rollback(run.run_dir, record), run.cpu_group)
        except OSError as error:
            raise DivergenceError(
                f"{record.reason}; no rollback, since {run.run_dir.rollbacks} cannot be written ({error.strerror}): "
                f"make room; {self._remedy()}"
            ) from error
        self.records.append(record)
        self.behind = record.number
        run.optimizer.forget_changes()
        self._checkpoints.put_back(reader, set(COMPONENTS) - {"data"})
        self._norms = LateReader(run.strategy.device)
        run.metrics.restart_clock()
        run.epochs.update_max_steps()
        run.state.healthy, run.control.divergence = True, None
        for entry in run.state.log_history:
            if entry["step"] > record.to_step:
                entry["abandoned"] = True
        if run.world.rank == 0:
            delete_abandoned(run.run_dir)
            log.warning(
                "rollback %d of %d: %s; back from step %d to %s, the %d samples since then are not seen again",
                record.number, asked.max_rollbacks, record.reason, record.from_step, reader.path,
                record.num_skipped_samples,
            )  # fmt: skip
        run.emit("on_rollback", rollback=record)
        return record

    def _target(self, asked: Divergence) -> Reader:
        """Collective. The newest healthy and whole checkpoint of the time when all looked well.

        First those of before the last sound step, where the newest is best; of the others the oldest is least
        suspicious. Suspicious, too, is what the last rollback went to, if nothing has looked well since.
        """
        run, now = self._run, self._run.state.global_step
        newest_first = [
            reader
            for reader in healthy_ones(run.run_dir, run.cpu_group)
            if reader.step <= now and reader.step not in self._foreign
        ]
        sound = now if asked.sound_step is None else asked.sound_step
        below = sound + 1
        if self.records and sound <= self.records[-1].to_step:
            below = self.records[-1].to_step
        by_trust = [reader for reader in newest_first if reader.step < below]
        by_trust += [reader for reader in reversed(newest_first) if reader.step >= below]
        for reader in whole_ones(by_trust, run.config.verify_checkpoint, run.cpu_group):
            return reader
        raise DivergenceError(
            f"{asked.reason}; there is no healthy checkpoint to roll back to: lower save_steps, or start again with a "
            "lower learning_rate or a smaller max_grad_norm"
        )

    def _record(self, reader: Reader, reason: str) -> Rollback:
        """Collective."""
        run, now = self._run, self._run.epochs.state_dict()
        states = gather(_encoded(now), run.cpu_group) if run.epochs.loader.state_is_per_rank else [_encoded(now)]
        data, tensors = zip(*states, strict=True)
        ids = run.epochs.loader.samples_between(reader.state("data"), now)
        # rollbacks before this one have told of some of them already, each as often as it was skipped
        told = Counter(i for each in self._unknown_to(reader) for i in each.skipped_sample_ids or ())
        fresh: list[int] = []
        for sample in ids or ():
            if told[sample] > 0:
                told[sample] -= 1
            else:
                fresh.append(sample)
        return Rollback(
            number=self.behind + 1,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            reason=reason,
            from_step=run.state.global_step,
            to_step=reader.step,
            num_skipped_samples=run.metrics.total_samples - run.metrics.samples_of(reader.state("trainer")["metrics"]),
            skipped_sample_ids=None if ids is None else fresh,
            data=list(data),
            tensors=list(tensors) if any(tensors) else [],
        )


def _used_up(asked: Divergence) -> str:
    return f"; max_rollbacks={asked.max_rollbacks} are used up"


def _encoded(state: Any) -> tuple[Any, str | None]:
    """A data position as JSON, and the tensors it refers to."""
    encoded = Encoded()
    encoded.add("data", state)
    tensors = base64.b64encode(save(encoded.tensors)).decode() if encoded.tensors else None
    return encoded.documents["data"], tensors


def _position(record: Rollback, rank: int) -> Any:
    """The position for ``rank``, also in a job of another size: the loader refuses one that it cannot resume."""
    place = rank % len(record.data)
    packed = record.tensors[place] if record.tensors else None
    try:
        tensors = load(base64.b64decode(packed)) if packed else {}
    except SafetensorError as error:
        raise FieldError(f"tensors of rollback {record.number} cannot be read ({error})") from error
    return decode(record.data[place], tensors.__getitem__)
