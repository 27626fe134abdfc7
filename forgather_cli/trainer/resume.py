"""What of a Trainer goes into a checkpoint, and how it comes back."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forgather_cli.checkpoint.compare import compare_configs
from forgather_cli.checkpoint.components import Component, LocalShard, Sharing, total_bytes
from forgather_cli.checkpoint.gather import gather
from forgather_cli.checkpoint.load import Reader, best_valid, named, newest_valid
from forgather_cli.checkpoint.restore import restore_components
from forgather_cli.checkpoint.save import Checkpointer
from forgather_cli.distributed import all_sum
from forgather_cli.errors import CheckpointError
from forgather_cli.models.parts import named_tensors, trainable_parameters
from forgather_cli.models.pretrained import write_model_files
from forgather_cli.optim.state import merge_group_states
from forgather_cli.shards import box_of, local
from forgather_cli.strategies.base import Stateful

if TYPE_CHECKING:
    from forgather_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds that a save in flight gets when training fails
OWN_MOMENTS = "own_moments"
"""Key of the component with a rank's own moments, beside their mean among the optimizer's tensors."""
COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "data", "rng", "callbacks")


class _TrainerState:
    """Progress counters, the seed, and the open log interval."""

    FIELDS = ("global_step", "best_metric", "best_global_step", "epoch")

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        t = self._trainer
        fields = {name: getattr(t.state, name) for name in self.FIELDS}
        return {**fields, "seed": t.seed, "metrics": t.metrics.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        t = self._trainer
        for name in self.FIELDS:
            setattr(t.state, name, state[name])
        t.metrics.load_state_dict(state["metrics"])
        t.state.num_input_tokens_seen = t.metrics.total_tokens


class _RandomState:
    """The process's generators. The loop seeds torch's for every step; these are for users' own code."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


class _CallbackStates:
    """The states of all callbacks that have one, by name."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        stateful = {
            n: c for n, c in self._trainer.callbacks.by_name.items() if callable(getattr(c, "state_dict", None))
        }
        return {name: callback.state_dict() for name, callback in stateful.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, callback in self._trainer.callbacks.by_name.items():
            if name in state and callable(getattr(callback, "load_state_dict", None)):
                callback.load_state_dict(state[name])


class _StrategyState:
    """What a strategy keeps besides weights; another kind of strategy leaves it alone."""

    def __init__(self, own: Stateful) -> None:
        self._own = own

    def state_dict(self) -> dict[str, Any]:
        return {"kind": type(self._own).__name__, "state": self._own.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["kind"] == type(self._own).__name__:
            self._own.load_state_dict(state["state"])


class _ToCompare:
    """State that is written as a component and read by hand: optimizer groups with their moments, the identity."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never restored as a whole")


