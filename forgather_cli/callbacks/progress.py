"""ProgressCallback: how far the run is, on the terminal, in a notebook, or as lines in a log."""

from __future__ import annotations

import math
import time
from typing import Any

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.columns import FINAL_METRICS, STEP_COLUMNS, Column, format_value, merge, time_shares
from forgather_cli.callbacks.console import Stream
from forgather_cli.callbacks.display import PlainDisplay, TableDisplay, evaluation_prefix
from forgather_cli.callbacks.screen import screen_of
from forgather_cli.config.schema import ProgressSettings
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import shown


class ProgressCallback(BuiltIn[ProgressSettings]):
    """Bar, table rows and results on world rank 0.

    A step costs one look at the clock; the bar moves at most five times a second. A script's ``output_stream`` may also
    be an open text file. Raises ConfigError for a column that is not one, and for a stream that cannot be written to.
    """

    def __init__(self, *args: Any, output_stream: Stream | None = None, **kwargs: Any) -> None:
        if isinstance(output_stream, str):
            kwargs["output_stream"] = output_stream
        elif output_stream is not None and not hasattr(output_stream, "write"):
            raise ConfigError(
                f"ProgressCallback.output_stream: must be stdout, stderr or an open text file, got {output_stream!r}; "
                'open it first: output_stream=open(PATH, "w")'
            )
        super().__init__(*args, **kwargs)
        self._output: Stream = self.settings.output_stream if output_stream is None else output_stream
        if problems := list(self.settings.problems()):
            raise ConfigError(problems)
        self.columns = merge(STEP_COLUMNS, self.settings.step_columns)
        self.final_metrics = merge(FINAL_METRICS, self.settings.final_metrics)
        self._display: PlainDisplay | TableDisplay | None = None
        self._next_advance = math.inf
        self._next_evaluation = 0.0
        self._evaluated = 0
        self._next_bar = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            data: Any = getattr(kwargs.get("train_dataloader"), "data", None)
            for name in (f"loss/{source}" for source in getattr(data, "names", ())):
                self.columns.setdefault(name, Column(name, name, max(8, len(name)), ".4f"))
            display = self._shown()
            work = "compiling" if getattr(args, "torch_compile", False) else "reading data"
            display.start(state.global_step, state.max_steps, f"{work} for the first step")
            self._next_advance = 0.0 if math.isfinite(display.interval) else math.inf

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now = time.perf_counter()
        if now >= self._next_advance:
            display = self._shown()
            display.advance(state.global_step)
            self._next_advance = now + display.interval
            self._evaluated = 0

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._evaluated += 1
        now = time.perf_counter()
        if state.is_world_process_zero and now >= self._next_evaluation:
            display = self._shown()
            loader: Any = kwargs.get("eval_dataloader")
            try:
                total = len(loader)
            except TypeError:  # None, or it cannot know
                total = None
            display.bar("eval", self._evaluated, total)
            self._next_evaluation = now + display.interval

    def show_bar(self, name: str, done: int, total: int) -> None:
        """A bar of another callback's work, moved as seldom as ours; it goes away when all is done. World rank 0."""
        now = time.perf_counter()
        if done < total and now >= self._next_bar:
            display = self._shown()
            display.bar(name, done, total)
            self._next_bar = now + display.interval
        elif done >= total:
            self._shown().hide(name)
            self._next_bar = 0.0

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, Any] = kwargs.get("logs") or {}
        if not state.is_world_process_zero:
            return
        if "train_runtime" in logs:
            shown = (column for column in self.final_metrics.values() if column.name in logs)
            entries = [(c.label, format_value(logs[c.name], c.fmt) + c.suffix) for c in shown]
            self._shown().final(entries, time_shares(logs))
        elif "loss" in logs:
            self._shown().log({"epoch": state.epoch, **logs, "step": state.global_step}, state.max_steps)
        elif evaluation_prefix(logs) is None:  # an evaluation's row is written by on_evaluate
            pairs = (f"{name} {format_value(value, '.4g')}" for name, value in logs.items())
            self._shown().note(f"step {state.global_step} " + " ".join(pairs))

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._evaluated, self._next_evaluation = 0, 0.0
        if state.is_world_process_zero:
            self._shown().evaluation(state.global_step, kwargs.get("metrics") or {})

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and kwargs.get("checkpoint") is not None:
            self._shown().note(f"checkpoint saved: {shown(kwargs['checkpoint'])}")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close()

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close()

    def _shown(self) -> PlainDisplay | TableDisplay:
        if self._display is None:
            columns = self.columns.values()
            screen = screen_of(self._output, self.settings.use_tqdm)
            if screen is None:
                self._display = PlainDisplay(self._output, columns)
            else:
                self._display = TableDisplay(screen, columns, self.settings.header_interval)
        return self._display

    def _close(self) -> None:
        self._next_advance = math.inf
        if self._display is not None:
            self._display.close()
