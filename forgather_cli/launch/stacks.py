"""Where a thread stands, told from its stack; and where a rank does: what it does, at which line, since when, and the
last collective it has come to.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import socket
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forgather_cli.launch.processes import process_state

_OURS = f"{os.sep}forgather_cli{os.sep}"
_DATA = f"{_OURS}data{os.sep}"
_SAVING = f"{_OURS}checkpoint{os.sep}"
_GATHER = f"{_OURS}distributed.py", "_all_gather"  # file and function
_TORCH = f"{os.sep}torch{os.sep}"
_COLLECTIVES = (f"{_TORCH}distributed{os.sep}", f"{_TORCH}nn{os.sep}parallel{os.sep}distributed.py")

WAITS, SAVES, COMPILES, DEBUGGED, READS, RUNS = (
    "waits for others", "saves", "compiles", "at a breakpoint", "reads data", "runs",
)  # fmt: skip
SILENT = "does not answer"
_WAITS_FOR_WRITER = "wait_for_writer"  # method of checkpoint.save.Checkpointer
_CONTEXT = 2  # collectives before one, by which what used to follow them is known
_COMPILER = (
    f"{os.sep}torch{os.sep}_dynamo{os.sep}convert_frame.py",
    f"{os.sep}torch{os.sep}_inductor{os.sep}compile_fx.py",
)


def main_thread_stack() -> traceback.StackSummary:
    """Where the main thread stands, outermost call first."""
    return thread_stack(threading.main_thread())


def thread_stack(thread: threading.Thread, depth: int | None = None) -> traceback.StackSummary:
    """Where a thread stands, outermost call first; of its innermost ``depth`` calls."""
    stack = traceback.StackSummary.extract(
        traceback.walk_stack(sys._current_frames().get(thread.ident or 0)), limit=depth, lookup_lines=False
    )
    stack.reverse()
    return stack


def standing_at(stack: traceback.StackSummary) -> str:
    """The innermost line in a stack that is no library's, and the innermost of all."""
    own = [entry for entry in stack if _OURS in entry.filename or not entry.filename.startswith(_libraries())]
    lines = dict.fromkeys(f"{e.filename}:{e.lineno} in {e.name}" for e in [*own[-1:], *stack[-1:]])
    return ", inside it ".join(lines)


@functools.cache
def _libraries() -> tuple[str, ...]:
    """How names of files begin that are neither ours nor the user's."""
    return ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def is_debugged(stack: traceback.StackSummary) -> bool:
    """A person at ``breakpoint()`` may take their time."""
    return any(entry.filename.endswith(f"{os.sep}bdb.py") for entry in stack)


def saves(stack: traceback.StackSummary) -> bool:
    """True if the stack's thread reads or writes a checkpoint."""
    return any(_SAVING in entry.filename for entry in stack)


def waits_for_others(stack: traceback.StackSummary) -> bool:
    """True if the stack's thread stands in a collective: in torch's, or in a backward, which may contain some.

    torch's code counts from where it was called last: a pipeline's schedule calls the model, which waits for nobody.
    """
    if not stack:
        return False
    inner = stack[-1]
    of_torch = itertools.takewhile(lambda entry: _TORCH in entry.filename, reversed(stack))
    in_collective = any(name in entry.filename for entry in of_torch for name in _COLLECTIVES)
    in_collective |= inner.filename.endswith(_GATHER[0]) and inner.name == _GATHER[1]  # which waits until a deadline
    return in_collective or inner.name == "_engine_run_backward" or (inner.line or "").endswith(".wait()")


# ------------------------------------------------------------------------------------------------------------- a rank


@dataclass(frozen=True)
class Collective:
    """One entry of torch's flight recorder."""

    group: str
    sequence: int
    """Its number within the group: equal on all ranks that are in the same one."""
    name: str
    sizes: list[list[int]]
    """Of the inputs."""
    state: str
    """scheduled, started or completed. gloo does not tell started."""

    def __str__(self) -> str:
        sizes = " ".join("x".join(map(str, size)) for size in self.sizes)
        return f"{self.name} #{self.sequence} of group {self.group} ({sizes}) {self.state}"


@dataclass(frozen=True)
class Standing:
    """What a rank tells of itself, or, where it is silent, what another one knows of it."""

    rank: int
    host: str
    pid: int
    step: int | None
    """Optimizer steps behind it."""
    seconds: float
    """Since it made progress: a step, an evaluation batch, a generated token."""
    doing: str
    collective: Collective | None
    """The newest one that is not completed, else the newest; None where torch records none."""
    unusual: bool
    """What it has come to last never followed on the collectives before it."""
    where: str
    """Line of its main thread, or of the thread that this one waits for."""
    odd: str = ""
    """Why it is the one to look at; empty for the others."""

    @classmethod
    def from_document(cls, raw: dict[str, Any]) -> Standing:
        """Of what ``asdict`` gave. Raises TypeError or KeyError for anything else."""
        collective = raw["collective"]
        return cls(**{**raw, "collective": None if collective is None else Collective(**collective)})


