"""What a checkpoint holds of a run (``Checkpoints._components``), and how a run is restored from it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgather_cli.checkpoint.average import average_run
from forgather_cli.checkpoint.compare import changed_files, compare_configs, differences, record_files
from forgather_cli.checkpoint.components import Component, LocalShard, Sharing, ToCompare, total_bytes
from forgather_cli.checkpoint.format import plan
from forgather_cli.checkpoint.load import (
    ADAPTER,
    ADAPTER_PREFIX,
    Reader,
    best_valid,
    instead_of,
    named,
    newest_valid,
    restore_components,
)
from forgather_cli.checkpoint.manifest import DamagedError
from forgather_cli.checkpoint.save import Checkpointer
from forgather_cli.checkpoint.snapshot import exchange_of, parts_to_write
from forgather_cli.checkpoint.tensors import write_index, write_share
from forgather_cli.config.schema import Config
from forgather_cli.distributed import all_sum, gather, on_rank_0
from forgather_cli.documents.fields import COUNT, FieldError, check_fields
from forgather_cli.errors import CheckpointError, SetupError
from forgather_cli.models.parts import named_tensors, trainable_parameters
from forgather_cli.models.pretrained import write_model_files
from forgather_cli.optim.state import check_group_states, check_steps, merge_group_states
from forgather_cli.run_dir import run_of, shown
from forgather_cli.shards import box_of, local, not_finite
from forgather_cli.terminal.bars import doing
from forgather_cli.trainer.run import TrainingRun
from forgather_cli.trainer.states import CallbackStates, RandomState, RunState, StrategyState, check_counters

log = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds that a save in flight gets when training fails
OWN_MOMENTS = "own_moments"
"""Key of the component with a rank's own moments, beside their mean among the optimizer's tensors."""
COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "data", "rng", "callbacks", "components")
"""Of ``resume_components``; ``components`` are the user's own."""
RESERVED = frozenset((*COMPONENTS, "identity", "strategy", "loss_scale", "diloco", OWN_MOMENTS))
"""Keys that no component of a user's own may have."""


class _Stopped(Exception):
    """The average was given up, since the run is to stop."""


