"""A callback that counts our functions in steps of a run, and writes them into the run's directory."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import forgather_cli
from forgather_cli.callbacks.base import TrainerCallback

PACKAGE = str(Path(forgather_cli.__file__).parent)


class Way(TrainerCallback):
    """Our functions that are called from one step's end to the next's, and those on the way to the first forward."""

    def __init__(self) -> None:
        self.steps: dict[int, Counter[str]] = {}
        self.frames: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(None)
        if 11 <= state.global_step < 25:
            self._now = self.steps.setdefault(state.global_step + 1, Counter())
            sys.setprofile(self._count)

    def _count(self, frame: FrameType | None, event: str, arg: Any) -> None:
        if frame is None or event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        self._now[f"{frame.f_code.co_filename}: {frame.f_code.co_qualname}"] += 1
        if not self.frames and frame.f_code.co_qualname == "Decoder.forward":
            while frame is not None:
                if frame.f_code.co_filename.startswith(PACKAGE):
                    self.frames.insert(0, frame.f_code.co_qualname)
                frame = frame.f_back

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        told = json.dumps({"steps": self.steps, "frames": self.frames})
        Path(args.output_dir, "way.json").write_text(told, encoding="utf-8")
