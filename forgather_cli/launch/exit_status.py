"""Exit status: how one rank ended, which of several statuses is the cause of the others, and ``RUN/exit.json``."""

from __future__ import annotations

import json
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args

from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.regular_files import open_file, read_json_object, write_whole
from forgather_cli.errors import (
    CallbackError,
    ConfigError,
    DivergenceError,
    ForgatherError,
    OutOfMemoryError,
    PartError,
    SetupError,
    not_installed,
    too_few_descriptors,
)
from forgather_cli.run_dir import RunDir

DONE = 0
FAILED = 1
MISTAKE = 2
STOPPED = 75
"""Stopped by a signal with a complete checkpoint (EX_TEMPFAIL: try again later)."""

State = Literal["done", "stopped", "aborted", "failed", "diverged", "cut"]
"""How a job ended. ``stopped``: by a signal or a command, with what training left saved by ``save_strategy``; ``cut``:
nothing was written at its end."""


class Kind(StrEnum):
    """How a rank ended. All but the first three are failures: either a cause, of which the earliest is reported, or the
    consequence of another rank's failure.
    """

    DONE = "done"
    STOPPED = "stopped"  # by a signal or a command
    ABORTED = "aborted"
    MISTAKE = "mistake"  # an error made for users: its message is the whole story
    ERROR = "error"  # any other exception
    CUT = "cut"  # ended at once by a signal
    UNHEEDED = "unheeded"  # a signal to stop was not acted on
    KILLED = "killed"  # gone without a word
    STUCK = "stuck"  # stood somewhere else while others waited for it
    WAITED = "waited"  # waited for others until its patience ended
    LOST = "lost"  # the connection to another rank broke
    TOLD = "told"  # ended since another rank had failed


_CAUSES = (Kind.MISTAKE, Kind.ERROR, Kind.CUT, Kind.UNHEEDED, Kind.KILLED)
_DEPTH = {**dict.fromkeys(_CAUSES, 0), Kind.STUCK: 1, Kind.WAITED: 2, Kind.LOST: 3, Kind.TOLD: 4}
"""Of failures: the higher, the more it needs another rank's failure to explain it."""


_NOT_USERS = re.compile(
    rf"{re.escape(str(Path(__file__).parents[1]))}/|.*-packages/torch(data)?/"
    rf"|{re.escape(sysconfig.get_path('stdlib'))}/(?!.*-packages/)|<frozen "
)
"""Files of code that is not the user's: ours, Python's and torch's."""


@dataclass(frozen=True)
class ExitStatus:
    """How a rank ended. Ranks send it to their launcher and to each other."""

    rank: int
    kind: Kind
    code: int
    """Exit code of the job, if this is how it ends."""
    message: str = ""
    problems: tuple[str, ...] = ()
    """Lines of a ConfigError."""
    traceback: str = ""
    diverged: bool = False
    """Of a failure: from the same checkpoint a restart would come to the same end."""
    batch: int | None = None
    """Sequences at a time for which there was no memory, where that can be mended by itself."""
    smaller_batch: int | None = None
    """Sequences at a time with which the job is to start again (auto_find_batch_size)."""
    origin: str = ""
    """The other rank's status as JSON, where ``kind`` is TOLD."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch, by the clock of the rank's node."""

    @property
    def failed(self) -> bool:
        return self.kind in _DEPTH

    @property
    def state(self) -> State:
        """What ``exit.json`` says of it."""
        if self.kind == Kind.CUT:
            return "stopped" if self.code == STOPPED else "cut"
        names: dict[str, State] = {"done": "done", "stopped": "stopped", "aborted": "aborted"}
        return names.get(self.kind, "diverged" if self.diverged else "failed")

    @property
    def is_cause(self) -> bool:
        """True if it is not the consequence of another rank's failure."""
        return _DEPTH.get(self.kind) == 0

    @property
    def cause(self) -> ExitStatus:
        """The status that this one is a consequence of, where that is known; else itself."""
        return ExitStatus.from_json(self.origin) if self.origin else self

    @property
    def worth_a_restart(self) -> bool:
        """True for failures that may not happen again; mistakes and signals end the job."""
        cause = self.cause
        otherwise = cause.diverged or cause.smaller_batch is not None
        return cause.failed and cause.code == FAILED and cause.kind != Kind.UNHEEDED and not otherwise

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ExitStatus:
        """Raises ValueError for anything else."""
        raw: dict[str, Any] = json.loads(text)
        try:
            known = {each.name: raw[each.name] for each in fields(cls)}
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an exit status: {text!r}") from error
        return cls(**{**known, "kind": Kind(known["kind"]), "problems": tuple(known["problems"])})


