"""What the loop does to its process: random seeds, Python's garbage collector, and words for running out of memory."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from forgather_cli.config.batch import smaller_micro_batch
from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import OutOfMemoryError

_MASK = (1 << 64) - 1
P = ParamSpec("P")
R = TypeVar("R")


def mix(*numbers: int) -> int:
    """A 63-bit seed from several numbers: SplitMix64's finalizer (Steele et al. 2014) over each in turn."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the device's generator for one step, so that dropout is a function of (seed, step, rank) alone.

    The generators are seeded directly: ``torch.manual_seed`` takes 59 us, this 1 us (torch 2.13).
    """
    value = mix(seed, step, rank)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


class garbage_collection:
    """Python's collector is off inside and runs every ``gc_steps`` steps, so that ranks do not pause at odd moments."""

    def __init__(self, args: RunSettings) -> None:
        self._steps = args.gc_steps
        self._threshold = args.gc_threshold

    def __enter__(self) -> garbage_collection:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.freeze()  # the libraries' two million objects are not looked through again
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        if step % self._steps == 0:
            gc.collect()
        if self._threshold is not None and torch.cuda.is_available():
            _release_cuda_cache(self._threshold)


def _release_cuda_cache(threshold: float) -> None:
    """Give cached CUDA memory back when more than ``threshold`` of the device is reserved and 10 % of it can be won."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    if reserved > threshold * total and reserved - allocated > 0.1 * total:
        torch.cuda.empty_cache()


_EARLY = 10  # first steps of a process, in which auto_find_batch_size starts again
_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory|bad_alloc|ALLOC_FAILED")
"""Words of CUDA's allocator and of the CPU's, of oneDNN, and of cuDNN and cuBLAS about memory of their own."""


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(_OUT_OF_MEMORY.search(str(error)))


def out_of_memory_explained(step: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Turn a step's out-of-memory error into one that names the step, the shapes, memory by kind and what helps."""

    @functools.wraps(step)
    def explained(trainer: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return step(trainer, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            batch, smaller = trainer.batch_plan.micro_batch, _smaller_batch(trainer)
            raise OutOfMemoryError(_memory_report(trainer, args[0], error), batch, smaller) from error

    return explained  # type: ignore[return-value]  # positional self against a named one


def _smaller_batch(trainer: Any) -> int | None:
    """What to start again with; None where that is not asked for, or training is past its first steps."""
    done = trainer.state.global_step - trainer.state.resumed_step
    if not trainer.args.auto_find_batch_size or done >= _EARLY:
        return None
    return smaller_micro_batch(trainer.batch_plan, trainer.strategy.batch_multiple)


def _memory_report(trainer: Any, step: Any, error: BaseException) -> str:
    shapes = {tuple(batch["input_ids"].shape) for batch in step.microbatches}
    shape = " or ".join(f"{b} x {t}" for b, t in sorted(shapes)) or "none"
    weights = sum(p.numel() * p.element_size() for part in trainer.strategy.parts for p in part.parameters())
    state = sum(t.numel() * t.element_size() for t in trainer.optimizer.state_tensors().values())
    a = trainer.args
    helps = [
        (
            a.per_device_train_batch_size > 1,
            f"a smaller per_device_train_batch_size (now {a.per_device_train_batch_size}"
            f"{'' if a.auto_find_batch_size else '; auto_find_batch_size=true finds one'})",
        ),
        (not a.gradient_checkpointing, "gradient_checkpointing=true"),
        (getattr(getattr(a, "loss", None), "type", "") != "linear_cross_entropy", "loss=linear_cross_entropy"),
        (a.precision.type == "fp32", "precision=bf16"),
        (not a.fuse_optim_with_backward, "fuse_optim_with_backward=true with max_grad_norm=null"),
    ]
    remedies = ", ".join(text for useful, text in helps if useful)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"out of memory in step {trainer.state.global_step + 1}, micro-batches of {shape} tokens: weights "
        f"{weights / 2**20:.0f} MiB, gradients up to {weights / 2**20:.0f} MiB, optimizer {state / 2**20:.0f} MiB, the "
        f"rest activations ({reason}); most likely to help: {remedies or 'a smaller model'}"
    )
