"""DefaultMetrics: model FLOPs utilization, peak memory and the wait for a core in the log record."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import time
from typing import Any

import torch

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.config.schema import MetricsSettings
from forgather_cli.distributed import all_sum

_T = 1e12
# Dense matrix-multiply peaks in FLOP/s: bf16 and fp16 (equal on all of these) with fp32 accumulation, TF32, fp32
# without tensor cores. NVIDIA's data sheets print most tensor-core numbers with 2:4 sparsity; these are half of that.
# First match wins.
_PEAKS: tuple[tuple[str, float, float, float], ...] = (
    (r"\bGB200\b", 2500 * _T, 1250 * _T, 80 * _T),  # GB200 NVL72 data sheet, per GPU
    (r"\bB200\b", 2250 * _T, 1125 * _T, 75 * _T),  # HGX B200 data sheet
    (r"\bH200 NVL\b", 835.5 * _T, 417.5 * _T, 60 * _T),  # H200 data sheet
    (r"\bH200\b", 989.5 * _T, 494.5 * _T, 67 * _T),  # H200 data sheet, SXM
    (r"\bGH200\b", 989.5 * _T, 494.5 * _T, 67 * _T),  # GH200 data sheet
    (r"\bH100 NVL\b", 835.5 * _T, 417.5 * _T, 60 * _T),  # H100 data sheet
    (r"\bH100 PCIe\b", 756 * _T, 378 * _T, 51 * _T),  # H100 data sheet
    (r"\bH100\b", 989.5 * _T, 494.5 * _T, 67 * _T),  # H100 data sheet, SXM
    (r"\bA100\b", 312 * _T, 156 * _T, 19.5 * _T),  # A100 data sheet
    (r"\bA30\b", 165 * _T, 82 * _T, 10.3 * _T),  # A30 data sheet
    (r"\bA40\b", 149.7 * _T, 74.8 * _T, 37.4 * _T),  # A40 data sheet
    (r"\bA10\b", 125 * _T, 62.5 * _T, 31.2 * _T),  # A10 data sheet
    (r"\bA6000\b", 154.8 * _T, 77.4 * _T, 38.7 * _T),  # Ampere GA102 white paper
    (r"\bL40S\b", 362.1 * _T, 183 * _T, 91.6 * _T),  # L40S data sheet
    (r"\bL40\b", 181.1 * _T, 90.5 * _T, 90.5 * _T),  # L40 data sheet
    (r"\bL4\b", 121 * _T, 60 * _T, 30.3 * _T),  # L4 data sheet
    (r"\bRTX 6000 Ada\b", 364.2 * _T, 182.1 * _T, 91.1 * _T),  # Ada white paper
    (r"\bRTX 5090$", 209.5 * _T, 104.8 * _T, 104.8 * _T),  # RTX Blackwell white paper, appendix A
    (r"\bRTX 5080$", 112.6 * _T, 56.3 * _T, 56.3 * _T),  # RTX Blackwell white paper, appendix A
    (r"\bRTX 4090$", 165.2 * _T, 82.6 * _T, 82.6 * _T),  # Ada white paper, appendix A
    (r"\bRTX 4080$", 97.5 * _T, 48.7 * _T, 48.7 * _T),  # Ada white paper, appendix A
    (r"\bRTX 3090$", 71 * _T, 35.6 * _T, 35.6 * _T),  # Ampere GA102 white paper, table 2
    (r"\bRTX 3080$", 59.5 * _T, 29.8 * _T, 29.8 * _T),  # Ampere GA102 white paper, table 2
)


_FLOAT8 = re.compile(r"\b(GB200|B200|GH200|H200|H100|L40S?|L4|RTX 6000 Ada|RTX [45]0\d0)\b")
"""Devices that multiply in float8, by the same sheets at twice bf16's rate; L40S and L4 at 1 % more."""


def peak_flops(device_name: str, kind: str) -> float | None:
    """Dense peak in FLOP/s of a device by its CUDA name for ``kind`` fp8, bf16, tf32 or fp32; None where it is not
    known.
    """
    if kind == "fp8":
        bf16 = peak_flops(device_name, "bf16")
        return 2 * bf16 if bf16 is not None and _FLOAT8.search(device_name) else None
    column = {"bf16": 1, "tf32": 2, "fp32": 3}[kind]
    for row in _PEAKS:
        if re.search(row[0], device_name):
            return float(row[column])
    return None


