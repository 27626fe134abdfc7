"""Makes the parts of a Trainer from its settings: strategy, model and loaders."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.config.schema import Config, RunSettings, Target
from forgather_cli.data.loaders.collate import CollateFn, default_collate
from forgather_cli.data.loaders.data_ranks import DataRanks
from forgather_cli.data.loaders.loader import EvalLoader, TrainLoader
from forgather_cli.distributed import gather, pick_device, world
from forgather_cli.errors import ConfigError
from forgather_cli.labels import STARTS
from forgather_cli.loss.base import Loss
from forgather_cli.loss.build import build_loss
from forgather_cli.loss.losses import ComputedLoss
from forgather_cli.models.attention import has_varlen
from forgather_cli.models.parts import named_tensors, num_elements, train_only
from forgather_cli.precision.dtypes import parameter_dtype
from forgather_cli.precision.scaling import LossScaler, ScaledLoss
from forgather_cli.shards import local
from forgather_cli.strategies.base import ModelSpec, Strategy, check_supported
from forgather_cli.strategies.build import build_strategy
from forgather_cli.trainer.arguments import ScriptSettings
from forgather_cli.trainer.given import Objects
from forgather_cli.trainer.run import TrainingRun

_log = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------ strategy and model


def strategy_of(config: Config, objects: Objects) -> tuple[Strategy, Loss | None, Loss | None, LossScaler | None]:
    """Collective. The given strategy, or the one that the settings select; the loss of the settings, and the one that
    is minimised, which is ``compute_loss`` where a subclass overrides that; under fp16 also its scaler.

    Raises ConfigError.
    """
    if objects.loss_fn is not None and objects.fused_loss_factory is not None:
        raise ConfigError("loss_fn: excludes fused_loss_factory, got both; give one")
    scaler = LossScaler(**config.precision.arguments()) if config.precision.scales_loss else None
    if objects.made_strategy is not None:
        if scaler is not None:
            raise ConfigError(
                f"precision: {config.precision.type} scales the loss, which the given strategy does not; give its "
                "settings as strategy, or leave it out"
            )
        check_supported(config, objects.made_strategy)
        return objects.made_strategy, None, None, None
    device, fused = pick_device(config.device), objects.fused_loss_factory
    loss = build_loss(config.loss, loss_fn=objects.loss_fn, fused_loss_factory=fused, device=device)
    minimised = loss if objects.compute_loss is None else ComputedLoss(objects.compute_loss)
    minimised = minimised if scaler is None else ScaledLoss(minimised, scaler)
    return build_strategy(config, minimised), loss, minimised, scaler


def model_spec(
    build: Callable[[], nn.Module],
    config: Config,
    strategy: Strategy,
    *,
    init: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    losses: tuple[Loss | None, Loss | None] = (None, None),
    enable_checkpointing: Callable[[nn.Module], Any] | None = None,
    checkpointing_options: dict[str, Any] | None = None,
) -> ModelSpec:
    """How to make the model: ``build``, then dtype and layers of ``precision``, ``adapter``, ``gradient_checkpointing``
    and ``torch_compile`` where the settings ask for them. ``init`` fills what ``build`` makes, and adapters start by
    ``seed``. ``losses``: of the settings, and what is minimised. ``enable_checkpointing``: the user's function for
    gradient_checkpointing, which changes the model or returns another one. Raises ConfigError.
    """
    from forgather_cli.models import transform

    of_settings, minimised = losses
    options = transform.compile_options(config) if config.torch_compile else None
    as_one = strategy.compiles_with_loss and minimised is not None and minimised.compiles
    if config.fuse_optim_with_backward or (config.torch_compile_fullgraph and getattr(minimised, "kernel", None)):
        as_one = False
    if options and config.torch_compile_scope == "model" and not as_one:
        raise ConfigError(
            "torch_compile_scope: model needs a strategy and a loss that compile as one, which those of your own, "
            "precision=fp16, and with torch_compile_fullgraph=true other losses than cross_entropy do not; set "
            "torch_compile_scope=blocks"
        )
    as_one = as_one and config.torch_compile_scope != "blocks"
    if options and of_settings is not None and (not as_one or of_settings.kernel is not None):
        of_settings.compile(**options)
    precision, dtype = config.precision, parameter_dtype(config.precision)
    logged = world().rank > 0  # rank 0 logs it once: a pipeline builds the model once per stage

    def adapt(model: nn.Module) -> nn.Module:
        nonlocal logged
        lines: list[str] = []
        if dtype is not None:
            transform.cast_parameters(model, dtype)
        if precision.maker:
            lines += precision.load_maker()(model, precision, strategy.device)
        lines += choose_trained(model, config)
        if precision.rounds_stream:  # after adapters, whose embeddings give out fp32
            transform.half_stream(model)
        for line in () if logged else lines:
            _log.log(logging.WARNING if line.startswith("warning: ") else logging.INFO, line.removeprefix("warning: "))
        logged = True
        return model

    def checkpoint(part: nn.Module) -> nn.Module:
        if enable_checkpointing is None:
            transform.apply_activation_checkpointing(part, config.recomputes, **(checkpointing_options or {}))
            return part
        changed = enable_checkpointing(part)
        return changed if isinstance(changed, nn.Module) else part

    def compiled(part: nn.Module) -> nn.Module:
        transform.compile_blocks(part, config)
        return part

    changes = dtype or precision.maker or config.trainable is not None or precision.rounds_stream
    if config.adapter.freezes_base:
        from forgather_cli.adapters.load import starting

        assert init is not None  # an adapter is of a model in a directory
        changes, init = True, starting(init, config, seed)
    spec = ModelSpec(
        build,
        adapt=adapt if changes else None,
        checkpoint=checkpoint if config.gradient_checkpointing else None,
        compile=compiled if options and not as_one else None,
        compile_with_loss=options if as_one else None,
        init=init,
    )
    return _shown(spec) if config.debug_model_init else spec


def _shown(spec: ModelSpec) -> ModelSpec:
    """``spec``, each of whose steps prints the parameters and buffers of what it has made or changed."""

    def shown(name: str, change: Callable[..., Any]) -> Any:
        def step(*part: nn.Module) -> Any:
            made = change(*part)
            print_tensors(name, part[0] if made is None else made)
            return made

        return step

    steps = {name: getattr(spec, name) for name in ("build", "adapt", "checkpoint", "compile", "init")}
    return replace(spec, **{name: shown(name, change) for name, change in steps.items() if change is not None})


def print_tensors(when: str, model: nn.Module) -> None:
    """Print what this rank holds of each parameter and buffer."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        print(f"rank {world().rank}: {when}: {name} {tuple(local(tensor).shape)} {tensor.dtype} {tensor.device}")


