"""A Trainer that a script makes, in the words of a recipe: so that it is checked, recorded and found like one. Its run
directory is taken, described and left as ``forgather train`` does.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from forgather_cli.callbacks.base import BuiltIn, CallbackList
from forgather_cli.callbacks.build import build_callbacks
from forgather_cli.checkpoint.choice import candidates
from forgather_cli.config.decode import dump_saved, to_tree
from forgather_cli.config.rules import rule_problems
from forgather_cli.config.schema import Config, DataTarget, RunSettings, Target, TrainerTarget
from forgather_cli.distributed import on_rank_0, pick_device, world, world_size
from forgather_cli.errors import CallbackError, ConfigError, PartError, did_you_mean
from forgather_cli.launch.exit_status import ExitStatus, from_error
from forgather_cli.launch.run_lock import RunLock, after_step
from forgather_cli.run_dir import RunDir, name_file
from forgather_cli.targets import name_of
from forgather_cli.terminal.folding import show_all_text
from forgather_cli.trainer.arguments import TrainingArguments
from forgather_cli.trainer.given import Objects
from forgather_cli.trainer.run import TrainingRun

_log = logging.getLogger(__name__)

_FUNCTIONS = {
    "data_collator": "of a list of samples, and data as train_dataset=",
    "optimizer_factory": "of [(name, parameter), ...]",
    "lr_scheduler_factory": "of an optimizer",
    "loss_fn": "of logits and labels, and an option's name as loss= to TrainingArguments",
    "fused_loss_factory": "of the model's head",
    "enable_activation_checkpoint_fn": "of the model, or of (rank, model)",
    "compute_metrics": "of an EvalPrediction",
    "preprocess_logits_for_metrics": "of logits and labels",
}
_ELSEWHERE = {
    "tokenizer": "give it as processing_class=",
    "compute_loss_func": "give loss_fn=, a function of logits and labels",
}
"""Arguments of transformers that have another name here."""


def check_kinds(given: dict[str, Any]) -> None:
    """Raise ConfigError, with all of them, for arguments of ``Trainer`` in a wrong place or of a wrong kind; ``given``:
    all of them by name, with what is too many or unknown in ``further`` and ``unknown``.
    """

    def got(name: str) -> str:
        value = given[name]
        what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        return f"{name}: got {what}"

    problems = []
    if given["further"]:
        problems.append(
            "Trainer: what comes after model_init is given by name, got more in a row; write compute_metrics=..., "
            "callbacks=[...] and so on"
        )
    for name in given["unknown"]:
        guess = _ELSEWHERE.get(name) or did_you_mean(name, given).strip() or "see docs/python_api.md"
        problems.append(f"{name}: Trainer has no such argument; {guess}")
    model, init = given["model"], given["model_init"]
    if isinstance(model, type):
        problems.append(f"{got('model')}; call it, or give model_init=, a function that makes the model")
    elif model is not None and not isinstance(model, nn.Module):
        problems.append(
            f"{got('model')}; write Trainer(model=..., args=...) with a torch.nn.Module; compose makes a recipe's model"
        )
    if isinstance(init, nn.Module) or not (init is None or callable(init)):
        problems.append(f"{got('model_init')}; give a function that makes the model, or the model as model=")
    problems += [
        f"{got(name)}; give a function {what}"
        for name, what in _FUNCTIONS.items()
        if given[name] is not None and not callable(given[name])
    ]
    callbacks = given["callbacks"]
    if callbacks is not None and (isinstance(callbacks, str) or not isinstance(callbacks, Iterable)):
        problems.append(f"{got('callbacks')}; give a list of callbacks: callbacks=[...]")
    for name, pair in (("optimizers", "(optimizer, scheduler), either of them may be None"),
                       ("optimizer_cls_and_kwargs", "(cls, kwargs)")):  # fmt: skip
        if given[name] is not None and not (isinstance(given[name], tuple | list) and len(given[name]) == 2):
            problems.append(f"{got(name)}; give two: {name}={pair}")
    if problems:
        raise ConfigError(problems)


def config_of(args: TrainingArguments, model: Any, data: Any) -> Config:
    """A script's arguments as the config that its run is made from, with the options that their names stand for. Of
    the script's model (or what makes it) and training data it has the names alone.
    """
    return Config(
        # where a script's model is made is no recipe's matter
        **{f.name: getattr(args, f.name) for f in fields(RunSettings) if f.name != "construct_model_on"},
        recipe="python",
        model=_named(model),
        data=DataTarget(
            _named(data).path,
            dispatch_batches=args.dispatch_batches,
            dispatch_eval_batches=args.dispatch_eval_batches,
        ),
        trainer=args.trainer,
        optimizer=args.optimizer,
        lr_scheduler=args.lr_scheduler,
        loss=args.loss,
        precision=args.precision,
        callbacks=args.callbacks,
    )


def recorded(args: TrainingArguments, config: Config, objects: Objects) -> Config:
    """``config`` as ``config.yaml`` has it and rules check it: with the names of the objects that stand in the place
    of options, from which nothing can be built. Raises ConfigError with all that a recipe would be refused for.
    """
    own, own_callbacks, size = objects.optimizer, built_in(objects.callbacks), world_size()
    loss, scheduler = objects.loss_fn or objects.fused_loss_factory, own.optimizers[1] or own.scheduler_factory
    optimizer = config.optimizer
    if own.way is not None:
        optimizer = _named(own.optimizers[0] or own.factory or (own.cls_and_kwargs or [None])[0])
    elif isinstance(own.groups, dict) and not isinstance(optimizer, Target):
        optimizer = replace(optimizer, groups=own.groups)
    record = replace(
        config,
        trainer=config.trainer if objects.made_strategy is None else TrainerTarget(name_of(objects.made_strategy)),
        optimizer=optimizer,
        lr_scheduler=_named(scheduler) if scheduler else config.lr_scheduler,
        loss=config.loss if loss is None else _named(loss),
        job_id=getattr(own_callbacks.get("control"), "job_id", None) or config.job_id,
        callbacks=replace(config.callbacks, **{name: each.settings for name, each in own_callbacks.items()}),
    )
    # who shares data in a strategy that was made already, it knows alone
    known = objects.made_strategy is None and size >= record.trainer.min_ranks
    here = replace(record, nproc_per_node=size if known else "auto", nnodes=1, node_rank=0)
    layers = dict.fromkeys(args.given - _READ_LATER, 0)
    for name, callback in own_callbacks.items():
        defaults, settings = vars(callback.kind()), vars(callback.settings)
        layers |= {f"callbacks.{name}.{key}": 0 for key, value in settings.items() if value != defaults[key]}
    typed = args.typed | {f"callbacks.{name}": type(each).__name__ for name, each in own_callbacks.items()}
    problems = [*_problems(args, objects, record, size), *own.problems(), *rule_problems(here, layers)]
    if problems:
        raise ConfigError([_as_typed(problem, typed) for problem in problems])
    return record


_READ_LATER = {
    "per_device_eval_batch_size", "max_eval_samples", "max_eval_steps", "metric_for_best_model", "greater_is_better",
    "resume_components", "ignore_data_skip", "overwrite_output_dir",
}  # fmt: skip
"""Settings that ``evaluate()``, ``predict()`` and ``train(resume_from_checkpoint=)`` read, whatever the others say."""


def built_in(callbacks: Iterable[Any]) -> dict[str, BuiltIn[Any]]:
    """Those of a script's callbacks that a recipe has settings for, by config name; not subclasses of them."""
    given = (each[1] if isinstance(each, tuple) else each for each in callbacks)
    return {vars(type(each))["config_name"]: each for each in given if "config_name" in vars(type(each))}


