"""JsonLogger: every log and evaluation as one line of RUN/metrics.jsonl; and files of such records."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.config.schema import JsonSettings
from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.regular_files import append, read_bytes, set_aside, write_whole


class RecordFile:
    """A log of one JSON object per line: ``time`` (UTC), ``step``, ``epoch`` and values. World rank 0 writes it.

    Floats are written with all their digits, so that two runs can be compared to the last bit; NaN and infinities,
    which JSON lacks, are null. A record is handed to the operating system as it is written. At the start, records
    after the resumed step are cut, as is a line that a crash left half-written; a file that is not such a log is set
    aside as ``<name>.bak``. Records of steps that the run has gone back from stay, with ``"abandoned": true``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ready = False
        self._wrote = False

    def begin(self, resumed_step: int) -> None:
        """Training begins after this step; 0: a fresh run."""
        # which repeats step 0 too, unless its record is of an evaluation by this very process
        self._prepare(resumed_step if resumed_step or self._wrote else -1)

    def add(self, values: Mapping[str, Any], *, step: int, epoch: float) -> None:
        if not self._ready:  # an evaluation without training
            self._prepare(math.inf)
        head = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "step": step}
        record = {**head, "epoch": epoch, **values, **head}
        line = json.dumps(plain(record), allow_nan=False) + "\n"
        append(self._path, line.encode())
        self._wrote = True

    def abandon(self, last_step: int) -> None:
        """The run has gone back to ``last_step``: mark the records after it."""
        _rewrite(self._path, lambda record: _marked(record) if record.step > last_step else record)

    def _prepare(self, last_step: float) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        cut_records(self._path, last_step)
        self._ready = True


class JsonLogger(BuiltIn[JsonSettings]):
    """Every training log, evaluation and final result as a record of ``metrics.jsonl``.

    Evaluations arrive by on_log too, so on_evaluate is not needed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Further keywords are values that every record has."""
        names = {"settings", "run", "config_tree", "stream"} & kwargs.keys()
        super().__init__(*args, **{name: kwargs.pop(name) for name in names})
        self._values = kwargs

    @cached_property
    def _file(self) -> RecordFile:
        return RecordFile(self.run.metrics)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._file.begin(state.resumed_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._file.add(self._values | (kwargs.get("logs") or {}), step=state.global_step, epoch=state.epoch)

    def on_rollback(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._file.abandon(state.global_step)


def plain(value: Any) -> Any:
    """``value`` as what JSON can hold: null for NaN and infinities, numbers for 0-dim tensors, text for the unknown."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if callable(getattr(value, "tolist", None)):  # tensors, arrays and their scalars
        return plain(value.tolist())
    return str(value)


def cut_records(path: Path, last_step: float) -> None:
    """Keep the records up to ``last_step``, in place and atomically; sets aside what cannot be read.

    Abandoned ones stay unless the run begins anew (below 0).
    """
    _rewrite(path, lambda record: record if record.step <= last_step or (record.abandoned and last_step >= 0) else None)


class _Record(NamedTuple):
    line: bytes
    step: int
    abandoned: bool


def _rewrite(path: Path, change: Callable[[_Record], _Record | None]) -> None:
    """Put what ``change`` makes of each record, None to leave it out, in its place."""
    try:
        lines = read_bytes(path).splitlines(keepends=True)
        whole = lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines  # a last line without an end is torn
        records = [_record(line, number) for number, line in enumerate(whole, 1)]
        kept = [record.line for record in map(change, records) if record is not None]
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        set_aside(path, f"{path}: cannot be read ({error})")
        return
    if kept != lines:  # also by a torn last line
        write_whole(path, b"".join(kept), durable=True)


def _marked(record: _Record) -> _Record:
    line = json.dumps({**json.loads(record.line), "abandoned": True}).encode() + b"\n"
    return _Record(line, record.step, abandoned=True)


def _record(line: bytes, number: int) -> _Record:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON") from error
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int):
        raise ValueError(f"line {number} has no step")
    return _Record(line, step, bool(record.get("abandoned")))