class Checkpoints:
    """A run's checkpoints: saving, publishing, restoring. A context manager: leaving it ends the writer thread."""

    def __init__(self, run: TrainingRun, callbacks: Mapping[str, Any]) -> None:
        """``callbacks``: the run's, by name."""
        self._run, self._callbacks = run, callbacks
        self._has_recorded_files = False
        self.own: list[Component] = []
        """Components of the user's own."""
        self.average_failure: str | None = None
        """Why the average at the end could not be written."""
        self._checkpointer = Checkpointer(
            run.run_dir, args=run.config, group=run.cpu_group, rank=run.world.rank, world_size=run.world.size
        )
        self.published = self._checkpointer.newly_published
        self.wait, self.wait_if_late = self._checkpointer.wait, self._checkpointer.wait_if_late
        self.failures = self._checkpointer.failures
        """(step, reason) of every save that was not published; the same on all ranks."""
        self.clean = self._checkpointer.clean

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        # after a failure the other ranks may be gone, for whom a save would wait until save_timeout
        self._checkpointer.close(patience=None if failure is None else _PATIENCE)

    # --------------------------------------------------------------------------------------------------------- saving

    def trial(self) -> None:
        """Collective. Before the first step: check that every state can be stored, that the directory can be written,
        and that there is room; with save_strategy=no too, since a signal saves in any case. Raises SetupError.
        """
        model, optimizer = self._model_rows(), self._optimizer_rows()
        # AdamW's two moments, before the first step makes them
        expected = 0 if optimizer or self._run.script.save_only_model else 2 * total_bytes(model)
        self._checkpointer.trial(self._components(), rows={**model, **optimizer}, num_bytes=expected)

    def save(self, metrics: dict[str, float], *, rollbacks: int) -> bool:
        """Collective. Begin a checkpoint of this step; returns once the state is copied. False: it failed.

        ``rollbacks``: number of the run's rollbacks so far.
        """
        run = self._run
        run.check_weights_are_equal()
        if run.world.rank == 0 and not self._has_recorded_files:
            with suppress(OSError):  # the save itself will say so
                record_files(run.run_dir, str(run.data_description.get("fingerprint")), run.data_files)
            self._has_recorded_files = True
        run.metrics.fold()
        self.note_data()
        return self._checkpointer.save(
            run.state.global_step,
            model=self._model_rows(),
            stem=stem_of(run),
            optimizer=self._optimizer_rows(),
            components=self._components(),
            write_model_files=run.write_model_files,
            info={
                "strategy": run.strategy.name,
                "final": run.state.global_step == run.state.max_steps,
                "rollbacks": rollbacks,
                "epoch": run.state.epoch,
                "config_fingerprint": fingerprint_of(identity_of(run)),
            },
            metrics=metrics,
            healthy=run.state.healthy,
        )

    def note_data(self, *, starts: bool = False) -> None:
        """Collective. Have the data write what was read of them, where they do that (``TrainingSteps.note``)."""
        run = self._run
        path = run.run_dir.mixture if run.world.rank == 0 else None
        run.epochs.loader.data.note(run.epochs.state_dict(), run.state.global_step, path, run.cpu_group, starts=starts)

    @property
    def is_done(self) -> bool:
        """True if this rank is not writing a checkpoint."""
        return self._checkpointer.is_done

    def _components(self) -> list[Component]:
        """Collective. All that is saved beside weights and moments."""
        run = self._run
        groups = ToCompare(merge_group_states(gather(run.optimizer.group_state(), run.cpu_group)))
        identity = Component("identity", ToCompare(identity_of(self._run)), Sharing.GLOBAL)
        if run.script.save_only_model:
            return [*self.restorable(), *self._of_scaling(), identity]
        own = [] if not run.ranks_differ else [ToCompare(run.optimizer.state_tensors())]
        return [
            *self.restorable(),
            *self.own,
            *self._of_strategy(),
            *self._of_scaling(),
            *(Component(OWN_MOMENTS, moments, Sharing.PER_RANK) for moments in own),
            Component("optimizer", groups, Sharing.GLOBAL),
            identity,
        ]

    def restorable(self) -> list[Component]:
        run = self._run
        position = Sharing.PER_RANK if run.epochs.loader.state_is_per_rank else Sharing.GLOBAL
        return [
            Component("scheduler", run.lr_scheduler, Sharing.REPLICATED),
            Component("data", run.epochs, position),
            Component("trainer", RunState(run), Sharing.GLOBAL),  # which counts what these do
            Component("callbacks", CallbackStates(self._callbacks), Sharing.GLOBAL),
            Component("rng", RandomState(), Sharing.PER_RANK),
            *self._of_callbacks(),
        ]

    def _of_callbacks(self) -> list[Component]:
        """States of the user's own callbacks, subclasses of Forgather's among them."""
        own = [(name, c) for name, c in self._callbacks.items() if "config_name" not in vars(type(c))]
        return [Component(f"callbacks.{name}", c, Sharing.AUTO) for name, c in own if hasattr(c, "state_dict")]

    def _of_strategy(self) -> list[Component]:
        """State beside weights and moments, of strategy and outer loop."""
        by_key = {"strategy": self._run.strategy.own_state}
        if self._run.outer is not None:
            by_key[self._run.outer.component] = self._run.outer
        return [Component(key, StrategyState(own), Sharing.PER_RANK) for key, own in by_key.items() if own is not None]

    def _of_scaling(self) -> list[Component]:
        scaler = self._run.scaler
        return [] if scaler is None else [Component("loss_scale", scaler, Sharing.REPLICATED)]

    def _model_rows(self) -> dict[str, LocalShard]:
        """Buffers, which may differ between ranks (batch statistics), are those of the first data rank."""
        strategy = self._run.strategy
        kept = {n: t for n, t in kept_tensors(self._run).items() if _is_parameter(t) or strategy.data_rank == 0}
        # a buffer may be a mask of infinities
        return stored(self._run, {n: LocalShard(t, must_be_finite=_is_parameter(t)) for n, t in kept.items()})

    def _optimizer_rows(self) -> dict[str, LocalShard]:
        """Collective. Where every rank has moments of its own (post-local SGD), their mean: any layout can resume."""
        run = self._run
        tensors = {} if run.script.save_only_model else run.optimizer.state_tensors()
        if run.ranks_differ:
            tensors = {n: all_sum(v.detach().clone(), run.world.group).div_(run.world.size) for n, v in tensors.items()}
        return {name: LocalShard(tensor) for name, tensor in tensors.items()}

    # ------------------------------------------------------------------------------------------------------ restoring

    def find(self, resume: bool | str) -> Reader | None:
        """Collective. The checkpoint to resume from: the run's newest valid one, or that at a path.

        Raises CheckpointError.
        """
        verify, group = self._run.config.verify_checkpoint, self._run.cpu_group
        if isinstance(resume, str) and not resume.strip():
            raise CheckpointError("resume_from_checkpoint: is empty; name a checkpoint, or give True for the newest")
        if resume is not True:
            return named(Path(str(resume)), verify, group, self._run.run_dir)
        newest = newest_valid(self._run.run_dir, verify, group)
        if newest is None and self._run.run_dir.metrics.is_file():  # else it is the run's first start
            log.info("no checkpoint in %s yet: starting fresh", shown(self._run.run_dir.root))
        return newest

    def restore(self, reader: Reader, position: Callable[[Reader], tuple[Any, str]]) -> None:
        """Collective. Restore the run from a checkpoint, and the data to the ``position`` that belongs to it, which
        comes with the name of its file.

        Raises CheckpointError when it does not fit this run.
        """
        run = self._run
        components = run.config.resume_components
        wanted: set[str] = {*COMPONENTS} if components == "all" else {*components}
        if identity := reader.identity():
            run_dir, before = run_of(reader.path) or run.run_dir, (identity.get("data") or {}).get("fingerprint")
            files = ""
            if before != run.data_description.get("fingerprint"):
                files = changed_files(run_dir, str(before), run.data_files, reader.manifest.created)
            refused, logged = compare_configs(identity, identity_of(self._run), wanted, files)
            if refused:
                without = wanted - {"data"}
                if not compare_configs(identity, identity_of(self._run), without, files)[0]:
                    rest = ",".join(name for name in COMPONENTS if name in without)
                    refused.append(f"to read the data from their beginning, add 'resume_components=[{rest}]'")
                raise CheckpointError(f"cannot resume from {reader.path}:\n" + "\n".join(refused))
            for line in logged:
                log.warning("%s", line)
        if run.config.ignore_data_skip:
            wanted.discard("data")
        if "data" in wanted and "data" in reader.components():
            state, file = position(reader)
            with reader.loading(file, "data"):
                run.epochs.load_state_dict(state)
            wanted.discard("data")
        with doing(f"reading {reader.path.name}"):
            self.put_back(reader, wanted)
        run.state.resumed_step = run.state.global_step
        log.info("resumed from %s at step %d", shown(reader.path), reader.step)

    def put_back(self, reader: Reader, wanted: set[str]) -> None:
        """Collective. Restore the components ``wanted`` from a checkpoint."""
        run = self._run
        rank, size = run.world.rank, run.world.size
        if "model" in wanted:
            load_model(reader, kept_tensors(run), run.cpu_group)
        if "optimizer" in wanted:
            self._restore_optimizer(reader)
            restore_components(reader, self._of_scaling())
        restore_components(reader, self.restorable(), rank=rank, world_size=size, only=wanted)
        if "trainer" in wanted and "trainer" in reader.components():
            check_counters(reader)
        if "callbacks" in wanted:
            keys = reader.components()
            own = [c for c in self._of_callbacks() if c.key in keys and hasattr(c.object, "load_state_dict")]
            # by which ranks may hold other parts of the model
            others = [n for n in differences(reader.identity(), identity_of(run)) if n.startswith("config.trainer.")]
            restore_components(reader, own, rank=rank, world_size=0 if others else size, foreign=logging.WARNING)
        if "components" in wanted:
            restore_components(reader, self.own, rank=rank, world_size=size, foreign=logging.WARNING)
        if "optimizer" in wanted:
            # how gradients and weights are shared belongs with it; another number of ranks takes rank 0's state
            saved = [component for component in self._of_strategy() if component.key in reader.components()]
            restore_components(reader, saved, rank=rank if reader.manifest.world_size == size else 0)

    def _restore_optimizer(self, reader: Reader) -> None:
        """Collective. Each rank reads the rows of moments that it holds of the parameters."""
        run = self._run
        if "optimizer" not in reader.components():
            log.warning("%s has no optimizer state: moments start at zero", shown(reader.path))
            return
        groups = reader.state("optimizer")
        with reader.loading(reader.file_of("optimizer"), "optimizer"):
            check_group_states(groups)
            listed = {f"{name}.{key}" for name, keys in groups["tensors"].items() for key in keys}
            if odd := sorted(listed ^ set(reader.optimizer_names())):
                raise FieldError(f"tensors lists others than optimizer/ has ({odd[0]})")
        parameters = dict(trainable_parameters(run.strategy.parts))
        tensors: dict[str, Tensor] = {}
        if run.ranks_differ and OWN_MOMENTS in reader.components():
            if reader.manifest.world_size == run.world.size:
                tensors = reader.state(OWN_MOMENTS, run.world.rank)
            else:
                log.warning(
                    "each rank's own moments were saved by %d ranks: continuing with their mean",
                    reader.manifest.world_size,
                )
        if not tensors:
            tensors = {
                f"{name}.{key}": _read_moment(reader, name, key, parameter)
                for name, parameter in parameters.items()
                for key in groups["tensors"].get(name, ())
            }
        _refuse_damage(reader, dict(run.optimizer.impossible(tensors)) | _void(tensors), run.cpu_group)
        with reader.loading(reader.file_of("optimizer"), "optimizer"):
            check_steps(groups, tensors)
        trained = set().union(*gather(list(parameters), run.cpu_group))
        changes = run.optimizer.load(tensors, groups, all_names=trained)
        if not run.config_tree:  # else the settings behind them have been told already
            for line in changes:
                log.warning("optimizer: %s", line)

    def average_last(self, count: int) -> None:
        """Collective. Write the mean of the last ``count`` checkpoints beside that of this step, if there is one. What
        goes wrong is an error in the log and in ``average_failure``; a request to stop leaves it to a resume.
        """
        run = self._run

        def check() -> None:
            if run.sync.has_request():
                raise _Stopped

        def write() -> bool:
            """On rank 0. False if it was given up."""
            try:
                if run.state.global_step in run.run_dir.checkpoint_steps():
                    average_run(run.run_dir, count, check)
            except _Stopped:
                return False
            return True

        try:
            if not on_rank_0(write, run.cpu_group):
                run.sync.poll()
        except (SetupError, OSError) as error:
            self.average_failure = f"average_last: {error}"
            log.error("%s", self.average_failure)

    def load_best(self) -> None:
        """Collective. Load the best of the checkpoints that are kept and whole into the model, and log which it is."""
        run, rule = self._run, self._checkpointer.best_by
        best = best_valid(run.run_dir, rule, run.config.verify_checkpoint, run.cpu_group)
        if best is None:
            log.warning(
                "load_best_model_at_end: no whole and healthy checkpoint has %s; the weights stay those of step %d",
                rule.metric, run.state.global_step,
            )  # fmt: skip
            return
        load_model(best, kept_tensors(run), run.cpu_group)
        run.state.best_model_checkpoint = str(best.path)
        value = rule.value(best.manifest.metrics)
        log.info("the best model is loaded: step %d, %s %.6g, %s", best.step, rule.metric, value, shown(best.path))