class Persistence:
    """A Trainer's checkpoints: saving, publishing, restoring. A context manager: leaving it ends the writer thread."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        world = trainer.world
        self._checkpointer = Checkpointer(
            trainer.run_dir, args=trainer.args, group=trainer.cpu_group, rank=world.rank, world_size=world.size
        )
        self._checkpointer.clean()

    def __enter__(self) -> Persistence:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self._checkpointer.close()
        else:  # the other ranks may be gone, for whom a save would wait until save_timeout
            self._checkpointer.close(patience=_PATIENCE)

    def _restorable(self) -> list[Component]:
        t = self._trainer
        assert t.train_loader is not None
        position = Sharing.PER_RANK if t.train_loader.state_is_per_rank else Sharing.GLOBAL
        return [
            Component("trainer", _TrainerState(t), Sharing.GLOBAL),
            Component("scheduler", t.lr_scheduler, Sharing.REPLICATED),
            Component("data", t.epochs, position),
            Component("callbacks", _CallbackStates(t), Sharing.GLOBAL),
            Component("rng", _RandomState(), Sharing.PER_RANK),
        ]

    def _of_strategy(self) -> list[Component]:
        own = self._trainer.strategy.own_state
        return [] if own is None else [Component("strategy", _StrategyState(own), Sharing.PER_RANK)]

    def _of_scaling(self) -> list[Component]:
        scaler = self._trainer.strategy.scaler
        return [] if scaler is None else [Component("loss_scale", scaler, Sharing.REPLICATED)]

    def _components(self) -> list[Component]:
        """Collective."""
        t = self._trainer
        groups = _ToCompare(merge_group_states(gather(t.optimizer.group_state(), t.cpu_group)))
        identity = _ToCompare(self._identity())
        moments = _ToCompare(t.optimizer.state_tensors() if t.strategy.averaging is not None else {})
        own = [Component(OWN_MOMENTS, moments, Sharing.PER_RANK)] if t.strategy.averaging is not None else []
        if t.args.save_only_model:
            return [*self._restorable(), *self._of_scaling(), Component("identity", identity, Sharing.GLOBAL)]
        return [
            *self._restorable(),
            *self._of_strategy(),
            *self._of_scaling(),
            *own,
            Component("optimizer", groups, Sharing.GLOBAL),
            Component("identity", identity, Sharing.GLOBAL),
        ]

    def _identity(self) -> dict[str, Any]:
        return {"config": self._trainer.config_tree, "data": self._trainer.data_description}

    def trial(self) -> None:
        """Collective. Before the first step: try to store every state, to write, and look for room. Whatever
        save_strategy says, since a signal saves in any case. Raises SetupError.
        """
        model, optimizer = self._model_rows(), self._optimizer_rows()
        # AdamW's two moments, before the first step makes them
        expected = 0 if optimizer or self._trainer.args.save_only_model else 2 * total_bytes(model)
        self._checkpointer.trial(self._components(), rows={**model, **optimizer}, num_bytes=expected)

    def save(self, metrics: dict[str, float], *, final: bool) -> bool:
        """Collective. Begin a checkpoint of this step; returns once the state is copied. False: it failed."""
        t = self._trainer
        t.metrics.fold()
        return self._checkpointer.save(
            t.state.global_step,
            model=self._model_rows(),
            optimizer=self._optimizer_rows(),
            components=self._components(),
            write_model_files=lambda directory: write_model_files(t.model, t.processing_class, directory),
            info={
                "strategy": t.strategy.name,
                "final": final,
                "rollbacks": t.recovery.behind,
                "epoch": t.state.epoch,
                "config_fingerprint": _fingerprint(self._identity()),
            },
            metrics=metrics,
            healthy=t.state.healthy,
        )

    def _model_rows(self) -> dict[str, LocalShard]:
        """Buffers, which may differ between ranks (batch statistics), are those of the first data rank."""
        strategy = self._trainer.strategy
        kept = {n: t for n, t in named_tensors(strategy.parts).items() if _is_parameter(t) or strategy.data_rank == 0}
        # a buffer may be a mask of infinities
        return {n: LocalShard(t, must_be_finite=_is_parameter(t)) for n, t in kept.items()}

    def _optimizer_rows(self) -> dict[str, LocalShard]:
        """Collective. Where every rank has moments of its own (post-local SGD), their mean: any layout can go on."""
        t = self._trainer
        tensors = {} if t.args.save_only_model else t.optimizer.state_tensors()
        if t.strategy.averaging is not None:
            tensors = {n: all_sum(v.detach().clone(), t.world.group).div_(t.world.size) for n, v in tensors.items()}
        return {name: LocalShard(tensor) for name, tensor in tensors.items()}

    @property
    def is_done(self) -> bool:
        """True if this rank is not writing a checkpoint."""
        return self._checkpointer.is_done

    @property
    def failures(self) -> list[tuple[int, str]]:
        """(step, reason) of every save that was not published; the same on all ranks."""
        return self._checkpointer.failures

    def published(self) -> list[Path]:
        """Checkpoints published since the last call."""
        paths = self._checkpointer.poll()
        for path in paths:
            self._trainer.recovery.published(path)
        return paths

    def wait(self) -> None:
        """Until the save in flight is published or has failed."""
        self._checkpointer.wait()

    # ------------------------------------------------------------------------------------------------------ restoring

    def find(self, resume: bool | str) -> Reader | None:
        """Collective. The checkpoint to resume from: the run's newest valid one, or that at a path.

        Raises CheckpointError.
        """
        verify = self._trainer.args.verify_checkpoint
        if resume is not True:
            return named(Path(str(resume)), verify, self._trainer.cpu_group)
        newest = newest_valid(self._trainer.run_dir, verify, self._trainer.cpu_group)
        if newest is None:
            log.info("no checkpoint in %s yet: starting fresh", self._trainer.run_dir.root)
        return newest

    def restore(self, reader: Reader) -> None:
        """Collective. Put the run back to a checkpoint. Raises CheckpointError when it does not fit this run."""
        t, wanted = self._trainer, self._wanted()
        self._compare(reader, wanted)
        if t.args.ignore_data_skip:
            wanted.discard("data")
        if "data" in wanted and "data" in reader.components():
            t.epochs.load_state_dict(t.recovery.position(reader))
            wanted.discard("data")
        self.put_back(reader, wanted)
        t.state.resumed_step = t.state.global_step
        log.info("resumed from %s at step %d", reader.path, reader.step)

    def put_back(self, reader: Reader, wanted: set[str]) -> None:
        """Collective. The components ``wanted``, as a checkpoint has them."""
        t = self._trainer
        if "model" in wanted:
            load_model(reader, named_tensors(t.strategy.parts), t.cpu_group)
        if "optimizer" in wanted:
            self._restore_optimizer(reader)
            restore_components(reader, self._of_scaling())
        restore_components(reader, self._restorable(), rank=t.world.rank, world_size=t.world.size, only=wanted)
        if "optimizer" in wanted and "strategy" in reader.components():
            # how gradients come about belongs to how they are used; another number of ranks goes on with rank 0's
            same = reader.manifest.world_size == t.world.size
            restore_components(reader, self._of_strategy(), rank=t.world.rank if same else 0)

    def _wanted(self) -> set[str]:
        wanted = self._trainer.args.resume_components
        return set(COMPONENTS) if wanted == "all" else set(wanted)

    def _compare(self, reader: Reader, wanted: set[str]) -> None:
        t = self._trainer
        if "identity" not in reader.components():
            return
        saved = reader.state("identity")
        refused, logged = compare_configs(saved, {"config": t.config_tree, "data": t.data_description}, wanted)
        if refused:
            raise CheckpointError(f"cannot resume from {reader.path}:\n" + "\n".join(refused))
        for line in logged:
            log.warning("%s", line)

    def _restore_optimizer(self, reader: Reader) -> None:
        """Collective. Each rank reads the rows of moments that it holds of the parameters."""
        t = self._trainer
        if "optimizer" not in reader.components():
            log.warning("%s has no optimizer state: moments start at zero", reader.path)
            return
        groups = reader.state("optimizer")
        parameters = dict(trainable_parameters(t.strategy.parts))
        tensors = self._own_moments(reader) or {
            f"{name}.{key}": self._read_moment(reader, name, key, parameter)
            for name, parameter in parameters.items()
            for key in groups["tensors"].get(name, ())
        }
        trained = set().union(*gather(list(parameters), t.cpu_group))
        changes = t.optimizer.load(tensors, groups, all_names=trained)
        if not t.config_tree:  # else the settings behind them have been told already
            for line in changes:
                log.warning("optimizer: %s", line)

    def _own_moments(self, reader: Reader) -> dict[str, Tensor]:
        """This rank's, where ranks have moments of their own and this is one of the ranks that saved them."""
        t = self._trainer
        if t.strategy.averaging is None or OWN_MOMENTS not in reader.components():
            return {}
        if reader.manifest.world_size != t.world.size:
            log.warning(
                "each rank's own moments were saved by %d ranks: going on with their mean", reader.manifest.world_size
            )
            return {}
        own: dict[str, Tensor] = reader.state(OWN_MOMENTS, t.world.rank)
        return own

    def _read_moment(self, reader: Reader, name: str, key: str, parameter: Tensor) -> Tensor:
        """The parameter's rows of a moment of its shape; others, like step counters, whole. Moments in the dtype of
        their weights follow these into another one (``precision`` has been changed).
        """
        moment = f"{name}.{key}"
        whole = reader.shape(moment, "optimizer") != tuple(parameter.shape) or not parameter.ndim
        read = reader.read(moment, "optimizer") if whole else reader.read_box(moment, "optimizer", box_of(parameter))
        follows = key != "step" and reader.dtype(moment, "optimizer") == reader.dtype(name)
        return read.to(parameter.dtype) if follows else read

    def load_best(self) -> None:
        """Collective. Put the best of the checkpoints that are kept and whole into the model, and say which it is."""
        t, rule = self._trainer, self._checkpointer.best_by
        best = best_valid(t.run_dir, rule, t.args.verify_checkpoint, t.cpu_group)
        if best is None:
            log.warning(
                "load_best_model_at_end: no whole and healthy checkpoint has %s; the weights stay those of step %d",
                rule.metric, t.state.global_step,
            )  # fmt: skip
            return
        load_model(best, named_tensors(t.strategy.parts), t.cpu_group)
        t.state.best_model_checkpoint = str(best.path)
        value = rule.value(best.manifest.metrics)
        log.info("the best model is loaded: step %d, %s %.6g, %s", best.step, rule.metric, value, best.path)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _fingerprint(identity: dict[str, Any]) -> str:
    """Of settings and data: a checkpoint of another run at the same step is not taken for this one's."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]


@torch.no_grad()
def load_model(reader: Reader, tensors: dict[str, Tensor], group: Any = None) -> None:
    """Collective. Copy a checkpoint's weights into this rank's rows of ``tensors`` by name.

    ``group``: a CPU group of all ranks, which hold the model together. Raises CheckpointError listing what does not
    match.
    """
    saved = set(reader.model_names())
    everything = set().union(*gather(list(tensors), group))
    problems = [f"missing in the checkpoint: {name}" for name in tensors if name not in saved]
    problems += [f"not in this model: {name}" for name in sorted(saved - everything)]
    if not problems:
        for name, tensor in tensors.items():
            shape, dtype = reader.shape(name), reader.dtype(name)
            if shape != tensor.shape:
                problems.append(f"{name}: the checkpoint has {shape}, this model {tuple(tensor.shape)}")
            elif dtype.is_floating_point != tensor.dtype.is_floating_point:
                problems.append(f"{name}: the checkpoint has {dtype}, this model {tensor.dtype}")
            else:
                local(tensor).copy_(reader.read_box(name, "model", box_of(tensor)))
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{reader.path} holds another model: {'; '.join(problems[:5])}{more}; use the model it was made with"
        )