def from_error(rank: int, error: BaseException) -> ExitStatus:
    """The status of a rank that an error ended, whatever other ranks did; Ctrl-C in a script is one."""
    if isinstance(error, KeyboardInterrupt):
        return ExitStatus(rank, Kind.CUT, 128 + signal.SIGINT, "KeyboardInterrupt")
    error = too_few_descriptors(error) or not_installed(error) or error
    if not isinstance(error, ForgatherError):
        text = "".join(traceback.format_exception(error))
        return ExitStatus(rank, Kind.ERROR, FAILED, f"{type(error).__name__}: {error}", traceback=text)
    users = error.__cause__ if isinstance(error, CallbackError | PartError) else None  # who will want to mend it
    return ExitStatus(
        rank,
        Kind.MISTAKE,
        error.exit_code,
        str(error),
        problems=tuple(error.problems) if isinstance(error, ConfigError) else (),
        traceback=_of_users(users) if users else "",
        diverged=isinstance(error, DivergenceError),
        batch=error.batch if isinstance(error, OutOfMemoryError) else None,
        smaller_batch=error.smaller_batch if isinstance(error, OutOfMemoryError) else None,
    )


def _of_users(error: BaseException) -> str:
    """The traceback of an error in a part of the user's own, from where their code begins, or that of a data loader's
    worker, which its message has; empty where it was in no code of theirs."""
    begins = error.__traceback__
    while begins is not None and _NOT_USERS.match(begins.tb_frame.f_code.co_filename):
        begins = begins.tb_next
    if begins is None:
        return str(error).partition("Original ")[2]
    return "".join(traceback.format_exception(type(error), error, begins))


def done(rank: int, reason: str = "done") -> ExitStatus:
    """The status of a rank that trained to the end; ``reason`` says which end."""
    return ExitStatus(rank, Kind.DONE, DONE, reason)


def cut(rank: int, run: RunDir | None, signum: int, early: bool) -> ExitStatus:
    """The status of a rank ended at once: by a second signal, or by one before the first step (``early``). A run with a
    checkpoint can be resumed after an early one, and its code is 75.
    """
    if run is not None and run.evaluation.exists():
        return ExitStatus(rank, Kind.CUT, 128 + signum, f"ended by {signal.Signals(signum).name}")
    kept = run.checkpoint_steps() if run is not None else []
    reason = f"ended at once by {signal.Signals(signum).name}{' before the first step' if early else ''}"
    left = f"the newest checkpoint is step {kept[-1]}" if kept else "there is no checkpoint"
    return ExitStatus(rank, Kind.CUT, STOPPED if early and kept else 128 + signum, f"{reason}; {left}")


def caused_by(rank: int, cause: ExitStatus) -> ExitStatus:
    """The status of a rank that ends because another one has failed, which ``cause`` is the status of."""
    return ExitStatus(rank, Kind.TOLD, cause.code, f"ended, since {cause.message}", origin=cause.to_json())


def killed(rank: int, code: int | None, log: object, noticed: float) -> ExitStatus:
    """The status of a rank that died without reporting one. ``code``: its exit code if known, negative for a signal;
    ``noticed``: when its end was seen (``ExitStatus.time``).
    """
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        how = f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    else:
        how = "ended without a word" + (f", exit code {code}" if code is not None else "")
    # Its connections break at once, and other ranks report that before its end is noticed: so its time is set back. Not
    # that of an abort, which a lost connection may have caused (NCCL's watchdog).
    early = 1.0 if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL) else 0.0
    return ExitStatus(rank, Kind.KILLED, FAILED, f"rank {rank} {how}; its log is {log}", time=noticed - early)


def first_cause(statuses: Iterable[ExitStatus]) -> ExitStatus | None:
    """The failure that explains all others; None if no rank failed."""
    causes = (status.cause for status in statuses)
    return min((e for e in causes if e.failed), key=lambda e: (_DEPTH[e.kind], e.time), default=None)


# -------------------------------------------------------------------------------------------------- exit.json


@dataclass(frozen=True)
class ExitRecord:
    """The end of one job in a run directory."""

    state: State
    code: int
    reason: str
    step: int
    """Optimizer step of the newest checkpoint or record."""
    time: str
    """UTC, ISO 8601."""


def write_exit_record(run: RunDir, state: State, code: int, reason: str, step: int | None = None) -> None:
    """Write ``RUN/exit.json``. ``step`` None: the newest one in checkpoints and metrics. Raises OSError."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = ExitRecord(state, code, reason, newest_step(run) if step is None else step, now)
    write_whole(run.exit, json.dumps(asdict(record)) + "\n")


def read_exit_record(run: RunDir) -> ExitRecord | None:
    """How the last job ended; None if it still runs, was killed, or never was."""
    try:
        raw = read_json_object(run.exit)
        code = int(raw["code"])
        state: Any = raw.get("state")
        if state not in get_args(State):  # of version 0.1.0, which wrote the code alone
            state = {DONE: "done", STOPPED: "stopped"}.get(code, "cut" if code > 128 else "failed")
        return ExitRecord(state, code, str(raw["reason"]), int(raw["step"]), str(raw["time"]))
    except (SetupError, ValueError, KeyError, TypeError):
        return None


def newest_step(run: RunDir) -> int:
    """The last step that left a checkpoint or a record, which is looked for in the last 64 KiB; 0 if none did."""
    newest = max([0, *run.checkpoint_steps()[-1:]])
    try:
        with open_file(run.metrics) as stream:
            stream.seek(max(0, run.metrics.stat().st_size - 65536))
            lines = stream.read().splitlines()
    except OSError:
        return newest
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # of a torn line
            record = parse_json(line)
            if not record.get("abandoned"):
                return max(newest, int(record["step"]))
    return newest
