"""What a Trainer is built from: loaders, optimizer, scheduler and the transformed model."""

from __future__ import annotations

import inspect
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from forgather_cli.checkpoint.gather import gather
from forgather_cli.config.schema import Config, RunSettings
from forgather_cli.data.loaders.collate import CollateFn, default_collate
from forgather_cli.data.loaders.data_ranks import DataRanks
from forgather_cli.data.loaders.loader import EvalLoader, TrainLoader
from forgather_cli.distributed import world
from forgather_cli.errors import ConfigError
from forgather_cli.models.parts import named_tensors
from forgather_cli.precision import parameter_dtype
from forgather_cli.precision.convert import converted, converts
from forgather_cli.strategies.base import ModelSpec, Strategy, check_supported
from forgather_cli.trainer.arguments import TrainingArguments

if TYPE_CHECKING:
    from forgather_cli.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


def prepare_process(args: RunSettings, seed: int) -> None:
    """Seed every generator that users' code may draw from; with ``deterministic`` two runs are bit-identical. Sets the
    level of our logs and the format of CUDA's fp32 products where TrainingArguments have one. Raises ConfigError.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers 5.23 reads it for flash-attn
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if (args.log_level, args.log_level_replica) != ("passive", "warning"):  # that library's defaults
        level = args.log_level if world().rank == 0 else args.log_level_replica
        logger = logging.getLogger("forgather_cli")
        if level != "passive":
            logger.setLevel("DEBUG" if level == "detail" else level.upper())
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())
    if args.tf32 is not None:
        if args.tf32 and not torch.cuda.is_available():
            raise ConfigError("tf32: needs a CUDA device, which there is none of, got True; leave it out")
        # not fp32_precision: after that torch 2.13 refuses get_float32_matmul_precision(), which torch.compile calls
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32


class Columns:
    """A collate function after Hugging Face's ``remove_unused_columns`` and ``label_names``: of samples that are dicts,
    what ``forward`` does not name is left out, and the labels are called ``labels``.

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


def collate_fn(args: RunSettings, model: nn.Module, collate: CollateFn | None) -> CollateFn | None:
    """The user's ``data_collator`` (None: the default), after what TrainingArguments say of columns."""
    names = set(inspect.signature(model.forward).parameters)
    labels = args.label_names[0] if args.label_names else "labels"
    # a forward of (*args, **kwargs), or of a pipeline's later stage, does not say what a batch may hold
    kept = names | {labels, "label", "label_ids"} if args.remove_unused_columns and "input_ids" in names else None
    return collate if kept is None and labels == "labels" else Columns(kept, labels, collate or default_collate)


def model_spec(
    build: Callable[[], nn.Module],
    args: Config | TrainingArguments,
    strategy: Strategy,
    *,
    init: Callable[[nn.Module], None] | None = None,
    enable_checkpointing: Callable[[nn.Module], Any] | None = None,
) -> ModelSpec:
    """What ``build`` makes, with dtype and layers of ``precision``, ``gradient_checkpointing`` (by the user's function
    where one is given, which changes the model or returns another one) and ``torch_compile``. Raises ConfigError.
    """
    from forgather_cli.models.transform import apply_activation_checkpointing, cast_parameters, compile_blocks

    check_supported(args, strategy)
    dtype = parameter_dtype(args.precision)
    told = world().rank > 0  # by rank 0, once: a pipeline builds the model once per stage

    def adapt(model: nn.Module) -> nn.Module:
        nonlocal told
        if dtype is not None:
            cast_parameters(model, dtype)
        done = converted(model, args.precision, strategy.device)
        if done and not told:
            for line in done.lines():
                _log.info("%s", line)
            told = True
        return model

    def checkpoint(part: nn.Module) -> nn.Module:
        if enable_checkpointing is None:
            apply_activation_checkpointing(part, **(args.gradient_checkpointing_kwargs or {}))
            return part
        changed = enable_checkpointing(part)
        return changed if isinstance(changed, nn.Module) else part

    def compiled(part: nn.Module) -> nn.Module:
        compile_blocks(part, args)
        return part

    return ModelSpec(
        build,
        adapt=adapt if dtype is not None or converts(args.precision) else None,
        checkpoint=checkpoint if args.gradient_checkpointing else None,
        compile=compiled if args.torch_compile else None,
        init=init,
    )


