"""A Trainer's loaders, as its settings say, and what its samples become on the way to the model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from forgather_cli.config.schema import Config, RunSettings
from forgather_cli.data.loaders.collate import CollateFn, default_collate
from forgather_cli.data.loaders.data_ranks import DataRanks
from forgather_cli.data.loaders.loader import EvalLoader, TrainLoader
from forgather_cli.strategies.base import Strategy
from forgather_cli.trainer.arguments import ScriptSettings, TrainingArguments
from forgather_cli.trainer.run import Run


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


def collate_fn(script: ScriptSettings, model: nn.Module, collate: CollateFn | None) -> CollateFn | None:
    """The user's ``data_collator`` (None: the default), after what TrainingArguments say of columns."""
    names = set(inspect.signature(model.forward).parameters)
    labels = script.label_names[0] if script.label_names else "labels"
    # a forward of (*args, **kwargs), or of a pipeline's later stage, does not say what a batch may hold
    kept = names | {labels, "label", "label_ids"} if script.remove_unused_columns and "input_ids" in names else None
    return collate if kept is None and labels == "labels" else Columns(kept, labels, collate or default_collate)


def train_loader(run: Run, dataset: Any, collate_fn: CollateFn | None, data_ranks: DataRanks | None) -> TrainLoader:
    args, script, strategy, plan = run.args, run.script, run.strategy, run.batch_plan
    return TrainLoader(
        dataset,
        global_batch_size=plan.global_batch,
        micro_batch_size=plan.micro_batch,
        seed=run.seed if script.data_seed is None else script.data_seed,
        rank=strategy.data_rank,
        size=strategy.data_size,
        drop_last=args.dataloader_drop_last,
        set_dataset_epoch=args.set_dataset_epoch,
        shuffle=script.train_sampling_strategy != "sequential",
        group_by_length=script.length_column_name if script.train_sampling_strategy == "group_by_length" else None,
        collate_fn=collate_fn,
        data_ranks=data_ranks,
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
