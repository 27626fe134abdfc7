"""Where one rank stands: what it does, at which line, since when, and the last collective it has come to."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import StackSummary
from typing import TYPE_CHECKING, Any

from forgather_cli.launch.signals import (
    is_debugged,
    main_thread_stack,
    saves,
    standing_at,
    thread_stack,
    waits_for_others,
)

if TYPE_CHECKING:
    from forgather_cli.launch.rank import Rank

WAITS, SAVES, COMPILES, DEBUGGED, READS, RUNS = (
    "waits for others", "saves", "compiles", "at a breakpoint", "reads data", "runs",
)  # fmt: skip
SILENT = "does not answer"
_CONTEXT = 2  # collectives before one, by which what used to follow them is known
_COMPILER = (
    f"{os.sep}torch{os.sep}_dynamo{os.sep}convert_frame.py",
    f"{os.sep}torch{os.sep}_inductor{os.sep}compile_fx.py",
)


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


def own_standing(rank: Rank, seconds: float) -> Standing:
    """Of this process. May be called in any thread."""
    stack = _telling_stack()
    recorded = _recorded()
    collective = _newest(recorded)
    return Standing(
        rank=rank.place.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        step=rank.step,
        seconds=round(seconds, 1),
        doing=_doing(stack, collective),
        collective=collective,
        unusual=_is_unusual(recorded),
        where=standing_at(stack),
    )


def silent_standing(rank: int, place: str | None, seconds: float) -> Standing:
    """Of a rank that does not answer. ``place``: its host and process id as JSON, where they are known."""
    host, pid = json.loads(place) if place is not None else ("", 0)
    where = ""
    if host == socket.gethostname():
        where = {"T": f"process {pid} is stopped; kill -CONT {pid} lets it go on", "": f"process {pid} is gone"}.get(
            _process_state(pid), f"process {pid} is alive, but runs no Python"
        )
    return Standing(rank, host, pid, None, round(seconds, 1), SILENT, None, False, where)


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


def _process_state(pid: int) -> str:
    """Linux's letter; empty for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _telling_stack() -> StackSummary:
    """The main thread's stack; while that waits for the checkpoint's writer, the writer's."""
    stack = main_thread_stack()
    if saves(stack) and any(entry.name == "_join" for entry in stack):
        writer = next((t for t in threading.enumerate() if t.name == "checkpoint"), None)
        return stack if writer is None else thread_stack(writer)
    return stack


def _doing(stack: StackSummary, collective: Collective | None) -> str:
    if is_debugged(stack):
        return DEBUGGED
    if any(name in entry.filename for entry in stack for name in _COMPILER):
        return COMPILES
    in_backward = bool(stack) and stack[-1].name == "_engine_run_backward"
    if waits_for_others(stack) and not (in_backward and collective is not None and collective.state == "completed"):
        return WAITS
    if saves(stack):
        return SAVES
    data = f"{os.sep}forgather_cli{os.sep}data{os.sep}"
    return READS if any(data in entry.filename for entry in stack) else RUNS


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
    for entry in [*[e for e in entries if not _is_completed(e)][-1:], *entries[-1:]]:
        try:
            state = "completed" if _is_completed(entry) else str(entry["state"])
            name = str(entry["profiling_name"]).rpartition(":")[2]
            return Collective(str(entry["process_group"][0]), int(entry["collective_seq_id"]), name,
                              entry["input_sizes"], state)  # fmt: skip
        except (KeyError, IndexError, ValueError, TypeError):
            return None
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
