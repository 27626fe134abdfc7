"""PeakMemory: the most memory each rank has held."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.columns import format_value
from forgather_cli.callbacks.console import say
from forgather_cli.callbacks.metrics import peak_memory, peak_reserved
from forgather_cli.callbacks.tensorboard import indented
from forgather_cli.config.schema import PeakMemorySettings
from forgather_cli.distributed import gather
from forgather_cli.documents.messages import sent

logger = logging.getLogger(__name__)

_MAX_HISTORY = 100_000  # allocations and frees that a snapshot can tell, about 1 KB each


@sent
@dataclass(frozen=True)
class Peak:
    """Of one rank, in bytes: CUDA memory, on CPU resident memory of the process."""

    device: str
    allocated: int
    resident: int
    """Host memory; ``allocated`` itself on CPU."""
    reserved: int | None = None
    """What torch has taken from CUDA, of which ``allocated`` was in use."""
    total: int | None = None
    """What the device has."""
    retries: int = 0
    """Allocations that succeeded only after cached memory was given back: a sign of fragments."""
    statistics: str = ""
    """CUDA's own of this process, as a table of text (``torch.cuda.memory_summary``)."""

    @classmethod
    def of(cls, device: torch.device, *, statistics: bool = False) -> Peak:
        """This process's so far."""
        host = f"cpu of {socket.gethostname()}"
        resident = peak_memory(torch.device("cpu"))
        if device.type != "cuda":
            return cls(host, resident, resident)
        return cls(
            f"{device} of {socket.gethostname()}, {torch.cuda.get_device_name(device)}",
            peak_memory(device),
            resident,
            peak_reserved(device),
            torch.cuda.get_device_properties(device).total_memory,
            torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
            torch.cuda.memory_summary(device) if statistics else "",
        )

    def line(self, rank: int, *, details: bool) -> str:
        """For people; ``details``: where, and everything else that is known."""
        words = [f"{_bytes(self.resident)} resident"]
        if self.reserved is not None:
            of = f" of {_bytes(self.total)}" if details and self.total else ""
            words = [f"{_bytes(self.allocated)} allocated", f"{_bytes(self.reserved)} reserved{of}"]
            if details:
                words += [f"{self.retries} allocation retries", f"{_bytes(self.resident)} resident on the host"]
        where = f" ({self.device})" if details else ""
        return f"peak memory of rank {rank}{where}: {', '.join(words)}"


class PeakMemory(BuiltIn[PeakMemorySettings]):
    """Ends training with a line for each rank: its peak of CUDA memory, on CPU of resident memory.

    ``show_details`` adds where it was, and on CUDA the device's size, retried allocations, host memory and below the
    lines each rank's statistics of CUDA as text, which stand in TensorBoard too. ``do_log``
    adds bytes to each training log: ``peak_mem_rank_<n>`` for every rank, with details also what it has reserved.
    ``enable_memory_snapshot`` records CUDA allocations and leaves ``<file_prefix>-rank-<n>.pickle`` for
    https://pytorch.org/memory_viz at the end of training, or where it fails; recording costs time and host memory.
    """

    def __init__(self, *args: Any, summary_writer: Any = None, **kwargs: Any) -> None:
        """``summary_writer``: a ResumableSummaryWriter, by default the Trainer's TensorBoard."""
        super().__init__(*args, **kwargs)
        self._summary_writer = summary_writer
        self._device = torch.device("cpu")
        self._snapshot: Path | None = None
        self._rank = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = kwargs["trainer"]
        self._device, self._rank = trainer.run.strategy.device, trainer.run.world.rank
        if self._summary_writer is not None:
            self._summary_writer.begin(self.run, state.resumed_step)
        if not self.settings.enable_memory_snapshot:
            return
        if self._device.type != "cuda":
            if state.is_world_process_zero:
                logger.warning(
                    "peak_memory.enable_memory_snapshot: torch keeps no memory history on %s, so there will be no "
                    "snapshot; set it to false, or train on CUDA",
                    self._device.type,
                )
            return
        self._snapshot = self.run.memory_snapshot(self.settings.file_prefix, self._rank)
        torch.cuda.memory._record_memory_history(max_entries=_MAX_HISTORY)

    def on_log_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self.settings.do_log or kwargs.get("interval") is None:  # the final record
            return
        for rank, peak in enumerate(gather(Peak.of(self._device), kwargs["trainer"].run.cpu_group)):
            kwargs["logs"][f"peak_mem_rank_{rank}"] = peak.allocated
            if self.settings.show_details and peak.reserved is not None:
                kwargs["logs"][f"peak_mem_reserved_rank_{rank}"] = peak.reserved

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        details = self.settings.show_details
        peaks = gather(Peak.of(self._device, statistics=details), kwargs["trainer"].run.cpu_group)
        if state.is_world_process_zero:
            for rank, peak in enumerate(peaks):
                say(peak.line(rank, details=details), self._stream)
            for rank, peak in enumerate(peaks):
                if peak.statistics:
                    say(peak.statistics, self._stream)
                    tag = f"peak memory/rank {rank}"
                    writer = self._summary_writer or kwargs["trainer"].tensorboard
                    writer.add_text(tag, indented(peak.statistics), state.global_step)
        self._dump()

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Each rank for itself: the others may be gone."""
        logger.warning("%s", Peak.of(self._device).line(self._rank, details=True))
        self._dump()

    def _dump(self) -> None:
        if self._snapshot is None:
            return
        self._snapshot.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self._snapshot))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("memory snapshot for https://pytorch.org/memory_viz: %s", self._snapshot)
        self._snapshot = None


def _bytes(count: int) -> str:
    return format_value(count, "bytes")
