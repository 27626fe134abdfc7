"""``auto_find_batch_size``: a run that has no room for its micro-batch starts again with a smaller one.

All its ranks end and start anew, under every strategy alike: ranks that wait in a collective for the one without memory
could not agree on anything. The sequences of one optimizer step stay the same, so the run does too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from forgather_cli.config.schema import Config
from forgather_cli.launch.exit_status import ExitStatus
from forgather_cli.launch.run_lock import RunLock

_NAME = "auto_find_batch_size"


def until_it_fits(held: RunLock, config: Config, path: Path, train: Callable[[Config], ExitStatus]) -> ExitStatus:
    """``train(config)``, again with smaller micro-batches as long as its status asks for that; returns the last status.

    What is tried is written to ``path``, the config of this start: ranks read it, and a resume goes on with it.
    """
    before = set(held.run.checkpoint_steps())
    status, tried = train(config), False
    while (size := status.smaller_batch) is not None:
        tried, was = True, status.batch
        print(f"\n{_NAME}: out of memory with {was} sequences at a time; starting again with {size}",
              file=sys.stderr, flush=True)  # fmt: skip
        config = _with_micro_batch(config, size, has_saved=bool(set(held.run.checkpoint_steps()) - before))
        _write(held, path, config)
        _release_memory()
        status = train(config)
    if tried and not status.failed:
        size = config.per_device_train_batch_size
        print(f"{_NAME}: found per_device_train_batch_size={size}, with which forgather resume goes on", flush=True)
    return status


def _with_micro_batch(config: Config, size: int, *, has_saved: bool) -> Config:
    """As many sequences per step, ``size`` at a time. ``has_saved``: this job has left a checkpoint to go on from."""
    steps = None  # follows from global_batch_size
    if config.global_batch_size is None:
        steps = config.per_device_train_batch_size * (config.gradient_accumulation_steps or 1) // size
    resume = True if has_saved else config.resume_from_checkpoint
    return replace(
        config, per_device_train_batch_size=size, gradient_accumulation_steps=steps, resume_from_checkpoint=resume
    )


def _write(held: RunLock, path: Path, config: Config) -> None:
    from forgather_cli.config.decode import dump_tree, load_tree

    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "resume_from_checkpoint")
    held.write(path, dump_tree({**load_tree(path), **{name: getattr(config, name) for name in names}}))


def _release_memory() -> None:
    """Of what was tried in this process: trainers are cycles, and CUDA's allocator keeps what it has got."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