def _read_moment(reader: Reader, name: str, key: str, parameter: Tensor) -> Tensor:
    """The parameter's rows of a moment of its shape; others, like step counters, whole. Moments in the dtype of their
    weights follow these into another one (``precision`` has been changed).
    """
    moment = f"{name}.{key}"
    whole = reader.shape(moment, "optimizer") != tuple(parameter.shape) or not parameter.ndim
    read = reader.read(moment, "optimizer") if whole else reader.read_box(moment, "optimizer", box_of(parameter))
    follows = key != "step" and reader.dtype(moment, "optimizer") == reader.dtype(name)
    return read.to(parameter.dtype) if follows else read


def frozen_base(config: Config, group: Any) -> dict[str, str] | None:
    """Collective. Of an adapter what checkpoints say of the model that it is for; None where the model is trained."""
    if not config.adapter.freezes_base:
        return None
    from forgather_cli.adapters.directory import base_of

    model: Any = config.model  # which an adapter's settings have looked at: it has a directory
    return on_rank_0(lambda: base_of(Path(model.path).expanduser()), group)


def kept_tensors(run: TrainingRun) -> dict[str, Tensor]:
    """What checkpoints hold of the model, by full name: all of it, or beside a frozen base what is trained."""
    if run.base is None:
        return named_tensors(run.strategy.parts)
    return dict(trainable_parameters(run.strategy.parts))