def print_model(config: Config, parts: list[nn.Module]) -> None:
    """Print what the strategy has made, as ``debug_model_params`` and the like say; torch's schedules tell the rest."""
    for part in parts:
        if config.debug_split_model:
            print(f"rank {world().rank}: stage: {part}")
        if config.debug_model_params:
            print_tensors("model", part)
    if config.debug_pipeline:
        logging.basicConfig()  # where nobody has said where a log goes
        logging.getLogger("torch.distributed.pipelining").setLevel(logging.DEBUG)


def choose_trained(model: nn.Module, config: Config) -> list[str]:
    """Freeze what the settings do not train, and give ``model`` (on meta too) its adapters. The lines for the log.
    Raises ModelError, SetupError.
    """
    if config.adapter.freezes_base:
        return [*config.adapter.load_maker()(model, config.adapter, config)]
    if config.trainable is not None:
        train_only(model, config.trainable)
    return []


def num_parameters(parts: list[nn.Module], group: Any) -> tuple[int, int]:
    """Collective. (all, trainable) parameters of the model that the ranks of ``group`` (CPU) hold, tied ones once."""
    own = {
        n: (num_elements(t), t.requires_grad) for n, t in named_tensors(parts).items() if isinstance(t, nn.Parameter)
    }
    sizes: dict[str, tuple[int, bool]] = {}
    for held in gather(own, group):
        sizes |= held
    return sum(n for n, _ in sizes.values()), sum(n for n, trained in sizes.values() if trained)


# ------------------------------------------------------------------------------------------------------------ loaders