def constructed(args: TrainingArguments, objects: Objects, run_dir: RunDir) -> Objects:
    """``objects``, whose ``model_init`` makes the model where ``construct_model_on`` says; on meta an ``init_weights``
    of their own leaves its parameters empty, for a checkpoint to fill. Raises ConfigError.
    """
    where, make, resume = args.construct_model_on, objects.model_init, args.resume_from_checkpoint
    restored = args.resume_components == "all" or "model" in args.resume_components
    if where == "meta" and not (restored and (isinstance(resume, str) or (resume and candidates(run_dir)))):
        where = "default"
        if args.process_index == 0:
            _log.warning("construct_model_on: resume_from_checkpoint gives no checkpoint for meta, so default is taken")
    if where == "meta" and make is None:
        raise ConfigError("construct_model_on: meta makes the model anew, got model; give model_init instead")
    # a pipeline's stages are cut from models that must be equal, which they are on a CPU
    if make is None or where == "default" or (where == "device" and args.trainer.cuts_layers):
        return objects

    def emptied(module: nn.Module, name: str, p: nn.Parameter | None) -> Any:
        return None if p is None or p.is_meta else nn.Parameter(p.to("meta"), p.requires_grad)

    def build() -> nn.Module:
        # on meta parameters alone: buffers that no checkpoint has only the constructor can compute
        with pick_device(args.device) if where == "device" else register_module_parameter_registration_hook(emptied):
            return make()

    fill = objects.init_weights if where == "device" else lambda part, seed: None
    return replace(objects, model_init=build, init_weights=fill)