def stem_of(run: TrainingRun) -> str:
    """Of a checkpoint's files with the model, or with its adapter."""
    return "model/model" if run.base is None else f"model/{ADAPTER}"


def stored(run: TrainingRun, held: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
    """What is held, under the names that its tensors have in files: of an adapter PEFT's."""
    prefix = "" if run.base is None else ADAPTER_PREFIX
    return {prefix + name: shard for name, shard in held.items()}


def identity_of(run: TrainingRun) -> dict[str, Any]:
    """What a checkpoint says that it was made with."""
    base = {} if run.base is None else {"base": run.base}
    return {"config": run.config_tree, "data": run.data_description, **base}


def fingerprint_of(identity: Any) -> str:
    """16 hex digits, so that a checkpoint of another run at the same step is not taken for this one's."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def drawn_seed(reader: Reader) -> int:
    """The seed that a run's first start has drawn at random. Raises CheckpointError."""
    state: dict[str, Any] = reader.state("trainer")
    with reader.loading(reader.file_of("trainer"), "trainer"):
        check_fields(state, {"seed": COUNT})
    return int(state["seed"])


def save_model(run: TrainingRun, directory: Path) -> None:
    """Collective. Write a Hugging Face directory: weights, and config and tokenizer where they are known. Raises
    TrainingError where each rank has weights of its own now.
    """
    run.check_weights_are_equal()
    directory.mkdir(parents=True, exist_ok=True)
    rank, group = run.world.rank, run.cpu_group
    shards = stored(run, {name: LocalShard(tensor) for name, tensor in kept_tensors(run).items()})
    pieces = gather([shard.piece(name) for name, shard in shards.items()], group)
    files = plan(pieces, Path(stem_of(run)).name)
    parts = parts_to_write(files, rank, shards, exchange_of(shards.values()))
    write_share(
        directory, files, rank, {name: torch.empty(rows.shape, dtype=rows.dtype).copy_(rows) for name, rows in parts}
    )
    if rank == 0:
        write_index(directory, files)
        run.write_model_files(directory)
    gather(None, group)  # no rank continues before the directory is complete


def write_side_files(model: torch.nn.Module, processing_class: Any, directory: Path, run: TrainingRun) -> None:
    """Everything of a Hugging Face directory but the weights, with the tokens that end a text by the chat template; of
    an adapter its config and the tokenizer."""
    from forgather_cli.data.chat.ends import write_stop_tokens

    write_model_files(model, processing_class, directory, with_config=run.base is None)
    if run.base is not None:
        from forgather_cli.adapters.directory import write_config

        write_config(directory, model, run.config, run.trained)
    write_stop_tokens(directory, processing_class)


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
    _refuse_damage(reader, _void({name: tensor for name, tensor in tensors.items() if _is_parameter(tensor)}), group)


def _void(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return dict.fromkeys(not_finite(tensors), "holds values that are not finite")


def _refuse_damage(reader: Reader, problems: Mapping[str, str], group: Any) -> None:
    """Collective. Raise DamagedError on all ranks where one has got from a checkpoint tensors that cannot be: name ->
    what is wrong."""
    if found := sorted({item for each in gather(list(problems.items()), group) for item in each}):
        (name, problem), more = found[0], f", and of {len(found) - 1} more" if len(found) > 1 else ""
        raise DamagedError(f"{reader.path}: is damaged: {name} {problem}{more}; {instead_of(reader.path)}")