class DefaultMetrics(BuiltIn[MetricsSettings]):
    """Adds to each training log:

    - ``mfu``: FLOPs of the interval / its active seconds / (peak per device x devices); left out where the peak of the
      device is not known (CPU) and ``peak_hardware_flops`` does not say it;
    - ``peak_mem_allocated``: bytes, the most any rank has held since the last log: of CUDA memory, on CPU resident
      memory; ``peak_mem_by_rank`` that of each where there are several.

    Collective.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._peak: float | None = None
        self._device = torch.device("cpu")
        self._before = (0.0, 0.0)
        """Seconds by the clock, and of waiting for a core, at the last log."""
        self._rank, self._world, self._group = 0, 1, None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = kwargs["trainer"]
        self._device, self._group = trainer.run.strategy.device, trainer.run.cpu_group
        self._rank, self._world = trainer.run.world.rank, trainer.run.world.size
        self._peak = self.settings.peak_hardware_flops
        self._before = (time.perf_counter(), _waited())
        if self._peak is None and self._device.type == "cuda":
            self._peak = peak_flops(torch.cuda.get_device_name(self._device), _matmul_kind(args))

    def on_log_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        interval, logs = kwargs.get("interval"), kwargs["logs"]
        if interval is None:  # an evaluation's or the final record
            return
        if self._peak and interval.flops > 0 and interval.active_seconds > 0:
            logs["mfu"] = interval.flops / interval.active_seconds / (self._peak * self._world)
        logs["peak_mem_allocated"] = peak = take_interval_peak(self._device)
        (then, waited), self._before = self._before, (time.perf_counter(), _waited())
        wait = (self._before[1] - waited) / max(self._before[0] - then, 1e-9)
        if self._world > 1:
            of_ranks = torch.zeros(2, self._world, dtype=torch.int64)
            of_ranks[:, self._rank] = torch.tensor([peak, round(1e6 * wait)])
            logs["peak_mem_by_rank"], waits = all_sum(of_ranks, self._group).tolist()
            logs["peak_mem_allocated"], wait = max(logs["peak_mem_by_rank"]), max(waits) / 1e6
        if self._before[1]:
            logs["cpu_wait"] = wait


def _waited() -> float:
    """Seconds that this thread was ready to run and had no core, since it began; 0 where the system does not tell.

    Source: Linux, Documentation/scheduler/sched-stats.rst. Unlike the load it is of now, and counts what runs on the
    cores that this process may use.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _matmul_kind(args: Any) -> str:
    """What the run's matrices are multiplied in; ``args`` are a recipe's settings or Hugging Face's arguments."""
    option = getattr(args, "precision", None)
    precision = getattr(option, "type", None)
    if precision == "fp8" and not getattr(option, "emulate", None):
        return "fp8"
    sharded = getattr(getattr(args, "trainer", None), "param_dtype", None)  # fsdp2's, which goes before precision
    if sharded is not None and sharded != "fp32":
        return "bf16"
    if sharded is None and (precision in ("bf16", "bf16_true", "fp16") or getattr(args, "bf16", False)):
        return "bf16"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"


_so_far: dict[str, int] = {}
"""Peaks of this process before the last interval began: ``cuda`` and ``cpu`` memory in bytes, ``reserved`` of CUDA."""


def peak_memory(device: torch.device) -> int:
    """Bytes: the peak of allocated CUDA memory, or of this process's resident memory on CPU."""
    if device.type == "cuda":
        return max(_so_far.get("cuda", 0), torch.cuda.max_memory_allocated(device))
    return max(_so_far.get("cpu", 0), _resident_peak())


def peak_reserved(device: torch.device) -> int:
    """Bytes: the most that torch has taken from CUDA."""
    return max(_so_far.get("reserved", 0), torch.cuda.max_memory_reserved(device))


def take_interval_peak(device: torch.device) -> int:
    """Bytes: the peak since the last call. On a CPU whose kernel cannot forget peaks (macOS), of the whole process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        _so_far.update(cuda=peak_memory(device), reserved=peak_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    peak = _resident_peak()
    _so_far["cpu"] = max(_so_far.get("cpu", 0), peak)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "wb", buffering=0) as file:
        file.write(b"5")  # VmHWM becomes VmRSS (proc(5))
    return peak


def _resident_peak() -> int:
    try:
        # ru_maxrss is inherited from the parent across exec on Linux (getrusage(2)); VmHWM is this program's own
        with open("/proc/self/status", "rb", buffering=0) as file:
            status = file.read()
        return int(status.split(b"VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