def num_parameters(parts: list[nn.Module], group: Any) -> tuple[int, int]:
    """Collective. (all, trainable) parameters of the model that the ranks of ``group`` (CPU) hold, tied ones once."""
    own = {n: (t.numel(), t.requires_grad) for n, t in named_tensors(parts).items() if isinstance(t, nn.Parameter)}
    sizes: dict[str, tuple[int, bool]] = {}
    for held in gather(own, group):
        sizes |= held
    return sum(n for n, _ in sizes.values()), sum(n for n, trained in sizes.values() if trained)


def train_loader(trainer: Trainer) -> TrainLoader:
    args, strategy, plan = trainer.args, trainer.strategy, trainer.batch_plan
    return TrainLoader(
        trainer.train_dataset,
        global_batch_size=plan.global_batch,
        micro_batch_size=plan.micro_batch,
        seed=trainer.seed if args.data_seed is None else args.data_seed,
        rank=strategy.data_rank,
        size=strategy.data_size,
        drop_last=args.dataloader_drop_last,
        set_dataset_epoch=args.set_dataset_epoch,
        shuffle=args.train_sampling_strategy != "sequential",
        group_by_length=args.length_column_name if args.train_sampling_strategy == "group_by_length" else None,
        collate_fn=trainer.collate_fn,
        data_ranks=trainer.data_ranks,
        dispatch=args.dispatch_batches,
        vocab_size=known_vocab_size(strategy.parts),
        **_loader_settings(args, strategy.device),
    )


def known_vocab_size(parts: list[nn.Module]) -> int | None:
    """Tokens that the model knows by its settings (the decoder) or its config (transformers); else None."""
    for part in parts:
        for told in (getattr(part, "settings", None), getattr(part, "config", None)):
            size = getattr(told, "vocab_size", None)
            if isinstance(size, int):
                return size
    return None


def eval_loader(
    args: Config | TrainingArguments,
    strategy: Strategy,
    dataset: Any,
    data_ranks: DataRanks | None,
    collate_fn: Any = None,
) -> EvalLoader:
    return EvalLoader(
        dataset,
        batch_size=args.per_device_eval_batch_size,
        rank=strategy.data_rank,
        size=strategy.data_size,
        max_samples=args.max_eval_samples,
        max_steps=args.max_eval_steps,
        collate_fn=collate_fn,
        data_ranks=data_ranks,
        dispatch=args.dispatch_batches if args.dispatch_eval_batches is None else args.dispatch_eval_batches,
        **_loader_settings(args, strategy.device),
    )


def _loader_settings(args: RunSettings, device: torch.device) -> dict[str, Any]:
    """How a loader reads, beside what."""
    return {
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "pin_memory": args.dataloader_pin_memory if args.dataloader_pin_memory is not None else device.type == "cuda",
        "persistent_workers": args.dataloader_persistent_workers,
        "device": device,
    }


def save_model(trainer: Trainer, directory: Path) -> None:
    """Collective. Write a Hugging Face directory: weights, and config and tokenizer where they are known."""
    from forgather_cli.checkpoint.components import LocalShard
    from forgather_cli.checkpoint.layout import plan
    from forgather_cli.checkpoint.snapshot import exchange_of, parts_to_write
    from forgather_cli.checkpoint.tensors import host_copy, write_index, write_share
    from forgather_cli.models.pretrained import write_model_files

    directory.mkdir(parents=True, exist_ok=True)
    rank, group = trainer.world.rank, trainer.cpu_group
    shards = {name: LocalShard(tensor) for name, tensor in named_tensors(trainer.strategy.parts).items()}
    files = plan(gather([shard.piece(name) for name, shard in shards.items()], group), "model")
    parts = parts_to_write(files, rank, shards, exchange_of(shards.values()))
    write_share(directory, files, rank, {name: host_copy(rows) for name, rows in parts})
    if rank == 0:
        write_index(directory, files)
        write_model_files(trainer.model, trainer.processing_class, directory)
    gather(None, group)  # no rank goes on before the directory is whole
