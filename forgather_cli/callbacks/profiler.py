"""ProfilerCallback: what a few steps spend their time on, by torch.profiler."""

from __future__ import annotations

import logging
import os
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.console import say
from forgather_cli.config.schema import ProfilerSettings
from forgather_cli.errors import SetupError

if TYPE_CHECKING:
    import torch
    from torch.profiler import ProfilerAction, profile

logger = logging.getLogger(__name__)

_ROWS = 30
_STACK_DEPTH = 5  # frames by which the rows of a table are told apart
_NAME_WIDTH = 60  # characters


class ProfilerCallback(BuiltIn[ProfilerSettings]):
    """Profiles ``num_steps`` steps on every rank, after the first ``start_step`` ones of this process.

    Steps are counted from where the process began, so a resumed run is profiled anew; files are named by the run's
    steps and overwrite no others. What happens between the steps (an evaluation, a save) is recorded too. Each rank
    writes a Chrome trace and the 30 operators that took the most time; rank 0 shows its own. Training that ends inside
    the window writes what there is, and training that ends before it is warned of.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    @cached_property
    def _directory(self) -> Path:
        return Path(self.settings.output_dir).expanduser() if self.settings.output_dir else self.run.profile

    def _begin(self) -> None:
        self._profiler: profile | None = None
        self._seen = 0  # finished steps of this process
        self._first = self._last = 0  # steps of the run that were recorded
        self._done = False

    @property
    def _recorded(self) -> int:
        """Finished steps inside the window."""
        return max(self._seen - self.settings.start_step, 0)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._begin()
        if kwargs["trainer"].strategy.device.type == "cpu":
            # Kineto (torch 2.13) writes its stages to stderr, and reads this when it is used first; on CUDA it may
            # have something to say, such as that counters need a privilege
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"callbacks.profiler.output_dir: {self._directory} cannot be made: {error.strerror}; choose another"
            ) from error

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._profiler is None and not self._done and self._seen >= self.settings.start_step - 1:
            # starting takes seconds: in the step before the window, if there is one
            self._profiler = _profiler(self.settings, kwargs["trainer"].strategy.device)
            self._profiler.start()
        if self._seen == self.settings.start_step:
            self._first = state.global_step + 1

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._seen += 1
        if self._profiler is None:
            return
        self._last = state.global_step
        if self._recorded < self.settings.num_steps:
            self._profiler.step()
            return
        start = time.perf_counter()
        self._finish(kwargs["trainer"].run.world.rank)
        kwargs["trainer"].run.metrics.profile_seconds += time.perf_counter() - start

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._done and state.is_world_process_zero:
            recorded, settings = self._recorded, self.settings
            what = (
                f"only {recorded} of {settings.num_steps} steps were profiled" if recorded else "nothing was profiled"
            )
            logger.warning(
                "callbacks.profiler.start_step: %s: training ended after %d steps of this process, of which "
                "start_step=%d are left out",
                what, self._seen, settings.start_step,
            )  # fmt: skip
        self._finish(kwargs["trainer"].run.world.rank)

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._finish(kwargs["trainer"].run.world.rank)

    def _finish(self, rank: int) -> None:
        """End the recording, and write what it holds."""
        profiler, self._profiler, self._done = self._profiler, None, True
        if profiler is None:
            return
        profiler.stop()
        if not self._recorded:
            return
        name = f"rank-{rank}-steps-{self._first}-{self._last}"
        text = f"steps {self._first} to {self._last} on rank {rank}\n\n" + "\n".join(_tables(profiler, self.settings))
        (self._directory / f"{name}.txt").write_text(text, encoding="utf-8")
        trace = self._directory / f"{name}.trace.json"
        written = _write_trace(profiler, trace)
        if rank == 0:
            say(f"profile of {text}", self._stream)
            if written:
                say(f"trace for chrome://tracing or ui.perfetto.dev: {trace}", self._stream)


def _profiler(settings: ProfilerSettings, device: torch.device) -> profile:
    from torch.profiler import ProfilerAction, ProfilerActivity, profile

    def action(step: int) -> ProfilerAction:
        warming_up = step == 0 and settings.start_step > 0
        return ProfilerAction.WARMUP if warming_up else ProfilerAction.RECORD

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return profile(
        activities=activities,
        schedule=action,
        record_shapes=settings.record_shapes,
        with_stack=settings.with_stack,
        with_flops=settings.with_flops,
    )


def _tables(profiler: profile, settings: ProfilerSettings) -> list[str]:
    """The operators that took the most time, by themselves and with what they called."""
    from torch.profiler import ProfilerActivity

    rows = profiler.key_averages(
        group_by_input_shape=settings.record_shapes, group_by_stack_n=_STACK_DEPTH if settings.with_stack else 0
    )
    orders = {
        "self_cpu_time_total": "CPU time of the operator itself",
        "cpu_time_total": "CPU time with what it called",
    }
    if ProfilerActivity.CUDA in profiler.activities:
        orders = {"self_device_time_total": "CUDA time of the operator itself", **orders}
    return [
        f"The {_ROWS} longest by {meaning}\n"
        + rows.table(sort_by=order, row_limit=_ROWS, max_name_column_width=_NAME_WIDTH)
        for order, meaning in orders.items()
    ]


def _write_trace(profiler: profile, path: Path) -> bool:
    """Kineto (torch 2.13) tells nobody when it cannot write, so its file is looked at; a torn one is removed."""
    profiler.export_chrome_trace(str(path))
    try:
        with path.open("rb") as file:
            file.seek(-16, os.SEEK_END)
            whole = file.read().rstrip().endswith(b"}")
    except OSError:
        whole = False
    if not whole:
        if path.is_file():
            path.unlink()
        logger.error("callbacks.profiler: the trace %s could not be written (disk full?); training continues", path)
    return whole