def described_data(objects: Objects) -> dict[str, Any]:
    """What the datasets tell of themselves, for people."""
    sets = {"train": objects.train_dataset, "eval": objects.eval_dataset}
    sizes = {f"{split}_samples": len(data) for split, data in sets.items() if isinstance(data, Sized)}
    return {"type": type(objects.train_dataset).__name__, **sizes} if objects.train_dataset is not None else sizes


def _named(given: Any) -> Target:
    """An object that no file can hold, by its name."""
    return Target(name_of(given))


def _problems(args: TrainingArguments, objects: Objects, config: Config, size: int) -> Iterator[str]:
    """What only a script can get wrong."""
    for name in sorted(args.given.intersection(_OF_THE_COMMAND)):
        yield f"{name}: forgather train reads it, a script does not; leave it out, and give torchrun its own option"
    if objects.made_strategy is None:
        yield from _placement(objects, config, size)
    if objects.eval_dataset is None:
        for name, off in (("eval_strategy", "no"), ("eval_on_start", False), ("eval_on_save", False),
                          ("load_best_model_at_end", False)):  # fmt: skip
            if getattr(args, name) != off:
                yield f"{name}: needs evaluations, and eval_dataset is missing; give one, or leave {name} out"
    if args.max_steps < 0 and args.num_train_epochs == -1 and hasattr(objects.train_dataset, "__len__"):
        yield "max_steps: -1 with num_train_epochs=-1 never ends on a dataset with a length; set one of them"
    if objects.enable_checkpointing is not None and not args.gradient_checkpointing:
        yield "enable_activation_checkpoint_fn: only gradient_checkpointing=true calls it; set that"
    if objects.enable_checkpointing is not None and args.gradient_checkpointing_every > 1:
        yield (
            "gradient_checkpointing_every: nothing reads it beside enable_activation_checkpoint_fn, which chooses the "
            "layers; leave it out"
        )
    pipeline: Any = config.trainer
    if pipeline.cuts_layers:
        # a schedule of the user's may be of either kind
        shape = vars(args)["pp_stage_type"] if pipeline.own_schedule else "v" if pipeline.is_v_shaped else "loop"
        has = {"pp_stage_type": shape, "is_multistage": not pipeline.has_one_stage}
        for name in (name for name, value in has.items() if getattr(args, name) not in (None, value)):
            yield f"{name}: schedule={pipeline.schedule} has {has[name]}, got {getattr(args, name)}; leave {name} out"
    yield from _said_twice(args, objects)


