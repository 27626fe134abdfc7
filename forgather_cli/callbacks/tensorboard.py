"""TBLogger: the run in TensorBoard."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.config.schema import TRANSFORMS, TensorboardSettings
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.run_dir import RunDir


class ResumableSummaryWriter:
    """torch's ``SummaryWriter``, which several callbacks may share (``summary_writer=``): made when something is first
    written, on world rank 0. What a run writes after a resume purges what lies behind the resumed step.

    ``log_dir``: by default that of the run, RUN/tensorboard.
    """

    def __init__(self, log_dir: str | Path | None = None) -> None:
        self.log_dir = log_dir
        self.writer: Any = None
        self._purge_step: int | None = None

    def begin(self, run: RunDir, last_step: int) -> None:
        """What comes next follows on this step of ``run``; 0: it begins."""
        self.log_dir = self.log_dir or run.tensorboard
        if self.writer is None:
            self._purge_step = last_step + 1 if last_step else 0

    def __getattr__(self, name: str) -> Any:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.log_dir, purge_step=self._purge_step)
            self._purge_step = None  # a later reopening goes on
            atexit.register(self.close)  # of what others write after on_train_end
        return getattr(self.writer, name)

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class TBLogger(BuiltIn[TensorboardSettings]):
    """Writes RUN/tensorboard on world rank 0.

    Every number of a log becomes a curve under Hugging Face's names: ``eval_loss`` is ``eval/loss``, the rest
    ``train/<name>``. ``scalars`` adds or replaces curves by tag, null removes one. Texts: the config,
    ``trainer.info()``, ``experiment_info`` and the results. What was typed for the run stands in the tab of
    hyperparameters, where the runs of a sweep are compared. A resumed run goes on in the same directory; what was
    written after the resumed step is purged. TensorBoard is imported with the first log, not before the first step.
    """

    def __init__(self, *args: Any, summary_writer: ResumableSummaryWriter | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if problems := list(self.settings.problems()):
            raise ConfigError(problems)
        self._waiting: list[tuple[str, str, int]] = []
        self._writer = summary_writer or ResumableSummaryWriter()
        self._begun = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if importlib.util.find_spec("tensorboard") is None:
            raise SetupError(
                "callbacks.tensorboard: the package is missing; pip install tensorboard, or set it to null"
            )
        self._begun = True
        self._writer.begin(self.run, state.resumed_step)
        if self._tree is not None:
            text = yaml.safe_dump(self._tree, sort_keys=False, allow_unicode=True)
            self._waiting.append(("config", indented(text), state.resumed_step))
        self._waiting.append(("training info", _table(kwargs["trainer"].info()), state.resumed_step))
        for name, info in self.settings.experiment_info.items():
            text = (
                info if isinstance(info, str) else indented(yaml.safe_dump(info, sort_keys=False, allow_unicode=True))
            )
            self._waiting.append((f"experiment_info/{name}", text, state.resumed_step))

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        logs = kwargs.get("logs") or {}
        writer = self._open()
        if "train_runtime" in logs:
            writer.add_text("results", _table(logs), state.global_step)
            return
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        # All curves of a record in one event, and not by add_scalar (torch 2.13), which makes an event of each: its
        # queue holds ten, so that training would wait for the thread that writes them.
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in self._values(logs).items()]
        writer._get_file_writer().add_summary(Summary(value=values), state.global_step)

    @property
    def tb_writer(self) -> Any:
        """The ``SummaryWriter`` for whoever has more to show; None before training begins and on other ranks than 0.

        The name is that of Hugging Face's TensorBoardCallback.
        """
        return self._open() if self._begun else None

    def on_rollback(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._writer.writer is not None:
            self._writer.close()
            self._writer.begin(self.run, state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._writer.close()

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._writer.close()

    def _values(self, logs: Mapping[str, Any]) -> dict[str, float]:
        values = {curve(name): float(value) for name, value in logs.items() if is_number(value) and name != "step"}
        for tag, scalar in self.settings.scalars.items():
            values.pop(tag, None)
            if scalar is not None and is_number(logs.get(scalar["source"])):
                values[tag] = _transformed(scalar.get("transform"), float(logs[scalar["source"]]))
        return values

    def _open(self) -> Any:
        self._writer.log_dir = self._writer.log_dir or self.run.tensorboard
        if self._waiting:
            chosen: dict[str, float | str] = {**self.run.typed()}  # numbers as such
            for name, value in chosen.items():
                with contextlib.suppress(ValueError):
                    chosen[name] = float(value)
            if chosen:
                from torch.utils.tensorboard.summary import hparams

                # not by add_hparams (torch 2.13), which makes a second run below this one
                for summary in hparams(chosen, {"eval/loss": None, "train/loss": None}):  # type: ignore[no-untyped-call]
                    self._writer._get_file_writer().add_summary(summary)
        for text in self._waiting:
            self._writer.add_text(*text)
        self._waiting.clear()
        return self._writer.writer or self._writer


def curve(name: str) -> str:
    """A metric's name as Hugging Face's loggers write it: ``eval/loss``, ``train/loss``."""
    for split in ("eval", "test"):
        if name.startswith(f"{split}_"):
            return f"{split}/{name.removeprefix(f'{split}_')}"
    return name if name.startswith("tasks/") else f"train/{name}"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _transformed(transform: str | None, value: float) -> float:
    """NaN where the transform is not defined: a curve with a gap instead of a run that ends."""
    try:
        return TRANSFORMS[transform](value) if transform else value
    except (ValueError, OverflowError, ZeroDivisionError):
        return math.nan


def _table(facts: Mapping[str, Any]) -> str:
    """A Markdown table."""
    rows = (f"| {_cell(key)} | {_cell(value)} |" for key, value in facts.items())
    return "\n".join(["| | |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def indented(text: str) -> str:
    """A Markdown code block: TensorBoard renders text as Markdown."""
    return "\n".join("    " + line for line in text.splitlines())
