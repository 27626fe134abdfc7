"""Who takes part in a round, what each is given, when it ends, and the ledger that says so. No HTTP, no torch.

``Rounds`` is told what happens (``register``, ``submit``, ``heartbeat``, the time) and asked what follows (``offer``,
``close``, ``opening``). Nothing of a round is decided by the order in which workers arrive: slots follow the sorted
worker ids, samples and sums follow the slots.

The ledger ``RUN/rounds.jsonl`` has one line for each published round; it closes one round and opens the next, so its
last complete line is the state. Times are seconds of a clock that only goes forward; the ledger's are UTC.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.diloco import wire
from forgather_cli.diloco.wire import WireError
from forgather_cli.errors import SetupError
from forgather_cli.input_files import parse_json, read_bytes

Range = tuple[int, int]
"""Samples [start, stop), numbered through all epochs."""
_SILENCE = 120.0
"""Seconds after which another process may take a worker's id, where eviction is off."""


@dataclass(frozen=True)
class Submission:
    """What a slot has sent for a round. ``rejected`` says why it does not count; empty where it does."""

    slot: int
    worker: str
    parts: tuple[str, ...]
    targets: int
    ranges: tuple[Range, ...]
    rejected: str = ""


@dataclass(frozen=True)
class Closed:
    """How a round ended. ``submissions`` in slot order, each with the weight of its change in the sum."""

    submissions: tuple[tuple[Submission, float], ...]
    missing: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    """(worker, reason)."""
    evicted: tuple[str, ...] = ()
    returned: tuple[Range, ...] = ()


@dataclass(frozen=True)
class Line:
    """A line of the ledger: round ``round`` is open, ``hash`` names the weights that it starts from."""

    round: int
    hash: str
    parent: str
    """Hash of the round before; of round 0 the SHA-256 of the initial weights."""
    time: str
    closed: Closed | None
    """How round - 1 ended; None in the first line."""
    members: tuple[tuple[int, str, int], ...]
    """(slot, worker, sequences per step), by slot."""
    ranges: Mapping[int, tuple[Range, ...]]
    """By slot."""
    cursor: int
    """The first sample that was never given out."""
    pool: tuple[Range, ...]
    """Samples that were given out and came back."""

    def to_json(self) -> str:
        """One line of text, without its end."""
        document = asdict(self) | {"ranges": {str(slot): ranges for slot, ranges in self.ranges.items()}}
        if self.closed is not None:
            document["closed"]["submissions"] = [
                {
                    "slot": sent.slot,
                    "worker": sent.worker,
                    "parts": sent.parts,
                    "targets": sent.targets,
                    "ranges": sent.ranges,
                    "weight": weight,
                }
                for sent, weight in self.closed.submissions
            ]
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Line:
        """Raises ValueError, KeyError or TypeError for a text that is no line."""
        raw = parse_json(text)
        closed = raw["closed"]
        if closed is not None:
            submissions = [
                (
                    Submission(
                        each["slot"], each["worker"], tuple(each["parts"]), each["targets"], _ranges(each["ranges"])
                    ),
                    each["weight"],
                )
                for each in closed["submissions"]
            ]
            closed = Closed(
                tuple(submissions),
                tuple(closed["missing"]),
                tuple((worker, why) for worker, why in closed["rejected"]),
                tuple(closed["evicted"]),
                _ranges(closed["returned"]),
            )
        return cls(
            raw["round"], raw["hash"], raw["parent"], raw["time"], closed,
            tuple((slot, worker, batch) for slot, worker, batch in raw["members"]),
            {int(slot): _ranges(ranges) for slot, ranges in raw["ranges"].items()},
            raw["cursor"], _ranges(raw["pool"]),
        )  # fmt: skip


@dataclass
class Worker:
    """A worker that has registered."""

    name: str
    secret: str
    """SHA-256 of the secret that it made up."""
    generation: int
    batch: int
    """Sequences per step."""
    host: str = ""
    pid: int = 0
    run: str = ""
    evicted: bool = False
    last_round: int | None = None
    """After which it takes no part, once it has said so."""
    heard: float = 0.0
    step: int | None = None
    tokens_per_second: float | None = None
    sent: int = 0
    received: int = 0
    """Bytes, as it says."""