class Columns:
    """Hugging Face's ``remove_unused_columns`` and ``label_names`` before a collate function: removes keys of dict
    samples that are not in ``names``, and renames the labels to ``labels``.

    transformers 5.23, ``trainer_utils.py: RemoveColumnsCollator``.
    """

    def __init__(self, names: set[str] | None, labels: str, collate: CollateFn) -> None:
        self._names, self._labels, self._collate = names, labels, collate

    def __call__(self, samples: list[Any]) -> Any:
        names = self._names
        if names is not None and isinstance(samples[0], dict) and not samples[0].keys() <= names:
            samples = [{key: value for key, value in sample.items() if key in names} for sample in samples]
        batch = self._collate(samples)
        if self._labels != "labels" and self._labels in batch:
            batch["labels"] = batch.pop(self._labels)
        return batch


def collate_fn(script: ScriptSettings, model: nn.Module, collate: CollateFn | None) -> CollateFn | None:
    """The user's ``data_collator`` (None: the default), with ``Columns`` where TrainingArguments ask for it."""
    names = set(inspect.signature(model.forward).parameters)
    labels = script.label_names[0] if script.label_names else "labels"
    # the signature (*args, **kwargs), or that of a pipeline's later stage, does not name the keys of a batch
    kept = names | {labels, "label", "label_ids"} if script.remove_unused_columns and "input_ids" in names else None
    return collate if kept is None and labels == "labels" else Columns(kept, labels, collate or default_collate)


def train_loader(
    run: TrainingRun,
    dataset: Any,
    collate_fn: CollateFn | None,
    data_ranks: DataRanks | None,
    token_bytes: Tensor | None,
) -> TrainLoader:
    config, script, strategy, plan = run.config, run.script, run.strategy, run.batch_plan
    return TrainLoader(
        dataset,
        global_batch_size=plan.global_batch,
        micro_batch_size=plan.micro_batch,
        seed=run.seed if script.data_seed is None else script.data_seed,
        rank=strategy.data_rank,
        size=strategy.data_size,
        drop_last=config.dataloader_drop_last,
        set_dataset_epoch=config.set_dataset_epoch,
        shuffle=script.train_sampling_strategy != "sequential",
        group_by_length=script.length_column_name if script.train_sampling_strategy == "group_by_length" else None,
        collate_fn=collate_fn,
        data_ranks=data_ranks,
        dispatch=config.dispatch_batches,
        vocab_size=known_vocab_size(strategy.parts) or run.data_description.get("vocab_size"),
        # a model or loss of the user's own may take others
        labels_are_ids=not any(isinstance(part, Target) for part in (config.model, config.loss)),
        token_bytes=token_bytes,
        **_loader_settings(config, strategy.device, strategy.parts[0]),
    )


def known_vocab_size(parts: list[nn.Module]) -> int | None:
    """The vocabulary size in the model's settings (the decoder) or its config (transformers); else None."""
    for part in parts:
        for settings in (getattr(part, "settings", None), getattr(part, "config", None)):
            size = getattr(settings, "vocab_size", None)
            if isinstance(size, int):
                return size
    return None


def eval_loader(
    config: Config,
    strategy: Strategy,
    dataset: Any,
    data_ranks: DataRanks | None,
    collate_fn: Any = None,
) -> EvalLoader:
    return EvalLoader(
        dataset,
        batch_size=config.per_device_eval_batch_size,
        rank=strategy.data_rank,
        size=strategy.data_size,
        max_samples=config.max_eval_samples,
        max_steps=config.max_eval_steps,
        collate_fn=collate_fn,
        data_ranks=data_ranks,
        dispatch=config.dispatch_batches if config.dispatch_eval_batches is None else config.dispatch_eval_batches,
        **_loader_settings(config, strategy.device, strategy.parts[0]),
    )


def _loader_settings(args: RunSettings, device: torch.device, model: nn.Module) -> dict[str, Any]:
    """The arguments of a loader that say how it reads, not what."""
    return {
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "pin_memory": args.dataloader_pin_memory if args.dataloader_pin_memory is not None else device.type == "cuda",
        "persistent_workers": args.dataloader_persistent_workers,
        "device": device,
        "document_starts": takes_starts(model, device),
    }


def takes_starts(model: nn.Module, device: torch.device) -> bool:
    """Whether batches on the device are to say where documents begin (``with_starts``)."""
    return STARTS in inspect.signature(model.forward).parameters and has_varlen(device)