_OF_THE_COMMAND = ("nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "max_restarts")


def _placement(objects: Objects, config: Config, size: int) -> Iterator[str]:
    """Where the model and its optimizer are to live."""
    has_optimizer = objects.optimizer.optimizers[0] is not None
    if has_optimizer and objects.model is None:
        yield "optimizers: model_init makes parameters that they cannot hold beforehand; give optimizer_factory"
    trainer: Any = config.trainer
    if trainer.is_one_process and size > 1:
        yield f"trainer: {trainer.type} is one process, and this is one of {size}; choose trainer=ddp"
    is_one_of_a_job = "WORLD_SIZE" in os.environ or dist.is_initialized()  # torchrun's, of one rank too
    if size < trainer.min_ranks or (trainer.is_one_process is False and not is_one_of_a_job):
        yield (
            f"trainer: {trainer.type} is for several ranks, and this process is alone; start the script with torchrun "
            f"--nproc_per_node={max(2, trainer.min_ranks)}, or choose trainer=single"
        )
    if objects.model is not None and not trainer.takes_built_model:
        yield f"model: trainer={trainer.type} builds its own parts; give a function that makes the model as model_init"
    elif has_optimizer and not trainer.trains_given_parameters:
        yield f"optimizers: trainer={trainer.type} makes parameters of its own; give optimizer_factory"


def _said_twice(args: TrainingArguments, objects: Objects) -> Iterator[str]:
    """Settings in whose place an object stands."""
    recipe = objects.optimizer
    scheduler = "optimizers" if recipe.optimizers[1] is not None else "lr_scheduler_factory"
    has_scheduler = recipe.optimizers[1] is not None or recipe.scheduler_factory is not None
    has_loss = objects.loss_fn is not None or objects.fused_loss_factory is not None
    job_id = getattr(built_in(objects.callbacks).get("control"), "job_id", None)
    stands_for: dict[str, tuple[str, ...]] = {
        recipe.way or "": ("optimizer", "optim", "adam_beta1", "adam_beta2", "adam_epsilon"),
        scheduler if has_scheduler else "": (
            "lr_scheduler",
            "lr_scheduler_type",
            "lr_scheduler_kwargs",
            "warmup_steps",
        ),
        "TrainerControlCallback.job_id" if job_id is not None else "": ("job_id",),
        "strategy" if objects.made_strategy is not None else "": ("trainer",),
        "loss_fn or fused_loss_factory" if has_loss else "": ("loss", "label_smoothing_factor"),
    }
    given = args.given | {f.name for f in fields(args.groups) if getattr(args.groups, f.name) is not None}
    for argument, names in stands_for.items():
        for name in given.intersection(names) if argument else ():
            yield f"{name}: nothing reads it, {argument} stands in its place; leave one of the two out"


def function_of_model(given: Callable[..., Any] | None) -> Callable[[nn.Module], Any] | None:
    """``enable_activation_checkpoint_fn`` as a function of the model: itself, or one of (rank, model) on this rank.

    Raises ConfigError for a function of neither.
    """
    if given is None:
        return None
    with contextlib.suppress(TypeError):
        with contextlib.suppress(ValueError):  # some C functions have no signature
            inspect.signature(given).bind(None)
        return given
    with contextlib.suppress(TypeError):
        inspect.signature(given).bind(0, None)
        return lambda model: given(world().rank, model)  # which is known when the strategy has joined the ranks
    raise ConfigError(
        f"enable_activation_checkpoint_fn: is called with the model, or with (rank, model), which {_named(given).path} "
        "cannot be; give a function of one or two arguments"
    )


# ------------------------------------------------------------------------------------------------------------ messages


_GROUPS_BUT_TRAINER = ("precision", "optimizer", "lr_scheduler", "loss")
"""What other names than a group's own say of it takes other values."""


def _as_typed(problem: str, typed: dict[str, str]) -> str:
    """A rule's words, in which settings stand as in a recipe, as the script has them: ``fp16=True``, ``None``."""

    def value(match: re.Match[str]) -> str:
        name, text = match.groups()
        if typed.get(name) == text:  # precision=fp16
            return f"{text}=True"
        shown = {"null": "None", "true": "True", "false": "False"}.get(text, f'"{text}"')
        if typed.get(name) == "mixed_precision" and text in ("fp32", "bf16", "fp16"):
            return f"""mixed_precision={'"no"' if text == "fp32" else shown}"""
        return f"{name if name in _GROUPS_BUT_TRAINER else typed.get(name, name)}={shown}"

    name, colon, words = problem.partition(": ")
    name = name.replace("optimizer.groups", "optimizer_groups")
    head, dot, tail = name.rpartition(".")
    name = f"{typed.get(head, head)}{dot}{tail}" if dot else typed.get(name, name)
    return name + colon + re.sub(r"\b([a-z]\w*)=([A-Za-z]\w*|1F1B)\b(?![.(])", value, words)


# --------------------------------------------------------------------------------------------------- its run directory


class RunFiles:
    """Lock, configs, metrics and ``exit.json`` of the run of one Trainer that no command has started.

    ``metrics.jsonl`` is written from the first ``train()`` on: who only evaluates leaves no trace in a run.
    """

    def __init__(
        self, run_dir: RunDir, tree: dict[str, Any], origin: dict[str, Any], built: Iterable[tuple[str, Any]]
    ) -> None:
        """``tree`` and ``origin`` are what ``config.yaml`` and ``origin.yaml`` hold; ``built``: ``build_callbacks``."""
        self._run_dir, self.tree, self._origin = run_dir, tree, origin
        wanted = dict(built)
        self._logger: Any = wanted.pop("json", None)
        self.callbacks = list(wanted.items())
        """What the Trainer is to be given."""
        self._has_trained = False

    @contextmanager
    def taken(
        self, run: TrainingRun, callbacks: CallbackList, finish: Callable[[], ExitStatus], *, resume: bool
    ) -> Iterator[None]:
        """Collective. Hold the directory while training lasts, and leave how it ended. Raises SetupError for one that
        another job holds, and for one with a run that is neither gone on with nor to be overwritten.
        """
        held: RunLock | None = None
        show_all_text()
        with ExitStack() as stack:

            def take() -> None:
                nonlocal held
                held = stack.enter_context(RunLock(self._run_dir.root))
                started_at = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
                held.prepare(
                    dump_saved(self.tree),
                    {**self._origin, "started_at": started_at},
                    overwrite=run.config.overwrite_output_dir and not resume,
                    resume=resume or self._has_trained,
                    ranks=0,
                )
                self._has_trained = True

            on_rank_0(take, run.cpu_group)
            if self._logger is not None:
                callbacks.add(self._logger, "json")
                self._logger = None
            try:
                yield
                status = finish()
            except BaseException as error:
                if isinstance(error, PartError | CallbackError):
                    name_file(error, self._run_dir.option_files())
                if held is not None:
                    held.conclude(from_error(0, error))
                raise
            if held is not None:
                held.conclude(status)


def script_files(run_dir: RunDir, args: TrainingArguments, config: Config, objects: Objects) -> RunFiles:
    """The run of a script, shown and written like every other, but for callbacks that the user gives in their place.

    ``config.yaml`` has the names of the objects that the script gave, in angle brackets: commands read the settings,
    and only the script can go on with the run. Raises ConfigError with all that a recipe would be refused for.
    """
    tree = to_tree(replace(recorded(args, config, objects), output_dir=str(run_dir.root)))
    origin = {"recipe": config.recipe, "recipe_path": sys.argv[0], "overrides": [], "directory": str(Path.cwd())}
    built, given = build_callbacks(config.callbacks, run_dir, config_tree=tree), built_in(objects.callbacks)
    return RunFiles(run_dir, tree, origin, [(name, each) for name, each in built if name not in given])


class ScriptJob:
    """The job of a Trainer that no command has started (``TrainingJob``): a script's own functions, and its run."""

    stacks = None

    def __init__(
        self,
        poll: Callable[[], int | None] = lambda: None,
        acknowledge: Callable[[int], None] = lambda signum: None,
        run_dir: RunDir | None = None,
    ) -> None:
        """``run_dir``: where the Trainer has one to itself."""
        self.poll, self.acknowledge, self._run_dir, self._has_begun = poll, acknowledge, run_dir, False

    def stepped(self, step: int) -> None:
        """So many steps are done. Raises TrainingError if the run directory is gone."""
        if self._run_dir is not None and world().rank == 0:
            after_step(self._run_dir, first=not self._has_begun)
            self._has_begun = True
