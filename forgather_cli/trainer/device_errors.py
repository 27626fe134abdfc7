"""Words for running out of memory and for other errors of the device: where, shapes, memory by kind, what helps."""

from __future__ import annotations

import re
from typing import Any

import torch

from forgather_cli.config.batch import smaller_micro_batch
from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import ModelError, OutOfMemoryError, PartError
from forgather_cli.strategies.base import Batch, Strategy
from forgather_cli.trainer.own_parts import explain_part
from forgather_cli.trainer.run import TrainingRun

_EARLY = 10  # first steps of a process, in which auto_find_batch_size starts again
_OUT_OF_MEMORY = re.compile(
    r"out of memory|not enough memory|can't allocate memory|bad_alloc|ALLOC_FAILED|Storage size calculation overflowed"
)
"""Words of CUDA's allocator and of the CPU's, of oneDNN, and of cuDNN and cuBLAS about memory of their own; and of
tensors larger than any memory."""
_OF_DEVICE = re.compile(r"(CUDA|HIP|MPS|cuDNN|MIOpen) error|(CUBLAS|CUDNN|CUSOLVER)_STATUS_\w+|device-side assert")


def _is_out_of_memory(error: BaseException | None) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))
    )


def _is_of_device(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and bool(_OF_DEVICE.search(str(error)))
    )


def explain_model(error: RuntimeError | MemoryError | PartError) -> None:
    """Raise ModelError for an error in making the model, where memory ran out."""
    cause = error.__cause__ if isinstance(error, PartError) else error
    if _is_out_of_memory(cause):
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise ModelError(
            f"model: out of memory when its weights were made ({reason}); make it smaller (model.vocab_size or "
            "model.config, layers, widths), or share it among more ranks (trainer=fsdp2; forgather plan)"
        ) from error


def explain_step(error: Exception, run: TrainingRun, batches: list[Batch]) -> None:
    """Explain an error in a training step: raise OutOfMemoryError, with settings that help, or PartError, or add a note
    with step, shapes and memory to another error of the device. ``batches``: none where they were being read.
    """
    step = f"in step {run.state.global_step + 1}"
    place = f"{step}, micro-batches of {_shapes(batches)}"
    memory = _memory(run.strategy, run.optimizer, gradients=True)
    if _is_out_of_memory(error):
        smaller: int | None = None  # the micro-batch to start again with (auto_find_batch_size)
        if run.config.auto_find_batch_size and run.state.global_step - run.state.resumed_step < _EARLY:
            smaller = smaller_micro_batch(run.batch_plan, run.strategy.batch_multiple)
        told = _out_of_memory(place, memory, error, _helps_training(run.config))
        raise OutOfMemoryError(told, run.batch_plan.micro_batch, smaller) from error
    if _is_of_device(error):
        error.add_note(_note(place, memory))
    else:
        explain_part(error, run, step, batches)


def explain_evaluation(
    error: Exception,
    what: str,
    batches: list[Batch],
    args: RunSettings,
    strategy: Strategy,
    run: TrainingRun | None = None,
) -> None:
    """As ``explain_step`` for an error in a pass over a split, named ``what`` in messages, at ``batches``."""
    place = f"in {what}, batches of {_shapes(batches)}"
    memory = _memory(strategy, run and run.optimizer, gradients=False)
    if _is_out_of_memory(error):
        size = args.per_device_eval_batch_size
        helps = [(size > 1, f"a smaller per_device_eval_batch_size (now {size})"), *_helps_both(args)]
        raise OutOfMemoryError(_out_of_memory(place, memory, error, helps)) from error
    if _is_of_device(error):
        error.add_note(_note(place, memory))
    elif run is not None:
        explain_part(error, run, f"in {what}", batches)


# ------------------------------------------------------------------------------------------------------------ the words


def _out_of_memory(place: str, memory: str, error: BaseException, helps: list[tuple[bool, str]]) -> str:
    remedies = ", ".join(text for useful, text in helps if useful)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"out of memory {place}: {memory}, the rest activations ({reason}); most likely to help: "
        f"{remedies or 'a smaller model'}"
    )


def _note(place: str, memory: str) -> str:
    return (
        f"{place}: {memory}, besides activations; a device reports errors late, so the call above may not be the one "
        "that failed: with CUDA_LAUNCH_BLOCKING=1 it is"
    )


def _shapes(batches: list[Batch]) -> str:
    shapes = {tuple(batch["input_ids"].shape) for batch in batches}
    return (" or ".join(f"{b} x {t}" for b, t in sorted(shapes)) or "no") + " tokens"


def _memory(strategy: Strategy, optimizer: Any, *, gradients: bool) -> str:
    """By kind, as far as sizes tell: it asks the device nothing, which may answer no more."""
    weights = sum(p.numel() * p.element_size() for part in strategy.parts for p in part.parameters())
    tensors = {} if optimizer is None else optimizer.state_tensors()
    state = sum(t.numel() * t.element_size() for t in tensors.values())
    of_gradients = f"gradients up to {weights / 2**20:.0f} MiB, " if gradients else ""
    return f"weights {weights / 2**20:.0f} MiB, {of_gradients}optimizer {state / 2**20:.0f} MiB"


def _helps_training(args: RunSettings) -> list[tuple[bool, str]]:
    """(whether it may help, what to set)."""
    size, finds = args.per_device_train_batch_size, args.auto_find_batch_size
    found = "" if finds else "; auto_find_batch_size=true finds one"
    return [
        (size > 1, f"a smaller per_device_train_batch_size (now {size}{found})"),
        (not args.gradient_checkpointing, "gradient_checkpointing=true"),
        (args.gradient_checkpointing_every > 1, "gradient_checkpointing_every=1"),
        *_helps_both(args),
        (not args.fuse_optim_with_backward, "fuse_optim_with_backward=true with max_grad_norm=null"),
    ]


def _helps_both(args: Any) -> list[tuple[bool, str]]:
    """``args``: a whole Config, or a Python user's arguments, which have no loss option."""
    other_loss = not args.loss_applies_head and not getattr(getattr(args, "data", None), "has_pairs", False)
    return [(other_loss, "loss=linear_cross_entropy"), (args.precision.is_fp32, "precision=bf16")]