def own_standing(rank: int, step: int | None, seconds: float) -> Standing:
    """Of this process, which is that rank; ``step`` steps are behind it. May be called in any thread."""
    stack = main_thread_stack()
    if saves(stack) and any(entry.name == _WAITS_FOR_WRITER for entry in stack):
        # two threads, of which the first may wait for the second
        writer = next((t for t in threading.enumerate()[::-1] if t.name.startswith("checkpoint")), None)
        stack = stack if writer is None else thread_stack(writer)
    recorded = _recorded()
    collective = _newest(recorded)
    in_backward = bool(stack) and stack[-1].name == "_engine_run_backward"
    if is_debugged(stack):
        doing = DEBUGGED
    elif any(name in entry.filename for entry in stack for name in _COMPILER):
        doing = COMPILES
    elif waits_for_others(stack) and not (in_backward and collective is not None and collective.state == "completed"):
        doing = WAITS
    elif saves(stack):
        doing = SAVES
    else:
        doing = READS if any(_DATA in entry.filename for entry in stack) else RUNS
    return Standing(
        rank, socket.gethostname(), os.getpid(), step, round(seconds, 1), doing, collective,
        unusual=_is_unusual(recorded), where=standing_at(stack),
    )  # fmt: skip


def silent_standing(rank: int, place: str | None, seconds: float) -> Standing:
    """Of a rank that does not answer. ``place``: its host and process id as JSON, where they are known."""
    host, pid = json.loads(place) if place is not None else ("", 0)
    where = ""
    if host == socket.gethostname():
        where = {"T": f"process {pid} is stopped; kill -CONT {pid} lets it go on", "": f"process {pid} is gone"}.get(
            process_state(pid), f"process {pid} is alive, but runs no Python"
        )
    return Standing(rank, host, pid, None, round(seconds, 1), SILENT, None, False, where)


def odd_first(standings: Sequence[Standing]) -> list[Standing]:
    """With a reason for each rank that the others wait for, as far as that can be known.

    That is one that does not answer, or that does not wait while others do; where that tells nothing, one whose last
    collective fewer ranks have come to than another, and of equally many those for which it is ``unusual``.
    """
    reasons = {standing.rank: SILENT for standing in standings if standing.doing == SILENT}
    awake = [standing for standing in standings if standing.doing != SILENT]
    busy = [standing for standing in awake if standing.doing != WAITS]
    if 0 < len(busy) < len(awake):
        reasons |= {standing.rank: "is what the others wait for" for standing in busy}
    elif not reasons:
        shared = Counter(str(standing.collective) for standing in awake)
        few, many = min(shared.values()), max(shared.values())
        strange = [standing.rank for standing in awake if standing.unusual]
        if few < many:
            rare = [standing.rank for standing in awake if shared[str(standing.collective)] < many]
            reasons |= dict.fromkeys(rare, "is in another collective than most")
        elif len(shared) > 1 and len(strange) < len(awake):
            reasons |= dict.fromkeys(strange, "is in a collective that never came there before")
    named = [replace(standing, odd=reasons.get(standing.rank, "")) for standing in standings]
    return sorted(named, key=lambda standing: (standing.doing != SILENT, not standing.odd, standing.rank))


def table(standings: Sequence[Standing]) -> list[str]:
    """A line for each rank under a header, with short paths."""
    rows = [("rank", "host", "step", "still for", "does", "last collective", "stands at")]
    for each in standings:
        step, collective = "-" if each.step is None else str(each.step), str(each.collective or "-")
        still = f"{each.seconds:.0f} s"
        where = re.sub(r"\S*/(?=[^/\s]+/[^/\s]+:\d)", "", each.where) or "-"  # the last two parts of each path
        rows.append((str(each.rank), each.host, step, still, each.doing, collective, where))
    widths = [*(max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]), 0]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


# -------------------------------------------------------------------------------------------- torch's flight recorder


def record_collectives() -> None:
    """Have torch remember the last collectives. Before the process group is made; what the user has set stays."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")


def _recorded() -> list[dict[str, Any]]:
    """The flight recorder's entries, oldest first; none where torch has no such recorder, or another one.

    Its one interface for threads is private (torch 2.13, pytorch#190738): it may go or change, and the rest is told
    without it.
    """
    torch = sys.modules.get("torch")
    dist = sys.modules.get("torch.distributed")
    if torch is None or dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    try:
        entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
        return [entry for entry in entries if not entry["is_p2p"]]
    except (AttributeError, RuntimeError, ValueError, KeyError, TypeError):
        return []


def _newest(entries: Sequence[dict[str, Any]]) -> Collective | None:
    under_way = [entry for entry in entries if not _is_completed(entry)]
    try:
        entry = (under_way or entries)[-1]
        state = "completed" if _is_completed(entry) else str(entry["state"])
        name = str(entry["profiling_name"]).rpartition(":")[2]
        group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
        return Collective(group, number, name, entry["input_sizes"], state)
    except (KeyError, IndexError, ValueError, TypeError):
        return None


def _is_completed(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _is_unusual(entries: Sequence[dict[str, Any]]) -> bool:
    """True if the newest collective follows on a sequence that other ones always followed on before.

    Training repeats itself, so a rank that has left one out, or has come to one too many, differs from its own past:
    with two ranks nothing else tells which of them it was.
    """
    keys = [(str(e.get("process_group")), e.get("profiling_name"), str(e.get("input_sizes"))) for e in entries]
    *before, newest = keys or [("", "", "")]
    context = before[-_CONTEXT:]
    followed = {keys[n] for n in range(_CONTEXT, len(before)) if keys[n - _CONTEXT : n] == context}
    return bool(followed) and newest not in followed
