"""The confirming step of ``forgather plan --fit``: a few real steps for each micro-batch, until one has room."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forgather_cli.config.schema import (
    CallbackSettings,
    Config,
    JsonSettings,
    MetricsSettings,
    SyntheticSettings,
    value_at,
)
from forgather_cli.errors import SetupError
from forgather_cli.launch.exit_status import read_exit_record
from forgather_cli.launch.processes import temporary_folder
from forgather_cli.plan.fit import Budget
from forgather_cli.plan.run import RunPlan
from forgather_cli.run_dir import RunDir

_STEPS = 3  # the second has moments already, the third what caching allocators have settled on
_OUT_OF_MEMORY = "CUDA out of memory."  # words by which Accelerate knows it, whatever the device


@dataclass(frozen=True)
class Confirmed:
    """What real steps have shown."""

    micro_batch: int
    peak: int
    """Bytes of rank 0: of CUDA memory, on CPU resident memory of the process."""
    too_large: list[int]
    """Micro-batches that were tried before, and were out of memory."""


def confirm(
    config: Config, made: RunPlan, sizes: Sequence[int], budget: Budget, tell: Callable[[str], None]
) -> Confirmed:
    """Train a few steps on random tokens in processes of their own, from the largest of ``sizes`` (ascending) down.

    Accelerate's finder does the trying. Raises SetupError where training fails for another reason, or nothing fits.
    """
    find_executable_batch_size: Any = importlib.import_module("accelerate.utils").find_executable_batch_size  # no stubs
    left = sorted(sizes)
    too_large: list[int] = []

    def smaller() -> int:
        too_large.append(left.pop())
        half = [size for size in left if size <= too_large[-1] * 0.9]  # Accelerate's own step
        left[:] = half
        return left[-1] if left else 0

    def attempt(micro_batch: int) -> int:
        tell(f"{_STEPS} steps with {micro_batch} sequences at a time ...")
        return _peak(_trial_config(config, made, micro_batch), budget)

    try:
        peak: int = find_executable_batch_size(attempt, starting_batch_size=left[-1], reduce_batch_size_fn=smaller)()
    except RuntimeError as error:
        if "No executable batch size" not in str(error):
            raise
        raise SetupError("--confirm: not even the smallest micro-batch has room; see the settings above") from error
    return Confirmed(left[-1], peak, too_large)


def _trial_config(config: Config, made: RunPlan, micro_batch: int) -> Config:
    """The run's, on random tokens, without evaluations and checkpoints."""
    model: Any = config.model
    if config.data.is_paired or config.data.has_pairs:
        raise SetupError(
            f"--confirm: trains on random text, and data={value_at(config, 'data')} has examples of two sides; "
            "leave it out"
        )
    assert made.seq_len is not None, "memory_by_micro_batch has refused that"
    if "vocab_size" in vars(model):
        model = replace(model, vocab_size=made.vocab_size)
    changes: dict[str, Any] = {"load_best_model_at_end": False, "eval_on_start": False, "eval_on_save": False}
    return replace(
        config,
        model=model,
        data=SyntheticSettings(seq_len=made.seq_len, num_samples=made.world_size * micro_batch * 2 * _STEPS),
        callbacks=CallbackSettings(metrics=MetricsSettings(), json=JsonSettings()),
        global_batch_size=None,
        per_device_train_batch_size=micro_batch,
        # gradients of the first micro-batch are there when the second one is computed
        gradient_accumulation_steps=1 if config.fuse_optim_with_backward else 2,
        max_steps=_STEPS,
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="no",
        save_strategy="no",
        resume_from_checkpoint=False,
        auto_find_batch_size=False,
        logging_dir=None,
        job_id=None,
        **changes,
    )


def _peak(config: Config, budget: Budget) -> int:
    """Peak memory of a trial. Raises RuntimeError as an allocator would if it has no room, SetupError if it fails."""
    from forgather_cli.config.decode import dump_saved, to_tree

    with temporary_folder("fit") as folder:
        run = RunDir(folder / "run")
        run.root.mkdir()
        run.config.write_text(dump_saved(to_tree(replace(config, output_dir=str(run.root)))), encoding="utf-8")
        command = [sys.executable, "-m", "forgather_cli", "resume", str(run.root)]  # in its saved state: from the start
        of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # the trial is in no world of others
        environment = {name: value for name, value in os.environ.items() if name not in of_a_rank}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        ended = read_exit_record(run)
        if done.returncode == -signal.SIGKILL or (ended is not None and "out of memory" in ended.reason):
            raise RuntimeError(_OUT_OF_MEMORY)
        if done.returncode != 0:
            raise SetupError(f"--confirm: the trial failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        records = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    peak = max(int(record.get("peak_mem_allocated") or 0) for record in records)
    if peak > budget.total:
        raise RuntimeError(_OUT_OF_MEMORY)
    return peak