@dataclass
class Registry:
    """What outlives a restart of the server besides the ledger (``RUN/workers.json``)."""

    generation: int = 0
    """The newest one given."""
    data: str | None = None
    tokenizer: str | None = None
    """Fingerprints that all workers share; those of the first one that stated any."""
    workers: dict[str, Worker] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        kept = ("name", "secret", "generation", "batch", "host", "pid", "run", "evicted", "last_round")
        listed = [{key: getattr(worker, key) for key in kept} for worker in self.workers.values()]
        return {"generation": self.generation, "data": self.data, "tokenizer": self.tokenizer, "workers": listed}

    @classmethod
    def from_document(cls, raw: Mapping[str, Any]) -> Registry:
        workers = {each["name"]: Worker(**each) for each in raw["workers"]}
        return cls(raw["generation"], raw["data"], raw["tokenizer"], workers)


class Rounds:
    """The rounds of one run. ``now`` is always the present time."""

    def __init__(
        self,
        settings: DilocoServerSettings,
        *,
        initial: str,
        model: str,
        ledger: Sequence[Line] = (),
        registry: Registry | None = None,
        now: float = 0.0,
    ) -> None:
        """``initial``: SHA-256 of the initial weights; ``model``: ``wire.model_hash`` of the trainable parameters."""
        self.settings, self._initial, self._model = settings, initial, model
        self.registry = registry or Registry()
        self.lines: list[Line] = []
        self.slots: dict[str, int] = {}
        self.sent: dict[int, Submission] = {}
        """What has come for the open round, by slot."""
        self.closing: Closed | None = None
        """The end of the open round, while its result is computed."""
        self.tokens = 0
        """Targets of all counted submissions of closed rounds."""
        self.opened = self._enough_since = now  # the latter: when the quorum was reached
        for worker in self.registry.workers.values():
            worker.heard = now
        for line in ledger:
            self.append(line, now)

    @property
    def line(self) -> Line | None:
        """The ledger's last line; None before the first round."""
        return self.lines[-1] if self.lines else None

    @property
    def finished(self) -> str | None:
        """Why training is over; None while it is not."""
        rounds, settings = len(self.lines) - 1, self.settings
        if settings.max_rounds is not None and rounds >= settings.max_rounds:
            return f"diloco.max_rounds={settings.max_rounds} is reached"
        if settings.max_tokens is not None and self.tokens >= settings.max_tokens:
            return f"diloco.max_tokens={settings.max_tokens} is reached"
        return None

    # ------------------------------------------------------------------------------------------------- what workers say

    def register(
        self,
        name: str,
        secret: str,
        *,
        batch: int,
        model: str,
        now: float,
        data: str | None = None,
        tokenizer: str | None = None,
        stated: Mapping[str, Any] | None = None,
        round: int | None = None,
        parent: str | None = None,
        host: str = "",
        pid: int = 0,
        run: str = "",
        leaves: bool = False,
    ) -> tuple[int, str]:
        """A worker joins, or comes back: its new generation, and whether the server knows the round it stands on.

        Raises WireError: refused for another model, data, tokenizer, other settings or an unknown round; held where
        another process has the id.
        """
        registry = self.registry
        if model != self._model:
            self._refuse("the model differs: its parameters have other names or shapes; use the server's recipe")
        for what, mine, theirs in (("data", registry.data, data), ("tokenizer", registry.tokenizer, tokenizer)):
            if mine is not None and theirs is not None and mine != theirs:
                self._refuse(f"{what}: has the fingerprint {theirs} here, {mine} at the others; use the same {what}")
        for key, value in (stated or {}).items():
            if value != (here := getattr(self.settings, key, None)):
                self._refuse(f"{key}: is {value} at {name}, {here} at the server, which decides it; leave {key} out")
        stood = "fresh"
        if parent is not None:
            known = self.lines[round].hash if round is not None and 0 <= round < len(self.lines) else None
            if known != parent:
                here = "no round" if self.line is None else f"round {self.line.round} ({self.line.hash[:12]})"
                self._refuse(
                    f"{name} stands on round {round} ({parent[:12]}), which this server does not know: it has {here}; "
                    "connect it to the server that it trained with, or begin a new run"
                )
            stood = "known"
        secret, before = hashlib.sha256(secret.encode()).hexdigest(), registry.workers.get(name)
        if before is not None and before.secret != secret and not before.evicted:
            silent, needed = now - before.heard, self.settings.eviction or _SILENCE
            if silent <= needed:
                raise WireError(
                    409,
                    f"{name}: another worker has this id (process {before.pid} on {before.host}, heard of "
                    f"{silent:.0f} s ago); choose another worker_id, or wait until it is silent for {needed:.0f} s",
                    wire.HELD,
                )
        registry.generation += 1
        registry.data, registry.tokenizer = registry.data or data, registry.tokenizer or tokenizer
        registry.workers[name] = Worker(
            name, secret, registry.generation, batch, host, pid, run, last_round=round if leaves else None, heard=now
        )
        return registry.generation, stood

    def _refuse(self, message: str) -> NoReturn:
        raise WireError(409, message, wire.REFUSED)

    def worker(self, generation: int, now: float) -> Worker:
        """The worker with this generation, which has been heard of now. Raises WireError for an older one."""
        for worker in self.registry.workers.values():
            if worker.generation == generation and not worker.evicted:
                worker.heard = now
                return worker
        raise WireError(
            409, "this registration is no longer valid: a newer one took over, or the server gave it up; register anew",
            wire.FENCED,
        )  # fmt: skip

    def offer(self, worker: Worker, after: int) -> dict[str, Any] | None:
        """The open round as ``/next`` answers it, if it is later than ``after`` and the worker is a member of it."""
        line = self.line
        slot = None if line is None else next((slot for slot, name, _ in line.members if name == worker.name), None)
        if line is None or slot is None or line.round <= after or self.closing is not None:
            return None
        members = [list(member) for member in line.members]
        ranges = [list(each) for each in line.ranges[slot]]
        return {"state": wire.OPEN, "round": line.round, "hash": line.hash, "slot": slot, "members": members,
                "ranges": ranges}  # fmt: skip

    def why_waiting(self) -> str:
        """What a worker without a round waits for."""
        if self.line is None:
            here, wanted = len(self.live()), self.settings.workers
            return f"{here} of {wanted} workers have registered"
        if self.closing is not None:
            return f"round {self.line.round} is being computed"
        return f"round {self.line.round} waits for {', '.join(self.waited_for()) or 'its end'}"

    def answered(self, worker: Worker, round: int, parts: Iterable[str]) -> tuple[str, str] | None:
        """(status, reason) of a submission that needs no look at its parts; None for one that is new.

        Raises WireError for a round that the worker has no part in.
        """
        line, slot = self.line, self.slots.get(worker.name)
        if line is None or slot is None or not 0 <= round <= line.round:
            raise WireError(400, f"round {round}: is not open, nor was it; ask /next which one is")
        parts = tuple(sorted(parts))
        if round < line.round:
            closed = self.lines[round + 1].closed
            assert closed is not None
            counted = any((sent.slot, sent.parts) == (slot, parts) for sent, _ in closed.submissions)
            return (wire.COUNTED, "") if counted else (wire.LATE, f"round {round} has ended without it")
        if all(slot != member for member, _, _ in line.members):
            raise WireError(400, f"round {round}: {worker.name} is no member of it; ask /next for its round")
        if (before := self.sent.get(slot)) is not None:
            if before.rejected:
                return wire.REJECTED, before.rejected
            same = before.parts == parts
            return (wire.COUNTED, "") if same else (wire.LATE, f"slot {slot} has sent something else for it before")
        return (wire.LATE, f"round {round} has ended without it") if self.closing is not None else None

    def check_ranges(self, worker: Worker, round: int, hash: str, ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
        """The samples that a submission names, merged. Raises WireError for others than the worker was given, and for a
        round that is not this run's.
        """
        if hash != (known := self.lines[round].hash):
            self._refuse(
                f"round {round}: {worker.name} stands on {hash[:12]}, the server's is {known[:12]}; begin anew"
            )
        used = [(start, stop) for start, stop in ranges if stop > start]
        merged, given = merge(used), self.lines[round].ranges.get(self.slots[worker.name], ())
        if total(merged) != total(used) or total(subtract(given, merged)) != total(given) - total(merged):
            raise WireError(400, f"ranges: {worker.name} was given {list(given)}, got {used}; name some of those")
        return merged

    def submit(self, submission: Submission, now: float) -> None:
        """A checked submission for the open round, on disk by now."""
        self.sent[submission.slot] = submission
        if not submission.rejected and len(self._counted()) == self.settings.quorum:
            self._enough_since = now

    # ------------------------------------------------------------------------------------------------- what follows

    def live(self, round: int | None = None) -> list[Worker]:
        """Workers that have registered, are not given up and take part in ``round`` (None: the next), by name."""
        number = len(self.lines) if round is None else round
        workers = sorted(self.registry.workers.values(), key=lambda worker: worker.name)
        return [each for each in workers if not each.evicted and (each.last_round is None or number <= each.last_round)]

    def evict(self, now: float) -> list[Worker]:
        """Give up the workers that were not heard of for ``eviction`` seconds; returns them."""
        limit = self.settings.eviction
        found = [] if limit is None else [worker for worker in self.live() if now - worker.heard > limit]
        for worker in found:
            worker.evicted = True
        return found

    def waited_for(self) -> list[str]:
        """Members of the open round that have not sent and are not given up, by slot."""
        if self.line is None:
            return []
        live, members = {worker.name for worker in self.live(self.line.round)}, self.line.members
        return [name for slot, name, _ in members if slot not in self.sent and name in live]

    def can_open(self) -> bool:
        """Whether the first round can begin."""
        return self.line is None and len(self.live()) >= self.settings.workers

    def close(self, now: float) -> Closed | None:
        """How the open round ends, if it is time: it takes nothing more from now on. None if it is not.

        With nobody to wait for and nothing sent it ends too, once there is somebody for the next one.
        """
        line, settings, counted = self.line, self.settings, self._counted()
        if line is None or self.closing is not None or self.finished:
            return None
        enough = settings.quorum is not None and len(counted) >= settings.quorum
        enough = enough and now - self._enough_since >= settings.grace
        overdue = settings.round_timeout is not None and now - self.opened >= settings.round_timeout
        nobody_left = not self.waited_for() and bool(counted or self.live())
        if not (nobody_left or (counted and (enough or overdue))):
            return None
        live, sum_of_targets = {worker.name for worker in self.live(line.round)}, sum(each.targets for each in counted)
        weights = [
            float32(1 / len(counted) if settings.weighting == "equal" else each.targets / max(sum_of_targets, 1))
            for each in counted
        ]
        silent = [(name, name in live) for slot, name, _ in line.members if slot not in self.sent]
        given = [each for ranges in line.ranges.values() for each in ranges]
        used = [each for sent in counted for each in sent.ranges]
        self.closing = Closed(
            tuple(zip(counted, weights, strict=True)),
            missing=tuple(name for name, is_live in silent if is_live),
            rejected=tuple((sent.worker, sent.rejected) for sent in self._in_slot_order() if sent.rejected),
            evicted=tuple(name for name, is_live in silent if not is_live),
            returned=subtract(merge(given), merge(used)),
        )
        return self.closing

    def opening(self, time: str) -> Line:
        """The line that ends the closing round, if there is one, and opens the next with those who are here."""
        before, closed = self.line, self.closing
        number = 0 if before is None else before.round + 1
        parent = self._initial if before is None else before.hash
        slots = dict(self.slots)
        for worker in self.live():
            slots.setdefault(worker.name, len(slots))
        members = sorted((slots[worker.name], worker.name, worker.batch) for worker in self.live())
        cursor = 0 if before is None else before.cursor
        pool = merge([*(() if before is None else before.pool), *(closed.returned if closed else ())])
        ranges = {}
        for slot, _, batch in members:
            ranges[slot], cursor, pool = take(self.settings.sync_every * batch, cursor, pool)
        return Line(
            number, round_hash(parent, number, closed), parent, time, closed, tuple(members), ranges, cursor, pool
        )

    def append(self, line: Line, now: float) -> None:
        """The line is in the ledger: its round is open."""
        self.lines.append(line)
        self.slots |= {name: slot for slot, name, _ in line.members}
        self.tokens += 0 if line.closed is None else sum(sent.targets for sent, _ in line.closed.submissions)
        self.sent, self.closing = {}, None
        self.opened = self._enough_since = now

    def _in_slot_order(self) -> list[Submission]:
        return [sent for _, sent in sorted(self.sent.items())]

    def _counted(self) -> list[Submission]:
        return [sent for sent in self._in_slot_order() if not sent.rejected]


# ------------------------------------------------------------------------------------------------------------- samples


def merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges sorted, those that touch or overlap as one."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif stop > start:
            found.append((start, stop))
    return tuple(found)


def subtract(ranges: Iterable[Range], taken: Iterable[Range]) -> tuple[Range, ...]:
    """What is in ``ranges`` and not in ``taken``, both of them merged."""
    left = list(ranges)
    for start, stop in taken:
        left = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, stop), b)) if piece[0] < piece[1]]
    return tuple(left)


