"""What one step between two logs sends to other ranks, that the host reads nothing of it from the device, how many of
our functions it goes through; when Python's garbage is collected, and when cached device memory is released.

Every collective and every read is named by its operation and the function of ours it happens in. The tables below are
the whole list: who adds to it says here why the step cannot do without.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from forks import FREEZE_COUNT
from program import Process
from ranks import run_ranks
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from forgather_cli.adapters.layers import attach_rows
from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.config.schema import RopeScaling, RunSettings
from forgather_cli.distributed import clip_grad_norm
from forgather_cli.errors import DivergenceError
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.process import garbage_collection

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


class Handed(TorchFunctionMode):
    """Counts tensors that Python makes on the device from numbers: the host waits for the copy (CUDA, torch 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tensor", "as_tensor") and (kwargs or {}).get("device") is not None:
            self.places[_place()] += 1
        return func(*args, **(kwargs or {}))


class Watch(TrainerCallback):
    """Looks from the end of step 4 to that of step 5, the fetch of the next one included."""

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
        **_SYNC, **_NORM, "send in pipeline_schedule.TrainingSchedule.step": 2 * 2,
        "recv_ in pipeline_schedule.TrainingSchedule.step": 2 * 2,
    },
}  # fmt: skip
LAYOUTS = {
    "ddp": ("trainer=ddp", "per_device_train_batch_size=2"),
    "fsdp2": ("trainer=fsdp2", "per_device_train_batch_size=2"),
    "pipeline": ("trainer=pipeline", "n_microbatches=2", "per_device_train_batch_size=4"),
}
LATE = {"metrics.LateReader._pop": 1}
"""The gradient norm of two steps ago: on CUDA a copy in the host's memory, which has come by then."""
COUNTED = {"collate.Counts.of": 4, "distributed.clip_grad_norm": 1}
ON_THE_HOST = COUNTED | {"step_sync.Sum.read": 1, "parallelize.EvenMicrobatches.is_last": 1}
"""Reads of what never was on the device, and of the norm, by which only a CPU asks whether there is much to clip."""


def test_one_device_waits_for_nothing_in_a_step(tmp_path: Path) -> None:
    sent, waits, reads = step_of(str(tmp_path), "seed=42", "per_device_train_batch_size=4")
    assert sent == {}
    assert waits == LATE | COUNTED
    assert reads == LATE | COUNTED


def test_a_forward_hands_the_device_no_numbers() -> None:
    """Of the parts that have some: rows of tokens, and angles that change with the length."""
    model = tiny.decoder(rope_scaling=RopeScaling(rope_type="dynamic", factor=2.0), max_position_embeddings=8)
    embedding, head = model.model.embed_tokens, model.head
    attach_rows(embedding, (3, 5), torch.float32, tied_to=None, is_new=False)
    attach_rows(head, (3, 5), torch.float32, tied_to=embedding, is_new=False)
    batch = tiny.token_batch()
    model(batch["input_ids"])
    with Handed() as handed:
        model(batch["input_ids"]).sum().backward()
    assert handed.places == {}


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
    """Counted in Python 3.11, where each comprehension is a call. One more is a place more that a reader goes to."""
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


class Litter(TrainerCallback):
    """Leaves more garbage in each step than the collector lets lie, and notes when it is collected."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.collected: list[int] = []
        self.enabled: set[bool] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        self.enabled.add(gc.isenabled())
        for _ in range(10 * gc.get_threshold()[0]):
            cycle: list[Any] = []
            cycle.append(cycle)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = None

    def heard(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and self.step is not None:
            self.collected.append(self.step)


def test_garbage_is_collected_every_gc_steps_and_at_no_other_moment(tmp_path: Path) -> None:
    litter = Litter()
    trainer = tiny.script(tmp_path, max_steps=7, gc_steps=3, callbacks=[litter])
    gc.callbacks.append(litter.heard)
    try:
        trainer.train()
    finally:
        gc.callbacks.remove(litter.heard)
    assert litter.collected == [3, 6]
    assert litter.enabled == {False}
    assert gc.isenabled()


def test_the_collector_is_left_as_it_was_on_or_off_and_frozen_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", FREEZE_COUNT)
    was_frozen = gc.get_freeze_count() > 0
    try:
        for frozen in (True, False):
            gc.freeze() if frozen else gc.unfreeze()
            with garbage_collection(RunSettings()):
                assert gc.get_freeze_count() > 0
            assert (gc.get_freeze_count() > 0) == frozen
    finally:
        if was_frozen:
            gc.freeze()
    for was_on in (True, False):
        gc.enable() if was_on else gc.disable()
        try:
            with pytest.raises(ZeroDivisionError), garbage_collection(RunSettings()):
                raise ZeroDivisionError
            assert gc.isenabled() == was_on
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("threshold", "reserved", "allocated", "released"),
    [
        (0.8, 81, 70, True),
        (0.8, 80, 0, False),  # not above the threshold
        (0.8, 95, 85, False),  # no more than a tenth of the device can be won
        (None, 99, 0, False),
    ],
)
def test_cuda_memory_is_released_above_the_threshold_where_a_tenth_can_be_won(
    monkeypatch: pytest.MonkeyPatch, threshold: float | None, reserved: int, allocated: int, released: bool
) -> None:
    """torch.cuda as it would answer on a device of 100 bytes."""
    emptied: list[bool] = []
    answers: dict[str, Any] = {
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=100),
        "memory_stats_as_nested_dict": lambda: {
            "reserved_bytes": {"all": {"current": reserved}},
            "allocated_bytes": {"all": {"current": allocated}},
        },
        "empty_cache": lambda: emptied.append(True),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    garbage_collection(RunSettings(gc_threshold=threshold)).after_step(1)
    assert emptied == [True] * released


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the heap is not glibc's")
def test_a_long_step_gives_free_memory_back_and_a_short_one_keeps_it() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [torch.ones(25_000) for _ in range(1000)]  # 100 kB each, less than has a mapping of its own
    blocks = blocks[::4]  # holes, which no end of the heap can give back
    gc.collect()  # what other tests have left
    collector, before = garbage_collection(RunSettings()), resident()
    collector.after_step(1)
    kept = resident()
    began = time.process_time()
    while time.process_time() < began + 0.15:
        torch.ones(1000).sum()
    collector.after_step(2)
    assert before - kept < 1e6
    assert kept - resident() > 50e6
    assert all(bool(block.all()) for block in blocks)


def test_fp32_products_are_as_precise_as_the_setting_says(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    tiny_run = ["max_steps=1", "save_strategy=no", "eval_strategy=no", "float32_matmul_precision=medium"]
    tiny.train(tiny.config(tmp_path, *tiny_run), RunDir(tmp_path))
    assert torch.get_float32_matmul_precision() == "medium"
    tiny.train(tiny.config(tmp_path, *tiny_run[:-1]), RunDir(tmp_path))
    assert torch.get_float32_matmul_precision() == "medium", "null leaves it as it is"


class _VoidGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


@pytest.mark.parametrize("finds", [True, False])
def test_anomaly_mode_names_what_has_made_a_gradient_nan(
    tmp_path: Path, finds: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return _VoidGradient.apply(logits).float().square().mean()

    trainer = tiny.script(tmp_path, max_steps=4, detect_anomaly=finds, loss_fn=loss_fn)
    with pytest.raises(RuntimeError if finds else DivergenceError, match="VoidGradient" if finds else "gradient norm"):
        trainer.train()
    assert ("detect_anomaly" in caplog.text) == finds
    assert not torch.is_anomaly_enabled()
