"""How one rank ended, and which of several endings is the cause of the others."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from forgather_cli.errors import ConfigError, ForgatherError
from forgather_cli.launch.outcome import DONE, FAILED, STOPPED, State
from forgather_cli.run_dir import RunDir

# causes, the earliest of which is told
MISTAKE = "mistake"  # an error made for users: its message is the whole story
ERROR = "error"  # any other exception
CUT = "cut"  # ended at once by a signal
UNHEEDED = "unheeded"  # a signal to stop was not acted on
KILLED = "killed"  # gone without a word
# what a rank notices of another one's trouble
STUCK = "stuck"  # stood somewhere else while others waited for it
WAITED = "waited"  # waited for others until its patience ended
LOST = "lost"  # the connection to another rank broke
TOLD = "told"  # ended since another rank had failed
_DEPTH = {MISTAKE: 0, ERROR: 0, CUT: 0, UNHEEDED: 0, KILLED: 0, STUCK: 1, WAITED: 2, LOST: 3, TOLD: 4}


@dataclass(frozen=True)
class Ending:
    """How a rank ended: ``done``, ``stopped`` by a signal or a command, ``aborted``, or one of the failures above."""

    rank: int
    kind: str
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
    """Of ``told``: the other rank's ending, as JSON."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch, by the clock of the rank's node."""

    @property
    def failed(self) -> bool:
        return self.kind in _DEPTH

    @property
    def state(self) -> State:
        """What ``exit.json`` says of it."""
        if self.kind == CUT:
            return "stopped" if self.code == STOPPED else "cut"
        names: dict[str, State] = {"done": "done", "stopped": "stopped", "aborted": "aborted"}
        return names.get(self.kind, "diverged" if self.diverged else "failed")

    @property
    def is_cause(self) -> bool:
        """True if it needs no other rank's failure to explain it."""
        return _DEPTH.get(self.kind) == 0

    @property
    def cause(self) -> Ending:
        """The other rank's ending that this rank was told of, else itself."""
        return Ending.from_json(self.origin) if self.origin else self

    @property
    def worth_a_restart(self) -> bool:
        """True for failures that may not happen again; mistakes and signals are answered by ending."""
        cause = self.cause
        otherwise = cause.diverged or cause.smaller_batch is not None
        return cause.failed and cause.code == FAILED and cause.kind != UNHEEDED and not otherwise

    def as_error(self) -> ForgatherError:
        """The error that told the user's mistake, to be reported like it."""
        return ConfigError(self.problems) if self.problems else ForgatherError(self.message)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Ending:
        """Raises ValueError for anything else."""
        raw: dict[str, Any] = json.loads(text)
        try:
            known = {each.name: raw[each.name] for each in fields(cls)}
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an ending: {text!r}") from error
        return cls(**{**known, "problems": tuple(known["problems"])})


def done(rank: int, reason: str = "done") -> Ending:
    """Training came to its end, which ``reason`` tells."""
    return Ending(rank, "done", DONE, reason)


def cut(rank: int, run: RunDir | None, signum: int, early: bool) -> Ending:
    """Ended at once, by a second signal or by one before the first step, when a run with a checkpoint can go on."""
    if run is not None and run.evaluation.exists():
        return Ending(rank, CUT, 128 + signum, f"ended by {signal.Signals(signum).name}")
    kept = run.checkpoint_steps() if run is not None else []
    reason = f"ended at once by {signal.Signals(signum).name}{' before the first step' if early else ''}"
    left = f"the newest checkpoint is step {kept[-1]}" if kept else "there is no checkpoint"
    return Ending(rank, CUT, STOPPED if early and kept else 128 + signum, f"{reason}; {left}")


def told(rank: int, cause: Ending) -> Ending:
    """Ended since another rank has failed."""
    return Ending(rank, TOLD, cause.code, f"ended, since {cause.message}", origin=cause.to_json())


def killed(rank: int, code: int | None, log: object, noticed: float) -> Ending:
    """Of a rank that left no word; ``code`` is its exit code where it is known, negative for a signal."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        how = f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    else:
        how = "ended without a word" + (f", exit code {code}" if code is not None else "")
    # Connections to it break at once, and what breaks because of that is told before its end is noticed. An abort may
    # itself come of a lost connection (NCCL's watchdog does that).
    early = 1.0 if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL) else 0.0
    return Ending(rank, KILLED, FAILED, f"rank {rank} {how}; its log is {log}", time=noticed - early)


def first_cause(endings: Iterable[Ending]) -> Ending | None:
    """The failure that explains the others; None where nobody failed."""
    causes = (ending.cause for ending in endings)
    return min((e for e in causes if e.failed), key=lambda e: (_DEPTH[e.kind], e.time), default=None)