def total(ranges: Iterable[Range]) -> int:
    """Number of samples."""
    return sum(stop - start for start, stop in ranges)


def take(count: int, cursor: int, pool: tuple[Range, ...]) -> tuple[tuple[Range, ...], int, tuple[Range, ...]]:
    """``count`` samples, from the pool first, the lowest first: them, and cursor and pool after it."""
    taken: list[Range] = []
    for start, stop in pool:
        if count:
            taken.append((start, min(stop, start + count)))
            count -= taken[-1][1] - start
    return merge([*taken, (cursor, cursor + count)]), cursor + count, subtract(pool, taken)


def float32(number: float) -> float:
    """The nearest fp32 number."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def round_hash(parent: str, number: int, closed: Closed | None) -> str:
    """The name of the weights that round ``number`` starts from: SHA-256 over its history."""
    submissions = (
        [[sent.slot, sent.parts, sent.targets, weight] for sent, weight in closed.submissions] if closed else []
    )
    return hashlib.sha256(json.dumps([parent, number, submissions], separators=(",", ":")).encode()).hexdigest()


def _ranges(raw: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    return tuple((int(start), int(stop)) for start, stop in raw)


# ---------------------------------------------------------------------------------------------------------- the ledger


def read_ledger(path: Path) -> list[Line]:
    """The complete lines of a ledger, none where there is no file. What a crash has left of a last one is cut off.

    Raises SetupError for a file that is no ledger.
    """
    if not path.exists():
        return []
    content = read_bytes(path)
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    lines: list[Line] = []
    for number, text in enumerate(whole.splitlines()):
        try:
            line = Line.from_json(text)
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{path}: line {number + 1} is no round ({error}); restore the file") from error
        parent = lines[-1].hash if lines else line.parent
        if (line.round, line.parent, line.hash) != (number, parent, round_hash(parent, number, line.closed)):
            raise SetupError(f"{path}: line {number + 1} does not follow from the one before; restore the file")
        lines.append(line)
    return lines


def write_line(path: Path, line: Line) -> None:
    """Append a line and sync it. Raises OSError; then the file is as it was."""
    end = path.stat().st_size if path.exists() else 0
    with path.open("ab", buffering=0) as file:
        try:
            text = line.to_json().encode() + b"\n"
            if file.write(text) < len(text):
                raise OSError(28, os.strerror(28), str(path))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise
