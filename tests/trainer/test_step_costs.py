"""What one step between two logs sends to other ranks, that the host reads nothing of it from the device, and how many
of our functions it goes through.

Every collective and every read is named by its operation and the function of ours it happens in. The tables below are
the whole list: who adds to it says here why the step cannot do without.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from program import Process
from ranks import run_ranks
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.distributed import clip_grad_norm
from forgather_cli.run_dir import RunDir

_READS = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__"}
"""Methods of a tensor that hand its numbers to Python."""
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2"}
"""Operations whose result the host needs, wherever they are called from."""


def _place() -> str:
    """The innermost function of the package on the stack, or of the tests."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not frame.f_globals["__name__"].startswith("forgather_cli."):
        frame = frame.f_back
    return f"{frame.f_globals['__name__'].rpartition('.')[2]}.{frame.f_code.co_qualname}"


class _Operations(TorchDispatchMode):
    """Counts what goes to other ranks, C++ reducers' included, and operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.sent[f"{func._opname} in {_place()}"] += 1
        elif func._opname in _WAITS:
            self.waits[_place()] += 1
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Counts reads that a tensor of the CPU answers without an operation (``tolist``, ``numpy``)."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self.reads[_place()] += 1
        return func(*args, **(kwargs or {}))


class Watch(TrainerCallback):
    """Looks from the end of step 4 to that of step 5: what lies between steps and the fetch of the next one, too."""

    newest: Watch

    def __init__(self) -> None:
        self.operations, self.methods = _Operations(), _Methods()
        Watch.newest = self

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.operations.__enter__()
            self.methods.__enter__()
        elif state.global_step == 5:
            self.methods.__exit__(None, None, None)
            self.operations.__exit__(None, None, None)


def step_of(root: str, *overrides: str) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """(what was sent, operations that wait, reads) of a step of two micro-batches, under the default callbacks."""
    settings = (
        "+callbacks.watch._target_=test_step_costs.Watch", "callbacks.textgen=null", "max_steps=6",
        "callbacks.control.enable_http=false", "logging_first_step=false", "logging_steps=100", "eval_strategy=no",
        "save_strategy=no",
    )  # fmt: skip
    layout = (f"nproc_per_node={dist.get_world_size()}",) if dist.is_initialized() else ()
    config = tiny.config(Path(root), *layout, *settings, *overrides, callbacks="default")
    tiny.train(config, RunDir(Path(root)))
    watch = sys.modules["test_step_costs"].Watch.newest
    return dict(watch.operations.sent), dict(watch.operations.waits), dict(watch.methods.reads)


_NORM = {"allreduce_ in distributed.all_sum": 1}
"""Of the squared gradient norm, where each rank holds a share of the model."""
_SYNC = {"allreduce_ in step_sync.Sum.__init__": 1}
"""Counts of the next step and what ranks were told, on the host's own group."""
SENT: dict[str, dict[str, int]] = {
    # the gradients, in one bucket, with the last micro-batch
    "ddp": {**_SYNC, "allreduce_ in ddp.DataParallel.forward_backward": 1},
    "fsdp2": {
        **_SYNC,
        **_NORM,
        # how many micro-batches the others have, on the host's own group
        "allreduce_ in parallelize.EvenMicrobatches.of": 1,
        # of each micro-batch: the weights of the root and of two blocks, and of the blocks again for the backward
        "_allgather_base_ in fsdp2.FullyShard.forward_backward": 2 * 3,
        "_allgather_base_ in decoder.Stack.forward": 2 * 2,
        "_reduce_scatter_base_ in fsdp2.FullyShard.forward_backward": 2 * 3,
    },
    # a hidden state and its gradient, of each of the schedule's two parts of two micro-batches
    "pipeline": {
        **_SYNC,
        **_NORM,
        "send in pipeline_schedule.TrainingSchedule.step": 2 * 2,
        "recv_ in pipeline_schedule.TrainingSchedule.step": 2 * 2,
    },
}
LAYOUTS = {
    "ddp": ("trainer=ddp", "per_device_train_batch_size=2"),
    "fsdp2": ("trainer=fsdp2", "per_device_train_batch_size=2"),
    "pipeline": ("trainer=pipeline", "n_microbatches=2", "per_device_train_batch_size=4"),
}
LATE = {"metrics.LateReader._pop": 1}
"""The gradient norm of two steps ago: on CUDA a copy in the host's memory, which has come by then."""
COUNTED = {"collate.Counts.of": 4, "distributed.clip_grad_norm": 1}
ON_THE_HOST = COUNTED | {"step_sync.Sum.read": 1, "parallelize.EvenMicrobatches.is_last": 1}
"""Reads of what never was on the device: targets of the CPU's batches and their bytes, sums over the host's own group;
and of what only a CPU reads: the norm that says whether there is something to clip.
"""


def test_one_device_waits_for_nothing_in_a_step(tmp_path: Path) -> None:
    sent, waits, reads = step_of(str(tmp_path), "seed=42", "per_device_train_batch_size=4")
    assert sent == {}
    assert waits == LATE | COUNTED
    assert reads == LATE | COUNTED


def test_gradients_that_are_small_enough_are_left_alone() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    clip_grad_norm([weight], 10.0)
    assert weight.grad._version == 0  # changed in place, were it by 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_sends_what_the_mathematics_needs_and_waits_for_nothing(layout: str, tmp_path: Path) -> None:
    for sent, waits, reads in run_ranks(2, step_of, str(tmp_path), *LAYOUTS[layout]):
        assert sent == SENT[layout]
        assert waits.items() - ON_THE_HOST.items() == LATE.items()
        assert reads.items() - ON_THE_HOST.items() == LATE.items()


def test_the_way_from_the_command_to_the_model_is_short(tmp_path: Path) -> None:
    """What a reader of the loop goes through (Python 3.11, where each comprehension is a call). A call more is a place
    more that a reader has to go to.
    """
    words = (
        "train", "model=nano", "seq_len=64", "precision=fp32", "optimizer=muon", "eval_strategy=no", "save_strategy=no",
        "max_steps=26", f"output_dir={tmp_path / 'run'}", "device=cpu", "+callbacks.way._target_=step_calls.Way",
    )  # fmt: skip
    train = Process(*words)
    assert train.finish() == 0, train.output
    way = json.loads((tmp_path / "run" / "way.json").read_text())
    inner = way["frames"][way["frames"].index("Loop.train") :]
    assert inner == [
        "Loop.train", "Loop._train_epoch", "Loop.step", "SingleDevice.forward_backward", "ModelWithLoss.forward",
        "CrossEntropy.total", "Decoder.forward",
    ]  # fmt: skip
    assert len(way["frames"]) <= 14, way["frames"]
    assert list(way["steps"]) == [str(step) for step in range(12, 26)]
    # in other steps something is due by the clock
    shortest = min(way["steps"].values(), key=lambda calls: sum(calls.values()))
    assert sum(shortest.values()) <= 127, shortest
    assert len(shortest) <= 92, sorted(shortest)
